"""The engine loop: admits sequences, schedules a step, runs the step, samples tokens, and passes the tokens on.

The loop runs on one thread, the engine's thread. Other threads do not change its state; they queue commands. A command
is a callable that the loop calls between two steps, for example for a new request, an abort, or a load that has ended.
So the scheduler and the block manager need no lock.
"""

from __future__ import annotations

import bisect
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
    """Callbacks for one sequence. The engine calls them on its thread; they must not block.

    Attributes:
        on_output: called with each token; the last call has a ``finish_reason``.
        on_saved: called once, after the last ``on_output``, when all saves of the sequence to the pool have ended.
        on_computed: called with blocks of the prompt when their KV is final; the partly filled last block is included.
            Its arguments are the index of the first of these blocks, and the blocks. The listener gets one reference
            for each block, and releases it by ``EngineCore.release_blocks``. If the model has several groups of layers,
            the engine passes only the blocks that decode needs (``BlockGroups.list_held_blocks``), in the order of that
            method's result, and the index is the position in this result.
    """

    on_output: Callable[[TokenOutput], None]
    on_saved: Callable[[], None] = lambda: None
    on_computed: Callable[[int, SequenceOf[int]], None] | None = None


@dataclass(frozen=True)
class Prefilled:
    """A prompt that another instance computed: its KV is in reserved blocks of this instance.

    Attributes:
        reservation: the blocks with the prompt's KV.
        token: the first token of the answer, or None if this instance must sample it. For that, it computes the
            prompt's last token again.
        logprobs: the log probabilities of ``token``, if the client requested them.
    """

    reservation: Reservation
    token: int | None
    logprobs: TokenLogprobs | None


