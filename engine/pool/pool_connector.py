"""Loads blocks of sequences from the pool before they run, and saves their blocks to the pool.

The threads of ``kvstore_backend.transfers`` move the bytes, not the engine's thread. A transfer has a reference on each
of its blocks until no late call (one that missed its deadline and still runs) can touch the block. During this time no
other sequence can use the block. If KV memory is too small for that, blocks are staged: they pass through buffers, and
a transfer releases its blocks when it ends.

If the model has several groups of layers, a load reads the blocks with which all groups can continue after as many
tokens as possible (the resume point). If one of these blocks does not arrive, the load counts as failed. ``Transfers``
counts block ``b`` of group ``g`` as number ``g * num_blocks + b``. The blocks of the first group are saved last: if the
pool has them, it has the blocks of the other groups, too.
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
from engine.pool.saved_blocks import PinnedBlocks, SavedBlocks
from engine.pool.staging import open_direct, open_staged
from engine.scheduling.pool_use import PoolUse, Reason
from engine.scheduling.request import Sequence
from engine.scheduling.scheduler import Scheduler
from engine.telemetry.metrics import EngineMetrics
from engine.telemetry.trace import log_look_up
from kvstore_backend import BlockPool, Status
from kvstore_backend.groups import find_resume_point
from kvstore_backend.load_or_compute import LoadOrCompute
from kvstore_backend.pool import count_leading
from kvstore_backend.refill import Refill
from kvstore_backend.resharding import PeerShardings, Run
from kvstore_backend.transfers import Outcome, ReadBlocks, ReadLeading, TransferMemory, Transfers

__all__ = ["PoolConnector"]

log = logging.getLogger(__name__)

# Maximum share of all blocks that waiting saves may hold. If the pool is slow and they would hold more, no save starts.
_SAVE_SHARE = 0.25


class PoolConnector:
    """Loads and saves the blocks of an engine's sequences.

    Call all methods except ``call_after_flush`` on the engine's thread. All callbacks run on it. While the pool is not
    ready, each load ends immediately without blocks.

    Args:
        runner: owns the KV memory; ``allocate_kv`` was called.
        scheduler: gets the end of each load. Its block manager counts the references of transfers.
        metrics: the counters to update.
        pool: the pool; ``close`` closes it.
        post: queues a callable for the engine's thread.
        on_saved: called with the sequence when a save has ended.
        ending_on_error: returns a context manager that ends a sequence with an error if an exception is raised in it.
        save_outputs: whether full blocks of generated tokens are saved, too.
        staged: whether blocks pass through buffers in host memory. Default: False if KV memory is in host memory,
            blocks are not compressed in the pool, and KV memory has room for three of the longest sequences (one with a
            load that hangs, one with a save that hangs, and one that runs); otherwise True.
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
        self.pending_save_blocks = 0
        """Number of blocks in saves that have not ended."""
        self._pinned = PinnedBlocks()
        self._block_bytes = runner.shape.nbytes
        self._groups = scheduler.groups
        self._num_blocks = scheduler.blocks.num_blocks
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
        """Use the namespace of the runner's current weights. Do not call this during a load or a save."""
        new, old = self._runner.namespace, self._pool.namespace
        if (new.model, new.weights_version) == (old.model, old.weights_version):
            return
        self._pool.move_to(replace(old, model=new.model, weights_version=new.weights_version))
        self._peers.close()
        self._peers = PeerShardings(self._pool, self._runner.family)
        self._pinned = PinnedBlocks()
        self._saved.forget_blocks()
        self._refill.close()
        self._refill = self._start_refill()

    @property
    def is_open(self) -> bool:
        """Whether the pool is ready."""
        return self._pool.is_ready

    def start_load(self, sequence: Sequence) -> None:
        """Start a load of the full blocks that ``sequence`` lacks.

        The load reads the leading blocks that the pool has, or none if computing them is faster. When it has ended, it
        calls ``Scheduler.on_load_end``, also if it failed.
        """
        first = sequence.num_computed // sequence.block_size
        # The last token is always computed, so a block that ends with this token is not loaded.
        last = (len(sequence.token_ids) - 1) // sequence.block_size
        prefix = sequence.hashes()[:last]
        hashes = prefix[first:]
        load = _Load(sequence.request.request_id, first, hashes, sequence.hashes_of, len(self._scheduler.running))
        names, blocks = self._list_blocks(sequence, range(first, last))
        held = [block % self._num_blocks for block in blocks]
        wanted = dict(zip(names, blocks, strict=True)) if not self._groups.is_full else {}

        def decide(read_leading: ReadLeading) -> int:
            if self._groups.is_full:
                present = self._look_up(load)
                return self._read(load, present, present, read_leading)
            names[:] = self._look_up_groups(load, prefix)
            blocks[:] = [wanted[name] for name in names]
            return self._read(load, load.num_reached, len(names), read_leading)

        def on_end(outcome: Outcome) -> None:
            count, gathered = load.count_arrived(outcome.count), load.list_gathered(outcome.count)
            arrived = [i for i in range(outcome.count) if first + i not in gathered]
            self._saved.note_blocks([names[i] for i in arrived], [blocks[i] for i in arrived])
            if not sequence.num_preemptions:
                sequence.pool_use, sequence.look_up, sequence.load = load.use, load.look_up, load.reading
                sequence.pool_cached_tokens = count * sequence.block_size
                sequence.prompt_sources.append(("the pool", sequence.pool_cached_tokens))
                sequence.pool_load_seconds = outcome.seconds
            sequence.gathered |= gathered
            with self._ending_on_error(sequence):
                self._scheduler.on_load_end(sequence, count, usable=outcome.is_released)

        self._scheduler.blocks.hold_blocks(held)
        release = partial(self._scheduler.blocks.release_blocks, held)
        self._transfers.load(names, blocks, on_end, release, decide=decide)

    def _list_blocks(self, sequence: Sequence, places: range) -> tuple[list[bytes], list[int]]:
        """Return names and ``Transfers`` numbers of the blocks that ``sequence`` has at the indices ``places``."""
        hashes = sequence.hashes()
        names: list[bytes] = []
        blocks: list[int] = []
        for number in reversed(range(len(sequence.tables))):
            table = sequence.tables[number]
            held = range(min(places.stop, max(places.start, table.num_released)), places.stop)
            names += self._groups.name_blocks(number, hashes, held)
            blocks += [number * self._num_blocks + table.blocks[i] for i in held]
        return names, blocks

    def _read(self, load: _Load, present: int, num_blocks: int, read_leading: ReadLeading) -> int:
        """Read blocks from the pool, unless computing them is faster.

        Args:
            load: gets the explanation and the times of the read.
            present: number of leading blocks of the sequence that the pool has.
            num_blocks: number of blocks to read: ``present`` if the model has one group of layers, else the number of
                blocks that all groups together need for ``present`` blocks of the sequence.
            read_leading: function that reads leading blocks of the load, and returns how many arrived.

        Returns:
            The number of blocks that arrived.
        """
        asked = len(load.hashes)
        if not present:
            return 0
        decision = self._load_or_compute.decide(present, load.num_running)
        self._metrics.load_or_compute.labels(decision).inc()
        if decision == "compute":
            text = (
                f"computing was expected to be faster ({present} of {asked} blocks are in the pool; "
                f"{self._load_or_compute})"
            )
            load.use = PoolUse(Reason.SLOW, text)
            return 0
        start = time.monotonic()
        read_blocks: ReadBlocks | None = None
        if run := load.run:  # the pool has some of the blocks in another sharding
            names = load.names_of(run.sharding.block_size)
            read_blocks = self._peers.reader_of(run, load.hashes, load.first, names)
        num_arrived = read_leading(num_blocks, read_blocks)
        load.reading = start, time.monotonic()
        seconds = load.reading[1] - start
        count = load.count_arrived(num_arrived)
        self._load_or_compute.record_load(count, seconds)
        log.debug(
            "request %s: load of %d blocks: %d arrived and were verified, %d bytes in %.1f ms",
            *(load.request_id, num_blocks, num_arrived, num_arrived * self._block_bytes, 1e3 * seconds),
        )
        load.use = load.explain_read(present, count)
        return num_arrived

    def _look_up_groups(self, load: _Load, hashes: SequenceOf[bytes]) -> list[bytes]:
        """Find the resume point: the largest number of blocks after which the pool lets all groups continue.

        Store it in ``load``; if there is none, store the explanation in ``load.use``. ``hashes`` are the block hashes
        of the sequence from the first block on.

        Returns:
            The names of the blocks that all groups need to continue there.
        """
        start, groups, size = time.monotonic(), self._groups, self._groups.block_size
        statuses: list[Status] = []

        def exist(wanted: SequenceOf[tuple[int, int]]) -> list[bool]:
            names = [groups.name_block(number, hashes[place]) for number, place in wanted]
            found = self._pool.exists(names) if self._pool.is_ready else [Status.FAILED] * len(names)
            statuses.extend(found)
            return list(map(bool, found))

        resume = find_resume_point(groups.groups, load.first * size, len(hashes) * size, exist)
        last = resume.num_tokens // size
        load.num_reached = last - load.first
        load.look_up = start, time.monotonic()
        log_look_up(load.request_id, load.first, load.hashes, statuses, load.num_reached, load.look_up[1] - start)
        names = [
            name
            for number in reversed(range(len(groups)))
            for name in groups.name_blocks(number, hashes, groups.list_needed_blocks(number, load.first, last))
        ]
        load.num_wanted = len(names)
        if not load.num_reached and Status.FAILED in statuses:
            load.use = self._explain_failure()
        elif not load.num_reached:
            load.use = PoolUse(Reason.ABSENT, f"not in the pool ({resume.describe(groups.groups)})")
        return names

    def _look_up(self, load: _Load) -> int:
        """Look up the blocks of ``load`` in the pool. If the pool has none, store the explanation in ``load.use``.

        Returns:
            The number of leading blocks that the pool has, in this sharding or another one.
        """
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
            evicted = ", which was evicted, because the pool has later blocks" if load.num_behind else ""
            text = f"not in the pool (it lacks the first of {len(load.hashes)} blocks{evicted})"
            return PoolUse(Reason.ABSENT, text)
        return self._explain_failure()

    def _explain_failure(self) -> PoolUse:
        health = self._pool.health()
        text = "the look-up failed" if health.ok else f"the pool is not reachable: {health.detail}"
        return PoolUse(Reason.FAILED, text)

    def start_save(self, sequence: Sequence, *, is_last: bool = False) -> None:
        """Start saves of the blocks of ``sequence`` that became full since the last call.

        If the pool is not ready, or too many blocks are being saved already, no save starts. The next call includes
        these blocks; if ``is_last``, there is no next call, and they count as unsaved.
        """
        tokens = sequence.num_exact
        if not self._save_outputs:
            tokens = min(tokens, sequence.num_prompt_tokens)
        elif is_last and tokens < sequence.num_computed:
            log.info(
                "request %s: %d generated tokens are not saved to the pool: sparse attention computed their KV, which "
                "is not exact; a later prompt with these tokens computes and saves them",
                sequence.request.request_id,
                sequence.num_computed - tokens,
            )
        first, last = sequence.num_saved, tokens // sequence.block_size
        if first >= last:
            return
        pending, new = self.pending_save_blocks, (last - first) * len(self._groups)
        if not self._pool.is_ready or (pending and pending + new > self._max_pending):
            if is_last:
                self._metrics.unsaved_blocks.inc(new)
                why = f"{pending} other blocks wait to be saved" if self._pool.is_ready else "the pool is not reachable"
                log.debug("request %s: %d blocks are not saved: %s", sequence.request.request_id, new, why)
            return
        for allowed in self._list_not_withheld(sequence, first, last):
            for begin, end, seconds in self._pinned.split_blocks(sequence, allowed.start, allowed.stop):
                # The pool has blocks from another sharding already. They are saved only if they must be pinned.
                for run in [range(begin, end)] if seconds else sequence.list_ungathered(begin, end):
                    self._start_save_of(sequence, run.start, run.stop, seconds)
        sequence.num_saved = last

    def _list_not_withheld(self, sequence: Sequence, first: int, last: int) -> Iterator[range]:
        """Yield the indices from ``first`` to ``last - 1`` whose blocks may be saved (are not withheld), as ranges."""
        is_withheld = self._scheduler.blocks.is_withheld

        def any_withheld(place: int) -> bool:
            return any(is_withheld(table.blocks[place]) for table in sequence.tables if place >= table.num_released)

        for withheld, run in groupby(range(first, last), key=any_withheld):
            if not withheld:
                members = list(run)
                yield range(members[0], members[-1] + 1)

    def _start_save_of(self, sequence: Sequence, first: int, last: int, keep_seconds: float) -> None:
        """Start to save the blocks with the indices ``first`` to ``last - 1`` of the sequence.

        If ``keep_seconds`` is above 0, the pool is asked to pin all these blocks for this time, even if it has them
        already.
        """
        hashes, blocks = self._list_blocks(sequence, range(first, last))
        held = [block % self._num_blocks for block in blocks]
        if not blocks:
            return

        def on_end(outcome: Outcome) -> None:
            self.pending_save_blocks -= len(blocks)
            if outcome.count == len(blocks):
                self._saved.note_blocks(hashes, blocks)
            sequence.pending_saves -= 1
            sequence.saves.num_done += outcome.count
            sequence.saves.ended_at = time.monotonic()
            self._metrics.saved_blocks.inc(outcome.count)
            self._metrics.unsaved_blocks.inc(len(blocks) - outcome.count)
            log.debug(
                "request %s: save of blocks %d to %d of the prompt and answer: the pool has %d of %d now, %d bytes; "
                "%.1f ms",
                *(sequence.request.request_id, first, last - 1, outcome.count, len(blocks)),
                *(outcome.count * self._block_bytes, 1e3 * outcome.seconds),
            )
            if keep_seconds and outcome.count < len(hashes):
                self._pinned.forget_blocks(hashes)
            self._on_saved(sequence)

        self._scheduler.blocks.hold_blocks(held)
        self.pending_save_blocks += len(blocks)
        sequence.pending_saves += 1
        sequence.saves.num_begun += len(blocks)
        sequence.saves.began_at = sequence.saves.began_at or time.monotonic()
        release = partial(self._scheduler.blocks.release_blocks, held)
        self._transfers.save(hashes, blocks, on_end, release, keep_seconds=keep_seconds)

    def skip_prompt(self, sequence: Sequence) -> None:
        """Mark the prompt of ``sequence`` as saved, because the instance that computed it saves it."""
        sequence.num_saved = len(sequence.hashes())

    def drop_unsaved_blocks(self, sequence: Sequence) -> None:
        """Do not save the full blocks of ``sequence`` for which no save has started; count them as unsaved."""
        unsaved = sequence.num_exact // sequence.block_size - sequence.num_saved
        if unsaved > 0:
            self._metrics.unsaved_blocks.inc(unsaved)
            sequence.num_saved += unsaved

    def remove_blocks(self, hashes: SequenceOf[bytes]) -> None:
        """Remove blocks from the pool when all saves that have already started are finished."""
        self._transfers.remove(hashes)

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Record how long a step with chunks of prompts took, to decide whether loading is faster than computing."""
        self._load_or_compute.record_step(num_tokens, seconds)

    def call_after_flush(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on any thread when other instances can read all saved blocks. Any thread may call this."""
        self._transfers.call_after_flush(callback)

    def close(self) -> None:
        """Wait a limited time for saves, drop saves that have not ended by then, and close the pool."""
        self._refill.close()
        self._transfers.close()


