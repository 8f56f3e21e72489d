"""Refill: an instance that still has blocks saves them again after the pool has lost them.

A Mooncake master that is restarted knows no blocks, and when a client with memory in the pool ends, its blocks are
lost. The hot blocks are also in the instances' own caches. Every few seconds each instance asks the pool for some
blocks that it had there. If the pool has clearly fewer than the time before, blocks were lost suddenly. Then the
instance saves the blocks that it still has, the most useful first, in small batches with pauses, as long as the pool
accepts them.

A look-up in Mooncake keeps a block from eviction for 10 s. So an instance asks for a quarter of the blocks that it
holds, and always for the same ones: if it asked for all, a full pool could only evict newer blocks.

A full pool also loses blocks, but gradually: that is eviction, and saving those again would only evict others. So only
a sudden loss counts, and the pauses between successive rounds become longer.

Blocks that an operator removes stay removed: ``kvstore clear`` leaves a mark (``clear_marks.py``) before it removes
anything. Marks are read in every period, before every batch, and once more between the look-up that shows a loss and
the round that would repair it. An instance that finds a new mark treats all its blocks as cleared.
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
# With 256 blocks a share is known to 3 %, enough to detect a loss of a tenth. The master answers them in 1 ms.
_SAMPLE = 256
_SAMPLED_FROM = 2048
_SAMPLED_SHARE = 0.25
_MIN_SAMPLE = 8
_LOST_SHARE = 0.1
_BATCH = 32
_MAX_BLOCKS = 16384
# Pause as a multiple of a batch's time, so that other work gets the pool, and the cores, more than half of the time.
_PAUSE_FACTOR = 1.5
_MAX_PAUSE_SECONDS = 600.0
_CALM_SECONDS = 1800.0


class Holder(Protocol):
    """An instance's own cache, as the refill uses it; called on the refill's thread."""

    def list_saved_blocks(self, most: int) -> Sequence[bytes]:
        """Return hashes of up to ``most`` blocks that are cached here and that the pool had, the most useful first."""

    def save_again(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Save those of these blocks that are still cached, and wait for the end.

        Returns how many were tried, and how many of them are in the pool now.

        Blocks that the pool has are not sent.
        """

    def end_round(self, hashes: Sequence[bytes]) -> None:
        """End a round of saves; restore the order of these blocks, of which the first is still the most useful."""

    def withhold_blocks(self) -> None:
        """Stop listing and saving the blocks cached now, because an operator cleared the pool."""


class LossDetector:
    """Detector of sudden losses, from the share of blocks that each look-up found."""

    def __init__(self) -> None:
        self._share: float | None = None

    def is_loss(self, found: int, asked: int) -> bool:
        """Return whether blocks were lost since the last time; after a loss the earlier share stays the reference."""
        if asked < _MIN_SAMPLE:
            return False
        share, before = found / asked, self._share
        if before is not None and before - share > max(_LOST_SHARE, asked**-0.5):  # of few blocks, more by chance
            return True
        self._share = share
        return False

    def start_anew(self) -> None:
        """Take the next share as the reference."""
        self._share = None


class Refill:
    """Watcher for losses on its own thread, which makes the instance save blocks again.

    Args:
        pool: the pool to watch.
        holder: the instance's cache.
        on_blocks: called with the number of blocks of each batch that the pool has again.
        start_thread: called first on the thread.
        digests: digests of all namespaces whose blocks the instance saves; default: the pool's.
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
        """Stop; a running batch is not waited for."""
        self._closed.set()

    def _run(self) -> None:
        self._start_thread()
        while not self._closed.wait(self._period):
            try:
                if self._pool.is_ready:
                    self._look_after_pool()
            except Exception:
                if not self._closed.is_set():
                    logger.exception("Looking for blocks that the pool has lost failed; it is tried again")
        self._marks.close()

    def _look_after_pool(self) -> None:
        """Check for a clear, and repair a loss that is not a clear."""
        is_due = time.monotonic() >= self._not_before
        is_loss = is_due and self._has_lost_blocks()
        if self._may_put_again() and is_loss:
            self._put_again()

    def _may_put_again(self) -> bool:
        """Return whether the pool reports that it was not cleared; after a clear, withhold all cached blocks."""
        is_cleared = self._marks.look()
        if is_cleared:
            self._holder.withhold_blocks()
            self._detector.start_anew()
            if all(self._pool.stack.drop_own_copies(key_prefix(digest)) for digest in self._digests):
                self._marks.accept()  # otherwise it tries again in the next period
                logger.info("An operator cleared the pool: blocks that were saved before are not put again")
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
            logger.info("The pool lacks blocks: it has %d of %d asked for", found, len(sample))
        return is_loss

    def _put_again(self) -> None:
        """Save all cached blocks again, until the pool refuses more than it accepts."""
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
        how = "; it refused others, and is asked again" if is_refused else ""
        logger.info("The pool has %d blocks again after %.1f s%s", count, time.monotonic() - begun, how)

    def _lengthen_pause(self, begun: float) -> None:
        """Set the end of the pause before the next round: twice as long as the last, unless that was long ago."""
        is_calm = begun - self._not_before > _CALM_SECONDS
        self._pause = self._period if is_calm else min(_MAX_PAUSE_SECONDS, 2 * self._pause)
        self._not_before = time.monotonic() + self._pause
