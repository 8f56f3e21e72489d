"""One request's way through an instance: from its checked body, over the hand-over, to pieces of text.

This is the asyncio side; the engine's thread is reached through ``EngineCore`` only.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from engine.core import EngineCore, Listener, Prefilled
from engine.detokenizer import Detokenizer
from engine.disaggregation import BlockMemory, Handed, HandoverReceiver, HandoverSender, Prompt, hand_over
from engine.protocol import DisaggregateInfo, usage
from engine.request import Request, Sequence, TokenLogprobs, TokenOutput
from engine.retrieval_config import Regime

__all__ = ["Generation", "Generations", "Piece"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """What one token added: text (may be empty), the token, and at the end why it ended."""

    text: str
    token_id: int | None
    finish_reason: str | None
    logprobs: TokenLogprobs | None


class Generation:
    """A request while it is being answered.

    Args:
        request: checked; its prompt and ``max_tokens`` fit the engine.
        disaggregate_info: what the router said of the pair, if it did.
    """

    def __init__(self, owner: Generations, request: Request, disaggregate_info: DisaggregateInfo | None) -> None:
        self._owner = owner
        self._info = disaggregate_info
        if disaggregate_info and owner.role == "prefill":
            # The decode instance makes the answer, from the first token on that is chosen here.
            params = dataclasses.replace(request.params, max_tokens=1, min_tokens=min(1, request.params.min_tokens))
            request = dataclasses.replace(request, params=params)
        self.request = request
        self.sequence = Sequence(request, owner.block_size)
        self._handed: Handed | None = None
        self._prefilled: Prefilled | None = None  # until it is submitted
        self._waiting: asyncio.Task[Handed | None] | None = None
        self._aborted = False
        # Not the sequence's own count: the engine may be a token ahead of what a stop string lets out.
        self._num_output_tokens = 0
        self._start = time.monotonic()

    def abort(self) -> None:
        """End it, wherever it stands, with finish reason ``abort``."""
        self._aborted = True
        if self._waiting is not None:
            self._waiting.cancel()
        self._owner.core.abort_sequence(self.sequence)

    def usage(self) -> dict[str, Any]:
        """Token counts; of a handed-over prompt, what the prefill instance found cached."""
        sequence = self.sequence
        own, pool = sequence.own_cached_tokens, sequence.pool_cached_tokens
        if self._handed is not None:
            own, pool = self._handed.own_cached_tokens, self._handed.pool_cached_tokens
        blocks = None if sequence.regime is Regime.DENSE else (sequence.blocks_read, sequence.blocks_passed)
        return usage(sequence.num_prompt_tokens, self._num_output_tokens, own, pool, blocks)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer, piece by piece; the last has a ``finish_reason``. Closing the iterator aborts the request."""
        with self._owner.listed(self):
            if self._info is None or self._owner.role == "mixed":
                async for piece in self._run():
                    yield piece
            elif self._owner.role == "prefill":
                async for piece in self._prefill(self._info):
                    yield piece
            else:
                async for piece in self._decode():
                    yield piece

    async def _prefill(self, info: DisaggregateInfo) -> AsyncIterator[Piece]:
        """Compute the prompt and hand it over before the (ignored) answer is given."""
        host, port = info.decode_ip or "", info.decode_connector_port or 0
        core, prompt = self._owner.core, Prompt.of(self.sequence)
        async with hand_over(
            host, port, self.request.request_id, prompt, self._owner.memory, lambda: core.is_working
        ) as decode:
            saved = asyncio.Event()
            pieces = [piece async for piece in self._run(saved=saved, sender=decode)]
            last = pieces[-1]
            cached = self.sequence.own_cached_tokens, self.sequence.pool_cached_tokens
            if last.token_id is None:
                decode.failed(f"prefill ended with {last.finish_reason}")
            elif not await decode.deliver(last.token_id, last.logprobs, *cached) and decode.is_wanted:
                await saved.wait()
                await self._drained()
                decode.saved(*cached)
        for piece in pieces:
            yield piece

    async def _drained(self) -> None:
        """Wait until other instances can read what was saved."""
        loop, drained = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the server has shut down meanwhile
                loop.call_soon_threadsafe(drained.set)

        self._owner.core.call_after_flush(tell)
        await drained.wait()

    async def _decode(self) -> AsyncIterator[Piece]:
        """Go on from what the prefill instance hands over, or from the prompt."""
        try:
            await self._wait_for_prefill()
            if self._aborted:
                yield Piece("", None, "abort", None)
                return
            prefilled, self._prefilled = self._prefilled, None
            first = True
            async for piece in self._run(prefilled):
                if first:
                    first = False
                    cached = self.sequence.pool_cached_tokens
                    self._owner.core.metrics.handed_over.labels(
                        "direct" if prefilled else "pool" if cached else "computed"
                    ).inc()
                yield piece
        finally:
            if self._prefilled is not None:
                self._owner.core.cancel_reservation(self._prefilled.reservation, clear=False)

    async def _wait_for_prefill(self) -> None:
        receiver, prompt = self._owner.receiver, Prompt.of(self.sequence)
        waiting = self._waiting = asyncio.create_task(receiver.wait(self.request.request_id, prompt))
        try:
            await waiting
        except asyncio.CancelledError:
            if not self._aborted:  # it was this task that was cancelled: the client has gone
                raise
        finally:
            self._waiting = None
            if not waiting.cancel() and not waiting.cancelled():
                self._handed = waiting.result()
                self._prefilled = self._handed.prefilled if self._handed else None

    async def _run(
        self,
        prefilled: Prefilled | None = None,
        *,
        saved: asyncio.Event | None = None,
        sender: HandoverSender | None = None,
    ) -> AsyncIterator[Piece]:
        """Run the sequence.

        Args:
            prefilled: where to go on from.
            saved: set when nothing of it is on its way to the pool any more.
            sender: given the blocks of the prompt as they are computed.
        """
        if self._aborted:
            yield Piece("", None, "abort", None)
            return
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[TokenOutput] = asyncio.Queue()

        def tell(callback: Any, *args: Any) -> None:
            # The loop closes first when the server shuts down; nobody listens then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(callback, *args)

        listener = Listener(
            on_output=lambda output: tell(outputs.put_nowait, output),
            on_saved=lambda: tell(saved.set) if saved else None,
            on_computed=(lambda first, blocks: tell(sender.computed, first, blocks))
            if sender and self._owner.memory
            else None,
        )
        detokenizer = Detokenizer(self._owner.tokenizer, self.request.prompt_token_ids, self.request.params.stop)
        self._owner.core.submit(self.sequence, listener, prefilled)
        reason: str | None = None
        first_token_seconds: float | None = None
        try:
            while reason is None:
                output = await outputs.get()
                if first_token_seconds is None:
                    first_token_seconds = time.monotonic() - self._start
                self._num_output_tokens += output.token_id is not None
                reason = output.finish_reason
                ended_by_token = reason == "stop"
                text = "" if output.token_id is None or ended_by_token else detokenizer.add(output.token_id)
                if reason:
                    text += detokenizer.finish()
                if detokenizer.stopped and reason in (None, "length"):
                    reason = "stop"
                    self._owner.core.abort_sequence(self.sequence, reason)
                yield Piece(text, output.token_id, reason, output.logprobs)
        finally:
            if reason is None:
                reason = "abort"
                self._owner.core.abort_sequence(self.sequence)
            self._log(reason, first_token_seconds)

    def _log(self, reason: str, first_token_seconds: float | None) -> None:
        sequence = self.sequence
        log.info(
            "request finished: request_id=%s role=%s finish_reason=%s prompt_token_num=%d output_token_num=%d "
            "gpu_cache_token_num=%d cpu_cache_token_num=0 storage_cache_token_num=%d "
            "storage_cache_prepare_time=%.6f ttft=%.6f total_time=%.6f",
            self.request.request_id,
            self._owner.role,
            reason,
            sequence.num_prompt_tokens,
            self._num_output_tokens,
            sequence.own_cached_tokens,
            sequence.pool_cached_tokens,
            sequence.pool_load_seconds,
            first_token_seconds if first_token_seconds is not None else -1,
            time.monotonic() - self._start,
        )


