"""PrefixIndex: who holds how much of a chain, against plain models; its bounds, and its snapshot."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies.prefix_index import PrefixIndex

# A tree of chains: the hash of a chunk names all that comes before it, as real ones do.
_chains = st.lists(st.integers(0, 2), max_size=12).map(
    lambda choices: [hash(tuple(choices[: i + 1])) % 2**64 for i in range(len(choices))]
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


@pytest.mark.parametrize("chunks", [30, 4000])
def test_what_was_not_used_for_a_lifetime_is_freed_although_there_is_room(chunks: int) -> None:
    now = 0.0
    index = PrefixIndex(max_entries=1_000_000, lifetime_seconds=1800, clock=lambda: now)
    for number in range(200):
        now += 60.0
        index.add_chain(range(number * chunks, (number + 1) * chunks), "a")
    assert len(index) == 31 * chunks


def test_prompts_of_one_chunk_need_more_memory_so_there_may_be_fewer() -> None:
    index = PrefixIndex(max_entries=100)
    for chunk in range(1000):
        index.add_chain([chunk], "a")
    assert len(index) == 20
    assert index.look_up([980]).pool == 1


def test_a_chain_of_many_branches_is_known_to_its_end() -> None:
    index = PrefixIndex(max_entries=100)
    for end in range(1, 50):
        index.add_chain([*range(end), 1000 + end], "a")
    index.add_chain(range(50), "b")
    assert held(index, range(50)) == (50, {"a": 49, "b": 50})


def test_a_chain_that_one_instance_continues_is_one_node() -> None:
    index = PrefixIndex()
    for end in range(10, 1000, 10):
        index.add_chain(range(end), "a")
    assert index._num_nodes == 1


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


def test_a_snapshot_that_another_thread_makes_has_all_that_was_there_before() -> None:
    index, other = PrefixIndex(), PrefixIndex()
    prompts = [[*range(100), *range(1000 * i, 1000 * i + 20)] for i in range(1, 2000)]
    for prompt in prompts:
        index.add_chain(prompt, "a")
    with ThreadPoolExecutor(1) as thread:
        encoding = thread.submit(index.dump)
        number = 0
        while not encoding.done():
            number += 1
            index.add_chain([*range(number % 100), 10**7 + number], f"{number % 300}")
            index.add_chain([*prompts[number % 1000][: 101 + number % 17], 10**8 + number], "b")
            index.forget_holder(f"{number % 300 - 100}")
    other.load(encoding.result())
    assert all(other.look_up(prompt).own["a"] == 120 for prompt in prompts)


def test_an_empty_snapshot_is_a_snapshot() -> None:
    index = PrefixIndex()
    index.load(PrefixIndex().dump())
    assert len(index) == 0


def test_a_snapshot_fits_into_a_smaller_index() -> None:
    index, smaller = PrefixIndex(), PrefixIndex(max_entries=20)
    index.add_chain(range(100, 120), "a")
    index.add_chain(range(15), "b")
    smaller.load(index.dump())
    assert held(smaller, range(15)) == (15, {"b": 15})
    assert held(smaller, range(100, 120)) == (5, {"a": 5})
    smaller.add_chain(range(10), "c")
    assert len(smaller) == 20


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
    index = PrefixIndex(max_entries=500_000)
    for start in range(0, 900_000, 5):
        index.add_chain([random.Random(start + i).getrandbits(64) for i in range(5)], "a")
    assert index._num_nodes > 90_000
    assert max(map(len, index._parts)) < 600  # one of them grows at a time


_own = st.sampled_from("ab")
_events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), _keys, _chains),
        st.tuples(st.just("drop"), _own, _chains, st.integers(0, 11)),
        st.tuples(st.just("restore"), _own, _chains),
        st.tuples(st.just("forget"), _keys, st.none()),
        st.tuples(st.just("wait"), st.floats(0.0, 60.0), st.none()),
        st.tuples(st.just("snapshot"), st.none(), st.none()),
    ),
    max_size=40,
)


class Model:
    """Each chunk with the time of its last use and the instances that have it; nothing is removed."""

    def __init__(self) -> None:
        self.used_at: dict[int, float] = {}
        self.holders: dict[int, set[str]] = {}

    def lacks(self, chunk: int, now: float) -> bool:
        return chunk not in self.used_at or now - self.used_at[chunk] > 100.0

    def add(self, chain: list[int], key: str, now: float) -> None:
        for chunk in chain:
            if self.lacks(chunk, now):
                self.holders[chunk] = set()
            self.used_at[chunk] = now
            self.holders[chunk].add(key)

    def look_up(self, chain: list[int], now: float) -> tuple[int, dict[str, int]]:
        pool = next((place for place, chunk in enumerate(chain) if self.lacks(chunk, now)), len(chain))
        own = {key: next((i for i in range(pool) if key not in self.holders[chain[i]]), pool) for key in "abcd"}
        return pool, {key: end for key, end in own.items() if end}


@given(events=_events, asked=st.lists(_chains, min_size=1, max_size=4))
def test_it_knows_what_a_table_of_all_chunks_knows(events: list[tuple[Any, ...]], asked: list[list[int]]) -> None:
    now = 0.0
    index, model = PrefixIndex(lifetime_seconds=100.0, clock=lambda: now), Model()
    for kind, argument, chain, *more in events:
        if kind == "add":
            index.add_chain(chain, argument)
            model.add(chain, argument, now)
        elif kind == "drop":
            index.drop_chunks(chain[more[0] :], argument)  # an instance has no chunk without those before it
            for chunk in chain[more[0] :]:
                model.holders.get(chunk, set()).discard(argument)
        elif kind == "restore":
            index.restore_chunks(chain, argument)
            for chunk in chain:
                if chunk not in model.holders:
                    break
                model.holders[chunk].add(argument)
        elif kind == "forget":
            index.forget_holder(argument)
            for holders in model.holders.values():
                holders.discard(argument)
        elif kind == "wait":
            now += argument
        elif not index._dropped:  # it is not in a snapshot, because events are read again after a restart
            index.load(index.dump())
        for each in asked:
            assert held(index, each) == model.look_up(each, now)
    assert len(index) == sum(len(node.chunks) for node in index._list_nodes())
    assert index._num_nodes == sum(map(len, index._parts)) == len(list(index._list_nodes()))
    for node in index._list_nodes():
        children = [child for child in index._list_nodes() if child.parent is node]
        assert node.num_children == len(children)


@given(chains=st.lists(_chains, max_size=8), known=st.lists(_chains, max_size=4), asked=_chains)
def test_an_instance_whose_cache_is_known_again_has_what_it_says(
    chains: list[list[int]], known: list[list[int]], asked: list[int]
) -> None:
    index = PrefixIndex()
    for chain in chains:
        index.add_chain(chain, "b")
    index.drop_chunks([chunk for chain in known for chunk in chain], "a")
    cached = {chunk for chain in known for chunk in chain}
    index.restore_holder("a", cached.__contains__)
    pool, own = held(index, asked)
    assert own.get("a", 0) == min(pool, leading(asked, cached))


def test_chunks_that_an_instance_dropped_long_ago_need_no_memory() -> None:
    index = PrefixIndex(max_entries=1000)
    for start in range(0, 100_000, 20):
        index.add_chain(range(start, start + 20), "a")
        index.drop_chunks(range(start, start + 20), "a")
    assert len(index._dropped["a"]) <= 10_000
    assert held(index, range(99_980, 100_000)) == (20, {})


@given(chains=st.lists(st.lists(st.integers(0, 5), max_size=8), max_size=30))
def test_equal_hashes_of_different_prefixes_break_nothing(chains: list[list[int]]) -> None:
    index = PrefixIndex(max_entries=30)
    for number, chain in enumerate(chains):
        index.add_chain(chain, f"{number % 3}")
        assert 0 <= index.look_up(chain).pool <= len(chain)
        assert len(index) <= 30
    PrefixIndex().load(index.dump())
