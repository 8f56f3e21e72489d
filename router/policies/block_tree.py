"""BlockTree: the blocks that one instance has cached, as its KV events report them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, repeat, takewhile
from typing import NamedTuple

from router.policies.block_names import SEED, TOKEN_BYTES, hash_contents, name_next

__all__ = ["BlockHash", "BlockTree", "Run", "StoredBlocks", "Tip", "Tokens"]

BlockHash = int | bytes
Tokens = bytes | bytearray | Callable[[], bytes]
"""Tokens of successive blocks, or a function that returns them."""

# Maximum number of blocks in a run of several events. The time for a block in the middle of a run grows with it.
_MAX_RUN_BLOCKS = 512


@dataclass(slots=True, eq=False)
class Run:
    """Successive cached blocks of one prefix. One or several events have stored them.

    A run has no object for each block, because an instance may have a million blocks, and events about thousands of
    them arrive each second.
    """

    parent: BlockHash | None
    """Hash of the block before the first one; None if the first one begins a prompt."""
    before: Run | None
    """The run that has ``parent``; None if that block is not cached."""
    start: int
    """Number of tokens of the prompt before the first block; -1 if it is unknown."""
    size: int
    """Number of tokens in each block."""
    seed: int
    """Seed for the names of these blocks."""
    stored_at: float
    """Time of the last event that stored any of these blocks."""
    hashes: list[BlockHash] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    """Names of the first blocks, as far as they were computed; see ``block_names``."""
    unnamed: list[tuple[int, int, Tokens]] = field(default_factory=list)
    """Tokens of blocks that have no names yet, as (first, end, tokens) for the blocks ``hashes[first:end]``. The tokens
    of the last blocks may be missing. A function ``tokens`` may also return tokens of blocks after ``end``."""
    behind: dict[Run, None] = field(default_factory=dict)
    """The runs whose ``before`` is this run."""
    chunks: dict[int, float] = field(default_factory=dict)
    """The prompt chunks that end in these blocks. The value is the number of tokens up to the end of the chunk."""
    tips: dict[int, Tip] = field(default_factory=dict)
    """Each ``Tip`` whose last cached block is in this run, by ``Tip.chunk``."""

    @property
    def end(self) -> int:
        """Number of tokens from the beginning of the prompt to the end of the last block."""
        return self.start + len(self.hashes) * self.size

    def find_end(self, block: BlockHash) -> int:
        """Return the number of tokens from the beginning of the prompt to the end of one of these blocks."""
        if block == self.hashes[-1]:
            return self.end
        return self.start + (self.hashes.index(block) + 1) * self.size

    def add_blocks(self, hashes: Iterable[BlockHash], tokens: Tokens, now: float) -> None:
        """Add blocks at the end. ``tokens`` may contain only the tokens of the first blocks of ``hashes``."""
        place = len(self.hashes)
        self.hashes += hashes
        self.stored_at = now
        if not tokens:
            return
        end = len(self.hashes)
        if not callable(tokens):
            tokens = bytearray(tokens[: (end - place) * self.size * TOKEN_BYTES])
            if self.unnamed:
                first, _, known = self.unnamed[-1]
                if isinstance(known, bytearray) and len(known) == (place - first) * self.size * TOKEN_BYTES:
                    known += tokens
                    self.unnamed[-1] = first, end, known
                    return
        self.unnamed.append((place, end, tokens))

    def keep_blocks(self, count: int) -> None:
        """Remove all blocks but the first ``count`` ones."""
        del self.hashes[count:], self.names[count:]
        while self.unnamed and self.unnamed[-1][0] >= count:
            self.unnamed.pop()
        if self.unnamed:
            first, end, tokens = self.unnamed[-1]
            self.unnamed[-1] = first, min(end, count), tokens
            if isinstance(tokens, bytearray):
                del tokens[(count - first) * self.size * TOKEN_BYTES :]


@dataclass(slots=True)
class Tip:
    """The position up to which an instance has cached a prompt and its response."""

    chunk: int
    """Hash of the prompt's last whole chunk."""
    run: Run
    """The run that has the last cached block."""
    end: int
    """Number of cached tokens, as the engine counts them."""
    prompt_end: int
    """Number of tokens up to the end of the last block that has only prompt tokens."""
    tokens_per_chunk: float
    num_rest_bytes: int
    """Number of bytes of the prompt's text after its last whole chunk. ``rest_digest`` is the hash of this text."""
    rest_digest: int


