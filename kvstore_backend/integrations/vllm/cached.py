"""vLLM's cached blocks that the pool was given, and can be given again where it has lost them.

vLLM keeps the blocks of requests that ended until it needs their memory, each with the hash of its contents. A block
whose hash is still the one it was saved under still holds those bytes. Answers come with vLLM's steps: an instance that
has nothing to do puts nothing again, and is asked once more later.
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

# Beyond it the oldest are forgotten; vLLM's own number of blocks is mostly smaller.
_MAX_NAMES = 1 << 16
# For a step of vLLM and a save in it; an instance that has nothing to do makes no step.
_SAVE_SECONDS = 30.0
_POLL_SECONDS = 0.5


class CachedBlocks:
    """Answers a ``Refill`` on its thread; vLLM's blocks are touched on the scheduler's.

    Args:
        pools: of every rank.
        blocks: vLLM's, each of which tells its ``block_hash``.
        post: runs a callable on the scheduler's thread, in its next step.
        save: begins to save named blocks, on the scheduler's thread, and calls its last argument at the end.
        touch_in_order: has vLLM reuse these blocks after all others, the last of them last; on the same thread.
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
        self._places: dict[bytes, tuple[int, Any]] = {}  # name -> block, and the hash it had then

    def note_blocks(self, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Hear that the pool is given these blocks, or has given them. On the scheduler's thread."""
        # The beginning of a prefix comes last, as it is of more use than what follows it.
        for name, block in reversed(list(zip(names, blocks, strict=True))):
            if (block_hash := getattr(self._blocks[block], "block_hash", None)) is not None:
                self._places.pop(name, None)
                self._places[name] = block, block_hash
        while len(self._places) > _MAX_NAMES:
            del self._places[next(iter(self._places))]

    def forget_all(self) -> None:
        """From now on blocks with the hashes of before may hold other bytes. On the scheduler's thread."""
        self._places.clear()

    def withhold_blocks(self) -> None:
        """Put nothing again that was given to the pool before: an operator cleared it. On the refill's thread.

        vLLM saves what it has cached once more where the next request uses it.
        """
        self._places = {}

    def list_saved_blocks(self, most: int) -> Sequence[bytes]:
        """Names of up to ``most`` blocks that are still cached, those given to the pool last first."""
        names = list(self._places)
        names.reverse()
        return [name for name in names if self._find(name) is not None][:most]

    def save_again(self, names: Sequence[bytes]) -> tuple[int, int]:
        """Save those that are still cached: how many were tried, and how many every rank's pool has now.

        Where no step of vLLM saves them in time, all were tried and none is there, and none is saved later.
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
        return len(there), min(pool.exists_for_all(there).count(Status.OK) for pool in self._pools)

    def close(self) -> None:
        """End a ``save_again`` on its way, and every later one."""
        self._is_closed = True

    def _wait_for(self, tried: queue.SimpleQueue[Sequence[bytes]]) -> Sequence[bytes] | None:
        """What was tried; None where nobody says so in time, or after ``close``."""
        give_up_at = time.monotonic() + _SAVE_SECONDS
        while not self._is_closed and time.monotonic() < give_up_at:
            with contextlib.suppress(queue.Empty):
                return tried.get(timeout=_POLL_SECONDS)
        return None

    def end_round(self, names: Sequence[bytes]) -> None:
        """Let those that were saved again be reused in the order they were in before."""

        def put_in_order() -> None:
            places = [self._find(name) for name in reversed(names)]
            self._touch_in_order([block for block in places if block is not None])

        self._post(put_in_order)

    def _find(self, name: bytes) -> int | None:
        """The block that still holds the contents of this name."""
        block, block_hash = self._places.get(name, (0, None))
        return block if block_hash is not None and self._blocks[block].block_hash == block_hash else None
