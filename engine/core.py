"""The engine loop: admit -> schedule -> run -> sample -> emit, on one thread that owns all bookkeeping.

Everything from outside (a new request, an abort, a load or save that ended) arrives as a command: a callable that runs
on this thread between steps. So scheduler and block manager need no lock.
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
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from engine.model.model_runner import ModelRunner
from engine.model.sampler import Choice
from engine.pool.pool_connector import PoolConnector
from engine.scheduling.prefill_progress import PrefillProgress
from engine.scheduling.request import Sequence, State, TokenLogprobs, TokenOutput
from engine.scheduling.retrieval_config import Regime
from engine.scheduling.scheduler import Chunk, Reservation, Scheduler
from engine.telemetry.metrics import EngineMetrics
from kvstore_backend import BlockPool

__all__ = ["EngineCore", "Listener", "Prefilled"]

log = logging.getLogger(__name__)

T = TypeVar("T")

STALL_SECONDS = 60.0


@dataclass(frozen=True)
class Listener:
    """Callbacks for one sequence. They are called on the engine's thread and must not block.

    ``on_output`` gets every token; its last call has a ``finish_reason``. ``on_saved`` is called once, after that, when
    no transfer of the sequence to the pool is left. ``on_computed`` gets the blocks of the prompt when their KV is
    final, including the partly filled last one: the index of the first block, and the blocks, with a reference on each
    that the listener releases by ``EngineCore.release_blocks``.
    """

    on_output: Callable[[TokenOutput], None]
    on_saved: Callable[[], None] = lambda: None
    on_computed: Callable[[int, SequenceOf[int]], None] | None = None


@dataclass(frozen=True)
class Prefilled:
    """A prompt that another instance computed: its KV, in reserved blocks, and the first token of the answer.

    If ``token`` is None, the first token is chosen here; for this the prompt's last token is computed again.
    """

    reservation: Reservation
    token: int | None
    logprobs: TokenLogprobs | None


class EngineCore:
    """Runs sequences of one model.

    Args:
        runner: with its KV memory allocated.
        scheduler: manages the same number of blocks.
        metrics: the counters to update.
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
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopped = False
        self._has_failed = False
        self.is_paused = False
        """Whether no sequence and no hand-over to this instance may begin; set and read from any thread."""
        self._turned_at = math.inf
        self._progress = PrefillProgress()
        self._connector = (
            PoolConnector(
                runner,
                scheduler,
                metrics,
                pool,
                self._commands.put,
                on_saved=self._report_saves,
                ending_on_error=self._ending_on_error,
                save_outputs=save_outputs,
            )
            if pool
            else None
        )
        self._thread = threading.Thread(target=self._run_loop, name="engine-core", daemon=True)
        self._watch_gauges()

    def start(self) -> None:
        """Start the loop."""
        self._thread.start()

    def stop(self) -> None:
        """End every sequence (finish reason ``abort``), wait a moment for running saves, and end the loop."""

        def end() -> None:
            self._end_all("abort")
            self._stopped = True

        self._commands.put(end)
        self._thread.join(timeout=30)
        if self._connector:
            self._connector.close()

    @property
    def holds_stop_up(self) -> str:
        """Describe the next operation that ``stop`` waits for."""
        if self.is_alive:
            return "the step that runs"
        if self._connector and (count := self._connector.pending_save_blocks):
            return "1 block on its way to the pool" if count == 1 else f"{count} blocks on their way to the pool"
        return "the pool's client to leave"

    @property
    def is_alive(self) -> bool:
        """Whether the loop runs and its device still computes."""
        return self._thread.is_alive() and not self._has_failed

    @property
    def is_working(self) -> bool:
        """Whether the loop makes progress: no step has been running for over ``STALL_SECONDS``."""
        return self.is_alive and time.monotonic() - self._turned_at < STALL_SECONDS

    def submit(self, sequence: Sequence, listener: Listener, prefilled: Prefilled | None = None) -> None:
        """Queue ``sequence``; ``listener`` gets its tokens and its end. From any thread.

        Args:
            prefilled: the sequence continues from it. The engine takes ownership, even if the sequence fails.

        Raises:
            ValueError: the sequence can never run to its end in this engine's KV memory.
        """
        wanted = sequence.num_prompt_tokens + sequence.request.params.max_tokens
        if wanted > self.scheduler.capacity_tokens:
            if prefilled:
                self.cancel_reservation(prefilled.reservation, clear=False)
            raise ValueError(f"{wanted} tokens do not fit in KV memory for {self.scheduler.capacity_tokens}")
        # A request that ends with its first token never decodes. A prefill instance has only such requests.
        if self._runner.retrieval and sequence.request.params.max_tokens > 1:
            sequence.regime = self._runner.retrieval.config.choose_regime(sequence.num_prompt_tokens)

        sequence.submitted_at = time.monotonic()
        self.metrics.requests.inc()
        self.metrics.prompt_sizes.observe(sequence.num_prompt_tokens)
        self.metrics.limits.observe(sequence.request.params.max_tokens)

        def add() -> None:
            self._listeners[sequence] = listener
            if prefilled is None:
                self.scheduler.add_sequence(sequence)
                return
            with self._ending_on_error(sequence):
                self._adopt_prompt(sequence, prefilled)

        self._commands.put(add)

    def _adopt_prompt(self, sequence: Sequence, prefilled: Prefilled) -> None:
        """Continue a sequence from its prompt's KV."""
        token, reservation = prefilled.token, prefilled.reservation
        if token is None and reservation.num_cached == len(reservation.blocks):
            # All blocks of the prompt are here and shared, so nothing may be written to them.
            self.scheduler.cancel_reservation(reservation)
            self.scheduler.add_sequence(sequence)
            return
        self.scheduler.adopt_reservation(sequence, reservation, recomputes_last=token is None)
        if self._connector:
            self._connector.skip_prompt(sequence)
        if token is not None:
            self._append_token(sequence, token, prefilled.logprobs)

    def reserve_blocks(
        self, hashes: SequenceOf[bytes], num_tokens: int, answer: Callable[[Reservation | None], None]
    ) -> None:
        """Request blocks for a prompt; ``answer`` is called on the engine's thread. From any thread.

        A paused or failed engine reserves none.
        """

        def reserve() -> None:
            is_closed = self.is_paused or self._has_failed
            answer(None if is_closed else self.scheduler.reserve_blocks(hashes, num_tokens))

        self._commands.put(reserve)

    def cancel_reservation(self, reservation: Reservation, *, clear: bool) -> None:
        """Release a reservation when no other instance writes to its blocks any more. From any thread.

        Set ``clear`` if another instance may have written to them. It zeros the blocks: masked positions are multiplied
        by 0, and 0 times a partly written number that reads as infinity or NaN is NaN.
        """

        def run() -> None:
            if clear:
                self._runner.kv[reservation.missing] = 0
            self.scheduler.cancel_reservation(reservation)

        self._commands.put(run)

    def release_blocks(self, blocks: SequenceOf[int]) -> None:
        """Release references that ``Listener.on_computed`` got. From any thread."""
        self._commands.put(lambda: self.scheduler.blocks.release_blocks(blocks))

    def count_cached_blocks(self) -> int:
        """Return the number of blocks in the prefix cache. From any thread."""
        return self.scheduler.blocks.num_cached_blocks

    def clear_prefix_cache(self) -> None:
        """Forget the prefixes that are cached now: sequences submitted after this call find none of them.

        Running sequences continue, and blocks that fill up later are cached again. The pool retains its blocks. From
        any thread.
        """

        def clear() -> None:
            log.info("The prefix cache is cleared: it had %d blocks", self.scheduler.blocks.unpublish_all())

        self._commands.put(clear)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call ``function`` on the engine's thread, between two steps and after all commands before it.

        From any thread.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as exc:
                future.set_exception(exc)
                raise  # to log it

        self._commands.put(run)
        return future

    @property
    def has_blocks_in_use(self) -> bool:
        """Whether a sequence, a load, a save or a hand-over holds a block. On the engine's thread."""
        blocks, connector = self.scheduler.blocks, self._connector
        return blocks.num_available < blocks.num_blocks or bool(connector and connector.pending_save_blocks)

    def follow_weights(self) -> None:
        """Use no KV of other weights than the runner's current ones, from the own cache or the pool.

        Call this on the engine's thread, while ``has_blocks_in_use`` is false.
        """
        self.scheduler.blocks.unpublish_all()
        if self._connector:
            self._connector.follow_weights()

    def call_after_flush(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, on any thread, once other instances can read all saved blocks. From any thread.

        This takes some seconds at most. The call is immediate if the pool writes before it answers.
        """
        if self._connector:
            self._connector.call_after_flush(callback)
        else:
            callback()

    def abort_sequence(self, sequence: Sequence, reason: str = "abort") -> None:
        """End ``sequence`` with this finish reason. It has no effect if the sequence has ended. From any thread."""
        self._commands.put(lambda: self._end_sequence(sequence, reason))

    def _run_loop(self) -> None:
        idle = True
        while not self._stopped:
            if self._has_failed:
                # Answer every command, and compute nothing any more.
                self._run_commands(wait=True)
                self._end_all("error")
                continue
            try:
                self._run_commands(wait=idle)
                self._admit_sequences()
                preempted = self.scheduler.num_preemptions
                chunks = self.scheduler.schedule_step()
                self.metrics.preemptions.inc(self.scheduler.num_preemptions - preempted)
                self.metrics.preempted.inc(self.scheduler.num_preemptions - preempted)
                if self._runner.retrieval:
                    self._runner.retrieval.forget_all_but(self.scheduler.running)
                # With nothing to compute, the next work (a request, a load that ended, blocks that a save releases)
                # arrives as a command.
                idle = not chunks
                if chunks:
                    self._run_step(chunks)
            except Exception:
                # A failed step must not end the instance: its sequences fail, the others continue.
                log.exception("A step failed; its requests end with an error")
                failed = list(self.scheduler.running)
                for sequence in failed:
                    self._end_sequence(sequence, "error")
                idle = not failed  # other sequences may wait for their blocks
                self._fail_with_device()

    def _fail_with_device(self) -> None:
        """Answer every request with an error from now on, if the device is lost.

        After some errors (an illegal address, a failed assertion, broken memory) CUDA returns the same error for every
        later call of the process. So one more call distinguishes these errors from all others, independent of the
        exception type.
        """
        try:
            self._runner.wait_for_device()
        except Exception:
            log.critical("The device is lost: this instance must be started again", exc_info=True)
            self._has_failed = True
            self._end_all("error")

    def _end_all(self, reason: str) -> None:
        for sequence in list(self._listeners):
            self._end_sequence(sequence, reason)

    def _admit_sequences(self) -> None:
        """Admit waiting sequences; those that lack blocks that the pool may have load them first."""
        for sequence in self.scheduler.admit_waiting():
            assert self._connector is not None
            self._connector.start_load(sequence)

    def _run_commands(self, *, wait: bool) -> None:
        """Run the queued commands; ``wait`` for the first if there is none."""
        self._turned_at = math.inf if wait else time.monotonic()
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return
            self._turned_at = time.monotonic()
            wait = False
            try:
                command()
            except Exception:
                log.exception("A command failed; the running sequences go on")

    @contextlib.contextmanager
    def _ending_on_error(self, sequence: Sequence) -> Iterator[None]:
        """Make an exception in this context end ``sequence``, and no other, with an error."""
        try:
            yield
        except Exception:
            log.exception("%s failed", sequence.request.request_id)
            self._end_sequence(sequence, "error")

    def _run_step(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self._index_blocks(chunk.sequence)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        start = time.monotonic()
        choices = dict(zip(sampling, self._run_chunks(chunks), strict=True))
        seconds = time.monotonic() - start
        for chunk in chunks:
            if chunk.samples and choices[chunk.sequence] is None:
                self._withdraw_broken_blocks(chunk.sequence)
                self._end_sequence(chunk.sequence, "error")
                continue
            self.scheduler.advance_sequence(chunk)
            if chunk.num_tokens > 1:
                self._progress.record_chunk(chunk, seconds)
            self._export_blocks(chunk.sequence)
        for sequence, choice in choices.items():
            if choice is not None:
                self._append_token(sequence, *choice)
        for chunk in chunks:
            if self._connector and chunk.sequence.state is State.RUNNING:
                self._connector.start_save(chunk.sequence)

    def _withdraw_broken_blocks(self, sequence: Sequence) -> None:
        """Unpublish the blocks of a failed sequence, from the first one that holds a NaN or an infinity.

        Earlier chunks of the prompt were published before the logits showed the failure.
        """
        first = sequence.num_offloaded
        is_broken = self._runner.find_broken_blocks(sequence.block_table[first : sequence.num_published])
        if True not in is_broken:
            return
        first += is_broken.index(True)
        hashes = sequence.hashes()[first : sequence.num_published]
        log.error("%s: %d blocks hold no numbers and are withdrawn", sequence.request.request_id, len(hashes))
        self.scheduler.blocks.unpublish_blocks(hashes)
        if self._connector:
            self._connector.remove_blocks(hashes)

    def _run_chunks(self, chunks: list[Chunk]) -> list[Choice]:
        prefills = any(chunk.sequence.is_prefilling for chunk in chunks)
        start = time.monotonic()
        choices = self._runner.run(chunks)
        if prefills and self._connector:
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            self._connector.record_step(num_tokens, time.monotonic() - start)
        return choices

    def _index_blocks(self, sequence: Sequence) -> None:
        """Index the computed blocks of a sequence with sparse attention; offload them once it decodes."""
        if self._runner.retrieval is None or sequence.regime is Regime.DENSE:
            return
        self._runner.retrieval.index_blocks(sequence)
        # Prompts are computed exactly, which needs all of their blocks.
        if sequence.regime is Regime.OFFLOADED and sequence.is_decoding:
            num_full = sequence.num_computed // sequence.block_size
            if self._connector:
                self._connector.drop_unsaved_blocks(sequence)
            self.scheduler.offload_blocks(sequence, num_full)

    def _export_blocks(self, sequence: Sequence) -> None:
        """Pass the blocks of the prompt that became final to a listener that wants them."""
        listener = self._listeners[sequence]
        if listener.on_computed is None:
            return
        block_size, computed = sequence.block_size, sequence.num_computed
        whole = computed >= sequence.num_prompt_tokens
        first, last = sequence.num_exported, -(-computed // block_size) if whole else computed // block_size
        if first >= last:
            return
        blocks = sequence.block_table[first:last]
        self.scheduler.blocks.hold_blocks(blocks)
        sequence.num_exported = last
        listener.on_computed(first, blocks)

    def _append_token(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        """Append a new token to the sequence, notify its listener, and end the sequence if this is its last token."""
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
            self._end_sequence(sequence, reason, token, logprobs)
        else:
            self._listeners[sequence].on_output(TokenOutput(token, None, logprobs))

    def _end_sequence(
        self, sequence: Sequence, reason: str, token: int | None = None, logprobs: TokenLogprobs | None = None
    ) -> None:
        listener = self._listeners.get(sequence)
        if listener is None or sequence.finish_reason:
            return
        if self._connector and sequence.state is State.RUNNING and reason != "error":
            self._connector.start_save(sequence, is_last=True)
        sequence.finish_reason = reason
        self.scheduler.finish_sequence(sequence)
        self._count_end(sequence, reason)
        listener.on_output(TokenOutput(token, reason, logprobs))
        self._report_saves(sequence)

    def _count_end(self, sequence: Sequence, reason: str) -> None:
        metrics = self.metrics
        sequence.ended_at = now = time.monotonic()
        metrics.finished.labels(reason).inc()
        metrics.prompt_tokens.inc(sequence.num_prompt_tokens)
        for origin, count in sequence.count_origins().items():
            metrics.prompt_origins.labels(origin).inc(count)
        metrics.own_cached_tokens.inc(sequence.own_cached_tokens)
        metrics.pool_cached_tokens.inc(sequence.pool_cached_tokens)
        if not sequence.pool_cached_tokens:
            metrics.pool_unused.labels(sequence.pool_use.reason.value).inc()
        metrics.latency.observe(now - sequence.arrival)
        self._count_completion(sequence, reason)
        started, first_token = sequence.started_at, sequence.first_token_at
        if started is not None:
            metrics.queue_time.observe(max(0.0, started - sequence.arrival - sequence.pool_load_seconds))
            if first_token is not None and first_token >= started:
                metrics.prefill_time.observe(first_token - started)
        if sequence.first_token_at is not None and sequence.num_output_tokens > 1:
            metrics.output_token.observe((now - sequence.first_token_at) / (sequence.num_output_tokens - 1))

    def _count_completion(self, sequence: Sequence, reason: str) -> None:
        """Count what FastDeploy counts: requests that were admitted, and those that ended normally."""
        metrics, started, first_token = self.metrics, sequence.started_at, sequence.first_token_at
        if started is None or first_token is None:
            return
        metrics.count_hits(sequence.num_prompt_tokens, sequence.own_cached_tokens, sequence.pool_cached_tokens)
        if reason in ("stop", "length"):
            metrics.succeeded.inc()
            seconds = sequence.ended_at - started
            metrics.inference_time.observe(seconds)
            metrics.decode_time.observe(sequence.ended_at - first_token)
            metrics.answer_sizes.observe(sequence.num_output_tokens)
            if seconds > 0:
                metrics.token_rates.observe(sequence.num_output_tokens / seconds)

    def _report_saves(self, sequence: Sequence) -> None:
        if sequence.finish_reason and not sequence.pending_saves:
            self._listeners.pop(sequence).on_saved()

    def _watch_gauges(self) -> None:
        """Let the gauges read the engine's state whenever they are scraped."""
        metrics, scheduler, blocks = self.metrics, self.scheduler, self.scheduler.blocks
        metrics.running.set_function(lambda: len(scheduler.running))
        metrics.waiting.set_function(lambda: len(scheduler.waiting) + len(scheduler.loading) + len(scheduler.ready))
        metrics.reserved_blocks.set_function(lambda: sum(len(held.blocks) for held in list(scheduler.reservations)))
        metrics.available_blocks.set_function(lambda: blocks.num_available)
        metrics.cache_usage.set_function(lambda: 1 - blocks.num_available / blocks.num_blocks)
        metrics.batch_size.set_function(lambda: len(scheduler.running))
        metrics.max_batch_size.set(scheduler.max_num_seqs)
        metrics.available_batch_size.set_function(lambda: scheduler.max_num_seqs - len(scheduler.running))
        metrics.preempted_now.set_function(lambda: sum(each.num_preemptions > 0 for each in list(scheduler.waiting)))
        metrics.max_blocks.set(blocks.num_blocks)
        metrics.free_blocks.set_function(lambda: blocks.num_free)
        metrics.available_share.set_function(lambda: blocks.num_available / blocks.num_blocks)
        if connector := self._connector:
            metrics.pending_saves.set_function(lambda: connector.pending_save_blocks)
            metrics.pool_open.set_function(lambda: connector.is_open)
