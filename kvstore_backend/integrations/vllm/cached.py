"""Blocks in vLLM's own cache that were saved to the pool, so that they can be saved again if the pool has lost them.

vLLM keeps the blocks of finished requests until it needs their memory, each with the hash of its contents. A block that
still has the hash under which it was saved still has the saved bytes. Saves are part of vLLM's steps. So an idle
instance saves nothing again, and the refill tries again later.
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

# Maximum number of names; further names replace the oldest ones. vLLM's number of blocks is usually smaller.
_MAX_NAMES = 1 << 16
# Maximum time until a step of vLLM, with the save in it, has ended. An idle instance makes no step.
_SAVE_SECONDS = 30.0
_POLL_SECONDS = 0.5


class CachedBlocks:
    """Blocks in vLLM's own cache that were saved to the pool, from which a ``Refill`` saves lost blocks again.

    The refill's thread calls the methods, but only the scheduler's thread uses vLLM's blocks.

    Args:
        pools: the pools of all ranks.
        find_block: returns vLLM's object for a block, with its ``block_hash``. The argument is the number in
            ``Transfer.blocks``.
        post: calls a function on the scheduler's thread, in its next step.
        save: begins to save blocks with their names, and calls its last argument when the save has ended. Called on
            the scheduler's thread.
        touch_in_order: makes vLLM reuse the memory of the given blocks last, in the given order. Called on the
            scheduler's thread.
    """

    def __init__(
        self,
        pools: Sequence[BlockPool],
        find_block: Callable[[int], Any],
        post: Callable[[Callable[[], None]], None],
        save: Callable[[Sequence[bytes], Sequence[int], Callable[[], None]], None],
        touch_in_order: Callable[[Sequence[int]], None],
    ) -> None:
        self._pools = pools
        self._find_block = find_block
        self._post = post
        self._save = save
        self._touch_in_order = touch_in_order
        self._is_closed = False
        self._places: dict[bytes, tuple[int, Any]] = {}  # name -> block, and its hash at that time

    def note_blocks(self, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Record blocks that have been or are being saved to the pool. Called on the scheduler's thread."""
        # The first block is recorded last, so that it is dropped last: it is useful without the blocks after it.
        for name, block in reversed(list(zip(names, blocks, strict=True))):
            if (block_hash := getattr(self._find_block(block), "block_hash", None)) is not None:
                self._places.pop(name, None)
                self._places[name] = block, block_hash
        while len(self._places) > _MAX_NAMES:
            del self._places[next(iter(self._places))]

    def forget_all(self) -> None:
        """Forget all blocks, because the same hashes may now mean other bytes. Called on the scheduler's thread."""
        self._places.clear()

    def withhold_blocks(self) -> None:
        """Forget all blocks, so that the refill does not save again what an operator has just cleared.

        Called on the refill's thread. When the next request uses a cached block, vLLM saves the block again.
        """
        self._places = {}

    def list_saved_blocks(self, most: int) -> Sequence[bytes]:
        """Return the names of up to ``most`` recorded blocks that vLLM still caches, the last recorded first."""
        names = list(self._places)
        names.reverse()
        return [name for name in names if self._find(name) is not None][:most]

    def save_again(self, names: Sequence[bytes]) -> tuple[int, int]:
        """Save the blocks ``names`` to the pool again, except those that vLLM does not cache any more.

        Returns:
            The number of blocks that were saved again, and how many of them the pools of all ranks have now. If no step
            of vLLM saves the blocks in time: the number of ``names``, and 0.
        """
        tried: queue.SimpleQueue[Sequence[bytes]] = queue.SimpleQueue()
        given_up = threading.Event()

        def begin() -> None:
            places = {name: block for name in names if (block := self._find(name)) is not None}
            if not given_up.is_set():
                self._save(list(places), list(places.values()), lambda: tried.put(list(places)))

        self._post(begin)
        saved = self._wait_for(tried)
        if saved is None:
            given_up.set()
            return len(names), 0
        if not saved:
            return 0, 0
        return len(saved), min(pool.exists(saved, for_all=True).count(Status.OK) for pool in self._pools)

    def close(self) -> None:
        """Make a running ``save_again``, and all later ones, return without saving blocks."""
        self._is_closed = True

    def _wait_for(self, tried: queue.SimpleQueue[Sequence[bytes]]) -> Sequence[bytes] | None:
        """Wait for the names of saved blocks in the queue; return None after ``_SAVE_SECONDS`` or ``close``."""
        give_up_at = time.monotonic() + _SAVE_SECONDS
        while not self._is_closed and time.monotonic() < give_up_at:
            with contextlib.suppress(queue.Empty):
                return tried.get(timeout=_POLL_SECONDS)
        return None

    def end_round(self, names: Sequence[bytes]) -> None:
        """Restore the order in which vLLM reuses the memory of the blocks; saving the blocks has changed it."""

        def put_in_order() -> None:
            places = [self._find(name) for name in reversed(names)]
            self._touch_in_order([block for block in places if block is not None])

        self._post(put_in_order)

    def _find(self, name: bytes) -> int | None:
        """Return the number of the block with this name; None if vLLM has reused the block for other contents."""
        block, block_hash = self._places.get(name, (0, None))
        return block if block_hash is not None and self._find_block(block).block_hash == block_hash else None
