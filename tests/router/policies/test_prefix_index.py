"""PrefixIndex: the part of a chain that each instance has, compared with a simple model; its bounds; its snapshot."""

from __future__ import annotations

import gc
import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies.prefix_index import PrefixIndex, _Node


def look_up_counts(index: PrefixIndex, chain: Sequence[int]) -> tuple[int, dict[str, int]]:
    return index.look_up(chain)[:2]


def test_the_size_never_exceeds_its_bound() -> None:
    index = PrefixIndex(max_entries=100)
    for start in range(0, 10_000, 30):
        index.add_chain(range(start, start + 30), "a")
        assert len(index) <= 100


@pytest.mark.parametrize("chunks", [30, 4000])
def test_chunks_without_use_for_a_lifetime_are_removed_below_the_bound(chunks: int) -> None:
    now = 0.0
    index = PrefixIndex(max_entries=1_000_000, lifetime_seconds=1800, clock=lambda: now)
    for number in range(200):
        now += 60.0
        index.add_chain(range(number * chunks, (number + 1) * chunks), "a")
    assert len(index) == 31 * chunks


def test_prompts_of_one_chunk_have_a_lower_bound() -> None:
    index = PrefixIndex(max_entries=100)
    for chunk in range(1000):
        index.add_chain([chunk], "a")
    assert len(index) == 20
    assert index.look_up([980]).pool == 1
    larger, smaller = PrefixIndex(max_entries=1000), PrefixIndex(max_entries=100)
    for chunk in range(1000):
        larger.add_chain([chunk], "a")
    smaller.load(larger.dump())
    assert len(smaller) == 20


def test_a_chain_with_many_branches_is_found_to_its_end() -> None:
    index = PrefixIndex(max_entries=100)
    for end in range(1, 50):
        index.add_chain([*range(end), 1000 + end], "a")
    index.add_chain(range(50), "b")
    assert look_up_counts(index, range(50)) == (50, {"a": 49, "b": 50})


def test_a_chain_that_one_instance_continues_is_one_node() -> None:
    index = PrefixIndex()
    for end in range(10, 1000, 10):
        index.add_chain(range(end), "a")
    assert index._num_nodes == 1


def test_the_first_part_of_a_chain_longer_than_the_index_is_stored() -> None:
    index = PrefixIndex(max_entries=100)
    index.add_chain(range(1000), "a")
    assert look_up_counts(index, range(1000)) == (50, {"a": 50})


def test_a_chain_without_use_for_its_lifetime_is_removed_and_a_used_one_retained() -> None:
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
def test_the_age_of_a_chunk_is_never_negative(now: float) -> None:
    index = PrefixIndex(clock=lambda: now)
    index.add_chain([1, 2], "a")
    [(_, age)] = index.look_up([1, 2]).ages
    assert 0.0 <= age < 1e-5


def test_all_chunks_expire_after_a_long_pause() -> None:
    now = 0.0
    index = PrefixIndex(lifetime_seconds=100, clock=lambda: now)
    index.add_chain([1, 2], "a")
    now = 101.0
    assert look_up_counts(index, [1, 2]) == (0, {})


def test_chunks_without_recent_use_by_an_instance_count_only_for_the_pool() -> None:
    now = 0.0
    index = PrefixIndex(clock=lambda: now)
    index.add_chain([1, 2, 3], "a")
    now = 50.0
    index.add_chain([1, 4], "b")
    now = 60.0
    assert index.look_up([1, 2, 3], kept_seconds=30) == (3, {"a": 1, "b": 1}, [(1, 10.0), (3, 60.0)])


def test_a_restarted_instance_has_no_chunks_but_the_pool_has_them() -> None:
    index = PrefixIndex()
    index.add_chain([1, 2, 3], "a")
    index.add_chain([1, 2], "b")
    index.forget_holder("a")
    assert look_up_counts(index, [1, 2, 3]) == (3, {"b": 2})


def test_many_restarts_do_not_affect_others_and_rarely_change_their_numbers() -> None:
    index = PrefixIndex()
    steady = [f"steady {number}" for number in range(150)]
    for key in steady:
        index.add_chain([1, 2], key)
    for restart in range(1000):
        index.add_chain([1, 2, 3], f"instance {restart}")
        index.forget_holder(f"instance {restart}")
    assert look_up_counts(index, [1, 2, 3]) == (3, dict.fromkeys(steady, 2))
    assert len(index._names) < 450
    assert index._numbering <= 2 * 4


def test_the_names_of_instances_are_cached_for_a_bounded_number_of_sets() -> None:
    index = PrefixIndex()
    for number in range(13):
        index.add_chain([1], f"{number}")
    for holders in range(1, 2**13):
        names = index._name_holders(holders)
        assert index._name_holders(holders) is names
        assert len(index._named_sets) <= 4096
    assert len(index._named_sets) > 1


