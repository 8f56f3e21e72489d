"""The prefill instance's part when decode requests the prompt: compute it, and retain its KV for a limited time."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from engine.disaggregation import Prompt
from engine.generation.base import Generation, Piece, SharedParts, call_in_loop
from engine.protocol import ApiError, quote_short
from engine.scheduling.request import Request
from engine.telemetry.tracing import Phase
from simulation.actors.dialects.retained import RetainedPrompt, retained_prompts_of

__all__ = ["RetainPrompt", "RetainingGeneration", "key_of"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RetainPrompt:
    """Compute the prompt and retain its KV, under a key, until a decode instance requests it.

    Args:
        key: the key of the prompt; no other retained prompt has it. Each further answer of a request adds its number.
        seconds: how long to retain it.
        waits_for_decode: whether the answer waits until decode has the prompt, and is an error if decode never asks.
        describe: returns the members of the answer by which decode finds the prompt.
    """

    key: str
    seconds: float
    waits_for_decode: bool = False
    describe: Callable[[RetainedPrompt], dict[str, Any]] = lambda _: {}

    def __call__(self, parts: SharedParts, request: Request) -> Generation:
        return RetainingGeneration(parts, request, dataclasses.replace(self, key=key_of(self.key, request)))


def key_of(key: str, request: Request) -> str:
    """Return the key of one answer's prompt: ``key`` for the first answer of a request, ``key_N`` for others."""
    return f"{key}_{request.request_id.rpartition('_')[2]}" if request.choice_of else key


class RetainingGeneration(Generation):
    """A request with a prompt that this instance computes for a decode instance, which requests its KV later.

    Raises:
        ApiError: 400, another prompt is retained under this key.
    """

    def __init__(self, parts: SharedParts, request: Request, info: RetainPrompt) -> None:
        params = dataclasses.replace(request.params, max_tokens=1, min_tokens=min(1, request.params.min_tokens))
        super().__init__(parts, dataclasses.replace(request, params=params))
        self._info = info
        self._table = retained_prompts_of(parts.receiver)
        self._retained: RetainedPrompt | None = None
        self._is_saved = asyncio.Event()
        if self._table.has_key(info.key):
            raise ApiError(400, f"{quote_short(info.key)} is in use by another request; give each one of its own")

    def abort(self) -> None:
        if self._retained is not None:
            self._table.drop_prompt(self._retained, "the request was aborted")
        super().abort()

    def describe_transfer(self) -> dict[str, Any]:
        """Return the members of the answer by which decode finds the prompt; none if the prompt is not retained."""
        return self._info.describe(self._retained) if self._retained and self._retained.is_ready else {}

    async def _answer(self) -> AsyncIterator[Piece]:
        table, info = self._table, self._info
        self._retained = retained = table.open_prompt(
            info.key, self.request.request_id, Prompt.of_sequence(self.sequence)
        )
        is_retained = False
        try:
            on_computed = retained.add_blocks if self._parts.memory else None
            running = self._run_sequence(on_saved=self._is_saved.set, on_computed=on_computed)
            pieces = [piece async for piece in running]
            first = pieces[-1]
            if first.token_id is not None:
                retained.record_computed(first.token_id, first.logprobs, self._cached_tokens(), self._wait_for_pool)
                if info.waits_for_decode:
                    start = time.monotonic()
                    is_taken = await retained.wait_until_taken(info.seconds)
                    trouble = "" if is_taken else "no decode instance came for the prompt"
                    self._phases.append(Phase("hand-over", start, time.monotonic(), trouble=trouble))
                    if not is_taken and not self.is_aborted:
                        log.error("%s: no decode instance came for it in %g s", info.key, info.seconds)
                        pieces = [Piece("", None, "error", None)]
                else:
                    table.drop_later(retained, info.seconds)
                    is_retained = True
            for piece in pieces:
                yield piece
        finally:
            if not is_retained:
                table.drop_prompt(retained, "its request has ended")

    async def _wait_for_pool(self) -> None:
        """Wait until other instances can read the prompt's blocks from the pool."""
        await self._is_saved.wait()
        is_drained = asyncio.Event()
        self._core.call_after_flush(call_in_loop(is_drained.set))
        await is_drained.wait()
