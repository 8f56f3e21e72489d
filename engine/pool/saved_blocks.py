"""Saves cached blocks again that the pool has lost (refill), and remembers which blocks are pinned in the pool."""

from __future__ import annotations

import itertools
import queue
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from functools import partial
from itertools import groupby
from typing import TypeVar

from engine.scheduling.block_manager import BlockManager
from engine.scheduling.cache_hints import seconds_kept
from engine.scheduling.request import Sequence
from kvstore_backend.transfers import Outcome, Transfers

__all__ = ["PinnedBlocks", "SavedBlocks"]

T = TypeVar("T")

# Maximum time to wait for the engine's thread. A step, or a save to a pool that hangs, takes less.
_ANSWER_SECONDS = 60.0
# Maximum share of the available blocks that one save of a refill may hold.
_HELD_SHARE = 0.25


class SavedBlocks:
    """The blocks of the own cache that were saved to the pool or loaded from it, so that they can be saved again.

    A ``Refill``, which saves blocks again that the pool has lost, calls ``list_saved_blocks``, ``save_again``,
    ``end_round`` and ``withhold_blocks`` on its own thread. These methods use ``post`` to run their work on the
    engine's thread, and wait until it is done. One save holds at most ``most_held`` blocks.
    """

    def __init__(
        self,
        blocks: BlockManager,
        transfers: Transfers,
        post: Callable[[Callable[[], None]], None],
        most_held: int,
    ) -> None:
        self._blocks = blocks
        self._transfers = transfers
        self._post = post
        self._most_held = most_held
        self._saved: dict[bytes, int] = {}
        """For the name of each block, the index of its group."""

    def note_blocks(self, names: SequenceOf[bytes], blocks: SequenceOf[int]) -> None:
        """Record that the pool has blocks. Call this on the engine's thread.

        Args:
            names: the names of the blocks.
            blocks: the numbers of the blocks in ``Transfers``: ``group * num_blocks + block``.
        """
        num_blocks = self._blocks.num_blocks
        self._saved.update(zip(names, (block // num_blocks for block in blocks), strict=True))
        if len(self._saved) > 2 * num_blocks:
            self._saved = {name: group for name, group in self._saved.items() if self._blocks.has_contents(name)}

    def forget_blocks(self) -> None:
        """Forget all recorded blocks. Call this on the engine's thread."""
        self._saved.clear()

    def list_saved_blocks(self, most: int) -> SequenceOf[bytes]:
        """Return the names of up to ``most`` cached blocks that were in the pool, the most recently used first."""

        def pick_hashes() -> list[bytes]:
            saved = filter(self._saved.__contains__, self._blocks.iterate_hashes())
            return list(itertools.islice(filter(self._may_save, saved), most))

        return self._ask(pick_hashes)

    def save_again(self, hashes: SequenceOf[bytes]) -> tuple[int, int]:
        """Save those blocks of ``hashes`` that are still cached.

        Returns:
            The number of these blocks, and the number of them that the pool has now.
        """

        def start_save(answer: Callable[[tuple[int, int]], None]) -> None:
            self._start_save(hashes, answer)

        return self._ask_later(start_save)

    def end_round(self, hashes: SequenceOf[bytes]) -> None:
        """Restore the order in which the blocks of ``hashes`` are evicted, because a save has changed this order."""
        self._ask(lambda: self._blocks.use_in_order(hashes))

    def withhold_blocks(self) -> None:
        """Mark all cached blocks so that they are not saved again, because an operator cleared the pool."""
        self._ask(self._blocks.withhold_published_blocks)

    def _may_save(self, block_hash: bytes) -> bool:
        block = self._blocks.find_block(block_hash)
        return block is not None and not self._blocks.is_withheld(block)

    def _start_save(self, hashes: SequenceOf[bytes], answer: Callable[[tuple[int, int]], None]) -> None:
        most = min(self._most_held, int(_HELD_SHARE * self._blocks.num_available))
        cached = [name for name in hashes if name in self._saved and self._may_save(name)][:most]
        cached.sort(key=self._saved.__getitem__, reverse=True)  # so that the blocks of a group are next to each other
        if not cached:
            answer((0, 0))
            return
        held = self._blocks.take_cached_blocks(cached)
        sources = [
            self._saved[name] * self._blocks.num_blocks + block for name, block in zip(cached, held, strict=True)
        ]

        def report_outcome(outcome: Outcome) -> None:
            answer((len(cached), outcome.count))

        self._transfers.save(cached, sources, report_outcome, partial(self._blocks.release_blocks, held))

    def _ask(self, call: Callable[[], T]) -> T:
        """Run ``call`` on the engine's thread, and return its result."""

        def answer_at_once(answer: Callable[[T], None]) -> None:
            answer(call())

        return self._ask_later(answer_at_once)

    def _ask_later(self, call: Callable[[Callable[[T], None]], None]) -> T:
        """Run ``call`` on the engine's thread, and wait until it, or a later callback, reports a result.

        Args:
            call: its argument is the function to which the result must be reported.

        Raises:
            queue.Empty: there was no result in time, because the engine has stopped.
        """
        answers: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._post(lambda: call(answers.put))
        return answers.get(timeout=_ANSWER_SECONDS)


# To pin a block, the pool must get the whole block again. So this is repeated only after half of the block's time.
_RENEW_AFTER = 0.5
_MAX_BLOCKS = 1 << 16


class PinnedBlocks:
    """Remembers which blocks were pinned in the pool, and when each may be pinned again.

    If there are too many, the blocks that were pinned first are forgotten.
    """

    def __init__(self) -> None:
        self._due_at: OrderedDict[bytes, float] = OrderedDict()

    def split_blocks(self, sequence: Sequence, first: int, last: int) -> Iterator[tuple[int, int, float]]:
        """Divide the blocks from index ``first`` to ``last - 1`` into ranges that must be pinned for the same time.

        The blocks of a range with a time above 0 are recorded as pinned.

        Yields:
            The first index, the index after the last one, and the time in seconds. The time is 0 if the request has no
            hint for these blocks, or if they were pinned a short time ago.
        """
        if not sequence.request.hints:
            yield first, last, 0.0
            return
        hashes, size = sequence.hashes(), sequence.block_size
        seconds = [
            self._ask_for(hashes[i], seconds_kept(sequence.request.hints, (i + 1) * size)) for i in range(first, last)
        ]
        for kept, run in groupby(range(first, last), key=lambda i: seconds[i - first]):
            members = list(run)
            yield members[0], members[-1] + 1, kept

    def forget_blocks(self, hashes: SequenceOf[bytes]) -> None:
        """Forget that blocks were pinned, because the pool did not store them."""
        for each in hashes:
            self._due_at.pop(each, None)

    def _ask_for(self, block_hash: bytes, seconds: float) -> float:
        """Return ``seconds`` and record the block as pinned; return 0 if the block need not be pinned now."""
        now = time.monotonic()
        if not seconds or self._due_at.get(block_hash, now) > now:
            return 0.0
        self._due_at[block_hash] = now + _RENEW_AFTER * seconds
        self._due_at.move_to_end(block_hash)
        while len(self._due_at) > _MAX_BLOCKS:
            self._due_at.popitem(last=False)
        return seconds