def test_a_snapshot_restores_all_chunks() -> None:
    index, other = PrefixIndex(), PrefixIndex()
    index.add_chain([1, 2**64 - 1, 3], "a")
    index.add_chain([1], "b")
    index.add_chain([1], "gone")
    index.forget_holder("gone")
    other.load(index.dump())
    assert look_up_counts(other, [1, 2**64 - 1, 3]) == (3, {"a": 3, "b": 1})


def test_a_snapshot_of_another_thread_has_all_earlier_chunks() -> None:
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


def test_a_snapshot_has_the_dropped_chunks() -> None:
    index, other = PrefixIndex(), PrefixIndex()
    index.add_chain(range(10), "a")
    index.add_chain(range(10), "b")
    index.drop_chunks(range(5, 10), "a")
    other.load(index.dump())
    assert look_up_counts(other, range(10)) == (10, {"a": 5, "b": 10})


def test_a_snapshot_of_another_index_replaces_the_instances() -> None:
    index, other = PrefixIndex(), PrefixIndex()
    index.add_chain([1, 2], "a")
    assert look_up_counts(index, [1, 2]) == (2, {"a": 2})
    other.add_chain([1, 2], "b")
    index.load(other.dump())
    assert look_up_counts(index, [1, 2]) == (2, {"b": 2})


def test_an_empty_snapshot_can_be_loaded() -> None:
    index = PrefixIndex()
    index.load(PrefixIndex().dump())
    assert len(index) == 0


def test_a_snapshot_fits_into_a_smaller_index() -> None:
    index, smaller = PrefixIndex(), PrefixIndex(max_entries=20)
    index.add_chain(range(100, 120), "a")
    index.add_chain(range(15), "b")
    smaller.load(index.dump())
    assert look_up_counts(smaller, range(15)) == (15, {"b": 15})
    assert look_up_counts(smaller, range(100, 120)) == (5, {"a": 5})
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


@pytest.mark.parametrize("size", range(5))
def test_a_snapshot_with_a_checksum_but_without_contents_is_ignored(size: int) -> None:
    contents = bytes(size)
    first_line = PrefixIndex().dump().partition(b"\n")[0] + b"\n"
    with pytest.raises(ValueError, match="prefix index"):
        PrefixIndex().load(first_line + zlib.crc32(contents).to_bytes(4, "little") + contents)


def test_no_part_of_the_index_is_large() -> None:
    index, hashes = PrefixIndex(max_entries=500_000), random.Random(0)
    for _ in range(180_000):
        index.add_chain([hashes.getrandbits(64) for _ in range(5)], "a")
    assert index._num_nodes > 90_000
    assert max(map(len, index._parts)) < 600  # the parts grow one at a time


