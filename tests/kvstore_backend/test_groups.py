"""Resume points of models with several kinds of layers, compared with brute force."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies

from kvstore_backend.groups import Group, Kind, Resume, find_resume_point

BLOCK_SIZES = (2, 4, 6, 8)


@strategies.composite
def models(draw: strategies.DrawFn) -> list[Group]:
    """Some groups, of one block size or of several."""
    groups = []
    for _ in range(draw(strategies.integers(1, 4))):
        kind: Kind = draw(strategies.sampled_from(("full", "window", "chunk", "state")))
        span = draw(strategies.integers(1, 40)) if kind in ("window", "chunk") else 0
        groups.append(Group(kind, draw(strategies.sampled_from(BLOCK_SIZES)), span))
    return groups


def read_tokens(group: Group, num_tokens: int) -> range:
    """Return the tokens that a layer of this group reads after ``num_tokens``, by definition of its attention."""
    reads = {
        "full": range(num_tokens),
        "window": range(max(0, num_tokens - (group.span - 1)), num_tokens),
        "chunk": range(num_tokens - num_tokens % group.span if group.span else 0, num_tokens),
        "state": range(max(0, num_tokens - 1), num_tokens),
    }
    return reads[group.kind]


def try_all(groups: Sequence[Group], first: int, end: int, lost: set[tuple[int, int]]) -> int:
    """Find the longest resume point with a check of every prefix and every token."""
    step = math.lcm(*(group.block_size for group in groups))
    first = first // step * step
    for tokens in range(end // step * step, first, -step):
        blocks = {
            (number, token // group.block_size)
            for number, group in enumerate(groups)
            for token in read_tokens(group, tokens)
            if token // group.block_size >= first // group.block_size
        }
        if not blocks & lost:
            return tokens
    return first


@settings(max_examples=150, deadline=None)
@given(
    models(), strategies.integers(0, 200), strategies.integers(0, 200), strategies.randoms(), strategies.floats(0, 1)
)
def test_the_resume_point_is_the_one_that_brute_force_finds(
    groups: list[Group], first: int, end: int, chooser: object, share: float
) -> None:
    choose = chooser.random  # type: ignore[attr-defined]
    lost = {
        (number, place)
        for number, group in enumerate(groups)
        for place in range(end // group.block_size + 1)
        if choose() < share**3
    }
    found = find_resume_point(groups, first, end, lambda blocks: [block not in lost for block in blocks])
    assert found.num_tokens == try_all(groups, first, end, lost)


def find_and_record(
    groups: Sequence[Group], lost: set[tuple[int, int]], first: int, end: int
) -> tuple[Resume, list[tuple[int, int]]]:
    lookups: list[tuple[int, int]] = []

    def exists(blocks: Sequence[tuple[int, int]]) -> list[bool]:
        lookups.extend(blocks)
        return [block not in lost for block in blocks]

    return find_resume_point(groups, first, end, exists), lookups


FULL, WINDOW, STATE = Group("full", 4), Group("window", 4, 9), Group("state", 4)


def test_only_blocks_that_a_group_needs_are_looked_up() -> None:
    found, lookups = find_and_record([FULL, WINDOW, STATE], set(), 0, 40)
    assert found.num_tokens == 40
    assert sorted(lookups) == [*((0, place) for place in range(10)), (1, 8), (1, 9), (2, 9)]


def test_blocks_in_the_own_cache_are_not_looked_up() -> None:
    _, lookups = find_and_record([FULL, WINDOW], set(), 36, 40)
    assert sorted(lookups) == [(0, 9), (1, 9)]


def test_no_block_of_a_window_is_looked_up_if_full_attention_has_none() -> None:
    found, lookups = find_and_record([FULL, WINDOW], {(0, 0)}, 0, 40)
    assert found.num_tokens == 0
    assert {number for number, _ in lookups} == {0}


def test_a_long_gap_of_a_window_needs_few_lookups() -> None:
    calls = 0

    def exists(blocks: Sequence[tuple[int, int]]) -> list[bool]:
        nonlocal calls
        calls += 1
        return [number == 0 or place < 20 for number, place in blocks]

    assert find_resume_point([FULL, WINDOW], 0, 4000, exists).num_tokens == 80
    assert calls <= 12


def test_the_reason_of_a_shorter_hit_names_every_group() -> None:
    groups = [FULL, WINDOW, WINDOW]
    found, _ = find_and_record(groups, {(1, 9), (1, 8), (2, 8)}, 0, 40)
    assert found.describe(groups) == (
        "full attention: 10 blocks; sliding window 9: 3 of 4 missing; resumed at 32 of 40 tokens"
    )


@pytest.mark.parametrize(
    ("group", "tokens", "needed"),
    [
        (FULL, 12, [0, 1, 2]),
        (WINDOW, 12, [1, 2]),
        (Group("window", 4, 10), 12, [0, 1, 2]),
        (Group("window", 4, 1), 12, []),
        (Group("chunk", 4, 8), 12, [2]),
        (Group("chunk", 4, 8), 16, []),
        (Group("chunk", 4, 6), 16, [3]),
        (STATE, 12, [2]),
        (STATE, 0, []),
    ],
)
def test_the_blocks_that_a_group_needs_at_a_resume_point_are_listed(
    group: Group, tokens: int, needed: list[int]
) -> None:
    assert list(group.list_needed(tokens)) == needed
