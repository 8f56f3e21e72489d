"""The interface of a pair dialect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from engine.generation import PairInfo
from engine.protocol import GenerationBody

__all__ = ["PairDialect"]


class PairDialect(ABC):
    """Reads from requests which role in a pair this instance has."""

    registration: dict[str, Any]
    """The fields about its dialect that the instance registers with."""
    owner = "fastdeploy-kvstore"
    """The owner of the models in the model list."""

    def describe_server(self) -> dict[str, dict[str, Any]]:
        """Return the paths that identify an engine of this dialect, and their answers."""
        return {}

    def find_request_id(self, body: GenerationBody) -> str | None:
        """Return the id that the client gave the request."""
        return body.request_id

    @abstractmethod
    def read_pairs(self, body: GenerationBody, request_id: str, num_prompts: int) -> Sequence[PairInfo | None]:
        """Return this instance's role for each of the request's prompts; None: it answers the prompt alone.

        Raises:
            ApiError: 400, the engine that this dialect emulates would refuse the request.
        """
