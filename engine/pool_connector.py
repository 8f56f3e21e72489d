"""Between the engine's blocks and the pool: loads and saves on threads of their own, never on the engine's.

Ownership: from ``start_load`` / ``start_save`` until their callback has been called, native code may write to or
read from the blocks' memory. Whoever starts one keeps a reference on the blocks until then; and on those that the
callback names as unsettled (the pool gave up on a call that is still running) until ``when_settled``. However long that
is, memory must do without them: where they would leave no room for the longest sequence, blocks are staged, which are
never unsettled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.background import yield_to_compute
from engine.load_or_compute import LoadOrCompute
from engine.model_runner import ModelRunner
from engine.staging import Staging
from kvstore_backend import BlockPool, Value

__all__ = ["PoolConnector"]

log = logging.getLogger(__name__)

# A share of all blocks may be held by saves that wait for a slow pool; beyond it saves are dropped, not queued.
_SAVE_SHARE = 0.25
_SETTLE_SECONDS = 60.0
_DRAIN_SECONDS = 5.0


class PoolConnector:
    """Loads and saves KV blocks of one ``ModelRunner``. While the pool is not ready, every load is a miss at once.

    Args:
        runner: owns the KV memory; ``allocate_kv`` has been called.
        pool: closed by ``close``.
        post: runs a callable on the engine's thread, soon. All callbacks go through it.
        longest_blocks: of the longest sequence.
        staged: blocks pass through host memory that is no KV memory. Default: unless the KV memory is the host's and
            has room for three of the longest sequences: one that a hung load keeps, one that a hung save does, and
            one to run.
    """

    def __init__(
        self,
        runner: ModelRunner,
        pool: BlockPool,
        post: Callable[[Callable[[], None]], None],
        longest_blocks: int,
        *,
        staged: bool | None = None,
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._post = post
        if staged is None:
            staged = runner.device.type != "cpu" or runner.kv.shape[0] < 3 * longest_blocks
        self._staged = staged
        self._loads = ThreadPoolExecutor(1, "pool-load", yield_to_compute)
        self._saves = ThreadPoolExecutor(1, "pool-save", yield_to_compute)
        self._max_pending = max(1, int(_SAVE_SHARE * runner.kv.shape[0]))
        self.load_or_compute = LoadOrCompute(runner.shape.block_size)
        """Told of loads here; to be told of steps by whoever runs them."""
        self.pending_save_blocks = 0
        """Blocks handed to ``start_save`` whose callback has not been posted yet; engine thread only."""
        if self._staged:
            self._incoming, self._outgoing = self._new_staging(), self._new_staging()
        else:
            pool.register(runner.kv.data_ptr(), runner.kv.numel() * runner.kv.element_size())

    @property
    def is_open(self) -> bool:
        """Whether the pool is in use now."""
        return self._pool.is_ready

    def start_load(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        num_running: int,
        done: Callable[[int, float, Sequence[int]], None],
    ) -> None:
        """Read as many leading blocks as the pool has, or none where computing them is quicker.

        Computing them would delay ``num_running`` other sequences.
        ``done(number, seconds, unsettled)`` is posted at the end; ``unsettled`` are blocks that a call which was
        given up may still write to.
        """

        def job() -> None:
            start = time.monotonic()
            present = count = 0
            try:
                present = self._pool.lookup(hashes)
                if present and self.load_or_compute.should_load(present, num_running):
                    count = self._timed_load(hashes[:present], blocks[:present])
            except Exception:
                log.exception("Loading %d blocks failed; they will be computed", len(blocks))
            seconds = time.monotonic() - start
            unsettled = self._unsettled(blocks[count:present])
            self._post(lambda: done(count, seconds, unsettled))

        self._submit(self._loads, job)

    def start_save(
        self, hashes: Sequence[bytes], blocks: Sequence[int], done: Callable[[int, Sequence[int]], None]
    ) -> bool:
        """Write the blocks out.

        ``done(number now in the pool, unsettled)`` is posted at the end; ``unsettled`` are blocks that a call which
        was given up may still read.

        Returns:
            False when too much is waiting already, or the pool is not ready: nothing was started.
        """
        if not self._pool.is_ready:
            return False
        if self.pending_save_blocks + len(blocks) > self._max_pending and self.pending_save_blocks:
            return False
        self.pending_save_blocks += len(blocks)

        def finish(count: int, unsettled: Sequence[int]) -> None:
            self.pending_save_blocks -= len(blocks)
            done(count, unsettled)

        def job() -> None:
            count = 0
            try:
                count = self._save(hashes, blocks)
            except Exception:
                log.exception("Saving %d blocks failed", len(blocks))
            unsettled = self._unsettled(blocks) if count < len(blocks) else []
            self._post(lambda: finish(count, unsettled))

        self._submit(self._saves, job)
        return True

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Post ``callback`` once no call that was given up touches blocks any more."""

        def wait() -> None:
            while not self._pool.settle(_SETTLE_SECONDS):
                log.warning("A call to the pool has been running for over %g s", _SETTLE_SECONDS)
            self._post(callback)

        threading.Thread(target=wait, name="pool-settle", daemon=True).start()

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on a thread of its own once other instances can read what was saved so far.

        Or once that has been given up, or after some seconds: whoever waits finds out what there is.
        """

        def wait() -> None:
            self._pool.drain(_DRAIN_SECONDS)
            callback()

        threading.Thread(target=wait, name="pool-drain", daemon=True).start()

    def close(self, flush_seconds: float = 2.0) -> None:
        """Give running saves ``flush_seconds``, drop the rest, and leave the pool."""
        drained = threading.Event()
        self._submit(self._saves, drained.set)
        drained.wait(flush_seconds)
        self._loads.shutdown(wait=False, cancel_futures=True)
        self._saves.shutdown(wait=False, cancel_futures=True)
        # A native client takes its time to leave; leaving is not worth more than a moment.
        leaving = threading.Thread(target=self._pool.close, name="pool-close", daemon=True)
        leaving.start()
        leaving.join(flush_seconds)

    @staticmethod
    def _submit(executor: ThreadPoolExecutor, job: Callable[[], None]) -> None:
        try:
            executor.submit(job)
        except RuntimeError:
            log.debug("The pool connector is closed; a transfer was dropped")

    def _timed_load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> int:
        start = time.monotonic()
        loaded = self._load(hashes, blocks)
        self.load_or_compute.record_load(loaded, time.monotonic() - start)
        return loaded

    def _load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> int:
        if not self._staged:
            loaded = 0
            try:
                loaded = self._pool.load(hashes, self._values(blocks))
            finally:
                self.clear(blocks[loaded:])
            return loaded
        loaded = 0
        while loaded < len(blocks):
            staging = self._incoming
            part = slice(loaded, loaded + staging.capacity)
            wanted = blocks[part]
            count = self._pool.load(hashes[part], staging.values(len(wanted)))
            staging.deliver(wanted[:count])
            loaded += count
            if count < len(wanted):
                self._incoming = self._usable(staging)
                break
        return loaded

    def _save(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> int:
        if not self._staged:
            return sum(map(bool, self._pool.save(hashes, self._values(blocks))))
        saved = 0
        for start in range(0, len(blocks), self._outgoing.capacity):
            staging = self._outgoing
            part = slice(start, start + staging.capacity)
            staging.fetch(blocks[part])
            saved += sum(map(bool, self._pool.save(hashes[part], staging.values(len(blocks[part])))))
            self._outgoing = self._usable(staging)
        return saved

    def clear(self, blocks: Sequence[int]) -> None:
        """Make what a failed read left behind finite: masked positions still meet it, times zero."""
        self._runner.kv[list(blocks)] = 0

    def _unsettled(self, blocks: Sequence[int]) -> Sequence[int]:
        """Which of ``blocks``, concerned by a call that failed just now, native code may still touch: all or none."""
        return [] if self._staged or not blocks or self._pool.settle(0) else blocks

    def _usable(self, staging: Staging) -> Staging:
        """This staging, or another if a call that was given up may still touch it."""
        if self._pool.settle(0):
            return staging
        self.when_settled(lambda: self._pool.unregister(*staging.span))
        return self._new_staging()

    def _new_staging(self) -> Staging:
        staging = Staging(self._runner.kv)
        self._pool.register(*staging.span)
        return staging

    def _values(self, blocks: Sequence[int]) -> list[Value]:
        return [(self._runner.span(block),) for block in blocks]
