"""Models: which ones an instance serves, including LoRA adapters, and which of them a request means.

Instances are queried (``GET /v1/models``) before they are selected, and again periodically, because adapters are loaded
and unloaded. An instance that does not list its models serves any model. Names matter only if there are several models:
a fleet with one model serves requests with any name, because clients send arbitrary ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from router.fleet.instance import Instance

__all__ = ["UNLISTED", "ServedModels", "parse_models"]

# With these names, clients mean any served model, unless a model has exactly this name. "default" is FastDeploy's.
_ANY_NAMES = frozenset({"", "any", "default"})

UNLISTED = "\0"
"""Stands for all models that no instance lists. Instances that do not list their models may serve them."""


def parse_models(data: bytes) -> list[dict[str, Any]]:
    """Return the entries of a list of models in OpenAI's format.

    Raises:
        ValueError: ``data`` has another format.
    """
    try:
        listed = orjson.loads(data)["data"]
    except (ValueError, KeyError, TypeError) as exc:
        raise ValueError(f"it is no list of models: {exc!r}") from None
    if not isinstance(listed, list):
        raise ValueError("it is no list of models: its data is none")
    return [model for model in listed if isinstance(model, dict)]


class ServedModels:
    """Names of the models that instances serve at one moment."""

    def __init__(self, instances: Iterable[Instance], gone: Collection[str] = ()) -> None:
        """
        Args:
            gone: names that were served by removed instances.
        """
        known = [instance.models for instance in instances]
        self._some_serve_any = frozenset() in known
        self.names: frozenset[str] = frozenset().union(*(names for names in known if names))
        self.gone = frozenset(gone) - self.names if known else frozenset()

    def __repr__(self) -> str:
        return f"<ServedModels {sorted(self.names)}>"

    @property
    def are_told_apart(self) -> bool:
        """Whether the model name in a request matters: there are several models, or there were."""
        return len(self.names) > 1 or bool(self.gone)

    def list_names(self) -> str:
        """Return the names as text for a message."""
        return ", ".join(map(repr, sorted(self.names))) or "none that they tell"

    def find(self, name: object) -> str | None:
        """Return the model that a request for ``name`` means, or ``UNLISTED``.

        Returns:
            ``""`` if any model is suitable, None if no served model matches.
        """
        if not isinstance(name, str):
            return ""  # it names no model, or the engine reports the mistake to the client
        if name in self.names:
            return name
        if name in _ANY_NAMES:
            return ""
        if name not in self.gone and len(self.names) <= 1:
            return ""
        return UNLISTED if self._some_serve_any else None
