"""Describes the KV cache groups of a model, and finds the longest prefix after which all groups can resume.

A group consists of layers that read the same part of a prefix. A model has several groups if its layers read different
parts. A *resume point* is a number of tokens ``n``: the instance computes from token ``n`` on, and needs these blocks:

full    all blocks before ``n``
window  the blocks of the last ``span - 1`` tokens before ``n``
chunk   the blocks from the last multiple of ``span`` to ``n``
state   the block with the state after exactly ``n`` tokens

A hit of ``n`` tokens needs the blocks of all groups. If one group lacks a block, ``n`` is not a resume point.

Groups may have different block sizes; a resume point is a multiple of all of them. All groups take their blocks from
the same memory: a block id belongs to one group at a time, and the block has bytes of that group's layers only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Exists", "Group", "Kind", "Resume", "find_resume_point"]

Kind = Literal["full", "window", "chunk", "state"]
Exists = Callable[[Sequence[tuple[int, int]]], Sequence[bool]]
"""Function that looks up blocks, and returns for each one whether the pool has it.

The argument has for each block the index of its group, and its index in the prefix."""

_TEXTS: Mapping[Kind, str] = {
    "full": "full attention",
    "window": "sliding window",
    "chunk": "chunked attention",
    "state": "state",
}
# Number of places before the needed blocks that the second look-up of a group includes. Each further look-up includes
# twice as many places.
_FIRST_REACH = 8


@dataclass(frozen=True)
class Group:
    """KV cache group: layers of a model that read the same part of a prefix.

    Attributes:
        kind: part of a prefix that the layers read: ``full``, ``window``, ``chunk`` or ``state``.
        block_size: tokens in a block of the group.
        span: tokens in the window or in a chunk; 0 if ``kind`` is ``full`` or ``state``.
    """

    kind: Kind
    block_size: int
    span: int = 0

    @property
    def name(self) -> str:
        """Description of the group for operators, such as ``sliding window 1024``."""
        return f"{_TEXTS[self.kind]} {self.span}" if self.span else _TEXTS[self.kind]

    def list_needed(self, num_tokens: int) -> range:
        """Return the indices of the blocks that the group needs to resume after ``num_tokens`` tokens.

        ``num_tokens`` must be a multiple of the block size.
        """
        return range(self.find_first_needed(num_tokens), num_tokens // self.block_size)

    def find_first_needed(self, num_tokens: int) -> int:
        """Return the index of the first block that the group needs to resume after ``num_tokens`` tokens.

        ``num_tokens`` may be any number, not only a multiple of the block size.
        """
        if self.kind == "full":
            return 0
        if self.kind == "state":
            return max(0, num_tokens - 1) // self.block_size
        if self.kind == "window":
            return max(0, num_tokens - self.span + 1) // self.block_size
        return num_tokens // self.span * self.span // self.block_size


@dataclass(frozen=True)
class Resume:
    """Result of ``find_resume_point``: where a prompt can resume, and how many blocks are missing for a longer prefix.

    Attributes:
        num_tokens: number of tokens of the longest prefix at which all groups can resume.
        num_reached: number of tokens of the longest prefix whose blocks are all present in all groups with full
            attention.
        needed: for each group, the number of blocks that it needs to resume at ``num_reached``.
        missing: for each group, how many of its blocks in ``needed`` are not present.
    """

    num_tokens: int
    num_reached: int
    needed: Sequence[int]
    missing: Sequence[int]

    def describe(self, groups: Sequence[Group]) -> str:
        """Return a line for the log: ``full attention: 4 blocks; state: 1 of 1 missing; resumed at 0 of 64 tokens``."""
        counts: dict[str, list[int]] = {}
        for group, needed, missing in zip(groups, self.needed, self.missing, strict=True):
            total = counts.setdefault(group.name, [0, 0])
            total[0] += needed
            total[1] += missing
        parts = [
            f"{name}: {f'{lost} of {all_} missing' if lost else f'{all_} blocks'}"
            for name, (all_, lost) in counts.items()
        ]
        return f"{'; '.join(parts)}; resumed at {self.num_tokens} of {self.num_reached} tokens"


def find_resume_point(groups: Sequence[Group], first: int, end: int, exists: Exists) -> Resume:
    """Find the longest prefix of at most ``end`` tokens at which all groups can resume.

    This function looks up all blocks of full-attention groups between ``first`` and ``end``. For the other groups, it
    tries the possible resume points, the last one first, and looks up the blocks that are needed there.

    Args:
        groups: the groups of the model.
        first: number of leading tokens that the instance has itself; their blocks are not looked up.
        end: maximum number of tokens. ``first`` and ``end`` are rounded down to multiples of all block sizes.
        exists: looks up blocks.

    Returns:
        The result, with ``first`` as ``num_tokens`` if no longer prefix can resume.
    """
    step = math.lcm(*(group.block_size for group in groups))
    first, tokens = first // step * step, end // step * step
    found = _Found(exists)
    full = [number for number, group in enumerate(groups) if group.kind == "full"]
    begins = [first // group.block_size for group in groups]
    found.look_up(
        [(number, place) for number in full for place in range(begins[number], tokens // groups[number].block_size)]
    )
    for number in full:
        size = groups[number].block_size
        missing = next((place for place in range(begins[number], tokens // size) if not found.has(number, place)), None)
        if missing is not None:
            tokens = missing * size // step * step
    tokens = reached = max(tokens, first)
    sides = [number for number in range(len(groups)) if number not in full]
    at_reached: tuple[Sequence[int], Sequence[int]] | None = None
    reach = 0
    while tokens > first:
        needed = {number: _list_from(groups[number], tokens, begins[number]) for number in sides}
        # The blocks of a group that were looked up have no gaps: they reach from some place to the end.
        if any(places and not found.knows(number, places.start) for number, places in needed.items()):
            before = {
                number: range(max(begins[number], places.start - reach), places.stop)
                for number, places in needed.items()
            }
            found.look_up([(number, place) for number in sides for place in before[number]])
            reach = max(_FIRST_REACH, 2 * reach)
        if at_reached is None:
            at_reached = _count(groups, reached, begins, found)
        lost = [
            place * groups[number].block_size // step * step
            for number, places in needed.items()
            for place in [next((place for place in reversed(places) if not found.has(number, place)), None)]
            if place is not None
        ]
        if not lost:
            break
        # A prefix that ends after a missing block needs this block too, so the next candidate ends before it.
        tokens = max(first, min(lost))
    counts = at_reached or _count(groups, reached, begins, found)
    return Resume(tokens, reached, *counts)


def _list_from(group: Group, num_tokens: int, begin: int) -> range:
    """Return the indices of the blocks, from ``begin`` on, that a group needs to resume after ``num_tokens`` tokens."""
    needed = group.list_needed(num_tokens)
    return range(max(begin, needed.start), needed.stop)


def _count(groups: Sequence[Group], tokens: int, begins: Sequence[int], found: _Found) -> tuple[list[int], list[int]]:
    """Return for each group the number of blocks that it needs to resume at ``tokens``, and how many are missing.

    Args:
        tokens: number of tokens before the resume point.
        begins: for each group, the index of the first block that is not in the instance's own cache.
    """
    places = [_list_from(group, tokens, begin) for group, begin in zip(groups, begins, strict=True)]
    missing = [sum(not found.has(number, place) for place in each) for number, each in enumerate(places)]
    return [len(each) for each in places], missing


class _Found:
    """Looks up blocks in the pool and remembers the answers, so that no block is looked up twice."""

    def __init__(self, exists: Exists) -> None:
        self._exists = exists
        self._known: dict[tuple[int, int], bool] = {}

    def look_up(self, blocks: Sequence[tuple[int, int]]) -> None:
        if wanted := [block for block in blocks if block not in self._known]:
            self._known.update(zip(wanted, self._exists(wanted), strict=True))

    def knows(self, number: int, place: int) -> bool:
        """Return whether the block with index ``place`` in the group with index ``number`` was looked up."""
        return (number, place) in self._known

    def has(self, number: int, place: int) -> bool:
        return self._known[number, place]
