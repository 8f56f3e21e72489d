"""Generation: runs one sequence in the engine, and turns its tokens into pieces of text."""

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

__all__ = ["ENGINE_FAILED", "Generation", "Piece", "SharedParts", "call_in_loop"]

ENGINE_FAILED = "the engine failed while computing this request; the instance's log says why"

log = logging.getLogger(__package__)  # the line at the end of each request has the name of the package


@dataclass(frozen=True)
class Piece:
    """A part of an answer: one token, and the text that this token adds.

    Attributes:
        text: the text; it may be empty.
        token_id: the token, or None if the answer ended without a further token.
        finish_reason: why the answer ended, in its last piece; None in all others.
        logprobs: the log probabilities of the token, if the client requested them.
        stop: the stop string that ended the answer, or None if no stop string did.
    """

    text: str
    token_id: int | None
    finish_reason: str | None
    logprobs: TokenLogprobs | None
    stop: str | None = None


@dataclass(frozen=True, eq=False)
class SharedParts:
    """The parts of an instance that all generations use.

    Attributes:
        core: runs sequences.
        tokenizer: a tokenizer of transformers.
        role: the role of the instance: ``mixed``, ``prefill`` or ``decode``.
        block_size: number of tokens in a block.
        receiver: receives hand-overs of prompts.
        memory: the blocks for direct transfers, or None if hand-overs go only through the pool.
        tracer: creates spans, or None if requests are not traced.
        live: the generations that are running, in the order of their start. Ids do not identify them, because clients
            may use an id twice.
    """

    core: EngineCore
    tokenizer: Any
    role: str
    block_size: int
    receiver: HandoverReceiver
    memory: BlockMemory | None = None
    tracer: Tracer | None = None
    live: dict[Generation, None] = field(default_factory=dict)


class Generation(ABC):
    """The answer to one prompt, while it is generated. Each subclass is for one role of the instance."""

    def __init__(self, parts: SharedParts, request: Request) -> None:
        self.request = request
        self.sequence = Sequence(request, parts.block_size)
        self._parts = parts
        self._core = parts.core
        self.is_aborted = False
        """Whether an abort was requested. The answer may not have ended yet."""
        # Not the count of the sequence: after a stop string was found, the engine may generate one token more.
        self.num_output_tokens = 0
        self._start = time.monotonic()
        self._first_token_seconds: float | None = None
        self._trace = parts.tracer.begin_request() if parts.tracer else None
        self._phases: list[Phase] = []
        """Phases of the request that the sequence does not record, such as the hand-over."""

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of the answer; the last one has a ``finish_reason``.

        If the iterator is closed before its end, the request is aborted.
        """
        self._parts.live[self] = None
        # The instance may have been paused after the request was accepted.
        self.is_aborted = self.is_aborted or self._core.is_paused
        piece: Piece | None = None
        try:
            async for piece in self._answer():
                yield piece
        finally:
            del self._parts.live[self]
            if self._trace is not None:
                self._end_trace(self._trace, piece.finish_reason if piece else None)

    def abort(self) -> None:
        """End the answer with the finish reason ``abort``, in any state."""
        self.is_aborted = True
        self._core.abort_sequence(self.sequence)

    def usage(self) -> dict[str, Any]:
        """Return the ``usage`` object of the answer."""
        sequence = self.sequence
        own, pool = self._cached_tokens()
        blocks = None if sequence.regime is Regime.DENSE else (sequence.blocks_read, sequence.blocks_passed)
        whole_blocks = sequence.num_prompt_tokens // self._parts.block_size * self._parts.block_size
        written = max(0, whole_blocks - own - pool) if self._core.scheduler.prefix_caching else 0
        return build_usage(sequence.num_prompt_tokens, self.num_output_tokens, own, pool, written, blocks)

    def describe_transfer(self) -> dict[str, Any]:
        """Return members to add to the response, by which another instance finds the prompt's KV.

        The result is empty in FastDeploy's dialect. Tests imitate engines that have such members.
        """
        return {}

    @abstractmethod
    def _answer(self) -> AsyncIterator[Piece]:
        """Generate the answer, and yield its pieces."""

    def _explain_handover(self) -> str:
        """Return a text for the log that explains the hand-over of the prompt; "" if there is none."""
        return ""

    def _cached_tokens(self) -> tuple[int, int]:
        """Return how many prompt tokens were in the own cache, and how many came from the pool.

        In a pair of prefill and decode instances these are the numbers of the prefill instance.
        """
        return self.sequence.own_cached_tokens, self.sequence.pool_cached_tokens

    async def _run_sequence(
        self,
        prefilled: Prefilled | None = None,
        *,
        on_saved: Callable[[], None] | None = None,
        on_computed: Callable[[int, SequenceOf[int]], None] | None = None,
    ) -> AsyncIterator[Piece]:
        """Run the sequence in the engine, and yield the pieces of its answer.

        Args:
            prefilled: the KV of the prompt from another instance. This method becomes the owner of its reservation,
                even if this method raises an exception.
            on_saved: called in the event loop when all saves of the sequence have ended.
            on_computed: called in the event loop; has the arguments of ``Listener.on_computed``.
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
                on_saved=self._make_on_saved(on_saved),
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

    def _make_on_saved(self, on_saved: Callable[[], None] | None) -> Callable[[], None]:
        """Return a function for ``Listener.on_saved``, which creates the span of saves and calls ``on_saved``."""
        trace = self._trace
        if trace is None:
            return call_in_loop(on_saved) if on_saved else lambda: None

        def end_saves() -> None:
            trace.end_saves(self.sequence)
            if on_saved:
                on_saved()

        return call_in_loop(end_saves)

    def _end_trace(self, trace: RequestTrace, reason: str | None) -> None:
        """Create the spans of the request. ``reason`` is its finish reason, or None if the client left early."""
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
        return ENGINE_FAILED

    def _make_detokenizer(self) -> Detokenizer:
        request = self.request
        first_begun = len(request.prompt_token_ids) - request.num_begun
        prompt, begun = request.prompt_token_ids[:first_begun], request.prompt_token_ids[first_begun:]
        return Detokenizer(self._parts.tokenizer, prompt, request.params.stop, begun, request.params.min_tokens)

    def _make_piece(self, output: TokenOutput, detokenizer: Detokenizer) -> Piece:
        """Return the piece for a token of the engine. If the text has a stop string, end the sequence."""
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
    """Return a function that any thread may call. It calls ``callback`` in the event loop that is running now."""
    loop = asyncio.get_running_loop()

    def schedule_call(*args: Any) -> None:
        # When the server shuts down, the loop is closed before the engine. Then no client waits for the result.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(callback, *args)

    return schedule_call