class Model:
    """A table of all chunks in an index: the time of their last use, and the instances that have them.

    It makes random prompts with common prefixes.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lifetime = self.random.choice([5.0, 100.0])
        self.now = 0.0
        self.used_at: dict[int, float] = {}
        self.holders: dict[int, set[str]] = {}
        self.caches: dict[str, set[int]] = {}  # of the instances that report evictions
        self.choices_of: dict[int, tuple[int, ...]] = {}  # of all chunks

    def make_prompt(self) -> list[int]:
        straight = self.random.random()
        choices = [
            0 if self.random.random() < straight else self.random.randint(1, 2)
            for _ in range(self.random.randint(0, 14))
        ]
        prompt = []
        for end in range(1, len(choices) + 1):
            prompt.append(hash(tuple(choices[:end])) % 2**64)
            self.choices_of[prompt[-1]] = tuple(choices[:end])
        return prompt

    def make_cache(self) -> set[int]:
        return {chunk for _ in range(self.random.randint(0, 3)) for chunk in self.make_prompt()}

    def list_subtree(self, chunk: int) -> list[int]:
        """Return a chunk and all chunks after it, in random order."""
        top = self.choices_of[chunk]
        chunks = [each for each, choices in self.choices_of.items() if choices[: len(top)] == top]
        self.random.shuffle(chunks)
        return chunks

    def add(self, chunks: Iterable[int], key: str) -> None:
        for chunk in chunks:
            if not self.has(chunk):
                self.holders[chunk] = set()
            self.used_at[chunk] = self.now
            self.holders[chunk].add(key)

    def has(self, chunk: int) -> bool:
        return chunk in self.used_at and self.now - self.used_at[chunk] <= self.lifetime

    def holds(self, key: str, chunk: int, kept_seconds: float) -> bool:
        is_retained = self.now - self.used_at[chunk] <= kept_seconds or chunk in self.caches.get(key, ())
        return key in self.holders[chunk] and is_retained

    def look_up(self, prompt: Sequence[int], kept_seconds: float) -> tuple[int, dict[str, int]]:
        pool = next((end for end, chunk in enumerate(prompt) if not self.has(chunk)), len(prompt))
        own = {
            key: next((end for end in range(pool) if not self.holds(key, prompt[end], kept_seconds)), pool)
            for key in "abcde"
        }
        return pool, {key: end for key, end in own.items() if end}

    def remove_missing(self, index: PrefixIndex) -> None:
        """Remove the chunks that the index has removed. Test that they are the least recently used."""
        present = {chunk for node in index._list_nodes() for chunk in node.chunks}
        removed = self.used_at.keys() - present
        assert present <= self.used_at.keys()
        assert max(map(self.used_at.__getitem__, removed), default=0.0) <= min(
            map(self.used_at.__getitem__, present), default=self.now
        )
        for chunk in removed:
            del self.used_at[chunk], self.holders[chunk]


def check_nodes(index: PrefixIndex) -> None:
    """Test that the tree, the list and the counts of the nodes agree."""
    nodes = list(index._list_nodes())
    places = {node: place for place, node in enumerate(nodes)}
    assert len(index) == sum(len(node.chunks) for node in nodes)
    assert index._num_nodes == len(nodes) == sum(map(len, index._parts))
    children = Counter(node.parent for node in nodes)
    for place, node in enumerate(nodes):
        assert index._parts[node.chunks[0] % 256][node.chunks[0]] is node
        assert node.num_children == children[node]
        assert node.parent is None or places[node.parent] < place
        assert place == 0 or node.used_at <= nodes[place - 1].used_at


@pytest.mark.parametrize("max_entries", [2, 10, 30, 60, 10_000])
def test_the_index_equals_a_table_of_all_chunks(max_entries: int) -> None:
    for seed in range(40):
        play(Model(seed), max_entries)


def play(model: Model, max_entries: int) -> None:
    """Do the same random operations with an index and a model, and compare them after each one."""
    index = PrefixIndex(max_entries, model.lifetime, lambda: model.now)
    rng = model.random
    for _ in range(60):
        key, prompt, added = rng.choice("abcde"), model.make_prompt(), set[int]()
        match rng.choices(range(10), [20, 10, 6, 4, 2, 6, 2, 2, 2, 1])[0]:
            case 0:
                index.add_chain(prompt, key)
                added.update(prompt[: max_entries // 2])
                model.add(added, key)
                assert len(index) <= max_entries
                assert index._num_nodes <= max(max_entries // 5, len(list(index._find_nodes(prompt))))
            case 1 if prompt:
                dropped = model.list_subtree(rng.choice(prompt))
                index.drop_chunks(dropped, key)
                for chunk in model.holders.keys() & dropped:
                    model.holders[chunk].discard(key)
            case 2:
                index.restore_chunks(prompt, key)
                for chunk in takewhile(model.holders.__contains__, prompt):
                    model.holders[chunk].add(key)
            case 3:
                cached = model.make_cache()
                index.restore_holder(cached, key)
                for chunk in model.holders.keys() & cached:
                    model.holders[chunk].add(key)
            case 4:
                index.forget_holder(key)
                for holders in model.holders.values():
                    holders.discard(key)
            case 5:
                model.now += rng.choice([1.0, model.lifetime]) * rng.randint(0, 4) / 4
            case 6:
                model.caches[key] = model.make_cache()
                index.set_aging(key, model.caches[key].__contains__)
            case 7:
                model.caches.pop(key, None)
                index.set_aging(key, None)
            case 8:
                data = index.dump()
                if rng.random() < 0.5:
                    index = PrefixIndex(max_entries, model.lifetime, lambda: model.now)
                    for name, cache in model.caches.items():
                        index.set_aging(name, cache.__contains__)
                index.load(data)
            case 9:
                index._renumber_bits()
        model.remove_missing(index)
        assert added <= model.used_at.keys()
        check_nodes(index)
        for _ in range(3):
            asked, kept_seconds = model.make_prompt(), rng.choice([math.inf, model.lifetime / 4, 1.0])
            pool, own, ages = index.look_up(asked, kept_seconds)
            assert (pool, own) == model.look_up(asked, kept_seconds)
            starts = [0, *(end for end, _ in ages)]
            each_age = [age for start, (end, age) in zip(starts, ages, strict=False) for _ in range(start, end)]
            assert each_age == pytest.approx([model.now - model.used_at[chunk] for chunk in asked[:pool]])


def test_dropped_chunks_use_no_memory_after_their_node_is_dropped_or_removed() -> None:
    index = PrefixIndex(max_entries=1000)
    for start in range(0, 100_000, 20):
        index.add_chain(range(start, start + 20), "a")
        index.drop_chunks(range(start + 10, start + 20), "a")
        if start % 40:
            index.drop_chunks(range(start, start + 10), "a")
    assert len(index._dropped) <= 500
    assert look_up_counts(index, range(99_980, 100_000)) == (20, {})
    assert look_up_counts(index, range(99_960, 99_980)) == (20, {"a": 10})


def test_dropped_chunks_that_are_not_in_the_index_use_bounded_memory() -> None:
    index = PrefixIndex()
    index.add_chain(range(20), "a")
    index.drop_chunks(range(15, 20), "a")
    for start in range(100, 1_000_000, 1000):
        index.drop_chunks(range(start, start + 1000), "a")
        assert len(index._dropped) <= 100_000
    assert look_up_counts(index, range(20)) == (20, {"a": 15})


def test_dropped_chunks_are_compared_with_the_index_rarely() -> None:
    class Counted(PrefixIndex):
        num_listed = 0

        def _list_nodes(self) -> Iterator[_Node]:
            self.num_listed += 1
            return super()._list_nodes()

    index = Counted()
    index.add_chain(range(300_000), "a")
    for start in range(1, 300_000, 1000):
        index.drop_chunks(range(start, start + 1000), "a")
    assert look_up_counts(index, range(300_000)) == (300_000, {"a": 1})
    assert index.num_listed <= 2


class CountedChunks(list[int]):
    """A prompt that counts the reads of its chunks."""

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


class CountedNames(PrefixIndex):
    """An index that counts the names of instances that it looks up."""

    num_named = 0

    def _name_holders(self, holders: int) -> tuple[str, ...]:
        names = super()._name_holders(holders)
        self.num_named += len(names)
        return names


def test_an_instance_that_dropped_many_chunks_of_a_prompt_is_looked_up_once() -> None:
    index = CountedNames()
    for number in range(50):
        index.add_chain(range(100), f"{number}")
        index.drop_chunks(range(50 + number, 100), f"{number}")
    assert index.look_up(range(100)).own == {f"{number}": 50 + number for number in range(50)}
    assert index.num_named <= 50 + 50


def test_a_prompt_with_many_branches_looks_up_each_instance_once() -> None:
    index = CountedNames()
    for end in range(1, 500):
        index.add_chain([*range(end), 1000 + end], f"{end % 100}")
    assert set(index.look_up(range(500)).own.values()) == set(range(400, 500))
    assert index.num_named <= 100


def test_restoring_a_small_cache_does_not_read_the_whole_index() -> None:
    index = PrefixIndex()
    for start in range(0, 10_000, 10):
        index.add_chain(range(start, start + 10), "b")
    cached = CountedSet(range(20, 35))
    index.restore_holder(cached, "a")
    assert index.look_up(range(20, 30)).own == {"a": 10, "b": 10}
    assert index.look_up(range(30, 40)).own == {"a": 5, "b": 10}
    assert cached.num_asked < 100


class CountedSet(set[int]):
    """A set that counts its queries for elements."""

    num_asked = 0

    def __contains__(self, element: object) -> bool:
        self.num_asked += 1
        return super().__contains__(element)


class Interrupted(list[Any]):
    """The parts of an index. A function runs while they are read, as if another thread ran it."""

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
    pool, own = look_up_counts(other, prompt)
    assert (pool, own["a"]) == (6, 6)
    assert index._moved is None


def test_a_prompt_that_is_used_while_a_snapshot_is_made_is_in_it() -> None:
    now = 0.0
    index, other = PrefixIndex(clock=lambda: now), PrefixIndex()
    index.add_chain([0, 200], "a")
    index.add_chain([0, 201], "a")

    def use() -> None:  # between the reads of the node of chunk 0 and of the others
        nonlocal now
        now = 5.0
        index.add_chain([0, 200], "b")

    index._parts = Interrupted(index._parts, 100, use)
    other.load(index.dump())
    assert look_up_counts(other, [0, 200]) == (2, {"a": 2})


def test_a_snapshot_has_the_right_instances_if_their_numbers_change_meanwhile() -> None:
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
        assert look_up_counts(other, [number]) == (1, {f"{number}": 1})


def test_a_snapshot_creates_no_objects_for_the_garbage_collector_per_node() -> None:
    index = PrefixIndex()
    for number in range(20_000):
        index.add_chain([number], "a")
    gc.collect()
    before = gc.get_stats()[0]["collections"]
    index.dump()
    assert gc.get_stats()[0]["collections"] - before <= 2


def test_nodes_that_are_removed_or_replaced_are_freed_without_the_garbage_collector() -> None:
    index, empty = PrefixIndex(max_entries=100), PrefixIndex().dump()
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
def test_equal_hashes_of_different_prefixes_cause_no_error(chains: list[list[int]]) -> None:
    index = PrefixIndex(max_entries=30)
    for number, chain in enumerate(chains):
        index.add_chain(chain, f"{number % 3}")
        assert 0 <= index.look_up(chain).pool <= len(chain)
        assert len(index) <= 30
    PrefixIndex().load(index.dump())
