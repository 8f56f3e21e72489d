"""Which other cuts of a model live in a pool, how much of a prompt they have, and how it is read.

One's own cut is always asked first, in one call, as if there were no other. Only where that lacks a block are others
asked, and of those only the ones that left their manifest in the pool, which is looked for in one call every 10 s. So
where all instances have one cut, that call is all that siblings cost.

Own blocks and another cut's may alternate in one prompt: who goes on from blocks of another cut saves in its own
the blocks that it computes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from kvstore_backend.backend import Status, Value
from kvstore_backend.cuts.family import Family
from kvstore_backend.cuts.gather import Gatherer, Unit
from kvstore_backend.manifest import manifest_key
from kvstore_backend.namespace import Namespace
from kvstore_backend.pool import BlockPool, count_leading
from kvstore_backend.transfers import ReadBlocks

__all__ = ["Run", "Siblings", "join_runs"]

_LOOK_AROUND_SECONDS = 10.0


@dataclass(frozen=True)
class Run:
    """The leading blocks of a prompt that a pool has, in one's own cut and in another.

    Attributes:
        count: how many.
        cut: the other one, by the namespace of its rank 0.
        gathered: which of them, counted from the first that was asked for, are to come from there.
    """

    count: int
    cut: Namespace
    gathered: tuple[range, ...]

    def count_foreign(self, count: int) -> int:
        """How many of the first ``count`` blocks come from the other cut."""
        return sum(len(part[: max(0, count - part.start)]) for part in self.gathered)

    def __str__(self) -> str:
        foreign = self.count_foreign(self.count)
        return f"{foreign} of them from TP {self.cut.tp_size}, blocks of {self.cut.block_size} tokens"


class Siblings:
    """The other cuts of one family in one pool. Calls may come from several threads.

    Args:
        pool: of the family's own namespace; one of another namespace has no siblings, as its blocks have other bytes.
        family: whose.
        heads: those that are wanted; default: those of the own rank.
    """

    def __init__(self, pool: BlockPool, family: Family, heads: range | None = None) -> None:
        self._pool = pool
        family = family.of_tenant(pool.namespace.tenant)
        self._family = family if family.own == pool.namespace else replace(family, siblings=())
        self._heads = family.heads_of(family.own) if heads is None else heads
        self._gatherer = Gatherer(pool.stack, family)
        self._lock = threading.Lock()  # guards the next one
        self._look_again_at = -math.inf
        self._alive: Sequence[Namespace] = ()

    def is_alone(self) -> bool:
        """Whether no other cut lives in the pool, as far as is known."""
        return not self._list_alive()

    def extend_run(
        self, statuses: Sequence[Status], first: int, names_of: Callable[[int], Sequence[bytes]]
    ) -> Run | None:
        """More leading blocks than the own cut has, with the help of the one other that adds most; None: none does.

        Args:
            statuses: the pool's answers for the own blocks of a prompt from ``first`` on.
            first: counted from the beginning of the sequence.
            names_of: the names of all blocks of the sequence under a block size.
        """
        if not self._alive and time.monotonic() < self._look_again_at:
            return None  # the usual answer, before anything is counted
        own = count_leading(statuses)
        if own == len(statuses) or statuses[own] is not Status.ABSENT:
            return None
        asked = [_Asked(self._family, cut, self._heads, names_of) for cut in self._list_alive()]
        if not asked:
            return None
        blocks = range(first + own, first + len(statuses))
        answers = iter(self._pool.stack._exists([key for each in asked for key in each.list_keys(blocks)]))
        best = max((each.find_run(statuses, first, blocks, answers) for each in asked), key=lambda run: run.count)
        return best if best.count > own else None

    def reader_of(self, run: Run, hashes: Sequence[bytes], first: int, names: Sequence[bytes]) -> ReadBlocks:
        """Reads the blocks of ``run``, by the pool's deadline (``BlockPool.load_by_deadline``).

        Args:
            run: from ``extend_run``, here or in another process.
            hashes: the names of own blocks, from ``first`` on.
            first: counted from the beginning of the sequence.
            names: of the other cut's blocks, from the beginning of the sequence.
        """

        def read(begin: int, targets: Sequence[Value]) -> int:
            done = 0
            for is_gathered, part in _split(run, range(begin, begin + len(targets))):
                into = targets[part.start - begin : part.stop - begin]
                if is_gathered:
                    count = self._gatherer.read_blocks(run.cut, names, first + part.start, into)
                else:
                    count = self._pool.load_by_deadline(hashes[part.start : part.stop], into)
                done += count
                if count < len(part):
                    break
            return done

        return read

    def _list_alive(self) -> Sequence[Namespace]:
        """The siblings whose manifests the pool has, as of some seconds ago."""
        now = time.monotonic()
        with self._lock:
            if now < self._look_again_at or not self._family.siblings:
                return self._alive
            self._look_again_at = now + _LOOK_AROUND_SECONDS
        # Not among the look-ups of blocks, whose share that is there is the hit rate.
        statuses = self._pool.stack._exists_for_all([manifest_key(cut.digest) for cut in self._family.siblings])
        if Status.FAILED not in statuses:
            self._alive = [cut for cut, status in zip(self._family.siblings, statuses, strict=True) if status]
        return self._alive


class _Asked:
    """One other cut that is asked for blocks of a prompt."""

    def __init__(
        self, family: Family, cut: Namespace, heads: range, names_of: Callable[[int], Sequence[bytes]]
    ) -> None:
        self._unit = Unit(family, cut, heads)
        self._cut = cut
        self._names = names_of(cut.block_size)
        self._keys: list[list[str]] = []

    def list_keys(self, blocks: range) -> Iterator[str]:
        """The keys of all pieces that hold something of ``blocks``."""
        self._units = self._unit.cover(blocks)
        self._keys = [self._unit.keys(number, self._names) for number in self._units]
        return (key for keys in self._keys for key in keys)

    def find_run(self, statuses: Sequence[Status], first: int, blocks: range, answers: Iterator[Status]) -> Run:
        """The run with this cut's help, by the pool's answers for the keys."""
        has_unit = [bool(keys) and all(list(islice(answers, len(keys)))) for keys in self._keys]

        def is_there(block: int) -> bool:
            return has_unit[block // self._unit.num_blocks - self._units.start]

        count, gathered = blocks.start - first, []
        for block in blocks:
            if not statuses[block - first]:
                if not is_there(block):
                    break
                gathered.append(block - first)
            count += 1
        return Run(count, self._cut, tuple(join_runs(gathered)))


def _split(run: Run, wanted: range) -> Iterator[tuple[bool, range]]:
    """``wanted`` blocks of a run in pieces, each either gathered or not."""
    begin = wanted.start
    for each in run.gathered:
        start, stop = max(each.start, begin), min(each.stop, wanted.stop)
        if start < stop:
            if begin < start:
                yield False, range(begin, start)
            yield True, range(start, stop)
            begin = stop
    if begin < wanted.stop:
        yield False, range(begin, wanted.stop)


def join_runs(numbers: Sequence[int]) -> Iterator[range]:
    """Rising numbers as ranges."""
    begin = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield range(numbers[begin], numbers[i - 1] + 1)
            begin = i
