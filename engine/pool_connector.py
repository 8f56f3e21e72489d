"""The engine's traffic with the pool: which blocks a sequence loads before it runs, and which it saves.

Bytes move on threads of ``kvstore_backend.transfers``, never on the engine's. A transfer holds a reference on each of
its blocks from its start until it releases them. However long that is, memory must do without them: where they would
leave no room for the longest sequence, blocks are staged, and a transfer releases its blocks when it ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from functools import partial

from engine.background import yield_to_compute
from engine.load_or_compute import LoadOrCompute
from engine.metrics import EngineMetrics
from engine.model_runner import ModelRunner
from engine.request import Sequence
from engine.scheduler import Scheduler
from engine.staging import StagedMemory
from kvstore_backend import BlockPool
from kvstore_backend.transfers import DirectMemory, Outcome, ReadLeading, TransferMemory, Transfers

__all__ = ["PoolConnector"]

log = logging.getLogger(__name__)

# A share of all blocks may be held by saves that wait for a slow pool; beyond it saves are dropped, not queued.
_SAVE_SHARE = 0.25


class PoolConnector:
    """Loads and saves of one engine's sequences. While the pool is not ready, every load is a miss at once.

    All methods but ``call_after_flush`` are for the engine's thread, and so are all callbacks.

    Args:
        runner: owns the KV memory; ``allocate_kv`` has been called.
        scheduler: hears of loads that ended; its block manager holds the blocks of transfers.
        metrics: counted into.
        pool: closed by ``close``.
        post: runs a callable on the engine's thread, soon.
        on_saved: called with a sequence when a save of it has ended.
        ending_on_error: a context in which an exception ends the sequence, and nobody else.
        save_outputs: save full blocks of generated text too, not only of prompts.
        staged: blocks pass through host memory that is no KV memory. Default: unless the KV memory is the host's and
            has room for three of the longest sequences: one that a hung load keeps, one that a hung save does, and
            one to run.
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
        if staged is None:
            staged = runner.device.type != "cpu" or runner.kv.shape[0] < 3 * scheduler.longest_blocks
        memory = StagedMemory(runner.kv, pool) if staged else _direct_memory(runner, pool)
        self._transfers = Transfers(pool, memory, post, start_thread=yield_to_compute)

    @property
    def is_open(self) -> bool:
        """Whether the pool is in use now."""
        return self._pool.is_ready

    @property
    def pending_save_blocks(self) -> int:
        """Blocks of saves that have not ended."""
        return self._pending_save_blocks

    def start_load(self, sequence: Sequence) -> None:
        """Begin to read the full blocks that ``sequence`` lacks; it runs when that is over, however it went.

        As many leading blocks as the pool has are read, or none where computing them is quicker.
        """
        first = sequence.num_computed // sequence.block_size
        # The last token is always computed, so a block that ends with it is of no use.
        last = (len(sequence.token_ids) - 1) // sequence.block_size
        hashes, blocks = sequence.hashes()[first:last], sequence.block_table[first:last]
        num_running = len(self._scheduler.running)  # whom computing the blocks would delay

        def decide(read_leading: ReadLeading) -> int:
            present = self._pool.lookup(hashes)
            if not present or not self._load_or_compute.should_load(present, num_running):
                return 0
            start = time.monotonic()
            count = read_leading(present)
            self._load_or_compute.record_load(count, time.monotonic() - start)
            return count

        def on_end(outcome: Outcome) -> None:
            if not sequence.num_preemptions:
                sequence.pool_cached_tokens = outcome.count * sequence.block_size
                sequence.pool_load_seconds = outcome.seconds
            with self._ending_on_error(sequence):
                self._scheduler.on_load_end(sequence, outcome.count, usable=outcome.is_released)

        self._scheduler.blocks.hold_blocks(blocks)
        release = partial(self._scheduler.blocks.release_blocks, blocks)
        self._transfers.load(hashes, blocks, on_end, release, decide=decide)

    def start_save(self, sequence: Sequence, *, is_last: bool = False) -> None:
        """Begin to save the blocks of ``sequence`` that became full.

        Nothing is begun where the pool is not ready, or too many blocks wait for it already: they are tried again with
        the next ones, and where there will be none (``is_last``) counted as unsaved.
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
        blocks = sequence.block_table[first:last]
        pending = self._pending_save_blocks
        if not self._pool.is_ready or (pending and pending + len(blocks) > self._max_pending):
            if is_last:
                self._metrics.unsaved_blocks.inc(len(blocks))
            return

        def on_end(outcome: Outcome) -> None:
            self._pending_save_blocks -= len(blocks)
            sequence.pending_saves -= 1
            self._metrics.saved_blocks.inc(outcome.count)
            self._metrics.unsaved_blocks.inc(len(blocks) - outcome.count)
            self._on_saved(sequence)

        self._scheduler.blocks.hold_blocks(blocks)
        self._pending_save_blocks += len(blocks)
        sequence.pending_saves += 1
        sequence.num_saved = last
        hashes = sequence.hashes()[first:last]
        self._transfers.save(hashes, blocks, on_end, partial(self._scheduler.blocks.release_blocks, blocks))

    def skip_prompt(self, sequence: Sequence) -> None:
        """Save nothing of the prompt: the instance that computed it does."""
        sequence.num_saved = len(sequence.hashes())

    def drop_unsaved_blocks(self, sequence: Sequence) -> None:
        """Give up saving full blocks that the pool did not take so far: they are not kept for it."""
        unsaved = sequence.num_exact // sequence.block_size - sequence.num_saved
        if unsaved > 0:
            self._metrics.unsaved_blocks.inc(unsaved)
            sequence.num_saved += unsaved

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Hear how long a step with chunks of prompts took: loads are weighed against it."""
        self._load_or_compute.record_step(num_tokens, seconds)

    def call_after_flush(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, on any thread, once other instances can read all that was saved. From any thread."""
        self._transfers.call_after_flush(callback)

    def close(self) -> None:
        """Give running saves a moment, drop the rest, and leave the pool."""
        self._transfers.close()


def _direct_memory(runner: ModelRunner, pool: BlockPool) -> TransferMemory:
    """The runner's KV memory, registered with the pool."""
    kv = runner.kv
    pool.register(kv.data_ptr(), kv.numel() * kv.element_size())

    def clear(blocks: SequenceOf[int]) -> None:
        kv[list(blocks)] = 0

    return DirectMemory(lambda blocks: [(runner.span(block),) for block in blocks], clear)
