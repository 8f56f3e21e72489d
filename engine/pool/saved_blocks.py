"""The engine's cached blocks that the pool had, to save them again if the pool has lost them."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import TypeVar

from engine.scheduling.block_manager import BlockManager
from kvstore_backend.transfers import Outcome, Transfers

__all__ = ["SavedBlocks"]

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
