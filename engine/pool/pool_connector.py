"""The engine's traffic with the pool: which blocks a sequence loads before it runs, and which it saves.

Bytes move on threads of ``kvstore_backend.transfers``, never on the engine's. A transfer holds a reference on each of
its blocks from its start until it releases them. Until then no other sequence can use them. If they would leave no
memory for the longest sequence, blocks are staged, and a transfer releases its blocks when it ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import groupby

from engine.model.model_runner import ModelRunner
from engine.pool.background import yield_to_compute
from engine.pool.saved_blocks import KeptBlocks, SavedBlocks
from engine.pool.staging import open_direct, open_staged
from engine.scheduling.pool_use import PoolUse, Reason
from engine.scheduling.request import Sequence
from engine.scheduling.scheduler import Scheduler
from engine.telemetry.metrics import EngineMetrics
from engine.telemetry.trace import log_load, log_look_up, log_save
from kvstore_backend import BlockPool, Status
from kvstore_backend.load_or_compute import LoadOrCompute
from kvstore_backend.pool import count_leading
from kvstore_backend.refill import Refill
from kvstore_backend.resharding import PeerShardings, Run
from kvstore_backend.transfers import Outcome, ReadBlocks, ReadLeading, TransferMemory, Transfers

__all__ = ["PoolConnector"]

log = logging.getLogger(__name__)

# The maximum share of all blocks that saves waiting for a slow pool may hold; beyond it saves are dropped, not queued.
_SAVE_SHARE = 0.25


class PoolConnector:
    """Loads and saves the blocks of one engine's sequences.

    While the pool is not ready, every load is an immediate miss.

    All methods but ``call_after_flush`` are for the engine's thread, and so are all callbacks.

    Args:
        runner: owns the KV memory; ``allocate_kv`` has been called.
        scheduler: notified when a load ends; its block manager holds the blocks of transfers.
        metrics: the counters to update.
        pool: closed by ``close``.
        post: runs a callable on the engine's thread, soon.
        on_saved: called with a sequence when a save of it has ended.
        ending_on_error: a context in which an exception ends the sequence, and no other.
        save_outputs: save full blocks of generated text too, not only of prompts.
        staged: blocks pass through host memory that is not KV memory. Default: true, unless the KV memory is the host's
            and holds three of the longest sequences: one for a hung load, one for a hung save, and one to run. Blocks
            that the pool has in another form (``kv_codec.py``) are always staged.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        pool: BlockPool,
        post: Callable[[Callable[[], None]], None],
        *,
        on_saved: Callable[[Sequence], None],
        ending_on_error: Callable[[Sequence], AbstractContextManager[None]],
        save_outputs: bool = False,
        staged: bool | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._metrics = metrics
        self._pool = pool
        self._on_saved = on_saved
        self._ending_on_error = ending_on_error
        self._save_outputs = save_outputs
        self._load_or_compute = LoadOrCompute(runner.shape.block_size)
        self._max_pending = max(1, int(_SAVE_SHARE * runner.kv.shape[0]))
        self._pending_save_blocks = 0
        self._kept = KeptBlocks()
        self._block_bytes = runner.shape.nbytes
        if staged is None:
            is_plain = pool.namespace.kv_dtype == runner.namespace.kv_dtype
            staged = not is_plain or runner.device.type != "cpu" or runner.kv.shape[0] < 3 * scheduler.longest_blocks
        memory: TransferMemory = open_staged(runner, pool) if staged else open_direct(runner, pool)
        self._runner = runner
        self._peers = PeerShardings(pool, runner.family)
        self._transfers = Transfers(pool, memory, post, start_thread=yield_to_compute)
        self._saved = SavedBlocks(scheduler.blocks, self._transfers, post, scheduler.longest_blocks)
        self._refill = self._start_refill()

    def _start_refill(self) -> Refill:
        return Refill(self._pool, self._saved, self._metrics.refilled_blocks.inc, start_thread=yield_to_compute)

    def follow_weights(self) -> None:
        """Use the namespace of the runner's current weights. Do not call it while a load or save is in progress."""
        new, old = self._runner.namespace, self._pool.namespace
        if (new.model, new.weights_version) == (old.model, old.weights_version):
            return
        self._pool.move_to(replace(old, model=new.model, weights_version=new.weights_version))
        self._peers = PeerShardings(self._pool, self._runner.family)
        self._kept = KeptBlocks()
        self._saved.forget_blocks()
        self._refill.close()
        self._refill = self._start_refill()

    @property
    def is_open(self) -> bool:
        """Whether the pool is in use now."""
        return self._pool.is_ready

    @property
    def pending_save_blocks(self) -> int:
        """Number of blocks of saves that have not ended."""
        return self._pending_save_blocks

    def start_load(self, sequence: Sequence) -> None:
        """Start to read the full blocks that ``sequence`` lacks; the sequence can run after the load, even if it fails.

        The load reads as many leading blocks as the pool has, or none if computing them is faster.
        """
        first = sequence.num_computed // sequence.block_size
        # The last token is always computed, so a block that ends with it is not needed.
        last = (len(sequence.token_ids) - 1) // sequence.block_size
        hashes, blocks = sequence.hashes()[first:last], sequence.block_table[first:last]
        load = _Load(sequence.request.request_id, first, hashes, sequence.hashes_of, len(self._scheduler.running))

        def decide(read_leading: ReadLeading) -> int:
            return self._look_up_and_read(load, read_leading)

        def on_end(outcome: Outcome) -> None:
            gathered = load.list_gathered(outcome.count)
            self._saved.note_blocks([hashes[i] for i in range(outcome.count) if first + i not in gathered])
            if not sequence.num_preemptions:
                sequence.pool_use, sequence.look_up, sequence.load = load.use, load.look_up, load.reading
                sequence.pool_cached_tokens = outcome.count * sequence.block_size
                sequence.prompt_sources.append(("the pool", sequence.pool_cached_tokens))
                sequence.pool_load_seconds = outcome.seconds
            sequence.gathered |= gathered
            with self._ending_on_error(sequence):
                self._scheduler.on_load_end(sequence, outcome.count, usable=outcome.is_released)

        self._scheduler.blocks.hold_blocks(blocks)
        release = partial(self._scheduler.blocks.release_blocks, blocks)
        self._transfers.load(hashes, blocks, on_end, release, decide=decide)

    def _look_up_and_read(self, load: _Load, read_leading: ReadLeading) -> int:
        """Read the leading blocks of ``load`` that the pool has, if reading is worth it; on the thread that loads."""
        present, asked = self._look_up(load), len(load.hashes)
        if not present:
            return 0
        decision = self._load_or_compute.decide(present, load.num_running)
        self._metrics.load_or_compute.labels(decision).inc()
        if decision == "compute":
            text = f"computing was expected to be quicker ({present} of {asked} blocks there; {self._load_or_compute})"
            load.use = PoolUse(Reason.SLOW, text)
            return 0
        start = time.monotonic()
        count = read_leading(present, self._reader_of(load, load.run) if load.run else None)
        load.reading = start, time.monotonic()
        seconds = load.reading[1] - start
        self._load_or_compute.record_load(count, seconds)
        log_load(load.request_id, present, count, self._block_bytes, seconds)
        load.use = load.explain_read(present, count)
        return count

    def _reader_of(self, load: _Load, run: Run) -> ReadBlocks:
        """Return the function that reads the blocks of ``load`` if another sharding has some of them."""
        return self._peers.reader_of(run, load.hashes, load.first, load.names_of(run.sharding.block_size))

    def _look_up(self, load: _Load) -> int:
        """Return how many leading blocks of ``load`` the pool has; if it has none, set the reason in ``load``."""
        start = time.monotonic()
        statuses = self._pool.exists(load.hashes) if self._pool.is_ready else []
        present = count_leading(statuses)
        log_look_up(load.request_id, load.first, load.hashes, statuses, present, time.monotonic() - start)
        load.num_behind = statuses.count(Status.OK) - present
        if run := self._peers.extend_run(statuses, load.first, load.names_of):
            load.run, load.num_behind, present = run, 0, run.count
        load.look_up = start, time.monotonic()
        if not present:
            load.use = self._explain_miss(statuses, load)
        return present

    def _explain_miss(self, statuses: SequenceOf[Status], load: _Load) -> PoolUse:
        if statuses and statuses[0] is Status.ABSENT:
            evicted = ", which was evicted, as it has later ones" if load.num_behind else ""
            text = f"not in the pool (it lacks the first of {len(load.hashes)} blocks{evicted})"
            return PoolUse(Reason.ABSENT, text)
        health = self._pool.health()
        return PoolUse(Reason.FAILED, "the look-up failed" if health.ok else f"pool away: {health.detail}")

    def start_save(self, sequence: Sequence, *, is_last: bool = False) -> None:
        """Start to save the blocks of ``sequence`` that became full.

        If the pool is not ready, or too many blocks wait for it already, nothing is started. The next call tries these
        blocks again; if there is none (``is_last``), they count as unsaved.
        """
        tokens = sequence.num_exact
        if not self._save_outputs:
            tokens = min(tokens, sequence.num_prompt_tokens)
        elif is_last and tokens < sequence.num_computed:
            log.info(
                "%s: %d generated tokens are not saved to the pool: sparse attention computed their KV, which is not "
                "exact; a prompt that has them computes and saves them",
                sequence.request.request_id,
                sequence.num_computed - tokens,
            )
        first, last = sequence.num_saved, tokens // sequence.block_size
        if first >= last:
            return
        pending = self._pending_save_blocks
        if not self._pool.is_ready or (pending and pending + last - first > self._max_pending):
            if is_last:
                self._metrics.unsaved_blocks.inc(last - first)
                why = f"{pending} others wait for it" if self._pool.is_ready else "the pool is away"
                log.debug("request %s: %d blocks are not saved: %s", sequence.request.request_id, last - first, why)
            return
        for allowed in self._list_not_withheld(sequence, first, last):
            for begin, end, seconds in self._kept.split_blocks(sequence, allowed.start, allowed.stop):
                # Blocks of another sharding are not stored twice, unless they must be retained.
                for run in [range(begin, end)] if seconds else sequence.list_ungathered(begin, end):
                    self._start_save_of(sequence, run.start, run.stop, seconds)
        sequence.num_saved = last

    def _list_not_withheld(self, sequence: Sequence, first: int, last: int) -> Iterator[range]:
        """Yield runs of the blocks from ``first`` to ``last``, without those withheld since the pool was cleared."""
        is_withheld = self._scheduler.blocks.is_withheld
        for withheld, run in groupby(range(first, last), key=lambda i: is_withheld(sequence.block_table[i])):
            if not withheld:
                members = list(run)
                yield range(members[0], members[-1] + 1)

    def _start_save_of(self, sequence: Sequence, first: int, last: int, keep_seconds: float) -> None:
        """Start to save some of the blocks; with ``keep_seconds`` also those that the pool has."""
        blocks, hashes = sequence.block_table[first:last], sequence.hashes()[first:last]

        def on_end(outcome: Outcome) -> None:
            self._pending_save_blocks -= len(blocks)
            if outcome.count == len(blocks):
                self._saved.note_blocks(hashes)
            sequence.pending_saves -= 1
            sequence.saves.num_done += outcome.count
            sequence.saves.ended_at = time.monotonic()
            self._metrics.saved_blocks.inc(outcome.count)
            self._metrics.unsaved_blocks.inc(len(blocks) - outcome.count)
            name = sequence.request.request_id
            log_save(name, first, hashes, outcome.count, self._block_bytes, outcome.seconds)
            if keep_seconds and outcome.count < len(hashes):
                self._kept.forget_blocks(hashes)
            self._on_saved(sequence)

        self._scheduler.blocks.hold_blocks(blocks)
        self._pending_save_blocks += len(blocks)
        sequence.pending_saves += 1
        sequence.saves.num_begun += len(blocks)
        sequence.saves.began_at = sequence.saves.began_at or time.monotonic()
        release = partial(self._scheduler.blocks.release_blocks, blocks)
        self._transfers.save(hashes, blocks, on_end, release, keep_seconds=keep_seconds)

    def skip_prompt(self, sequence: Sequence) -> None:
        """Save nothing of the prompt: the instance that computed it saves it."""
        sequence.num_saved = len(sequence.hashes())

    def drop_unsaved_blocks(self, sequence: Sequence) -> None:
        """Give up saving full blocks that the pool has not accepted so far: they are not held for it any longer."""
        unsaved = sequence.num_exact // sequence.block_size - sequence.num_saved
        if unsaved > 0:
            self._metrics.unsaved_blocks.inc(unsaved)
            sequence.num_saved += unsaved

    def remove_blocks(self, hashes: SequenceOf[bytes]) -> None:
        """Remove blocks from the pool, after the saves that have begun."""
        self._transfers.remove(hashes)

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Record how long a step with chunks of prompts took: loads are compared with that."""
        self._load_or_compute.record_step(num_tokens, seconds)

    def call_after_flush(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, on any thread, once other instances can read all saved blocks. From any thread."""
        self._transfers.call_after_flush(callback)

    def close(self) -> None:
        """Wait a moment for running saves, drop the rest, and close the pool."""
        self._refill.close()
        self._transfers.close()


