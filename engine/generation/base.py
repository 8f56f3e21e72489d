"""One request while it is answered: the engine's tokens become pieces of text."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from engine.core import EngineCore, Listener, Prefilled
from engine.disaggregation import BlockMemory, HandoverReceiver
from engine.generation.detokenizer import Detokenizer
from engine.protocol import build_usage
from engine.scheduling.request import Request, Sequence, TokenLogprobs, TokenOutput
from engine.scheduling.retrieval_config import Regime
from engine.telemetry.trace import log_prompt_sources
from engine.telemetry.tracing import Phase, RequestTrace, Tracer

__all__ = ["Generation", "Piece", "SharedParts", "call_in_loop"]

log = logging.getLogger(__package__)  # the package logs the last line of each request


@dataclass(frozen=True)
class Piece:
    """The result of one token: text (may be empty), the token, and in the last piece why the answer ended."""

    text: str
    token_id: int | None
    finish_reason: str | None
    logprobs: TokenLogprobs | None
    stop: str | None = None
    """The stop string that ended the answer."""


@dataclass(frozen=True, eq=False)
class SharedParts:
    """The parts of an instance that all of its requests share.

    Args:
        memory: the blocks that direct hand-overs read and write; None: prompts go through the pool only.
        tracer: traces requests.
        live: the requests that are being answered; not by id, because clients may use one id twice.
    """

    core: EngineCore
    tokenizer: Any
    role: str
    block_size: int
    receiver: HandoverReceiver
    memory: BlockMemory | None = None
    tracer: Tracer | None = None
    live: set[Generation] = field(default_factory=set)


class Generation(ABC):
    """A request while it is being answered; each subclass is one way to answer it.

    Args:
        parts: the parts of the instance that answers.
        request: checked; its prompt and ``max_tokens`` fit the engine.
    """

    def __init__(self, parts: SharedParts, request: Request) -> None:
        self.request = request
        self.sequence = Sequence(request, parts.block_size)
        self._parts = parts
        self._core = parts.core
        self.is_aborted = False
        """Whether an abort was requested; the request may not have ended yet."""
        # Not the sequence's own count: with a stop string, the engine may have one token more than the answer's text.
        self.num_output_tokens = 0
        self._start = time.monotonic()
        self._first_token_seconds: float | None = None
        self._trace = parts.tracer.begin_request() if parts.tracer else None
        self._phases: list[Phase] = []
        """Phases that the sequence itself does not record."""

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the answer in pieces; the last has a ``finish_reason``. Closing the iterator aborts the request."""
        self._parts.live.add(self)
        self.is_aborted = self.is_aborted or self._core.is_paused  # it began just before the pause
        piece: Piece | None = None
        try:
            async for piece in self._answer():
                yield piece
        finally:
            self._parts.live.remove(self)
            if self._trace is not None:
                self._end_trace(self._trace, piece.finish_reason if piece else None)

    def abort(self) -> None:
        """End the request in any state, with finish reason ``abort``."""
        self.is_aborted = True
        self._core.abort_sequence(self.sequence)

    def usage(self) -> dict[str, Any]:
        """Return token counts, and where the prompt's KV came from."""
        sequence = self.sequence
        own, pool = self._cached_tokens()
        blocks = None if sequence.regime is Regime.DENSE else (sequence.blocks_read, sequence.blocks_passed)
        return build_usage(sequence.num_prompt_tokens, self.num_output_tokens, own, pool, blocks)

    def describe_transfer(self) -> dict[str, Any]:
        """Return the members of the response by which another instance finds the prompt's KV."""
        return {}

    @abstractmethod
    def _answer(self) -> AsyncIterator[Piece]:
        """Answer in this subclass's way."""

    def _explain_handover(self) -> str:
        """Explain how the prompt's KV reached this instance; empty if the request needs no hand-over."""
        return ""

    def _cached_tokens(self) -> tuple[int, int]:
        """Return the prompt's tokens that the computing instance found in its own cache, and in the pool."""
        return self.sequence.own_cached_tokens, self.sequence.pool_cached_tokens

    async def _run_sequence(
        self,
        prefilled: Prefilled | None = None,
        *,
        on_saved: Callable[[], None] | None = None,
        on_computed: Callable[[int, SequenceOf[int]], None] | None = None,
    ) -> AsyncIterator[Piece]:
        """Let the engine run the sequence, and relay its tokens.

        Args:
            prefilled: the state to continue from. This takes ownership of it, even if it raises.
            on_saved: called in the event loop when no transfer of the sequence to the pool is left.
            on_computed: called in the event loop with the blocks of the prompt as they are computed.
        """
        with contextlib.ExitStack() as unless_submitted:
            if prefilled:
                unless_submitted.callback(self._core.cancel_reservation, prefilled.reservation, clear=False)
            if self.is_aborted:
                yield Piece("", None, "abort", None)
                return
            outputs: asyncio.Queue[TokenOutput] = asyncio.Queue()
            listener = Listener(
                on_output=call_in_loop(outputs.put_nowait),
                on_saved=self._hear_of_saves(on_saved),
                on_computed=call_in_loop(on_computed) if on_computed else None,
            )
            detokenizer = self._make_detokenizer()
            unless_submitted.pop_all()
        self._core.submit(self.sequence, listener, prefilled)
        reason: str | None = None
        try:
            while reason is None:
                piece = self._make_piece(await outputs.get(), detokenizer)
                reason = piece.finish_reason
                yield piece
        finally:
            if reason is None:
                reason = "abort"
                self._core.abort_sequence(self.sequence)
            self._log_end(reason)

    def _hear_of_saves(self, on_saved: Callable[[], None] | None) -> Callable[[], None]:
        """Return the function that the engine must call when no transfer of the sequence to the pool is left."""
        trace = self._trace
        if trace is None:
            return call_in_loop(on_saved) if on_saved else lambda: None

        def end_saves() -> None:
            trace.end_saves(self.sequence)
            if on_saved:
                on_saved()

        return call_in_loop(end_saves)

    def _end_trace(self, trace: RequestTrace, reason: str | None) -> None:
        """Create the spans; ``reason`` is None if the answer ended without its last piece."""
        trouble = ""
        if reason is None:
            reason, trouble = "abort", "the client left"
        if self.is_aborted and reason == "abort":
            trouble = "the request was aborted"
        elif reason == "abort":
            trouble = trouble or "the instance stopped"
        elif reason == "error":
            trouble = self._explain_error()
        trace.end(self.sequence, self._parts.role, self.num_output_tokens, reason, self._phases, trouble)

    def _explain_error(self) -> str:
        return "the engine failed while computing this request; its log says why"

    def _make_detokenizer(self) -> Detokenizer:
        request = self.request
        first_begun = len(request.prompt_token_ids) - request.num_begun
        prompt, begun = request.prompt_token_ids[:first_begun], request.prompt_token_ids[first_begun:]
        return Detokenizer(self._parts.tokenizer, prompt, request.params.stop, begun, request.params.min_tokens)

    def _make_piece(self, output: TokenOutput, detokenizer: Detokenizer) -> Piece:
        """Turn a token into text, and end the sequence at a stop string in the text."""
        if self._first_token_seconds is None:
            self._first_token_seconds = time.monotonic() - self._start
        self.num_output_tokens += output.token_id is not None
        reason = output.finish_reason
        ended_by_token = reason == "stop"
        text = "" if output.token_id is None or ended_by_token else detokenizer.add_token(output.token_id)
        if reason:
            text += detokenizer.flush_text()
        if detokenizer.stopped and reason in (None, "length"):
            reason = "stop"
            self._core.abort_sequence(self.sequence, reason)
        return Piece(text, output.token_id, reason, output.logprobs, detokenizer.met_stop if reason == "stop" else None)

    def _log_end(self, reason: str) -> None:
        sequence = self.sequence
        log_prompt_sources(sequence, self._explain_handover())
        reason_text = sequence.pool_use.text.replace('"', "'")
        log.info(
            "request finished: request_id=%s role=%s finish_reason=%s prompt_token_num=%d output_token_num=%d "
            "gpu_cache_token_num=%d cpu_cache_token_num=0 storage_cache_token_num=%d "
            "storage_cache_prepare_time=%.6f ttft=%.6f total_time=%.6f%s",
            self.request.request_id,
            self._parts.role,
            reason,
            sequence.num_prompt_tokens,
            self.num_output_tokens,
            sequence.own_cached_tokens,
            sequence.pool_cached_tokens,
            sequence.pool_load_seconds,
            self._first_token_seconds if self._first_token_seconds is not None else -1,
            time.monotonic() - self._start,
            "" if sequence.pool_cached_tokens else f' storage_cache_reason="{reason_text}"',
        )


def call_in_loop(callback: Callable[..., object]) -> Callable[..., None]:
    """Return a function that any thread may call to run ``callback`` in the running loop."""
    loop = asyncio.get_running_loop()

    def schedule_call(*args: Any) -> None:
        # The loop closes first when the server shuts down; then no client waits for the result.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(callback, *args)

    return schedule_call
