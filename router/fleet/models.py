"""Models: finds out which models the instances serve, including LoRA adapters, and which model a request means.

The router queries instances (``GET /v1/models``) before it selects them, and again periodically, because adapters are
loaded and unloaded. An instance that does not list its models may serve any model. Names matter only if there are
several models: if all instances serve one model, requests with any name are served, because clients send arbitrary
names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import orjson

from router.fleet.registration import MAX_MODELS

if TYPE_CHECKING:
    from router.fleet.instance import Instance

__all__ = ["UNLISTED", "ListTooLong", "ServedModels", "parse_models", "read_names"]

# Names that mean any model, unless a model has exactly this name. "default" comes from FastDeploy.
_ANY_NAMES = frozenset({"", "any", "default"})

# Limit of the bytes of a list of models, which blocks the router while it is parsed.
_LIST_BYTES = 4 * 1024 * 1024
# Limit of the bytes of a response that a message quotes.
_QUOTED_BYTES = 200

UNLISTED = "\0"
"""Name for every model that no instance lists. An instance that does not list its models may serve such a model."""


class ListTooLong(ValueError):
    """A list of models has too many bytes to be parsed. The message is one sentence."""


def parse_models(data: bytes) -> list[dict[str, Any]]:
    """Return the entries of a list of models in OpenAI's format, at most the first ``MAX_MODELS``.

    Raises:
        ListTooLong: ``data`` is too long.
        ValueError: ``data`` has another format.
    """
    if len(data) > _LIST_BYTES:
        raise ListTooLong(f"the list of models is longer than {_LIST_BYTES} bytes")
    try:
        listed = orjson.loads(data)["data"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"the response is not a list of models: {data[:_QUOTED_BYTES]!r}") from None
    if not isinstance(listed, list):
        raise ValueError("the response is not a list of models: its data is not a list")
    return [model for model in listed[:MAX_MODELS] if isinstance(model, dict)]


def read_names(models: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return the names of the models in a list, without those that cannot be printed, because the log shows them."""
    names = (str(model.get("id") or "") for model in models)
    return frozenset(name for name in names if name and name.isprintable())


class ServedModels:
    """The names of the models that the instances serve at one moment."""

    def __init__(self, instances: Iterable[Instance], gone: Collection[str] = ()) -> None:
        """
        Args:
            instances: the instances.
            gone: names of models that only removed instances have served.
        """
        known = [instance.models for instance in instances]
        self._some_serve_any = frozenset() in known
        self.names: frozenset[str] = frozenset().union(*(names for names in known if names))
        self.gone = frozenset(gone) - self.names if known else frozenset()

    @property
    def are_several(self) -> bool:
        """Whether a request's model name matters, because the instances serve, or have served, several models."""
        return len(self.names) > 1 or bool(self.gone)

    def list_names(self) -> str:
        """Return the names of the served models, as text for a message."""
        return ", ".join(map(repr, sorted(self.names))) or "none (they list no models)"

    def find(self, name: object) -> str | None:
        """Return the model that a request for ``name`` means.

        Returns:
            The name of a model; ``UNLISTED`` if only an instance that does not list its models may serve it; ``""`` if
            any model is suitable; None if no instance serves a suitable model.
        """
        if not isinstance(name, str):
            return ""  # the request names no model, or the engine will report the wrong type to the client
        if name in self.names:
            return name
        if name in _ANY_NAMES:
            return ""
        if name not in self.gone and len(self.names) <= 1:
            return ""
        return UNLISTED if self._some_serve_any else None