class _Load:
    """The load of one sequence: its look-up, its read, and their results."""

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
        self.names_of = names_of  # returns the hashes of all blocks of the sequence, for a block size
        self.run: Run | None = None  # the blocks to read, if the pool has some of them in another sharding
        # If the model has several groups: number of blocks up to the resume point, and number of blocks of all groups
        # that must be read for it.
        self.num_reached = 0
        self.num_wanted = 0
        self.num_running = num_running  # number of sequences that would be delayed if the blocks were computed
        self.num_behind = 0  # number of blocks that the pool has after the first block that it lacks
        self.use = PoolUse(Reason.FAILED, "the load failed; the log says why")
        self.look_up: tuple[float, float] | None = None  # start and end of the look-up, on time.monotonic
        self.reading: tuple[float, float] | None = None  # start and end of the read

    def count_arrived(self, num_arrived: int) -> int:
        """Return after how many blocks the sequence can continue, if ``num_arrived`` blocks were read.

        If the model has several groups of layers, and not all wanted blocks were read, the result is 0.
        """
        if not self.num_reached:
            return num_arrived
        return self.num_reached if num_arrived == self.num_wanted else 0

    def list_gathered(self, count: int) -> set[int]:
        """Return which of the first ``count`` blocks of the load are read from another sharding.

        The indices count from the first block of the prompt.
        """
        parts = self.run.gathered if self.run else ()
        return {self.first + i for part in parts for i in part if i < count}

    def explain_read(self, present: int, count: int) -> PoolUse:
        """Return reason and explanation for a read in which ``count`` of ``present`` blocks arrived."""
        if not count:
            text = f"none of {present} blocks arrived (evicted meanwhile, damaged, or the pool is not reachable)"
            return PoolUse(Reason.FAILED, text)
        asked, lacking = len(self.hashes), self.first + present
        why = "was evicted, because the pool has later blocks" if self.num_behind else "is new or was evicted"
        rest = "" if present == asked else f"; it lacks block {lacking}, which {why}"
        sharding = f", {self.run}" if self.run else ""
        text = f"the pool had {present} of {asked} blocks{sharding}, of which {count} arrived{rest}"
        return PoolUse(Reason.HIT, text)
