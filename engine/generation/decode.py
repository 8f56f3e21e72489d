"""The generation of a decode instance: waits for the prompt's KV and continues from it, or computes the prompt."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

from engine.core import Prefilled
from engine.disaggregation import HandoverResult, Prompt
from engine.generation.base import Generation, Piece, SharedParts
from engine.scheduling.request import Request
from engine.telemetry.tracing import Phase

__all__ = ["DecodeGeneration"]

log = logging.getLogger(__name__)


class DecodeGeneration(Generation):
    """The answer to a prompt that a prefill instance computes.

    After a direct transfer this object owns the reserved blocks, until it submits them to the engine.
    """

    _needs_handover = False
    """Whether the request fails if the hand-over fails. Tests set this to imitate vLLM and SGLang."""

    def __init__(self, parts: SharedParts, request: Request) -> None:
        super().__init__(parts, request)
        self._result: HandoverResult | None = None
        self._prefilled: Prefilled | None = None  # the prompt's KV, until it is submitted to the engine
        self._waiting: asyncio.Task[HandoverResult | None] | None = None

    def abort(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        super().abort()

    async def _answer(self) -> AsyncIterator[Piece]:
        """Wait for the hand-over, and generate the answer from the prompt's KV; without KV, compute the prompt."""
        try:
            if not self.is_aborted:
                await self._wait_for_prompt()
            if self.is_aborted:
                yield Piece("", None, "abort", None)
                return
            if self._result is None and self._needs_handover:
                log.error(
                    "request %s: the prompt's KV did not arrive from the prefill instance", self.request.request_id
                )
                yield Piece("", None, "error", None)
                return
            prefilled, self._prefilled = self._prefilled, None
            is_first = True
            async for piece in self._run_sequence(prefilled):
                if is_first:
                    is_first = False
                    self._count_way(is_direct=prefilled is not None)
                yield piece
        finally:
            if self._prefilled is not None:
                self._core.cancel_reservation(self._prefilled.reservation, clear=False)

    async def _wait_for_prompt(self) -> None:
        start = time.monotonic()
        waiting = asyncio.create_task(self._receive_prompt())
        self._waiting = waiting
        try:
            await waiting
        except asyncio.CancelledError:
            if not self.is_aborted:  # not ``abort`` has cancelled, but the client has disconnected
                raise
        finally:
            self._waiting = None
            if not waiting.cancel() and not waiting.cancelled():
                self._result = waiting.result()
                self._prefilled = self._result.prefilled if self._result else None
            self._phases.append(self._describe_handover(start))

    def _describe_handover(self, start: float) -> Phase:
        end, result = time.monotonic(), self._result
        if result is None:
            return Phase("hand-over", start, end, trouble="no KV arrived at this instance")
        way = "directly" if result.prefilled else "through the pool"
        return Phase("hand-over", start, end, {"engine.handover": way})

    def _explain_error(self) -> str:
        if self._result is None and self._needs_handover:
            return "the prompt's KV did not arrive from the prefill instance"
        return super()._explain_error()

    async def _receive_prompt(self) -> HandoverResult | None:
        """Wait for the result of the hand-over; return None if it failed."""
        prompt = Prompt.of_sequence(self.sequence)
        return await self._parts.receiver.wait_for_prompt(self.request.request_id, prompt)

    def _count_way(self, *, is_direct: bool) -> None:
        """Count in the metrics how this instance got the prompt's KV: directly, from the pool, or by computing it.

        Call this when the first token exists. ``is_direct`` says that the KV came by a direct transfer.
        """
        way = "direct" if is_direct else "pool" if self.sequence.pool_cached_tokens else "computed"
        self._core.metrics.handed_over.labels(way).inc()

    def _explain_handover(self) -> str:
        if self._result is None:
            return "no KV came from a prefill instance, so this instance loaded or computed the prompt itself"
        own, pool = self._cached_tokens()
        way = "directly" if self._result.prefilled else "through the pool"
        return (
            f"KV from prefill: {way}; the prefill instance took {own} tokens from its own cache and {pool} "
            "from the pool"
        )

    def _cached_tokens(self) -> tuple[int, int]:
        """Return the cached tokens of the prefill instance, or of this instance if the hand-over failed."""
        if self._result is None:
            return super()._cached_tokens()
        return self._result.own_cached_tokens, self._result.pool_cached_tokens
