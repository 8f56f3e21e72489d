from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_backend.backend import Status
from kvstore_backend.stores.memory import MemoryStore
from tests.support.memory import Memory
from tests.support.stored import count_keys

OK, ABSENT, FAILED = Status.OK, Status.ABSENT, Status.FAILED


def put(store: MemoryStore, *keys: str, nbytes: int = 10) -> list[Status]:
    source = Memory(nbytes)
    return store.put(keys, [source.value] * len(keys))


def get(store: MemoryStore, key: str, nbytes: int = 10) -> Status:
    target = Memory(nbytes)
    return store.get([key], [target.value])[0]


def test_the_least_recently_used_key_is_evicted() -> None:
    store = MemoryStore(30)
    put(store, "a", "b", "c")
    assert get(store, "a") is OK
    put(store, "d")
    assert store.exists(["a", "b", "c", "d"]) == [OK, ABSENT, OK, OK]


def test_a_lookup_does_not_count_as_a_use() -> None:
    store = MemoryStore(30)
    put(store, "a", "b", "c")
    store.exists(["a"])
    put(store, "d")
    assert store.exists(["a", "b"]) == [ABSENT, OK]


def test_a_value_larger_than_the_store_fails_and_evicts_nothing() -> None:
    store = MemoryStore(30)
    put(store, "a", "b", "c")
    assert put(store, "huge", nbytes=31) == [FAILED]
    assert store.exists(["a", "b", "c"]) == [OK, OK, OK]


def test_a_value_as_large_as_the_store_fits() -> None:
    store = MemoryStore(30)
    put(store, "a")
    assert put(store, "whole", nbytes=30) == [OK]
    assert store.exists(["a", "whole"]) == [ABSENT, OK]


@given(st.lists(st.tuples(st.sampled_from("pgr"), st.sampled_from("abcdefgh"), st.integers(1, 40))))
def test_any_sequence_of_calls_obeys_the_limit_and_counts_correctly(steps: list[tuple[str, str, int]]) -> None:
    store, sizes = MemoryStore(100), dict[str, int]()
    for action, key, nbytes in steps:
        if action == "p":
            put(store, key, nbytes=nbytes)
            sizes.setdefault(key, nbytes)
        elif action == "g":
            get(store, key, nbytes)
        else:
            store.remove([key])
        present = dict(zip(sizes, store.exists(list(sizes)), strict=True))
        sizes = {key: nbytes for key, nbytes in sizes.items() if present[key]}
        assert repr(store) == f"MemoryStore({len(sizes)} keys, {sum(sizes.values())} of 100 bytes)"
        assert sum(sizes.values()) <= 100


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_is_positive(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity_bytes is {capacity}"):
        MemoryStore(capacity)


def test_a_store_may_be_as_small_as_one_byte() -> None:
    store = MemoryStore(1)
    assert put(store, "a", "b", nbytes=1) == [OK, OK]
    assert store.exists(["a", "b"]) == [ABSENT, OK]


def test_a_closed_store_is_empty_and_clears_nothing() -> None:
    store = MemoryStore(30)
    put(store, "a")
    store.close()
    assert (count_keys(store), repr(store)) == (0, "MemoryStore(closed)")
    assert store.clear("a") is FAILED
