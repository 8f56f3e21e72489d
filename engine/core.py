"""The loop: admit -> schedule -> run -> sample -> emit, on one thread that owns all bookkeeping.

Everything from outside (a new request, an abort, a load or save that ended) arrives as a callable in a mailbox and
runs on this thread between steps, so that scheduler and block manager need no lock.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from engine.metrics import EngineMetrics
from engine.model_runner import ModelRunner
from engine.pool_connector import PoolConnector
from engine.request import Sequence, State, TokenLogprobs, TokenOutput
from engine.retrieval_config import Regime
from engine.sampler import Choice
from engine.scheduler import Chunk, Reservation, Scheduler
from kvstore_backend import BlockPool

__all__ = ["EngineCore", "Listener", "Prefilled"]

log = logging.getLogger(__name__)

STALL_SECONDS = 60.0


@dataclass(frozen=True)
class Listener:
    """Who hears of a sequence; both are called on the engine's thread and must not block.

    ``on_output`` gets every token, and last an output with a ``finish_reason``. ``on_saved`` is called once, after
    that, when nothing of the sequence is on its way to the pool any more. ``on_computed`` gets the blocks of the
    prompt as their KV becomes final, the partly filled last one too: the index of the first, and the blocks, with a
    reference on each that the listener gives back by ``EngineCore.release``.
    """

    on_output: Callable[[TokenOutput], None]
    on_saved: Callable[[], None] = lambda: None
    on_computed: Callable[[int, SequenceOf[int]], None] | None = None


@dataclass(frozen=True)
class Prefilled:
    """What another instance made of a prompt: its KV, in reserved blocks, and the first token of the answer."""

    reservation: Reservation
    token: int
    logprobs: TokenLogprobs | None


class EngineCore:
    """Runs sequences of one model.

    Args:
        runner: with its KV memory allocated.
        scheduler: over as many blocks.
        metrics: counted into.
        pool: closed by ``stop``; None: there is none.
        save_outputs: save full blocks of generated text too, not only of prompts (output caching).
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        *,
        pool: BlockPool | None = None,
        save_outputs: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.metrics = metrics
        self._runner = runner
        self._listeners: dict[Sequence, Listener] = {}
        self._mailbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopped = False
        self._turned_at = math.inf
        self._connector = (
            PoolConnector(
                runner,
                scheduler,
                metrics,
                pool,
                self._mailbox.put,
                on_saved=self._forget_if_saved,
                ending_on_error=self._ending_on_error,
                save_outputs=save_outputs,
            )
            if pool
            else None
        )
        self._thread = threading.Thread(target=self._loop, name="engine-core", daemon=True)
        self._watch()

    def start(self) -> None:
        """Begin the loop."""
        self._thread.start()

    def stop(self) -> None:
        """End every sequence (finish reason ``abort``), flush what can be flushed, and end the loop."""

        def end() -> None:
            for sequence in list(self._listeners):
                self._end(sequence, "abort")
            self._stopped = True

        self._mailbox.put(end)
        self._thread.join(timeout=30)
        if self._connector:
            self._connector.close()

    @property
    def is_alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    @property
    def is_working(self) -> bool:
        """Whether the loop turns: no step of it has been running for over ``STALL_SECONDS``."""
        return self.is_alive and time.monotonic() - self._turned_at < STALL_SECONDS

    def submit(self, sequence: Sequence, listener: Listener, prefilled: Prefilled | None = None) -> None:
        """Queue ``sequence``; its fate is told to ``listener``. From any thread.

        Args:
            prefilled: taken over, whatever becomes of the sequence; it goes on from there.

        Raises:
            ValueError: the sequence can never run to its end in this engine's KV memory.
        """
        wanted = sequence.num_prompt_tokens + sequence.request.params.max_tokens
        if wanted > self.scheduler.capacity_tokens:
            if prefilled:
                self.cancel(prefilled.reservation, clear=False)
            raise ValueError(f"{wanted} tokens do not fit in KV memory for {self.scheduler.capacity_tokens}")
        # What ends with the first token never decodes: a prefill instance's requests.
        if self._runner.retrieval and sequence.request.params.max_tokens > 1:
            sequence.regime = self._runner.retrieval.config.regime(sequence.num_prompt_tokens)

        def add() -> None:
            self._listeners[sequence] = listener
            if prefilled is None:
                self.scheduler.add(sequence)
                return
            with self._ending_on_error(sequence):
                self.scheduler.adopt(sequence, prefilled.reservation)
                if self._connector:
                    self._connector.skip_prompt(sequence)
                self._append(sequence, prefilled.token, prefilled.logprobs)

        self._mailbox.put(add)

    def reserve(self, hashes: SequenceOf[bytes], num_tokens: int, answer: Callable[[Reservation | None], None]) -> None:
        """Ask for blocks for a prompt; ``answer`` is called on the engine's thread. From any thread."""
        self._mailbox.put(lambda: answer(self.scheduler.reserve(hashes, num_tokens)))

    def cancel(self, reservation: Reservation, *, clear: bool) -> None:
        """Give a reservation back, when nobody writes to its blocks any more. From any thread.

        ``clear`` where something may have been written: masked positions still meet it, times zero, so half a number
        that reads as infinite or NaN must not stay.
        """

        def run() -> None:
            if clear:
                self._runner.kv[reservation.missing] = 0
            self.scheduler.cancel(reservation)

        self._mailbox.put(run)

    def release(self, blocks: SequenceOf[int]) -> None:
        """Give back references that ``Listener.on_computed`` was given. From any thread."""
        self._mailbox.put(lambda: self.scheduler.blocks.release(blocks))

    def call_when_flushed(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, on any thread, once other instances can read all that was saved. From any thread.

        It comes after some seconds at the latest, and at once where the pool writes before it answers.
        """
        if self._connector:
            self._connector.call_when_flushed(callback)
        else:
            callback()

    def abort(self, sequence: Sequence, reason: str = "abort") -> None:
        """End ``sequence`` with this finish reason; nothing happens if it has ended. From any thread."""
        self._mailbox.put(lambda: self._end(sequence, reason))

    def _loop(self) -> None:
        idle = True
        while not self._stopped:
            try:
                self._read_mailbox(wait=idle)
                self._admit()
                preempted = self.scheduler.num_preemptions
                chunks = self.scheduler.schedule()
                self.metrics.preemptions.inc(self.scheduler.num_preemptions - preempted)
                if self._runner.retrieval:
                    self._runner.retrieval.keep(self.scheduler.running)
                # With nothing to compute, whatever lets work begin (a request, a load that ended, blocks that a
                # save gives back) comes by mail.
                idle = not chunks
                if chunks:
                    self._step(chunks)
            except Exception:
                # One bad step must not end the instance: those in it fail, the others go on.
                log.exception("A step failed; its requests end with an error")
                failed = list(self.scheduler.running)
                for sequence in failed:
                    self._end(sequence, "error")
                idle = not failed  # their blocks may be what others wait for

    def _admit(self) -> None:
        """Let waiting sequences in; those that lack blocks the pool may have load them first."""
        for sequence in self.scheduler.admit():
            assert self._connector is not None
            self._connector.start_load(sequence)

    def _read_mailbox(self, *, wait: bool) -> None:
        """Run what lies in the mailbox; ``wait`` for the first piece if it is empty."""
        self._turned_at = math.inf if wait else time.monotonic()
        while True:
            try:
                letter = self._mailbox.get(block=wait)
            except queue.Empty:
                return
            self._turned_at = time.monotonic()
            wait = False
            try:
                letter()
            except Exception:
                log.exception("A piece of mail failed; what runs goes on")

    @contextlib.contextmanager
    def _ending_on_error(self, sequence: Sequence) -> Iterator[None]:
        """What fails in here ends ``sequence`` with an error, and nobody else."""
        try:
            yield
        except Exception:
            log.exception("%s failed", sequence.request.request_id)
            self._end(sequence, "error")

    def _step(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self._absorb(chunk.sequence)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        choices = self._timed_run(chunks)
        for chunk in chunks:
            self.scheduler.computed(chunk)
            self._export(chunk.sequence)
        for sequence, choice in zip(sampling, choices, strict=True):
            if choice is None:
                self._end(sequence, "error")
            else:
                self._append(sequence, *choice)
        for chunk in chunks:
            if self._connector and chunk.sequence.state is State.RUNNING:
                self._connector.start_save(chunk.sequence)

    def _timed_run(self, chunks: list[Chunk]) -> list[Choice]:
        prefills = any(chunk.sequence.is_prefilling for chunk in chunks)
        start = time.monotonic()
        choices = self._runner.run(chunks)
        if prefills and self._connector:
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            self._connector.note_computed(num_tokens, time.monotonic() - start)
        return choices

    def _absorb(self, sequence: Sequence) -> None:
        """Take computed blocks of a sequence that looks blocks up into the index; offload them once it decodes."""
        if self._runner.retrieval is None or sequence.regime is Regime.DENSE:
            return
        self._runner.retrieval.absorb(sequence)
        # Prompts are computed exactly, for which all of their blocks are needed.
        if sequence.regime is Regime.OFFLOADED and sequence.is_decoding:
            num_full = sequence.num_computed // sequence.block_size
            if self._connector:
                self._connector.drop_unsaved(sequence)
            self.scheduler.offload(sequence, num_full)

    def _export(self, sequence: Sequence) -> None:
        """Give a listener that wants them the blocks of the prompt that became final."""
        listener = self._listeners[sequence]
        if listener.on_computed is None:
            return
        block_size, computed = sequence.block_size, sequence.num_computed
        whole = computed >= sequence.num_prompt_tokens
        first, last = sequence.num_exported, -(-computed // block_size) if whole else computed // block_size
        if first >= last:
            return
        blocks = sequence.block_table[first:last]
        self.scheduler.blocks.hold(blocks)
        sequence.num_exported = last
        listener.on_computed(first, blocks)

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        """Take a new token into the sequence, tell its listener, and end the sequence if it was the last."""
        now = time.monotonic()
        if sequence.first_token_at is None:
            sequence.first_token_at = now
            self.metrics.first_token.observe(now - sequence.arrival)
        sequence.token_ids.append(token)
        self.metrics.generated_tokens.inc()
        params = sequence.request.params
        reason = None
        is_end = token in self._runner.eos_token_ids and not params.ignore_eos
        if is_end or token in params.stop_token_ids:
            reason = "stop"
        elif sequence.num_output_tokens >= params.max_tokens:
            reason = "length"
        if reason:
            self._end(sequence, reason, token, logprobs)
        else:
            self._listeners[sequence].on_output(TokenOutput(token, None, logprobs))

    def _end(
        self, sequence: Sequence, reason: str, token: int | None = None, logprobs: TokenLogprobs | None = None
    ) -> None:
        listener = self._listeners.get(sequence)
        if listener is None or sequence.finish_reason:
            return
        if self._connector and sequence.state is State.RUNNING and reason != "error":
            self._connector.start_save(sequence, is_last=True)
        sequence.finish_reason = reason
        self.scheduler.finish(sequence)
        self._count(sequence, reason)
        listener.on_output(TokenOutput(token, reason, logprobs))
        self._forget_if_saved(sequence)

    def _count(self, sequence: Sequence, reason: str) -> None:
        metrics, now = self.metrics, time.monotonic()
        metrics.finished.labels(reason).inc()
        metrics.prompt_tokens.inc(sequence.num_prompt_tokens)
        metrics.own_cached_tokens.inc(sequence.own_cached_tokens)
        metrics.pool_cached_tokens.inc(sequence.pool_cached_tokens)
        metrics.latency.observe(now - sequence.arrival)
        if sequence.first_token_at is not None and sequence.num_output_tokens > 1:
            metrics.output_token.observe((now - sequence.first_token_at) / (sequence.num_output_tokens - 1))

    def _forget_if_saved(self, sequence: Sequence) -> None:
        if sequence.finish_reason and not sequence.pending_saves:
            self._listeners.pop(sequence).on_saved()

    def _watch(self) -> None:
        """Let the gauges read the engine's state whenever they are scraped."""
        metrics, scheduler, blocks = self.metrics, self.scheduler, self.scheduler.blocks
        metrics.running.set_function(lambda: len(scheduler.running))
        metrics.waiting.set_function(lambda: len(scheduler.waiting) + len(scheduler.loading) + len(scheduler.ready))
        metrics.reserved_blocks.set_function(lambda: sum(len(held.blocks) for held in list(scheduler.reservations)))
        metrics.available_blocks.set_function(lambda: blocks.num_available)
        metrics.cache_usage.set_function(lambda: 1 - blocks.num_available / blocks.num_blocks)
        if connector := self._connector:
            metrics.pending_saves.set_function(lambda: connector.pending_save_blocks)
            metrics.pool_open.set_function(lambda: connector.is_open)
