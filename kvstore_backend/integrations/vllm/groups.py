"""KV cache groups of a model, and the longest prefix at which it can resume; imports nothing from vLLM.

A model has several groups if its layers read different parts of a prefix. At a *resume point* of ``n`` tokens, a group
needs only the blocks that its layers read from token ``n`` on:

full    all blocks before ``n``
window  the blocks of the last ``span - 1`` tokens
chunk   the blocks of the tokens since the last multiple of ``span``
state   the block with the state after exactly ``n`` tokens

A hit is all or nothing: a prefix is a resume point only if every group has everything that it needs there.

Facts of vLLM 0.32. Groups may have different block sizes; hits are multiples of their least common multiple. Block
hashes are made every ``hash_block_size`` tokens, which divides all block sizes, and the last hash in a block names its
whole prefix. Before an asynchronous load vLLM allocates exactly the blocks that a group needs, and fills the places
before them with its null block. All groups take their blocks from one pool: a block id belongs to one group at a time,
and its bytes are those of that group's layers only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Exists", "Group", "Kind", "Resume", "find_resume_point"]

Kind = Literal["full", "window", "chunk", "state"]
Exists = Callable[[Sequence[tuple[int, int]]], Sequence[bool]]
"""Function that looks up blocks, each given as the index of its group and its place in the prefix."""

_TEXTS: Mapping[Kind, str] = {
    "full": "full attention",
    "window": "sliding window",
    "chunk": "chunked attention",
    "state": "state",
}
# Places before a missing block that the next look-up of a group includes; each further look-up has twice as many.
_FIRST_REACH = 8


@dataclass(frozen=True)
class Group:
    """One KV cache group.

    Attributes:
        kind: which part of a prefix its layers read.
        block_size: tokens in one of its blocks.
        span: tokens of the window or of a chunk; 0 for other kinds.
    """

    kind: Kind
    block_size: int
    span: int = 0

    @property
    def name(self) -> str:
        """Text for operators, such as ``sliding window 1024``."""
        return f"{_TEXTS[self.kind]} {self.span}" if self.span else _TEXTS[self.kind]

    def list_needed(self, num_tokens: int) -> range:
        """Return the places of the blocks that the layers read after ``num_tokens``, a multiple of the block size."""
        end = num_tokens // self.block_size
        if self.kind == "full":
            return range(end)
        if self.kind == "state":
            return range(max(0, end - 1), end)
        if self.kind == "window":
            first_token = max(0, num_tokens - self.span + 1)
        else:
            first_token = num_tokens // self.span * self.span
        return range(first_token // self.block_size, end)


@dataclass(frozen=True)
class Resume:
    """Result of a look-up.

    Attributes:
        num_tokens: length of the longest prefix at which every group can resume.
        num_reached: length of the longest prefix of which the full-attention groups have all blocks.
        needed: for each group, number of blocks that it needs at ``num_reached``.
        missing: for each group, number of these that are not present.
        num_asked: number of blocks that were looked up.
    """

    num_tokens: int
    num_reached: int
    needed: Sequence[int]
    missing: Sequence[int]
    num_asked: int

    def describe(self, groups: Sequence[Group]) -> str:
        """Return one line, such as ``full attention: 40 blocks; sliding window 64: 3 of 4 missing; resumed at 24``."""
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
    """Find the longest prefix of at most ``end`` tokens at which every group has what it needs.

    Full-attention groups are looked up from the front. The others are looked up from the end back, and only the blocks
    that they need at the candidates.

    Args:
        groups: the groups.
        first: tokens that the instance has itself: what a group needs of them is not looked up.
        end: maximum length; both are rounded down to resume points.
        exists: looks up blocks.

    Returns:
        The result; its ``num_tokens`` is ``first`` if there is no longer resume point.
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
        before = {
            number: range(max(begins[number], places.start - reach), places.stop) for number, places in needed.items()
        }
        found.look_up([(number, place) for number in sides for place in before[number]])
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
        # A block that is missing stays needed until the prefix ends before it.
        tokens = max(first, min(lost))
        reach = max(_FIRST_REACH, 2 * reach)
    counts = at_reached or _count(groups, reached, begins, found)
    return Resume(tokens, reached, *counts, found.num_asked)


def _list_from(group: Group, num_tokens: int, begin: int) -> range:
    """Return the places that a group needs, from ``begin`` on."""
    needed = group.list_needed(num_tokens)
    return range(max(begin, needed.start), needed.stop)


def _count(groups: Sequence[Group], tokens: int, begins: Sequence[int], found: _Found) -> tuple[list[int], list[int]]:
    """Return how many blocks each group needs at ``tokens``, and how many of them are not present."""
    places = [_list_from(group, tokens, begin) for group, begin in zip(groups, begins, strict=True)]
    missing = [sum(not found.has(number, place) for place in each) for number, each in enumerate(places)]
    return [len(each) for each in places], missing


class _Found:
    """Blocks that were looked up, each once."""

    def __init__(self, exists: Exists) -> None:
        self._exists = exists
        self._known: dict[tuple[int, int], bool] = {}

    @property
    def num_asked(self) -> int:
        return len(self._known)

    def look_up(self, blocks: Sequence[tuple[int, int]]) -> None:
        if wanted := [block for block in blocks if block not in self._known]:
            self._known.update(zip(wanted, self._exists(wanted), strict=True))

    def has(self, number: int, place: int) -> bool:
        return self._known[number, place]
