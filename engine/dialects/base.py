"""A dialect of pairs, as the rest of the engine knows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from engine.generation import PairInfo
from engine.protocol import GenerationBody

__all__ = ["PairDialect"]


class PairDialect(ABC):
    """Reads from requests which part of a pair this instance plays."""

    registration: dict[str, Any]
    """What the instance says of its dialect when it registers."""
    owner = "fastdeploy-kvstore"
    """Whose the models are that it lists."""

    def describe_server(self) -> dict[str, dict[str, Any]]:
        """Paths by which an engine of this dialect is known, and their answers."""
        return {}

    def find_request_id(self, body: GenerationBody) -> str | None:
        """The id that the client gave the request."""
        return body.request_id

    @abstractmethod
    def read_pairs(self, body: GenerationBody, request_id: str, num_prompts: int) -> Sequence[PairInfo | None]:
        """The part of a pair that each of a request's prompts has this instance play; None: it answers by itself.

        Raises:
            ApiError: 400, the engine whose dialect it is would refuse the request.
        """
