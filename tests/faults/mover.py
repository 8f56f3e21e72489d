"""The memory of an engine that does not wait for the pool: it holds blocks during loads and saves."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

from kvstore_backend.backend import Value
from kvstore_backend.pool import BlockPool
from kvstore_backend.transfers import DirectMemory, Outcome, Transfers
from tests.support.memory import Memory

__all__ = ["Mover"]

_DEADLINE_SECONDS = 60.0


class Mover:
    """Loads and saves blocks with ``Transfers``, and holds the memory of each block until it is released.

    Args:
        pool: the pool, which remains open.
        nbytes: size of a block.
    """

    def __init__(self, pool: BlockPool, nbytes: int) -> None:
        self._nbytes = nbytes
        self._numbers = itertools.count()
        self._memory: dict[int, Memory] = {}  # by block, until its release
        self._transfers = Transfers(pool, DirectMemory(self._values, lambda _: None), lambda event: event())

    @property
    def num_held(self) -> int:
        """The number of blocks that are not released yet."""
        return len(self._memory)

    def load(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the bytes of the leading blocks that could be read."""
        blocks = self._take([Memory(self._nbytes) for _ in hashes])
        targets = [self._memory[block] for block in blocks]
        ended: list[Outcome] = []
        is_over = threading.Event()
        self._transfers.load(hashes, blocks, lambda outcome: _note(outcome, ended, is_over), lambda: self._drop(blocks))
        assert is_over.wait(_DEADLINE_SECONDS), "a load that does not end"
        return [target.content for target in targets[: ended[0].count]]

    def save(self, hashes: Sequence[bytes], contents: Sequence[bytes]) -> int:
        """Return the number of leading blocks that the pool has after the save."""
        blocks = self._take(list(map(Memory, contents)))
        ended: list[Outcome] = []
        is_over = threading.Event()
        self._transfers.save(
            hashes, blocks, lambda outcome: _note(outcome, ended, is_over), lambda: self._reuse(blocks)
        )
        assert is_over.wait(_DEADLINE_SECONDS), "a save that does not end"
        return ended[0].count

    def _take(self, memory: Sequence[Memory]) -> list[int]:
        blocks = [next(self._numbers) for _ in memory]
        self._memory.update(zip(blocks, memory, strict=True))
        return blocks

    def _drop(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._memory[block]

    def _reuse(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._memory[block].fill(b"\xdd" * self._nbytes)
        self._drop(blocks)

    def _values(self, blocks: Sequence[int]) -> list[Value]:
        return [self._memory[block].value for block in blocks]


def _note(outcome: Outcome, ended: list[Outcome], is_over: threading.Event) -> None:
    ended.append(outcome)
    is_over.set()
