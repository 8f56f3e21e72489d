"""The engine's cached blocks that the pool had, to save them again if the pool has lost them."""

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

__all__ = ["KeptBlocks", "SavedBlocks"]

T = TypeVar("T")

# Longer than a step, and than a save to a pool that hangs.
_ANSWER_SECONDS = 60.0
# The share of the available blocks that one save may hold.
_HELD_SHARE = 0.25


class SavedBlocks:
    """Answers a ``Refill`` on its thread; the work runs on the engine's thread.

    Args:
        blocks: the engine's block manager.
        transfers: saves them.
        post: runs a callable on the engine's thread, soon.
        most_held: the maximum number of blocks that one save may hold.
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
        self._saved: dict[bytes, None] = {}

    def note_blocks(self, hashes: SequenceOf[bytes]) -> None:
        """Record that the pool has these blocks. On the engine's thread."""
        self._saved.update(dict.fromkeys(hashes))
        if len(self._saved) > 2 * self._blocks.num_blocks:
            self._saved = {each: None for each in self._saved if self._blocks.has_contents(each)}

    def forget_blocks(self) -> None:
        """Record that the pool has none of these blocks. On the engine's thread."""
        self._saved.clear()

    def list_saved_blocks(self, most: int) -> SequenceOf[bytes]:
        """Return hashes of up to ``most`` cached blocks that the pool had, the most recently used first."""

        def pick_hashes() -> list[bytes]:
            saved = filter(self._saved.__contains__, self._blocks.iterate_hashes())
            return list(itertools.islice(filter(self._may_save, saved), most))

        return self._ask(pick_hashes)

    def save_again(self, hashes: SequenceOf[bytes]) -> tuple[int, int]:
        """Save those of these blocks that are still cached; return how many were tried, and how many the pool has."""

        def start_save(answer: Callable[[tuple[int, int]], None]) -> None:
            self._start_save(hashes, answer)

        return self._ask_later(start_save)

    def end_round(self, hashes: SequenceOf[bytes]) -> None:
        """Restore the previous reuse order of the blocks that were saved again."""
        self._ask(lambda: self._blocks.use_in_order(hashes))

    def withhold_blocks(self) -> None:
        """Save no block again that is cached now: an operator cleared the pool."""
        self._ask(self._blocks.withhold_published)

    def _may_save(self, block_hash: bytes) -> bool:
        block = self._blocks.find_block(block_hash)
        return block is not None and not self._blocks.is_withheld(block)

    def _start_save(self, hashes: SequenceOf[bytes], answer: Callable[[tuple[int, int]], None]) -> None:
        most = min(self._most_held, int(_HELD_SHARE * self._blocks.num_available))
        cached = list(filter(self._may_save, hashes))[:most]
        if not cached:
            answer((0, 0))
            return
        held = self._blocks.take_cached_blocks(cached)

        def report_outcome(outcome: Outcome) -> None:
            answer((len(cached), outcome.count))

        self._transfers.save(cached, held, report_outcome, partial(self._blocks.release_blocks, held))

    def _ask(self, call: Callable[[], T]) -> T:
        """Run ``call`` on the engine's thread and return its result."""

        def answer_at_once(answer: Callable[[T], None]) -> None:
            answer(call())

        return self._ask_later(answer_at_once)

    def _ask_later(self, call: Callable[[Callable[[T], None]], None]) -> T:
        """Run ``call`` on the engine's thread and return what it passes to its argument, then or later.

        Raises:
            queue.Empty: no result came; the engine has stopped.
        """
        answers: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._post(lambda: call(answers.put))
        return answers.get(timeout=_ANSWER_SECONDS)


# Pinning a block costs the pool a write of the whole block: do not repeat it before half of its time is over.
_RENEW_AFTER = 0.5
_MAX_BLOCKS = 1 << 16


class KeptBlocks:
    """The hashes of pinned blocks, and from when on each may be pinned again; bounded, the oldest are forgotten."""

    def __init__(self) -> None:
        self._due_at: OrderedDict[bytes, float] = OrderedDict()

    def split_blocks(self, sequence: Sequence, first: int, last: int) -> Iterator[tuple[int, int, float]]:
        """Yield runs of the blocks from ``first`` to ``last``: beginning, end, and how long the pool must retain them.

        The time is 0 if no hint gives one, or if the pool was asked a short time ago. A block that gets a time here
        counts as pinned.
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
        """Forget these blocks, so that they are pinned the next time: the pool did not store them."""
        for each in hashes:
            self._due_at.pop(each, None)

    def _ask_for(self, block_hash: bytes, seconds: float) -> float:
        """Return ``seconds``, or 0 if the pool was already asked, for long enough."""
        now = time.monotonic()
        if not seconds or self._due_at.get(block_hash, now) > now:
            return 0.0
        self._due_at[block_hash] = now + _RENEW_AFTER * seconds
        self._due_at.move_to_end(block_hash)
        while len(self._due_at) > _MAX_BLOCKS:
            self._due_at.popitem(last=False)
        return seconds
