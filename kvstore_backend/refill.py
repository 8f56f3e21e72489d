"""Refill: an instance saves blocks again that the pool has lost and that the instance still has in its own cache.

A pool loses blocks when a Mooncake master is restarted, or when a client that gives it memory ends. Often used blocks
are also in the instances' own caches. Every few seconds, each instance looks up some blocks that it saved to the pool.
If clearly fewer of them are found than in the look-up before, the pool has lost blocks. Then the instance saves all
blocks again that it still has, the most useful first, in small batches with pauses, as long as the pool accepts them.

A look-up protects a block in Mooncake from eviction for 10 s. So an instance looks up at most a quarter of its blocks
(eight if it has few), and always the same ones. If it looked up all of them, a full pool could evict only newer blocks.

A full pool evicts blocks gradually. These are not saved again, because the pool would evict other blocks for them. So
only a sudden loss starts a refill, and the pauses between successive refills become longer.

Blocks that an operator removed are not saved again: ``kvstore clear`` writes a mark to the pool (``clear_marks.py``)
before it removes blocks. An instance reads the marks every few seconds, after a look-up that shows a loss, and before
each batch. If it finds a new mark, it treats all blocks that it saved before as removed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore_backend.backend import Status
from kvstore_backend.clear_marks import ClearMarks
from kvstore_backend.namespace import key_prefix
from kvstore_backend.pool import BlockPool

__all__ = ["Holder", "LossDetector", "Refill"]

logger = logging.getLogger(__name__)

_PERIOD_SECONDS = 5.0
# Number of blocks that are looked up: enough to measure a share to 3 %, and so to detect a loss of 10 %. The master
# answers in 1 ms.
_SAMPLE = 256
_SAMPLED_FROM = 2048
_SAMPLED_SHARE = 0.25
_MIN_SAMPLE = 8
_LOST_SHARE = 0.1
_BATCH = 32
_MAX_BLOCKS = 16384
# Pause after a batch, as a multiple of the batch's time, so that other work can use the pool and the cores in between.
_PAUSE_FACTOR = 1.5
_MAX_PAUSE_SECONDS = 600.0
_CALM_SECONDS = 1800.0


class Holder(Protocol):
    """Interface of an instance's own cache. The refill calls its methods on the refill's thread."""

    def list_saved_blocks(self, most: int) -> Sequence[bytes]:
        """Return the hashes of up to ``most`` cached blocks that were saved to the pool, the most useful first."""

    def save_again(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Save the blocks that are still cached and that the pool lacks; wait for the end of the save.

        Returns:
            The number of blocks that were still cached, and how many of them the pool has now.
        """

    def end_round(self, hashes: Sequence[bytes]) -> None:
        """Restore the order in which the cache evicts blocks, after a refill has changed it by reading blocks.

        The first of ``hashes`` is evicted last.
        """

    def withhold_blocks(self) -> None:
        """Never save again the blocks that are cached now, because an operator has cleared the pool."""


class LossDetector:
    """Detects sudden losses of blocks in a pool, from the share of blocks that successive look-ups found."""

    def __init__(self) -> None:
        self._share: float | None = None

    def is_loss(self, found: int, asked: int) -> bool:
        """Return whether the share of found blocks is clearly lower than in the look-up before.

        After a loss, later shares are still compared with the share from before the loss.

        Args:
            found: number of blocks that the look-up found.
            asked: number of blocks that were looked up.
        """
        if asked < _MIN_SAMPLE:
            return False
        share, before = found / asked, self._share
        # The threshold is higher for few blocks, because their share changes more by chance.
        if before is not None and before - share > max(_LOST_SHARE, asked**-0.5):
            return True
        self._share = share
        return False

    def start_anew(self) -> None:
        """Compare the shares of later look-ups with the share of the next look-up, not with earlier shares."""
        self._share = None