class Generations:
    """All requests that are being answered, and what they share."""

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Any,
        role: str,
        block_size: int,
        receiver: HandoverReceiver,
        memory: BlockMemory | None = None,
    ) -> None:
        self.core = core
        self.tokenizer = tokenizer
        self.role = role
        self.block_size = block_size
        self.receiver = receiver
        self.memory = memory
        self._live: set[Generation] = set()  # not by id: nothing keeps clients from using one twice

    def start(self, request: Request, disaggregate_info: DisaggregateInfo | None) -> Generation:
        """A new generation; nothing happens before its ``pieces`` are asked for."""
        return Generation(self, request, disaggregate_info)

    def abort(self, req_ids: list[str]) -> list[str]:
        """Abort by request id, with or without ``chatcmpl-`` before and ``_0`` behind; return those that lived."""
        asked = set(req_ids)
        return _abort([each for each in self._live if not asked.isdisjoint(_names(each.request.request_id))])

    def abort_all(self) -> list[str]:
        """Abort everything; return the request ids."""
        return _abort(list(self._live))

    @contextlib.contextmanager
    def listed(self, generation: Generation) -> Any:
        """Findable for ``abort`` while the context lasts."""
        self._live.add(generation)
        try:
            yield
        finally:
            self._live.remove(generation)


def _abort(generations: list[Generation]) -> list[str]:
    for generation in generations:
        generation.abort()
    return [generation.request.request_id for generation in generations]


def _names(request_id: str) -> set[str]:
    """What clients and routers call a request of this id: as its answer does, or as FastDeploy's engine would."""
    return {f"{prefix}{request_id}{suffix}" for prefix in ("", "chatcmpl-", "cmpl-") for suffix in ("", "_0")}
