"""The half of the vLLM connector that lives in a worker: moves blocks, on threads of its own; free of vLLM.

Ownership of blocks: ``vllm_transfers``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvstore_backend.integrations.vllm.counts import Counts
from kvstore_backend.integrations.vllm.memory import KVMemory
from kvstore_backend.integrations.vllm.transfers import Report, Transfer
from kvstore_backend.pool import BlockPool

__all__ = ["Loaded", "WorkerHalf"]

logger = logging.getLogger(__name__)

_SETTLE_SECONDS = 60.0
_FLUSH_SECONDS = 2.0


@dataclass
class Loaded:
    """Loads that came to an end, by request.

    Attributes:
        requests: all of them.
        blocks: blocks that did not come, of requests that keep what came before.
        failed: requests that start anew in other blocks, as a call that was given up may still write to theirs.
    """

    requests: set[str] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class WorkerHalf:
    """Loads and saves blocks of one worker.

    Args:
        pool: closed by ``close``.
        memory: the worker's KV memory.
    """

    def __init__(self, pool: BlockPool, memory: KVMemory) -> None:
        self.namespace = pool.namespace
        self._pool = pool
        self._memory = memory
        self._counts = Counts(pool.namespace.digest)
        self._loading = ThreadPoolExecutor(1, "pool-load")
        self._saving = ThreadPoolExecutor(1, "pool-save")
        self._lock = threading.Lock()  # guards the next two
        self._loaded = Loaded()
        self._report = Report()
        for span in memory.allocations():
            pool.register(*span)

    def start_loads(self, loads: Iterable[Transfer]) -> None:
        """Begin to read; the end is told by ``take``."""
        for load in loads:
            self._submit(self._loading, lambda load=load: self._load(load))  # type: ignore[misc]

    def start_saves(self, saves: Iterable[Transfer]) -> None:
        """Begin to write blocks whose contents are complete."""
        for save in saves:
            self._submit(self._saving, lambda save=save: self._save(save))  # type: ignore[misc]

    def take(self) -> tuple[Loaded, Report]:
        """Loads that ended since the last call, and what the scheduler has to know; all of it has been counted."""
        with self._lock:
            loaded, self._loaded = self._loaded, Loaded()
            report, self._report = self._report, Report()
        return loaded, report

    def take_counts(self) -> dict[str, dict[str, float]]:
        """What was counted since the last call."""
        return self._counts.take()

    def close(self) -> None:
        """Give running saves a moment, drop the rest, and leave the pool."""
        drained = threading.Event()
        self._submit(self._saving, drained.set)
        drained.wait(_FLUSH_SECONDS)
        self._loading.shutdown(wait=False, cancel_futures=True)
        self._saving.shutdown(wait=False, cancel_futures=True)
        leaving = threading.Thread(target=self._pool.close, name="pool-close", daemon=True)
        leaving.start()
        leaving.join(_FLUSH_SECONDS)

    @staticmethod
    def _submit(thread: ThreadPoolExecutor, work: Callable[[], None]) -> None:
        try:
            thread.submit(work)
        except RuntimeError:
            logger.debug("The connector is closed; a transfer was dropped")

    def _load(self, load: Transfer) -> None:
        start = time.monotonic()
        count = 0
        try:
            count = self._pool.load(load.names, self._memory.values(load.blocks))
        except Exception:
            logger.exception("Loading %d blocks failed; they will be computed", len(load.blocks))
        missing = load.blocks[count:]
        nbytes = count * self._memory.block_bytes
        self._counts.add("load", time.monotonic() - start, nbytes, ok=count, failed=len(missing))
        is_settled = not missing or self._pool.settle(0)
        if is_settled:
            self._memory.clear(missing)
        with self._lock:
            self._loaded.requests.add(load.request_id)
            if missing:
                self._report.short.add(load.request_id)
            if is_settled:
                self._loaded.blocks.update(missing)
                self._report.ended[load.number] += 1
            else:
                self._loaded.failed.add(load.request_id)
        if not is_settled:
            self._when_settled(load, missing)

    def _save(self, save: Transfer) -> None:
        start = time.monotonic()
        count = 0
        try:
            count = sum(map(bool, self._pool.save(save.names, self._memory.values(save.blocks))))
        except Exception:
            logger.exception("Saving %d blocks failed", len(save.blocks))
        missing = len(save.blocks) - count
        # "ok" means that the pool has the block now; many it had before, so bytes would say too much.
        self._counts.add("save", time.monotonic() - start, ok=count, failed=missing)
        if missing and not self._pool.settle(0):
            self._when_settled(save, ())
        else:
            self._end(save)

    def _when_settled(self, transfer: Transfer, spoilt: Sequence[int]) -> None:
        """Report the transfer's end once nothing touches its blocks; what a late read left in ``spoilt`` is cleared."""

        def wait() -> None:
            while not self._pool.settle(_SETTLE_SECONDS):
                logger.warning("A call to the pool has been running for over %g s", _SETTLE_SECONDS)
            self._memory.clear(spoilt)
            self._end(transfer)

        threading.Thread(target=wait, name="pool-settle", daemon=True).start()

    def _end(self, transfer: Transfer) -> None:
        with self._lock:
            self._report.ended[transfer.number] += 1
