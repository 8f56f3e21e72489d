"""An instance that computes the prompt and the answer itself."""

from __future__ import annotations

from collections.abc import AsyncIterator

from engine.generation.base import Generation, Piece, SharedParts
from engine.protocol import DisaggregateInfo
from engine.scheduling.request import Request

__all__ = ["MixedGeneration"]


class MixedGeneration(Generation):
    """A request that one instance answers alone, even if a router names a pair for it."""

    def __init__(self, parts: SharedParts, request: Request, _: DisaggregateInfo | None = None) -> None:
        super().__init__(parts, request)

    def _answer(self) -> AsyncIterator[Piece]:
        return self._run_sequence()
