"""Models: which ones an instance serves, LoRA adapters among them, and which of them a request means.

Instances are asked (``GET /v1/models``) before they are chosen, and again now and then, as adapters come and go. One
that does not tell serves any model. Names are told apart only where that matters: a fleet with one model serves
requests by any name, as its clients send any.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from router.fleet.instance import Instance

__all__ = ["UNLISTED", "ServedModels", "parse_models"]

# By these names clients mean whatever is served, if nothing is served by the name itself; "default" is FastDeploy's.
_ANY_NAMES = frozenset({"", "any", "default"})

UNLISTED = "\0"
"""Stands for all models that no instance lists; those that do not tell theirs may serve them."""


def parse_models(data: bytes) -> list[dict[str, Any]]:
    """The entries of a list of models in OpenAI's form.

    Raises:
        ValueError: ``data`` is none.
    """
    try:
        listed = orjson.loads(data)["data"]
    except (ValueError, KeyError, TypeError) as exc:
        raise ValueError(f"it is no list of models: {exc!r}") from None
    if not isinstance(listed, list):
        raise ValueError("it is no list of models: its data is none")
    return [model for model in listed if isinstance(model, dict)]


class ServedModels:
    """The names of the models that instances serve at one moment."""

    def __init__(self, instances: Iterable[Instance], gone: Collection[str] = ()) -> None:
        """
        Args:
            gone: names that were served by instances which are gone.
        """
        known = [instance.models for instance in instances]
        self._some_serve_any = frozenset() in known
        self.names: frozenset[str] = frozenset().union(*(names for names in known if names))
        self.gone = frozenset(gone) - self.names if known else frozenset()

    def __repr__(self) -> str:
        return f"<ServedModels {sorted(self.names)}>"

    @property
    def are_told_apart(self) -> bool:
        """Whether it matters which model a request names: there are several, or were."""
        return len(self.names) > 1 or bool(self.gone)

    def list_names(self) -> str:
        """The names, as they are told to people."""
        return ", ".join(map(repr, sorted(self.names))) or "none that they tell"

    def find(self, name: object) -> str | None:
        """The model that a request for ``name`` is for, or ``UNLISTED``.

        Returns:
            ``""`` if any model will do, None if none is served that could be meant.
        """
        if not isinstance(name, str):
            return ""  # it names none; or engines tell the client what is wrong with it
        if name in self.names:
            return name
        if name in _ANY_NAMES:
            return ""
        if name not in self.gone and len(self.names) <= 1:
            return ""
        return UNLISTED if self._some_serve_any else None
