"""vLLM's cached blocks that were saved to the pool, and can be saved again if the pool has lost them.

vLLM retains the blocks of finished requests until it needs their memory, each with the hash of its contents. A block
whose hash is still the one under which it was saved still has those bytes. Saves are part of vLLM's steps: an idle
instance saves nothing again, and the refill tries later.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstore_backend.backend import Status
from kvstore_backend.pool import BlockPool

__all__ = ["CachedBlocks"]

# Beyond this number the oldest names are dropped; vLLM's own number of blocks is usually smaller.
_MAX_NAMES = 1 << 16
# Time for a step of vLLM and a save in it; an idle instance makes no step.
_SAVE_SECONDS = 30.0
_POLL_SECONDS = 0.5


class CachedBlocks:
    """Source of blocks for a ``Refill``, called on its thread; vLLM's blocks are touched on the scheduler's thread.

    Args:
        pools: the pools of every rank.
        blocks: vLLM's blocks, each with its ``block_hash``.
        post: runs a callable on the scheduler's thread, in its next step.
        save: begins to save named blocks, on the scheduler's thread, and calls its last argument at the end.
        touch_in_order: makes vLLM reuse these blocks after all others, the last of them last; on the same thread.
    """

    def __init__(
        self,
        pools: Sequence[BlockPool],
        blocks: Sequence[Any],
        post: Callable[[Callable[[], None]], None],
        save: Callable[[Sequence[bytes], Sequence[int], Callable[[], None]], None],
        touch_in_order: Callable[[Sequence[int]], None],
    ) -> None:
        self._pools = pools
        self._blocks = blocks
        self._post = post
        self._save = save
        self._touch_in_order = touch_in_order
        self._is_closed = False
        self._places: dict[bytes, tuple[int, Any]] = {}  # name -> block, and its hash at that time

    def note_blocks(self, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Record blocks that the pool receives or has received. Called on the scheduler's thread."""
        # The beginning of a prefix is recorded last, because it is more useful than the blocks after it.
        for name, block in reversed(list(zip(names, blocks, strict=True))):
            if (block_hash := getattr(self._blocks[block], "block_hash", None)) is not None:
                self._places.pop(name, None)
                self._places[name] = block, block_hash
        while len(self._places) > _MAX_NAMES:
            del self._places[next(iter(self._places))]

    def forget_all(self) -> None:
        """Drop all records, because known hashes may mean other bytes from now on. Called on the scheduler's thread."""
        self._places.clear()

    def withhold_blocks(self) -> None:
        """Do not save earlier blocks again, because an operator cleared the pool. Called on the refill's thread.

        vLLM saves a cached block once more when the next request uses it.
        """
        self._places = {}

    def list_saved_blocks(self, most: int) -> Sequence[bytes]:
        """Return names of up to ``most`` blocks that are still cached, the last saved first."""
        names = list(self._places)
        names.reverse()
        return [name for name in names if self._find(name) is not None][:most]

    def save_again(self, names: Sequence[bytes]) -> tuple[int, int]:
        """Save blocks that are still cached; return how many were tried, and how many every rank's pool has now.

        If no step of vLLM saves them in time, the result is all tried and none present, and none is saved later.
        """
        tried: queue.SimpleQueue[Sequence[bytes]] = queue.SimpleQueue()
        given_up = threading.Event()

        def begin() -> None:
            places = {name: block for name in names if (block := self._find(name)) is not None}
            if not given_up.is_set():
                self._save(list(places), list(places.values()), lambda: tried.put(list(places)))

        self._post(begin)
        there = self._wait_for(tried)
        if there is None:
            given_up.set()
            return len(names), 0
        if not there:
            return 0, 0
        return len(there), min(pool.exists(there, for_all=True).count(Status.OK) for pool in self._pools)

    def close(self) -> None:
        """Stop a running ``save_again``, and every later one."""
        self._is_closed = True

    def _wait_for(self, tried: queue.SimpleQueue[Sequence[bytes]]) -> Sequence[bytes] | None:
        """Return the names that were tried; None if no step reports them in time, or after ``close``."""
        give_up_at = time.monotonic() + _SAVE_SECONDS
        while not self._is_closed and time.monotonic() < give_up_at:
            with contextlib.suppress(queue.Empty):
                return tried.get(timeout=_POLL_SECONDS)
        return None

    def end_round(self, names: Sequence[bytes]) -> None:
        """Restore the order in which vLLM reuses the blocks that were saved again."""

        def put_in_order() -> None:
            places = [self._find(name) for name in reversed(names)]
            self._touch_in_order([block for block in places if block is not None])

        self._post(put_in_order)

    def _find(self, name: bytes) -> int | None:
        """Return the block that still has the contents of this name; None if there is none."""
        block, block_hash = self._places.get(name, (0, None))
        return block if block_hash is not None and self._blocks[block].block_hash == block_hash else None