class EngineCore:
    """Runs sequences of one model.

    Args:
        runner: computes the steps; its KV memory is allocated.
        scheduler: chooses the chunks of each step; its block manager has as many blocks as the KV memory.
        metrics: the counters to update.
        pool: the pool to load from and save to; ``stop`` closes it. None if the engine uses no pool.
        save_outputs: whether full blocks of generated tokens are saved too, not only those of prompts (output caching).
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
        """Whether the instance is paused: ``reserve_blocks`` reserves none. Any thread may read and set this."""
        self._broken_blocks: set[int] = set()
        """Blocks with a NaN or an infinity. The engine has a reference on each block until it has set it to zero."""
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
        """End all sequences with the finish reason ``abort``, end the loop, and close the pool.

        Wait for the running step and for running saves, each for a limited time.
        """

        def end() -> None:
            self._end_all("abort")
            self._stopped = True

        self._commands.put(end)
        self._thread.join(timeout=30)
        if self._connector:
            self._connector.close()

    @property
    def holds_stop_up(self) -> str:
        """What ``stop`` waits for, as text for the log: the running step, saves to the pool, or the pool's client."""
        if self.is_alive:
            return "the running step"
        if self._connector and (count := self._connector.pending_save_blocks):
            what = "1 block that is" if count == 1 else f"{count} blocks that are"
            return f"{what} being saved to the pool"
        return "the pool's client to close"

    @property
    def is_alive(self) -> bool:
        """Whether the loop runs and the device has not failed."""
        return self._thread.is_alive() and not self._has_failed

    @property
    def is_working(self) -> bool:
        """Whether the engine is alive, and no step or command has been running for over ``STALL_SECONDS``."""
        return self.is_alive and time.monotonic() - self._turned_at < STALL_SECONDS

    def submit(self, sequence: Sequence, listener: Listener, prefilled: Prefilled | None = None) -> None:
        """Queue a sequence. Any thread may call this.

        Args:
            sequence: the sequence to run.
            listener: gets the tokens of the sequence and its end.
            prefilled: the prompt's KV, if another instance computed it. The engine takes ownership of the reservation,
                even if this method raises.

        Raises:
            ValueError: the prompt and ``max_tokens`` together do not fit in this engine's KV memory.
        """
        wanted = sequence.num_prompt_tokens + sequence.request.params.max_tokens
        if wanted > self.scheduler.capacity_tokens:
            if prefilled:
                self.cancel_reservation(prefilled.reservation, clear=False)
            raise ValueError(
                f"{wanted} tokens do not fit in KV memory, which has space for {self.scheduler.capacity_tokens} tokens"
            )
        # Sparse attention is for decode. A request for one token never decodes, and prefill instances have only those.
        if self._runner.retrieval and sequence.request.params.max_tokens > 1:
            # If another instance began the answer, it has chosen by the tokens before the answer.
            num_tokens = sequence.num_prompt_tokens - sequence.request.num_begun
            sequence.regime = self._runner.retrieval.config.choose_regime(num_tokens)

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
        """Continue a sequence from the KV of its prompt, which another instance computed.

        If that is not possible, queue it as a new sequence.
        """
        token, reservation = prefilled.token, prefilled.reservation
        is_shared = reservation.num_cached == len(reservation.blocks)
        if token is None and (is_shared or not self.scheduler.groups.is_full):
            # The prompt's last token would be computed again. Its KV must not be written to shared blocks, and with
            # windows or states the token may read blocks that the reservation does not have.
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
        """Request a reservation of blocks for a prompt. Any thread may call this.

        Args:
            hashes: the hashes of the prompt's full blocks.
            num_tokens: the number of tokens of the prompt.
            answer: called on the engine's thread with the reservation, or with None if there are not enough blocks, or
                if the engine is paused or has failed.
        """

        def reserve() -> None:
            is_closed = self.is_paused or self._has_failed
            answer(None if is_closed else self.scheduler.reserve_blocks(hashes, num_tokens))

        self._commands.put(reserve)

    def cancel_reservation(self, reservation: Reservation, *, clear: bool) -> None:
        """Release a reservation. Any thread may call this, when no other instance writes to its blocks any more.

        Use ``clear`` if another instance may have written to the blocks: it sets them to zero, because a partly
        written number can be NaN, and attention multiplies masked positions by 0: 0 times NaN is NaN.
        """

        def run() -> None:
            if clear:
                self._runner.kv[reservation.missing] = 0
            self.scheduler.cancel_reservation(reservation)

        self._commands.put(run)

    def release_blocks(self, blocks: SequenceOf[int]) -> None:
        """Release one reference on each block that ``Listener.on_computed`` got. Any thread may call this."""
        self._commands.put(lambda: self.scheduler.blocks.release_blocks(blocks))

    def count_cached_blocks(self) -> int:
        """Return the number of blocks in the prefix cache. Any thread may call this."""
        return self.scheduler.blocks.num_cached_blocks

    def clear_prefix_cache(self) -> None:
        """Clear the prefix cache: sequences that are submitted later do not find the blocks that are cached now.

        Running sequences continue, and blocks that become full later are cached. The blocks in the pool stay there. Any
        thread may call this.
        """

        def clear() -> None:
            log.info("The prefix cache was cleared; it had %d blocks", self.scheduler.blocks.unpublish_all())

        self._commands.put(clear)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queue ``function`` as a command, and return a future with its result. Any thread may call this."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as exc:
                future.set_exception(exc)
                raise  # the loop logs it

        self._commands.put(run)
        return future

    @property
    def has_blocks_in_use(self) -> bool:
        """Whether a sequence, a load, a save or a direct transfer uses a block. Read this on the engine's thread."""
        blocks, connector = self.scheduler.blocks, self._connector
        return blocks.num_available < blocks.num_blocks or bool(connector and connector.pending_save_blocks)

    def follow_weights(self) -> None:
        """Clear the prefix cache and switch the pool to the namespace of the runner's new weights.

        Call this on the engine's thread after the weights have changed, while ``has_blocks_in_use`` is false. Then no
        sequence reads KV of the old weights.
        """
        self.scheduler.blocks.unpublish_all()
        if self._connector:
            self._connector.follow_weights()

    def call_after_flush(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when other instances can read all blocks that were saved so far. Any thread may call this.

        ``callback`` is called on any thread, after a few seconds at most; if the pool writes each block before it
        confirms the save, ``callback`` is called immediately.
        """
        if self._connector:
            self._connector.call_after_flush(callback)
        else:
            callback()

    def abort_sequence(self, sequence: Sequence, reason: str = "abort") -> None:
        """End ``sequence`` with this finish reason, unless it has ended already. Any thread may call this."""
        self._commands.put(lambda: self._end_sequence(sequence, reason))

    def _run_loop(self) -> None:
        idle = True
        events = self.scheduler.blocks.events
        while not self._stopped:
            if events:
                events.flush()
            if self._has_failed:
                # Run commands and end new sequences with an error, but compute nothing.
                self._run_commands(wait=True)
                self._end_all("error")
                continue
            try:
                self._run_commands(wait=idle)
                self._clear_broken_blocks()
                self._admit_sequences()
                preempted = self.scheduler.num_preemptions
                chunks = self.scheduler.schedule_step()
                self.metrics.preemptions.inc(self.scheduler.num_preemptions - preempted)
                self.metrics.preempted.inc(self.scheduler.num_preemptions - preempted)
                if self._runner.retrieval:
                    self._runner.retrieval.forget_all_but(self.scheduler.running)
                # If there is nothing to compute, wait for the next command: a new request, the end of a load, or blocks
                # that a save releases.
                idle = not chunks
                if chunks:
                    self._run_step(chunks)
            except Exception:
                # A failed step must not end the instance: its sequences fail, the others continue.
                log.exception("A step failed; the requests in this step end with an error")
                failed = list(self.scheduler.running)
                for sequence in failed:
                    self._end_sequence(sequence, "error")
                idle = not failed  # other sequences may wait for the blocks of the failed ones
                self._fail_with_device()

    def _fail_with_device(self) -> None:
        """Check whether the device still works; if not, end all requests with an error, from now on.

        After some errors (an illegal address, a failed assertion, broken memory) CUDA returns the same error for every
        later call of the process. So one more call shows whether the device is lost, whatever the type of the first
        exception was.
        """
        try:
            self._runner.wait_for_device()
        except Exception:
            log.critical("The device (GPU) fails every call: restart this instance", exc_info=True)
            self._has_failed = True
            self._end_all("error")

    def _end_all(self, reason: str) -> None:
        for sequence in list(self._listeners):
            self._end_sequence(sequence, reason)

    def _admit_sequences(self) -> None:
        """Admit waiting sequences, and start a load for each admitted sequence that needs blocks from the pool."""
        for sequence in self.scheduler.admit_waiting():
            assert self._connector is not None
            self._connector.start_load(sequence)

    def _run_commands(self, *, wait: bool) -> None:
        """Call all queued commands of other threads. With ``wait``, block until there is at least one."""
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
                log.exception("A command of another thread to the engine failed; the running sequences continue")

    @contextlib.contextmanager
    def _ending_on_error(self, sequence: Sequence) -> Iterator[None]:
        """Catch an exception in the ``with`` block: log it, and end ``sequence`` with an error."""
        try:
            yield
        except Exception:
            log.exception("request %s failed in the engine and ends with an error", sequence.request.request_id)
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
        """Remove the first broken block of a failed sequence, and all blocks after it, from prefix cache and pool.

        A block is broken if it has a NaN or an infinity. Blocks of earlier chunks of the prompt were cached before the
        logits showed the failure. If the sequence has released a block, and the prefix cache has evicted it, the pool
        may still have it. Such a block cannot be checked; it counts as broken if the block after it is broken.
        """
        groups, hashes, blocks = self.scheduler.groups, sequence.hashes(), self.scheduler.blocks
        first = last = sequence.num_published
        broken: set[int] = set()
        for number, table in enumerate(sequence.tables):
            names = groups.name_blocks(number, hashes, range(min(last, table.num_released)))
            cached = {place: blocks.find_block(name) for place, name in enumerate(names)}
            found = {place: block for place, block in cached.items() if block is not None}
            found |= {place: table.blocks[place] for place in range(table.num_released, len(table.blocks))}
            is_broken = self._runner.find_broken_blocks(list(found.values()))
            places = [place for place, each in zip(found, is_broken, strict=True) if each]
            broken.update(found[place] for place in places)
            if places:
                begin = places[0]
                while begin > 0 and begin - 1 not in found:
                    begin -= 1
                first = min(first, begin)
        broken -= self._broken_blocks
        blocks.hold_blocks(sorted(broken))
        self._broken_blocks |= broken
        if first == last:
            return
        names = [name for i in range(len(groups)) for name in groups.name_blocks(i, hashes, range(first, last))]
        log.error(
            "request %s: KV has NaN or infinity; %d blocks are removed from the prefix cache and from the pool",
            sequence.request.request_id,
            len(names),
        )
        blocks.unpublish_blocks(names)
        if self._connector:
            self._connector.remove_blocks(names)

    def _clear_broken_blocks(self) -> None:
        """Zero and release the broken blocks that no sequence, load or save uses any more.

        Otherwise a later sequence that gets such a block would compute NaN: attention multiplies masked positions by 0,
        and 0 times NaN is NaN.
        """
        blocks = self.scheduler.blocks
        unused = [block for block in self._broken_blocks if blocks.num_references(block) == 1]
        if unused:
            self._runner.kv[unused] = 0
            self._broken_blocks.difference_update(unused)
            blocks.release_blocks(unused)

    def _run_chunks(self, chunks: list[Chunk]) -> list[Choice]:
        prefills = any(chunk.sequence.is_prefilling for chunk in chunks)
        start = time.monotonic()
        choices = self._runner.run(chunks)
        if prefills and self._connector:
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            self._connector.record_step(num_tokens, time.monotonic() - start)
        return choices

    def _index_blocks(self, sequence: Sequence) -> None:
        """Add new full blocks of a sequence with sparse attention to the index that decode steps search for blocks.

        If the sequence is offloaded (host memory has its full blocks) and in decode, also release its full blocks in
        KV memory.
        """
        if self._runner.retrieval is None or sequence.regime is Regime.DENSE:
            return
        self._runner.retrieval.index_blocks(sequence)
        # Blocks are released only in decode, because a prompt is computed with full attention, which reads all of them.
        if sequence.regime is Regime.OFFLOADED and sequence.is_decoding:
            num_full = sequence.num_computed // sequence.block_size
            if self._connector:
                self._connector.drop_unsaved_blocks(sequence)
            self.scheduler.offload_blocks(sequence, num_full)

    def _export_blocks(self, sequence: Sequence) -> None:
        """Call ``Listener.on_computed``, if there is one, with the blocks of the prompt whose KV is now complete."""
        listener = self._listeners[sequence]
        if listener.on_computed is None:
            return
        block_size, computed = sequence.block_size, sequence.num_computed
        whole = computed >= sequence.num_prompt_tokens
        first, last = sequence.num_exported, -(-computed // block_size) if whole else computed // block_size
        if self.scheduler.groups.is_full:
            blocks = sequence.block_table[first:last]
        else:
            held = self.scheduler.groups.list_held_blocks(sequence.num_prompt_tokens)
            last = bisect.bisect_left(held, last, key=lambda block: block[1])
            blocks = [sequence.tables[number].blocks[place] for number, place in held[first:last]]
        if first >= last:
            return
        self.scheduler.blocks.hold_blocks(blocks)
        sequence.num_exported = last
        listener.on_computed(first, blocks)

    def _append_token(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        """Append a new token to the sequence, pass it to the listener, and end the sequence if it is the last token."""
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
        """Update FastDeploy's metrics of requests that got a first token, and of those that ended normally."""
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
        """Connect the gauges with functions that read the engine's state at each scrape."""
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
