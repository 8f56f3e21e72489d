"""Finds the blocks of a prompt in other shardings of the model in a pool, and reads them.

A reader always looks up its own sharding first, in one call. It looks up other shardings only if the own sharding lacks
a block, and only if they have a manifest in the pool. One call every 10 s looks up the manifests. If all instances have
the same sharding, this is the only additional call.

The blocks of a prompt may alternate between the own and another sharding: an instance that loaded blocks of another
sharding saves the blocks that it computes in its own sharding.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from kvstore_backend.backend import Status, Value
from kvstore_backend.manifest import manifest_key
from kvstore_backend.namespace import Namespace
from kvstore_backend.pool import BlockPool, count_leading
from kvstore_backend.resharding.family import ShardingFamily
from kvstore_backend.resharding.gather import AlignedSpan, Gatherer
from kvstore_backend.transfers import ReadBlocks

__all__ = ["PeerShardings", "Run", "join_runs"]

_LOOK_AROUND_SECONDS = 10.0


@dataclass(frozen=True)
class Run:
    """Leading blocks of a prompt that a pool has, some in the reader's own sharding and some in another one.

    Attributes:
        count: number of blocks.
        sharding: the other sharding, as the namespace of its rank 0.
        gathered: indices of the blocks that come from the other sharding, counted from the first requested block.
    """

    count: int
    sharding: Namespace
    gathered: tuple[range, ...]

    def count_foreign(self, count: int) -> int:
        """Return how many of the first ``count`` blocks come from the other sharding."""
        return sum(len(part[: max(0, count - part.start)]) for part in self.gathered)

    def __str__(self) -> str:
        foreign = self.count_foreign(self.count)
        return f"{foreign} of them from TP {self.sharding.tp_size}, blocks of {self.sharding.block_size} tokens"


class PeerShardings:
    """Finds and reads blocks of the same model in other shardings in a pool. Several threads may call the methods.

    Args:
        pool: the pool. If its namespace is not ``family.own``, there are no peers, because the blocks have other bytes.
        family: the reader's family.
        heads: the heads that are read, or None for the heads of the own rank.
    """

    def __init__(self, pool: BlockPool, family: ShardingFamily, heads: range | None = None) -> None:
        self._pool = pool
        family = family.of_tenant(pool.namespace.tenant)
        self._family = family if family.own == pool.namespace else replace(family, peers=())
        self._heads = family.heads_of(family.own) if heads is None else heads
        self._gatherer = Gatherer(pool.stack, family)
        self._lock = threading.Lock()  # guards the next two attributes
        self._look_again_at = -math.inf
        self._alive: Sequence[Namespace] = ()

    def is_alone(self) -> bool:
        """Return whether the last look-up, which is made every 10 s, found no manifest of another sharding."""
        return not self._list_alive()

    def extend_run(
        self, statuses: Sequence[Status], first: int, names_of: Callable[[int], Sequence[bytes]]
    ) -> Run | None:
        """Look up in other shardings the blocks of a prompt after its leading blocks in the own sharding.

        Args:
            statuses: the pool's answers for the prompt's blocks from ``first`` on, in the own sharding.
            first: index of the first of these blocks, counted from the beginning of the sequence.
            names_of: returns the names of all blocks of the sequence for a given block size.

        Returns:
            The run with the sharding that adds the most blocks; None if no sharding adds a block.
        """
        if not self._alive and time.monotonic() < self._look_again_at:
            return None  # the usual answer, before any block is counted
        own = count_leading(statuses)
        if own == len(statuses) or statuses[own] is not Status.ABSENT:
            return None
        lookups = [_PeerLookup(self._family, sharding, self._heads, names_of) for sharding in self._list_alive()]
        if not lookups:
            return None
        blocks = range(first + own, first + len(statuses))
        answers = iter(self._pool.stack.exists([key for each in lookups for key in each.list_keys(blocks)]))
        best = max((each.find_run(statuses, first, blocks, answers) for each in lookups), key=lambda run: run.count)
        return best if best.count > own else None

    def reader_of(self, run: Run, hashes: Sequence[bytes], first: int, names: Sequence[bytes]) -> ReadBlocks:
        """Return a function that reads the blocks of ``run``, and returns at the pool's deadline at the latest.

        Args:
            run: result of ``extend_run``, in this or another process.
            hashes: names of the blocks in the own sharding, from ``first`` on.
            first: index of the run's first block, counted from the beginning of the sequence.
            names: names of the other sharding's blocks, from the beginning of the sequence.
        """

        def read(begin: int, targets: Sequence[Value]) -> int:
            done = 0
            for is_gathered, part in _split(run, range(begin, begin + len(targets))):
                into = targets[part.start - begin : part.stop - begin]
                if is_gathered:
                    count = self._gatherer.read_blocks(run.sharding, names, first + part.start, into)
                else:
                    count = count_leading(self._pool.get_blocks(hashes[part.start : part.stop], into, wait=False))
                done += count
                if count < len(part):
                    break
            return done

        return read

    def close(self) -> None:
        """Unregister the memory for blocks of other shardings. Later reads of such blocks are not allowed."""
        self._gatherer.close()

    def _list_alive(self) -> Sequence[Namespace]:
        """Return the shardings that had a manifest in the pool at the last look-up, which is made every 10 s."""
        now = time.monotonic()
        with self._lock:
            if now < self._look_again_at or not self._family.peers:
                return self._alive
            self._look_again_at = now + _LOOK_AROUND_SECONDS
        # Not counted with the look-ups of blocks, because their success rate is the hit rate.
        statuses = self._pool.stack.exists_for_all([manifest_key(sharding.digest) for sharding in self._family.peers])
        if Status.FAILED not in statuses:
            self._alive = [sharding for sharding, status in zip(self._family.peers, statuses, strict=True) if status]
        return self._alive


class _PeerLookup:
    """Look-up of a prompt's blocks in one other sharding."""

    def __init__(
        self, family: ShardingFamily, sharding: Namespace, heads: range, names_of: Callable[[int], Sequence[bytes]]
    ) -> None:
        self._aligned = AlignedSpan(family, sharding, heads)
        self._sharding = sharding
        self._names = names_of(sharding.block_size)
        self._keys: list[list[str]] = []

    def list_keys(self, blocks: range) -> Iterator[str]:
        """Return the keys of all stored blocks of the other sharding that contain a part of ``blocks``."""
        self._spans = self._aligned.cover(blocks)
        self._keys = [self._aligned.keys(number, self._names) for number in self._spans]
        return (key for keys in self._keys for key in keys)

    def find_run(self, statuses: Sequence[Status], first: int, blocks: range, answers: Iterator[Status]) -> Run:
        """Return the leading blocks of the prompt that the pool has, each in the own or in the other sharding.

        Args:
            statuses: the pool's answers for blocks of the own sharding.
            first: index of the block to which the first of ``statuses`` belongs.
            blocks: indices of the blocks that were passed to ``list_keys``.
            answers: the pool's answers for the keys from ``list_keys``.
        """
        has_span = [bool(keys) and all(list(islice(answers, len(keys)))) for keys in self._keys]

        def is_there(block: int) -> bool:
            return has_span[block // self._aligned.num_blocks - self._spans.start]

        count, gathered = blocks.start - first, []
        for block in blocks:
            if not statuses[block - first]:
                if not is_there(block):
                    break
                gathered.append(block - first)
            count += 1
        return Run(count, self._sharding, tuple(join_runs(gathered)))


def _split(run: Run, wanted: range) -> Iterator[tuple[bool, range]]:
    """Split the ``wanted`` blocks of ``run`` by sharding; yield each range with True if it is in the other sharding."""
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
    """Convert ascending indices to ranges of successive indices: 1, 2, 3, 7 to 1-3 and 7."""
    begin = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield range(numbers[begin], numbers[i - 1] + 1)
            begin = i