class _Load:
    """A look-up in the pool for one sequence, and its outcome."""

    def __init__(
        self,
        request_id: str,
        first: int,
        hashes: SequenceOf[bytes],
        names_of: Callable[[int], SequenceOf[bytes]],
        num_running: int,
    ) -> None:
        self.request_id = request_id
        self.first = first
        self.hashes = hashes
        self.names_of = names_of  # names of all blocks of the sequence, under a block size
        self.run: Run | None = None  # set if another sharding has some of them
        self.num_running = num_running  # number of sequences that computing the blocks would delay
        self.num_behind = 0  # number of blocks that the pool has after the first one that it lacks
        self.use = PoolUse(Reason.FAILED, "the load failed; the log tells how")
        self.look_up: tuple[float, float] | None = None  # beginning and end, on time.monotonic
        self.reading: tuple[float, float] | None = None

    def list_gathered(self, count: int) -> set[int]:
        """Return which of the sequence's blocks came from another sharding, if ``count`` leading ones arrived."""
        parts = self.run.gathered if self.run else ()
        return {self.first + i for part in parts for i in part if i < count}

    def explain_read(self, present: int, count: int) -> PoolUse:
        """Explain a read in which ``count`` of ``present`` leading blocks arrived."""
        if not count:
            text = f"none of {present} blocks arrived (evicted meanwhile, damaged, or pool away)"
            return PoolUse(Reason.FAILED, text)
        asked, lacking = len(self.hashes), self.first + present
        why = "was evicted, as it has later ones" if self.num_behind else "is new or was evicted"
        rest = "" if present == asked else f"; it lacks block {lacking}, which {why}"
        sharding = f", {self.run}" if self.run else ""
        text = f"it had {present} of {asked} blocks{sharding}, of which {count} arrived{rest}"
        return PoolUse(Reason.HIT, text)
