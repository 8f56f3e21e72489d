"""The engine's cached blocks that the pool had, and can be given again where it has lost them."""

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
# Of the blocks that could be given to sequences now, a save may keep so many from them.
_HELD_SHARE = 0.25


class SavedBlocks:
    """Answers a ``Refill``, on its thread; the work is done on the engine's.

    Args:
        blocks: the engine's.
        transfers: saves them.
        post: runs a callable on the engine's thread, soon.
        most_held: blocks that one save may hold.
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
        """Hear that the pool has these blocks. On the engine's thread."""
        self._saved.update(dict.fromkeys(hashes))
        if len(self._saved) > 2 * self._blocks.num_blocks:
            self._saved = {each: None for each in self._saved if self._blocks.has_contents(each)}

    def forget_blocks(self) -> None:
        """Hear that the pool has none of these blocks. On the engine's thread."""
        self._saved.clear()

    def list_saved_blocks(self, most: int) -> SequenceOf[bytes]:
        """Hashes of up to ``most`` cached blocks that the pool had, those used last first."""

        def pick_hashes() -> list[bytes]:
            saved = filter(self._saved.__contains__, self._blocks.iterate_hashes())
            return list(itertools.islice(filter(self._may_save, saved), most))

        return self._ask(pick_hashes)

    def save_again(self, hashes: SequenceOf[bytes]) -> tuple[int, int]:
        """Save those of these blocks that are still cached: how many were tried, and how many the pool has now."""

        def start_save(answer: Callable[[tuple[int, int]], None]) -> None:
            self._start_save(hashes, answer)

        return self._ask_later(start_save)

    def end_round(self, hashes: SequenceOf[bytes]) -> None:
        """Let those that were saved again be reused in the order they were in before."""
        self._ask(lambda: self._blocks.use_in_order(hashes))

    def withhold_blocks(self) -> None:
        """Save nothing more that is cached now: an operator cleared the pool."""
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
        """The answer of ``call``, made on the engine's thread."""

        def answer_at_once(answer: Callable[[T], None]) -> None:
            answer(call())

        return self._ask_later(answer_at_once)

    def _ask_later(self, call: Callable[[Callable[[T], None]], None]) -> T:
        """The answer that ``call``, made on the engine's thread, gives to its argument, then or later.

        Raises:
            queue.Empty: nothing came; the engine has stopped.
        """
        answers: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._post(lambda: call(answers.put))
        return answers.get(timeout=_ANSWER_SECONDS)