class StoredBlocks(NamedTuple):
    """Successive blocks that one event has stored, and whose position in the prompt is known."""

    at: float
    """Time of the event."""
    last: BlockHash
    """The last one of the blocks."""
    num_blocks: int
    end: int
    """Number of tokens from the beginning of the prompt to the end of the last block."""


class BlockTree:
    """The cached blocks of one instance, as a tree of runs: a run's children begin after one of its blocks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._run_of: dict[BlockHash, Run] = {}
        """The run of each cached block."""
        self._size = 0
        self._copies: Counter[BlockHash] = Counter()
        """The number of further copies of each block that is cached several times."""
        self._orphans: dict[BlockHash, dict[Run, None]] = {}
        """The runs whose parent was removed, by the parent's hash. Runs after an unknown block are missing."""
        self._by_name: dict[int, BlockHash] = {}
        """The block of each name, after the first call of ``name_blocks``. Most routers get no queries for names."""
        self._is_naming = self._is_named = False

    def __len__(self) -> int:
        return len(self._run_of)

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._run_of)

    def __contains__(self, block: object) -> bool:
        return block in self._run_of

    @property
    def block_size(self) -> int:
        """Number of tokens in each whole block; 0 if there are no blocks."""
        return self._size if self._run_of else 0

    def name_blocks(self) -> Iterator[None]:
        """Compute the names of all blocks, for ``count_named`` and ``count_leading``. Yield after each run.

        After each yield, other code may run and apply events. Blocks that are stored after the first call of this
        method get their names at once.
        """
        self._is_naming = True
        if not self._is_named:
            runs = [run for run in dict.fromkeys(self._run_of.values()) if run.before is None]
            while runs:
                run = runs.pop()
                self._name_run(run)
                runs += run.behind
                yield
        self._is_named = True

    def count_named(self, names: Iterable[int]) -> int:
        """Return the number of leading blocks of a prompt that are cached.

        Args:
            names: names of the prompt's blocks, in order; see ``block_names``.
        """
        return sum(1 for _ in takewhile(self._by_name.__contains__, names))

    def count_leading(self, hashes: Iterable[BlockHash]) -> int:
        """Return the number of leading blocks of a prompt that are cached.

        Args:
            hashes: for each block of the prompt, in order, its hash in the instance's events, or its name.
        """
        return sum(1 for _ in takewhile(lambda each: each in self._run_of or each in self._by_name, hashes))

    def store_blocks(
        self,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        block_size: int,
        tokens: Tokens = b"",
        seed: int = SEED,
    ) -> list[StoredBlocks]:
        """Add a chain of blocks that the instance has stored. Return its parts whose positions are known.

        Args:
            hashes: the blocks, in order.
            parent: the block before the first one; None if the first block begins a prompt.
            block_size: number of tokens in each block.
            tokens: tokens of the first blocks. Blocks without tokens get no names.
            seed: seed for the names if the first block begins a prompt; otherwise the seed of ``parent`` is used.
        """
        if not hashes:
            return []
        now = self._clock()
        self._size = max(block_size, self.block_size)  # vLLM may also send a part of a block, as a smaller block
        if self._run_of.keys().isdisjoint(hashes):
            return self._store_run(hashes, parent, block_size, now, tokens, seed)
        # Some blocks are stored a second time, by a request that ran at the same time, or that computed the last block
        # of a cached prompt again. They stay where they are, until the instance has evicted all copies.
        unique = dict.fromkeys(hashes)
        self._copies.update(filter(self._run_of.__contains__, unique))
        if len(unique) < len(hashes):
            tokens = b""
        stored: list[StoredBlocks] = []
        at, step = 0, block_size * TOKEN_BYTES
        for run, group in groupby(unique, self._find_placed):
            blocks = list(group)
            end = at + len(blocks)
            if run is None:
                tokens = tokens() if callable(tokens) else tokens
                self._remove(blocks)
                stored += self._store_run(blocks, parent, block_size, now, tokens[at * step : end * step], seed)
            else:
                run.stored_at = now
                stored.append(StoredBlocks(now, blocks[-1], len(blocks), run.find_end(blocks[-1])))
            parent, at = blocks[-1], end
        return stored

    def remove_blocks(self, hashes: Sequence[BlockHash]) -> None:
        """Remove blocks that the instance has evicted. Blocks after an evicted block are cached, but cannot be used.

        If several copies of a block are cached, one of them is removed.
        """
        if not self._copies.keys().isdisjoint(hashes):
            hashes = [block for block in hashes if not self._remove_copy(block)]
        self._remove(hashes)

    def forget_copies(self) -> None:
        """Assume that each block is cached once. Call this if events may be missing. Otherwise a block would never be
        removed if the event about the removal of one of its copies is missing.
        """
        self._copies.clear()

    def clear(self) -> None:
        """Remove all blocks."""
        for each in (self._run_of, self._copies, self._orphans, self._by_name):
            each.clear()

    def _on_lost(self, run: Run, blocks: Sequence[BlockHash], end: int, last: Run | None) -> None:
        """Called when blocks of a run were removed, or can no longer be used because an earlier block was removed.

        Args:
            blocks: these blocks.
            end: number of tokens from the beginning of the prompt to the first removed block.
            last: the run that has the last block before ``end``; None if there is none.
        """

    def _find_placed(self, block: BlockHash) -> Run | None:
        """Return the run that has a block; None if it is not cached, or its position in the prompt is unknown."""
        run = self._run_of.get(block)
        return None if run is None or run.start < 0 else run

    def _store_run(
        self,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        size: int,
        now: float,
        tokens: Tokens,
        seed: int,
    ) -> list[StoredBlocks]:
        """Add blocks that are not cached: to the run that ends with their parent, or as a new run.

        Args:
            hashes: the blocks, in order.
            parent: the block before the first one; None if the first block begins a prompt.
            size: number of tokens in each block.
            now: the present time.
            tokens: tokens of the first blocks.
            seed: seed for the names if ``parent`` is not cached.

        Returns:
            One entry for all these blocks; empty if their position in the prompt is unknown.
        """
        before = None if parent is None else self._run_of.get(parent)
        if (
            before is not None
            and before.hashes[-1] == parent
            and before.size == size
            and not before.behind
            and len(before.hashes) + len(hashes) <= _MAX_RUN_BLOCKS
        ):
            run = before
        else:
            start = 0
            if parent is not None:
                start = -1 if before is None or before.start < 0 else before.find_end(parent)
            run = Run(parent, before, start, size, seed if before is None else before.seed, now)
            self._link(run)
        placed = dict.fromkeys(hashes, run)
        run.add_blocks(placed, tokens if len(placed) == len(hashes) else b"", now)
        self._run_of.update(placed)
        if self._is_naming:
            self._name_run(run)
        if self._orphans:
            for block in [block for block in placed if block in self._orphans]:
                self._adopt(block, run)
        return [StoredBlocks(now, run.hashes[-1], len(placed), run.end)] if run.start >= 0 else []

    def _link(self, run: Run) -> None:
        if run.before is not None:
            run.before.behind[run] = None
        elif run.parent is not None and run.start > 0:
            self._orphans.setdefault(run.parent, {})[run] = None

    def _unlink(self, run: Run) -> None:
        if run.before is not None:
            del run.before.behind[run]
        elif run.parent is not None and run.start > 0:
            orphans = self._orphans[run.parent]
            del orphans[run]
            if not orphans:
                del self._orphans[run.parent]

    def _adopt(self, block: BlockHash, run: Run) -> None:
        """Make the runs that follow ``block`` children of ``run``, in which ``block`` was stored again."""
        end = run.find_end(block)
        for orphan in list(self._orphans[block]):
            # If the block was stored again in another chain, it ends elsewhere, and the chain of the orphan is broken.
            if run.start >= 0 and orphan.start == end:
                self._unlink(orphan)
                orphan.before = run
                self._link(orphan)

    def _remove(self, hashes: Sequence[BlockHash]) -> None:
        """Remove all copies of blocks. Blocks that are not cached are ignored."""
        removed: dict[Run, list[BlockHash]] = {}
        at = 0
        for run, group in groupby(map(self._run_of.pop, hashes, repeat(None))):
            end = at + len(list(group))
            if run is not None:
                removed.setdefault(run, []).extend(hashes[at:end])
            at = end
        for run, blocks in removed.items():
            self._cut(run, blocks)

    def _remove_copy(self, block: BlockHash) -> bool:
        """Remove one of several copies of a block; return False if there are not several."""
        count = self._copies.get(block, 0)
        if count > 1:
            self._copies[block] = count - 1
        elif count:
            del self._copies[block]
        return count > 0

    def _cut(self, run: Run, removed: list[BlockHash]) -> None:
        """Remove blocks from a run. The blocks after them become runs of their own, whose parents are not cached."""
        keep = len(run.hashes) - len(removed)
        tail = run.hashes[keep:]
        if keep and tail != removed[::-1] and tail != removed:  # in the usual order, the last blocks are evicted first
            gone = set(removed)
            keep = next(place for place, block in enumerate(run.hashes) if block in gone)
            tail = run.hashes[keep:]
            self._split(run, keep, gone)
        end = run.start + keep * run.size
        for name, block in zip(run.names[keep:], tail, strict=False):
            if self._by_name.get(name) == block and block not in self._run_of:
                del self._by_name[name]
        run.keep_blocks(keep)
        last = run if keep else run.before
        self._on_lost(run, tail, end, last)
        for each in [each for each in run.behind if each.start > end or run.start < 0]:
            self._lose_subtree(each, end, last)
            del run.behind[each]
            each.before = None if each.parent is None else self._run_of.get(each.parent)
            self._link(each)
        if not keep:
            self._unlink(run)

    def _split(self, run: Run, keep: int, gone: set[BlockHash]) -> None:
        """Make new runs of those blocks in ``run.hashes[keep:]`` that are not in ``gone``."""
        at = keep
        for is_gone, group in groupby(run.hashes[keep:], gone.__contains__):
            blocks = list(group)
            if not is_gone:
                start = run.start + at * run.size if run.start >= 0 else -1
                parent = run.hashes[at - 1]
                piece = Run(parent, None, start, run.size, run.seed, run.stored_at, blocks)
                piece.names = run.names[at : at + len(blocks)]
                self._run_of.update(dict.fromkeys(blocks, piece))
                self._link(piece)
            at += len(blocks)

    def _lose_subtree(self, root: Run, end: int, last: Run | None) -> None:
        """Report that ``root`` and all runs after it cannot be used, because a block before them was removed."""
        stack = [root]
        while stack:
            run = stack.pop()
            stack += run.behind
            self._on_lost(run, run.hashes, end, last)

    def _name_run(self, run: Run) -> None:
        """Compute the names of a run's blocks from their tokens (see ``block_names``).

        Stop at the first block whose tokens are not known, or whose previous block has no name.
        """
        while run.unnamed:
            first, end, tokens = run.unnamed[0]
            name = _find_name_before(run, first)
            if name is None and (first or run.parent is not None):
                return
            data = tokens() if callable(tokens) else bytes(tokens)
            for content, block in zip(hash_contents(data, run.size, run.seed), run.hashes[first:end], strict=False):
                name = name_next(name, content)
                run.names.append(name)
                self._by_name[name] = block
            del run.unnamed[0]


def _find_name_before(run: Run, place: int) -> int | None:
    """Return the name of the block before ``run.hashes[place]``; None if there is no such block, or it has no name."""
    owner = run
    if not place:
        if run.before is None:
            return None
        owner, place = run.before, (run.start - run.before.start) // run.before.size
    return owner.names[place - 1] if 0 < place <= len(owner.names) else None
