"""PrefixIndex: who holds how much of a chain, against a plain model; its bounds, and its snapshot."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies.prefix_index import PrefixIndex

# A tree of chains: the hash of a chunk names all that comes before it, as real ones do.
_chains = st.lists(st.integers(0, 2), max_size=12).map(
    lambda choices: [hash(tuple(choices[: i + 1])) for i in range(len(choices))]
)
_keys = st.sampled_from("abcd")
_steps = st.lists(
    st.one_of(st.tuples(st.just("add"), _keys, _chains), st.tuples(st.just("forget"), _keys)), max_size=30
)


def held(index: PrefixIndex, chain: Sequence[int]) -> tuple[int, dict[str, int]]:
    return index.look_up(chain)[:2]


def leading(chain: list[int], known: set[int]) -> int:
    return next((i for i, chunk in enumerate(chain) if chunk not in known), len(chain))


@given(steps=_steps, asked=_chains)
def test_it_knows_what_a_plain_set_for_each_instance_knows(steps: list[tuple[Any, ...]], asked: list[int]) -> None:
    index = PrefixIndex()
    pool: set[int] = set()
    own: dict[str, set[int]] = {key: set() for key in "abcd"}
    for step in steps:
        if step[0] == "add":
            index.add_chain(step[2], step[1])
            pool |= set(step[2])
            own[step[1]] |= set(step[2])
        else:
            index.forget_holder(step[1])
            own[step[1]].clear()
    expected = {key: leading(asked, chunks) for key, chunks in own.items()}
    assert held(index, asked) == (leading(asked, pool), {key: n for key, n in expected.items() if n})


@given(steps=_steps, chain=_chains.filter(len), turns=st.integers(0, 1))
def test_what_was_added_last_is_known_whatever_was_dropped_before(
    steps: list[tuple[Any, ...]], chain: list[int], turns: int
) -> None:
    index = PrefixIndex(max_entries=24)
    for step in steps:
        if step[0] == "add":
            index.add_chain(step[2], step[1])
    index.add_chain(chain, "a")
    assert index.look_up(chain).own["a"] == len(chain)
    assert len(index) <= 24


def test_it_never_holds_more_than_its_bound() -> None:
    index = PrefixIndex(max_entries=100)
    for start in range(0, 10_000, 30):
        index.add_chain(range(start, start + 30), "a")
        assert len(index) <= 100


@pytest.mark.parametrize(("seconds", "chunks"), [(60, 300), (0, 4000)], ids=["few prompts", "long prompts"])
def test_what_it_has_dropped_is_freed_however_few_prompts_follow(seconds: float, chunks: int) -> None:
    now = 0.0
    index = PrefixIndex(max_entries=100_000, lifetime_seconds=1800, clock=lambda: now)
    for number in range(200):
        now += seconds
        index.add_chain(range(number * chunks, (number + 1) * chunks), "a")
    assert sum(map(len, index._retired)) <= 50_000  # one generation
    assert len(index._retired) <= 2 * 256


def test_a_chain_longer_than_the_index_is_known_as_far_as_it_goes() -> None:
    index = PrefixIndex(max_entries=100)
    index.add_chain(range(1000), "a")
    assert held(index, range(1000)) == (50, {"a": 50})


def test_a_chain_not_used_for_its_lifetime_is_forgotten_and_a_used_one_kept() -> None:
    now = 0.0
    index = PrefixIndex(lifetime_seconds=100, clock=lambda: now)
    index.add_chain([1, 2], "a")
    index.add_chain([3, 4], "a")
    for later in (40.0, 80.0, 120.0):
        now = later
        index.add_chain([1, 2], "a")
    assert index.look_up([1, 2]).pool == 2
    assert index.look_up([3, 4]).pool == 0


@given(now=st.floats(0, 1e7))
def test_chunks_that_were_used_at_this_moment_are_not_younger_than_nothing(now: float) -> None:
    index = PrefixIndex(clock=lambda: now)
    index.add_chain([1, 2], "a")
    [(_, age)] = index.look_up([1, 2]).ages
    assert 0.0 <= age < 1e-5


def test_all_is_stale_after_a_long_pause() -> None:
    now = 0.0
    index = PrefixIndex(lifetime_seconds=100, clock=lambda: now)
    index.add_chain([1, 2], "a")
    now = 101.0
    assert held(index, [1, 2]) == (0, {})


def test_what_an_instance_did_not_use_for_long_is_taken_to_be_in_the_pool_only() -> None:
    now = 0.0
    index = PrefixIndex(clock=lambda: now)
    index.add_chain([1, 2, 3], "a")
    now = 50.0
    index.add_chain([1, 4], "b")
    now = 60.0
    assert index.look_up([1, 2, 3], kept_seconds=30) == (3, {"a": 1, "b": 1}, [(1, 10.0), (3, 60.0)])


def test_a_restarted_instance_holds_nothing_and_the_pool_still_does() -> None:
    index = PrefixIndex()
    index.add_chain([1, 2, 3], "a")
    index.add_chain([1, 2], "b")
    index.forget_holder("a")
    assert held(index, [1, 2, 3]) == (3, {"b": 2})


def test_many_restarts_leave_the_others_known() -> None:
    index = PrefixIndex()
    index.add_chain([1, 2], "steady")
    for restart in range(1000):
        index.add_chain([1, 2, 3], f"instance {restart}")
        index.forget_holder(f"instance {restart}")
    assert held(index, [1, 2, 3]) == (3, {"steady": 2})
    assert len(index._names) < 300


def test_a_snapshot_brings_all_back() -> None:
    index, other = PrefixIndex(), PrefixIndex()
    index.add_chain([1, 2**64 - 1, 3], "a")
    index.add_chain([1], "b")
    index.add_chain([1], "gone")
    index.forget_holder("gone")
    other.load(index.dump())
    assert held(other, [1, 2**64 - 1, 3]) == (3, {"a": 3, "b": 1})


def test_a_copy_stays_as_it_was() -> None:
    index = PrefixIndex()
    index.add_chain([1], "a")
    copy = index.copy()
    index.add_chain([1, 2], "b")
    index.forget_holder("a")
    other = PrefixIndex()
    other.load(copy.dump())
    assert held(copy, [1, 2]) == held(other, [1, 2]) == (1, {"a": 1})


def test_an_empty_snapshot_is_a_snapshot() -> None:
    index = PrefixIndex()
    index.load(PrefixIndex().dump())
    assert len(index) == 0


def test_a_snapshot_fits_into_a_smaller_index() -> None:
    index, smaller = PrefixIndex(), PrefixIndex(max_entries=10)
    index.add_chain(range(20), "a")
    smaller.load(index.dump())
    assert held(smaller, range(20)) == (5, {"a": 5})


@given(damage=st.integers(0, 10_000), cut=st.booleans())
def test_a_damaged_snapshot_is_ignored(damage: int, cut: bool) -> None:
    index = PrefixIndex()
    index.add_chain([7], "a")
    data = PrefixIndex().dump()
    at = damage % len(data)
    broken = data[:at] if cut else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    with pytest.raises(ValueError, match="prefix index"):
        index.load(broken)
    assert index.look_up([7]).pool == 1


def test_no_step_touches_a_large_part_of_the_index() -> None:
    index = PrefixIndex(max_entries=100_000)
    for start in range(0, 180_000, 30):
        index.add_chain([hash((start, i)) for i in range(30)], "a")
    parts = [*index._current, *index._previous, *index._retired]
    assert len(index) > 50_000
    assert max(map(len, parts)) < 500  # one is freed, or grows, at a time
    assert not any(map(gc.is_tracked, parts))  # the garbage collector looks at no entry
