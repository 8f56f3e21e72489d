"""PrefixIndex: who holds how much of a chain, against plain models; its bounds, and its snapshot."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies.prefix_index import PrefixIndex, _Node

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


def test_a_snapshot_says_which_chunks_were_dropped() -> None:
    index, other = PrefixIndex(), PrefixIndex()
    index.add_chain(range(10), "a")
    index.add_chain(range(10), "b")
    index.drop_chunks(range(5, 10), "a")
    other.load(index.dump())
    assert held(other, range(10)) == (10, {"a": 5, "b": 10})


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
        else:
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
    index.restore_holder("a", cached)
    pool, own = held(index, asked)
    assert own.get("a", 0) == min(pool, leading(asked, cached))


def test_chunks_that_an_instance_dropped_need_no_memory_when_their_node_is_dropped_or_removed() -> None:
    index = PrefixIndex(max_entries=1000)
    for start in range(0, 100_000, 20):
        index.add_chain(range(start, start + 20), "a")
        index.drop_chunks(range(start + 10, start + 20), "a")
        if start % 40:
            index.drop_chunks(range(start, start + 10), "a")
    assert len(index._dropped) <= 500
    assert held(index, range(99_980, 100_000)) == (20, {})
    assert held(index, range(99_960, 99_980)) == (20, {"a": 10})


def test_dropped_chunks_that_are_not_in_the_index_need_bounded_memory() -> None:
    index = PrefixIndex()
    index.add_chain(range(20), "a")
    index.drop_chunks(range(15, 20), "a")
    for start in range(100, 1_000_000, 1000):
        index.drop_chunks(range(start, start + 1000), "a")
        assert len(index._dropped) <= 100_000
    assert held(index, range(20)) == (20, {"a": 15})


class CountedChunks(list[int]):
    """A prompt that counts how many of its chunks are read."""

    num_read = 0

    def __iter__(self) -> Iterator[int]:
        for chunk in super().__iter__():
            self.num_read += 1
            yield chunk

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return self
        self.num_read += 1
        return super().__getitem__(place)


def test_instances_that_dropped_chunks_do_not_each_read_the_prompt() -> None:
    index = PrefixIndex()
    for number in range(100):
        index.add_chain([*range(1000), 2000 + number, 3000 + number], f"{number}")
        index.drop_chunks([3000 + number], f"{number}")
    index.drop_chunks(range(990, 1000), "0")
    prompt = CountedChunks(range(1000))
    own = index.look_up(prompt).own
    assert own == {"0": 990, **{f"{number}": 1000 for number in range(1, 100)}}
    assert prompt.num_read < 5000


def test_a_prompt_of_many_branches_names_each_instance_once() -> None:
    class Counted(PrefixIndex):
        num_named = 0

        def _name_holders(self, holders: int) -> tuple[str, ...]:
            names = super()._name_holders(holders)
            self.num_named += len(names)
            return names

    index = Counted()
    for end in range(1, 500):
        index.add_chain([*range(end), 1000 + end], f"{end % 100}")
    assert set(index.look_up(range(500)).own.values()) == set(range(400, 500))
    assert index.num_named <= 100


def test_an_instance_whose_small_cache_is_known_again_does_not_read_the_whole_index() -> None:
    index = PrefixIndex()
    for start in range(0, 10_000, 10):
        index.add_chain(range(start, start + 10), "b")
    cached = CountedSet(range(20, 35))
    index.restore_holder("a", cached)
    assert index.look_up(range(20, 30)).own == {"a": 10, "b": 10}
    assert index.look_up(range(30, 40)).own == {"a": 5, "b": 10}
    assert cached.num_asked < 100


class CountedSet(set[int]):
    """A set that counts how often it is asked for an element."""

    num_asked = 0

    def __contains__(self, element: object) -> bool:
        self.num_asked += 1
        return super().__contains__(element)


class Interrupted(list[Any]):
    """The parts of an index; something happens while they are read, as if another thread did it."""

    def __init__(self, parts: list[Any], place: int, happen: Callable[[], None]) -> None:
        super().__init__(parts)
        self._place, self._happen = place, happen

    def __iter__(self) -> Iterator[Any]:
        for place, part in enumerate(super().__iter__()):
            if place == self._place:
                self._place = -1
                self._happen()
            yield part


@given(place=st.integers(0, 255), common=st.integers(1, 5), parts=st.permutations(range(0, 240, 40)))
def test_a_prompt_that_branches_while_a_snapshot_is_made_is_in_it(place: int, common: int, parts: list[int]) -> None:
    index, other = PrefixIndex(), PrefixIndex()
    prompt = [256 * i + part for i, part in enumerate(parts)]
    index.add_chain(prompt, "a")

    def branch() -> None:
        index.add_chain([*prompt[:common], 10_000, 10_255], "c")
        index.add_chain([*prompt[:1], 20_000, 20_255], "c")

    index._parts = Interrupted(index._parts, place, branch)
    other.load(index.dump())
    pool, own = held(other, prompt)
    assert (pool, own["a"]) == (6, 6)


def test_a_snapshot_names_the_right_instances_if_their_numbers_change_meanwhile() -> None:
    with ThreadPoolExecutor(1) as thread:

        class Encoded(PrefixIndex):
            encoding: Future[bytes] | None = None

            def _list_nodes(self) -> Iterator[_Node]:
                for place, node in enumerate(super()._list_nodes()):
                    if place == 50 and self.encoding is None:
                        self.encoding = thread.submit(self.dump)
                        wait([self.encoding], timeout=0.2)
                    yield node

        index, other = Encoded(), PrefixIndex()
        for number in range(300):
            index.add_chain([number], f"{number}")
        for number in range(300 - 40):
            index.forget_holder(f"{number}")
        assert index.encoding is not None
        other.load(index.encoding.result(timeout=30))
    for number in range(300 - 40, 300):
        assert held(other, [number]) == (1, {f"{number}": 1})


def test_a_snapshot_has_no_object_for_each_node_that_the_garbage_collector_would_visit() -> None:
    index = PrefixIndex()
    for number in range(20_000):
        index.add_chain([number], "a")
    gc.collect()
    before = gc.get_stats()[0]["collections"]
    index.dump()
    assert gc.get_stats()[0]["collections"] - before <= 2


def test_an_index_that_is_replaced_is_freed_without_the_garbage_collector() -> None:
    index, empty = PrefixIndex(), PrefixIndex().dump()
    gc.collect()
    before = sum(isinstance(each, _Node) for each in gc.get_objects())
    gc.disable()
    try:
        for number in range(100):
            index.add_chain([*range(number), 1000 + number], "a")
        index.load(empty)
        assert sum(isinstance(each, _Node) for each in gc.get_objects()) == before
    finally:
        gc.enable()


@given(chains=st.lists(st.lists(st.integers(0, 5), max_size=8), max_size=30))
def test_equal_hashes_of_different_prefixes_break_nothing(chains: list[list[int]]) -> None:
    index = PrefixIndex(max_entries=30)
    for number, chain in enumerate(chains):
        index.add_chain(chain, f"{number % 3}")
        assert 0 <= index.look_up(chain).pool <= len(chain)
        assert len(index) <= 30
    PrefixIndex().load(index.dump())