class Refill:
    """Thread that detects when a pool has lost blocks, and makes the instance save them again.

    Args:
        pool: the pool, which may lose blocks.
        holder: the instance's own cache.
        on_blocks: called after each batch with the number of blocks of the batch that the pool has again.
        start_thread: called on the new thread before everything else.
        digests: digests of all namespaces of the instance's blocks; if empty, the digest of the pool's namespace.
        period: seconds between two look-ups.
    """

    def __init__(
        self,
        pool: BlockPool,
        holder: Holder,
        on_blocks: Callable[[int], None],
        *,
        start_thread: Callable[[], None] = lambda: None,
        digests: Sequence[str] = (),
        period: float = _PERIOD_SECONDS,
    ) -> None:
        self._pool = pool
        self._holder = holder
        self._on_blocks = on_blocks
        self._start_thread = start_thread
        self._period = period
        self._pause = period
        self._not_before = 0.0
        self._detector = LossDetector()
        self._digests = digests or [pool.namespace.digest]
        self._marks = ClearMarks(pool, self._digests)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool-refill", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread without waiting for a running batch."""
        self._closed.set()

    def _run(self) -> None:
        self._start_thread()
        while not self._closed.wait(self._period):
            try:
                if self._pool.is_ready:
                    self._look_after_pool()
            except Exception:
                if not self._closed.is_set():
                    logger.exception(
                        "Looking for blocks that the pool has lost, or saving them again, failed; both are tried again"
                    )
        self._marks.close()

    def _look_after_pool(self) -> None:
        """Look up some blocks.

        If the pool has lost blocks, and no operator has cleared it, save all cached blocks again.
        """
        is_due = time.monotonic() >= self._not_before
        is_loss = is_due and self._has_lost_blocks()
        if self._may_put_again() and is_loss:
            self._put_again()

    def _may_put_again(self) -> bool:
        """Read the marks of cleared namespaces; return False if the pool was cleared, or a mark could not be read.

        If the pool was cleared, the blocks that the instance has now are never saved again.
        """
        is_cleared = self._marks.look()
        if is_cleared:
            self._holder.withhold_blocks()
            self._detector.start_anew()
            if all(self._pool.stack.drop_own_copies(key_prefix(digest)) for digest in self._digests):
                self._marks.accept()  # otherwise the copies are dropped in the next period
                logger.info("An operator cleared the pool, so blocks that were saved before are not stored again")
        return is_cleared is False

    def _has_lost_blocks(self) -> bool:
        held = self._holder.list_saved_blocks(_SAMPLED_FROM)
        sample = sorted(held)[: min(_SAMPLE, max(_MIN_SAMPLE, int(_SAMPLED_SHARE * len(held))))]
        statuses = self._pool.exists(sample, for_all=True)
        if Status.FAILED in statuses:
            return False
        found = statuses.count(Status.OK)
        is_loss = self._detector.is_loss(found, len(statuses))
        if is_loss:
            logger.info(
                "The pool has lost blocks: it has only %d of %d saved blocks that were looked up", found, len(sample)
            )
        return is_loss

    def _put_again(self) -> None:
        """Save all cached blocks again, in batches. Stop after a batch of which the pool refuses more than half."""
        begun = time.monotonic()
        hashes = self._holder.list_saved_blocks(_MAX_BLOCKS)
        count, is_refused = 0, False
        for start in range(0, len(hashes), _BATCH):
            batch_begun = time.monotonic()
            if not self._may_put_again():
                break
            tried, stored = self._holder.save_again(hashes[start : start + _BATCH])
            self._on_blocks(stored)
            count += stored
            is_refused = stored < tried / 2
            if is_refused or self._closed.wait(_PAUSE_FACTOR * (time.monotonic() - batch_begun)):
                break
        self._holder.end_round(hashes)
        if not is_refused:
            self._detector.start_anew()
        self._lengthen_pause(begun)
        how = "; the pool refused some blocks, which are stored again later" if is_refused else ""
        logger.info(
            "%d lost blocks were stored again in the pool within %.1f s%s", count, time.monotonic() - begun, how
        )

    def _lengthen_pause(self, begun: float) -> None:
        """Set the end of the pause after a refill that began at the time ``begun``.

        The pause is twice as long as the last pause, or ``period`` if the refill before was long ago.
        """
        is_calm = begun - self._not_before > _CALM_SECONDS
        self._pause = self._period if is_calm else min(_MAX_PAUSE_SECONDS, 2 * self._pause)
        self._not_before = time.monotonic() + self._pause
