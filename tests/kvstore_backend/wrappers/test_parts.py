"""Large batches in parts: every block is what it was, whichever way the parts go, and a dead pool is asked no more."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence

import pytest

from kvstore_backend.backend import Span, Status, Value
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers import parts
from kvstore_backend.wrappers.checked import CheckedBackend
from tests.faults.blocks import NAMESPACE, conversation
from tests.support.memory import Memory
from tests.support.waiting import wait_until

COUNT, SIZE = 16, 1000
KEYS = [NAMESPACE.key(block_hash) for block_hash in conversation(0, COUNT)]


class Store(MemoryStore):
    """Notes how many keys each call had; may fail, raise, or wait."""

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.calls: list[int] = []
        self.is_dead = False
        self.raises_at = ""
        self.go = threading.Event()
        self.go.set()

    def _get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        self.calls.append(len(keys))
        if self.raises_at in keys:
            wait_until(lambda: len(self.calls) > 1, "another part")
            raise RuntimeError("a store that breaks its word")
        self.go.wait(30)
        return [Status.FAILED] * len(keys) if self.is_dead else super()._get(keys, targets)

    def _put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        self.calls.append(len(keys))
        return super()._put(keys, values)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads and eight parts, on any machine, and a store that counts as quick once it was seen."""
    monkeypatch.setattr(parts, "_PART_BYTES", SIZE)
    monkeypatch.setattr(parts, "_THREADS", 2)
    monkeypatch.setattr(parts, "_PARTS", 8)
    monkeypatch.setattr(parts, "_SLOW", 0.0)
    monkeypatch.setattr(parts, "_QUICK", 0.0)
    monkeypatch.setattr(parts, "_SHARED_BYTES", 0)


@pytest.fixture(params=[0.0, 1e99], ids=["quick", "slow"])
def is_quick(small_parts: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(parts, "_QUICK", request.param)
    return bool(request.param == 0.0)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def checked(store: Store) -> CheckedBackend:
    """In front of the store, which it has seen a large batch of."""
    checked = CheckedBackend(store)
    whole = Memory(COUNT * SIZE)
    names = [f"earlier {i}" for i in range(COUNT)]
    assert all(checked.put(names, cut(whole)))
    assert all(checked.get(names, cut(whole)))
    store.calls.clear()
    return checked


def cut(memory: Memory) -> list[Value]:
    return [(Span(memory.address + i * SIZE, SIZE),) for i in range(COUNT)]


def test_every_block_comes_back_and_none_that_was_damaged(
    is_quick: bool, checked: CheckedBackend, store: Store
) -> None:
    source, target = Memory(secrets.token_bytes(COUNT * SIZE)), Memory(COUNT * SIZE)
    assert checked.put(KEYS, cut(source)) == [Status.OK] * COUNT
    store.remove([KEYS[3], KEYS[9]])
    damaged = Memory(128 + SIZE)
    assert store.put(KEYS[3:4], [damaged.value]) == [Status.OK]
    expected = [Status.OK] * COUNT
    expected[3] = expected[9] = Status.ABSENT
    assert checked.get(KEYS, cut(target)) == expected
    for i in (0, 1, 2, *range(4, 9), *range(10, COUNT)):
        assert target.content[i * SIZE : (i + 1) * SIZE] == source.content[i * SIZE : (i + 1) * SIZE]
    assert store.exists(KEYS[3:4]) == [Status.ABSENT], "it was removed"


def test_a_quick_store_is_given_parts_and_a_slow_one_the_whole(
    is_quick: bool, checked: CheckedBackend, store: Store
) -> None:
    memory = Memory(COUNT * SIZE)
    checked.put(KEYS, cut(memory))
    checked.get(KEYS, cut(memory))
    assert store.calls == ([2] * 16 if is_quick else [COUNT] * 2)


def test_a_small_batch_is_one_part(monkeypatch: pytest.MonkeyPatch, checked: CheckedBackend, store: Store) -> None:
    monkeypatch.setattr(parts, "_PART_BYTES", COUNT * SIZE)
    memory = Memory(COUNT * SIZE)
    assert all(checked.put(KEYS, cut(memory)))
    assert checked.put([], []) == []
    assert store.calls == [COUNT, 0]


def test_parts_have_about_as_many_bytes_each() -> None:
    sizes = [100, 100, 5000, 100, 100, 4000, 100, 1, 1]
    nbytes, found = parts._cut_batch([(Span(1, size),) for size in sizes])
    assert nbytes == sum(sizes)
    assert [sizes[part] for part in found] == [[100, 100, 5000], [100, 100, 4000], [100, 1, 1]]


def test_a_dead_pool_is_not_asked_for_all_parts(checked: CheckedBackend, store: Store) -> None:
    store.is_dead = True
    memory = Memory(COUNT * SIZE)
    assert checked.get(KEYS, cut(memory)) == [Status.FAILED] * COUNT
    assert len(store.calls) <= 3


def test_an_exception_is_raised_when_no_part_uses_the_memory_any_more(checked: CheckedBackend, store: Store) -> None:
    store.raises_at = KEYS[0]
    store.go.clear()
    ended = threading.Event()
    memory = Memory(COUNT * SIZE)

    def get() -> None:
        with pytest.raises(RuntimeError, match="breaks its word"):
            checked.get(KEYS, cut(memory))
        ended.set()

    caller = threading.Thread(target=get)
    caller.start()
    assert not ended.wait(0.1)
    store.go.set()
    caller.join(30)
    assert ended.is_set()


def test_a_call_goes_on_where_others_have_all_helpers(checked: CheckedBackend, store: Store) -> None:
    memory = Memory(COUNT * SIZE)
    assert all(checked.put(KEYS, cut(memory)))
    busy = threading.Event()
    for _ in range(8):
        checked._incoming._helpers.submit(lambda: busy.wait(30))
    try:
        assert all(checked.get(KEYS, cut(memory)))
    finally:
        busy.set()
