"""KeptBlocks: which blocks this instance has pinned in the pool, so that it pins them again in time and not earlier."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from itertools import groupby

from engine.scheduling.cache_hints import seconds_kept
from engine.scheduling.request import Sequence

__all__ = ["KeptBlocks"]

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
