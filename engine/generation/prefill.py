"""The generation of a prefill instance: computes the prompt, and hands over its KV directly or through the pool."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator

from engine.disaggregation import HandoverSender, Prompt, hand_over
from engine.generation.base import Generation, Piece, SharedParts, call_in_loop
from engine.protocol import DisaggregateInfo
from engine.scheduling.request import Request
from engine.telemetry.tracing import Phase

__all__ = ["PrefillGeneration"]

log = logging.getLogger(__name__)


class PrefillGeneration(Generation):
    """The computation of a prompt for a decode instance, with the first token of the answer.

    Args:
        parts: what all generations of the instance share, such as the engine core and the tokenizer.
        request: the client's request, already checked. ``max_tokens`` is ignored: one token is generated.
        info: has the address of the decode instance.
    """

    def __init__(self, parts: SharedParts, request: Request, info: DisaggregateInfo) -> None:
        # The decode instance generates the other tokens of the answer.
        min_tokens = min(1, request.params.min_tokens)
        params = dataclasses.replace(request.params, max_tokens=1, min_tokens=min_tokens)
        super().__init__(parts, dataclasses.replace(request, params=params))
        self._info = info
        self._is_saved = asyncio.Event()

    async def _answer(self) -> AsyncIterator[Piece]:
        """Compute the prompt and hand it over; then yield the pieces, which the router ignores."""
        host, port = self._info.decode_ip or "", self._info.decode_connector_port or 0
        core, memory, prompt = self._core, self._parts.memory, Prompt.of_sequence(self.sequence)
        async with hand_over(host, port, self.request.request_id, prompt, memory, lambda: core.is_working) as sender:
            on_computed = sender.queue_blocks if memory else None
            running = self._run_sequence(on_saved=self._is_saved.set, on_computed=on_computed)
            pieces = [piece async for piece in running]
            if pieces[-1].token_id is None:
                sender.report_failure(f"prefill ended with {pieces[-1].finish_reason}")
            else:
                await self._hand_over(sender, pieces[-1])
        for piece in pieces:
            yield piece

    async def _hand_over(self, sender: HandoverSender, first: Piece) -> None:
        start, way = time.monotonic(), ""
        try:
            if await self._hand_over_directly(sender, first):
                way = "directly"
            elif self._parts.memory is not None:
                self._core.metrics.failed_sends.inc()
            if not way and sender.is_wanted:
                await self._hand_over_through_pool(sender)
                way = "through the pool"
        finally:
            trouble = "" if way else sender.trouble
            attributes = {"engine.handover": way} if way else {}
            start = min(start, sender.first_write_at or start)
            self._phases.append(Phase("hand-over", start, time.monotonic(), attributes, trouble))

    async def _hand_over_directly(self, sender: HandoverSender, first: Piece) -> bool:
        """Complete the direct transfer; return whether the decode instance has accepted the blocks."""
        assert first.token_id is not None
        return await sender.deliver_directly(first.token_id, first.logprobs, *self._cached_tokens())

    async def _hand_over_through_pool(self, sender: HandoverSender) -> None:
        """Wait until the pool has the prompt's KV, as far as possible, and tell the decode instance."""
        await self._is_saved.wait()
        is_flushed = asyncio.Event()
        self._core.call_after_flush(call_in_loop(is_flushed.set))
        await is_flushed.wait()
        log.debug("request %s: KV transferred through the pool, because %s", self.request.request_id, sender.trouble)
        sender.report_save(*self._cached_tokens())
