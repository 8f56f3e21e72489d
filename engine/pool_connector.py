"""Between the engine's blocks and the pool: loads and saves on threads of their own, never on the engine's.

Ownership: from ``start_load`` / ``start_save`` until their callback has been called, native code may write to or
read from the blocks' memory. Whoever starts one keeps a reference on the blocks until then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.model_runner import ModelRunner
from kvstore_backend import BlockPool, PoolUnavailable, Span, Value

__all__ = ["PoolConnector"]

log = logging.getLogger(__name__)

_REOPEN_SECONDS = 2.0
# A share of all blocks may be held by saves that wait for a slow pool; beyond it saves are dropped, not queued.
_SAVE_SHARE = 0.25


class PoolConnector:
    """Loads and saves KV blocks of one ``ModelRunner``.

    The pool is opened in the background and tried again until it can be had: an engine starts without it, and
    every load is a miss until then.

    Args:
        runner: owns the KV memory; ``allocate_kv`` has been called.
        open_pool: opens the pool; raises ``PoolUnavailable`` with one sentence.
        post: runs a callable on the engine's thread, soon. All callbacks go through it.
        staged: blocks pass through host memory. Default: unless the KV memory is host memory itself.
    """

    def __init__(
        self,
        runner: ModelRunner,
        open_pool: Callable[[], BlockPool],
        post: Callable[[Callable[[], None]], None],
        *,
        staged: bool | None = None,
    ) -> None:
        self._runner = runner
        self._open_pool = open_pool
        self._post = post
        self._staged = runner.device.type != "cpu" if staged is None else staged
        self._pool: BlockPool | None = None
        self._closing = threading.Event()
        self._loads = ThreadPoolExecutor(1, "pool-load")
        self._saves = ThreadPoolExecutor(1, "pool-save")
        self._max_pending = max(1, int(_SAVE_SHARE * runner.kv.shape[0]))
        self.pending_save_blocks = 0
        """Blocks handed to ``start_save`` whose callback has not been posted yet; engine thread only."""
        self._opener = threading.Thread(target=self._open_until_closed, name="pool-open", daemon=True)
        self._opener.start()

    @property
    def is_open(self) -> bool:
        """Whether the pool has been joined."""
        return self._pool is not None

    def start_load(self, hashes: Sequence[bytes], blocks: Sequence[int], done: Callable[[int, float], None]) -> None:
        """Read as many leading blocks as the pool has; ``done(number, seconds)`` is posted at the end."""
        if self._pool is None:
            self._post(lambda: done(0, 0.0))
            return

        def job() -> None:
            start = time.monotonic()
            count = 0
            try:
                count = self._load(hashes, blocks)
            except Exception:
                log.exception("Loading %d blocks failed; they will be computed", len(blocks))
            seconds = time.monotonic() - start
            self._post(lambda: done(count, seconds))

        self._submit(self._loads, job)

    def start_save(self, hashes: Sequence[bytes], blocks: Sequence[int], done: Callable[[int], None]) -> bool:
        """Write the blocks out; ``done(number now in the pool)`` is posted at the end.

        Returns:
            False when too much is waiting already, or there is no pool: nothing was started.
        """
        if self._pool is None:
            return False
        if self.pending_save_blocks + len(blocks) > self._max_pending and self.pending_save_blocks:
            return False
        self.pending_save_blocks += len(blocks)

        def finish(count: int) -> None:
            self.pending_save_blocks -= len(blocks)
            done(count)

        def job() -> None:
            count = 0
            try:
                count = self._save(hashes, blocks)
            except Exception:
                log.exception("Saving %d blocks failed", len(blocks))
            self._post(lambda: finish(count))

        self._submit(self._saves, job)
        return True

    def close(self, flush_seconds: float = 2.0) -> None:
        """Give running saves ``flush_seconds``, drop the rest, and leave the pool."""
        self._closing.set()
        drained = threading.Event()
        self._submit(self._saves, drained.set)
        drained.wait(flush_seconds)
        self._loads.shutdown(wait=False, cancel_futures=True)
        self._saves.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            # With its master gone a native client takes its time; leaving is not worth more than a moment.
            leaving = threading.Thread(target=self._pool.close, name="pool-close", daemon=True)
            leaving.start()
            leaving.join(flush_seconds)

    def _open_until_closed(self) -> None:
        said = ""
        while not self._closing.is_set():
            try:
                pool = self._open_pool()
            except Exception as exc:  # PoolUnavailable, or a fault of a library that another try may not meet
                problem = str(exc) if isinstance(exc, PoolUnavailable) else f"{type(exc).__name__}: {exc}"
                if problem != said:
                    said = problem
                    log.warning("Serving without the pool, and trying again every %g s: %s", _REOPEN_SECONDS, problem)
                self._closing.wait(_REOPEN_SECONDS)
                continue
            if not self._staged:
                kv = self._runner.kv
                pool.register(kv.data_ptr(), kv.numel() * kv.element_size())
            self._pool = pool
            log.info("Joined the pool: %r", pool)
            if self._closing.is_set():  # it came too late for close() to see it
                pool.close()
            return

    @staticmethod
    def _submit(executor: ThreadPoolExecutor, job: Callable[[], None]) -> None:
        try:
            executor.submit(job)
        except RuntimeError:
            log.debug("The pool connector is closed; a transfer was dropped")

    def _load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> int:
        assert self._pool is not None
        present = self._pool.lookup(hashes)
        if present == 0:
            return 0
        hashes, blocks = hashes[:present], list(blocks[:present])
        if not self._staged:
            loaded = 0
            try:
                loaded = self._pool.load(hashes, self._values(blocks))
            finally:
                # Whatever a failed read left behind must be finite: masked positions still meet it times zero.
                self._runner.kv[blocks[loaded:]] = 0
            return loaded
        staging = self._stage(present)
        loaded = self._pool.load(hashes, self._rows(staging))
        self._runner.kv[blocks[:loaded]] = staging[:loaded].to(self._runner.device)
        return loaded

    def _save(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> int:
        assert self._pool is not None
        if not self._staged:
            return sum(map(bool, self._pool.save(hashes, self._values(blocks))))
        staging = self._stage(len(blocks))
        staging.copy_(self._runner.kv[list(blocks)])
        return sum(map(bool, self._pool.save(hashes, self._rows(staging))))

    def _values(self, blocks: Sequence[int]) -> list[Value]:
        return [(self._runner.span(block),) for block in blocks]

    def _stage(self, count: int) -> torch.Tensor:
        """Host memory for ``count`` blocks, in a block's own shape."""
        kv = self._runner.kv
        return torch.empty((count, *kv.shape[1:]), dtype=kv.dtype)

    def _rows(self, staging: torch.Tensor) -> list[Value]:
        nbytes = self._runner.shape.nbytes
        return [(Span(staging.data_ptr() + i * nbytes, nbytes),) for i in range(len(staging))]
