"""Large batches in parts: every block is what it was, whichever way the parts go, and a dead pool is asked no more."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore_backend.backend import Span, Status, Value
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers import parts
from kvstore_backend.wrappers.checked import CheckedBackend
from tests.faults.blocks import NAMESPACE, conversation
from tests.support.memory import Memory

COUNT, SIZE = 16, 1000
KEYS = [NAMESPACE.key(block_hash) for block_hash in conversation(0, COUNT)]


class Store(MemoryStore):
    """Notes how many keys each call had; may fail."""

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.calls: list[int] = []
        self.is_dead = False

    def _get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        self.calls.append(len(keys))
        return [Status.FAILED] * len(keys) if self.is_dead else super()._get(keys, targets)

    def _put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        self.calls.append(len(keys))
        return [Status.FAILED] * len(keys) if self.is_dead else super()._put(keys, values)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that share a small batch, on any machine, and a store that counts as quick once it was seen."""
    monkeypatch.setattr(parts, "_SHARED_BYTES", COUNT * SIZE)
    monkeypatch.setattr(parts, "_PIECE_BYTES", SIZE)
    monkeypatch.setattr(parts, "_THREADS", 2)
    monkeypatch.setattr(parts, "_SLOW", 0.0)
    monkeypatch.setattr(parts, "_QUICK", 0.0)
    monkeypatch.setattr(parts, "_UNLOCKED_BYTES", 0)


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
    assert store.calls == ([4, 12, 13, 3] if is_quick else [COUNT] * 2)


def test_a_small_batch_is_one_part(monkeypatch: pytest.MonkeyPatch, checked: CheckedBackend, store: Store) -> None:
    monkeypatch.setattr(parts, "_SHARED_BYTES", COUNT * SIZE + 1)
    memory = Memory(COUNT * SIZE)
    assert all(checked.put(KEYS, cut(memory)))
    assert checked.put([], []) == []
    assert store.calls == [COUNT, 0]


@pytest.mark.parametrize("sizes", [[1, 1], [5000, 1], [1, 5000], [100, 100, 5000, 100, 4000, 1]], ids=str)
def test_both_parts_have_blocks_whatever_their_sizes(
    is_quick: bool, checked: CheckedBackend, store: Store, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    monkeypatch.setattr(parts, "_SHARED_BYTES", 2)
    sources, targets = ([Memory(secrets.token_bytes(size)) for size in sizes] for _ in range(2))
    keys = KEYS[: len(sizes)]
    assert all(checked.put(keys, [source.value for source in sources]))
    assert all(checked.get(keys, [target.value for target in targets]))
    assert [target.content for target in targets] == [source.content for source in sources]
    assert len(store.calls) == (4 if is_quick else 2)
    assert 0 not in store.calls


@pytest.mark.parametrize("piece_bytes", [1, 3 * SIZE, 1 << 30])
def test_every_value_is_hashed_once_in_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    monkeypatch.setattr(parts, "_PIECE_BYTES", piece_bytes)
    hashed: list[int] = []
    with ThreadPoolExecutor(2) as helpers:
        batch = parts._Batch(
            cut(Memory(COUNT * SIZE)), helpers, lambda part: hashed.extend(range(part.start, part.stop))
        )
        first, rest = batch.cut(0.3)
        hashing = batch.begin_hashing(rest)
        hashing.add(first)
        hashing.finish()
    assert sorted(hashed) == list(range(COUNT))


def test_a_part_is_on_its_way_while_the_next_is_hashed(checked: CheckedBackend, store: Store) -> None:
    """The helper seals what the store is not given yet, or this thread waits for ever."""
    sealed = threading.Event()
    memory = Memory(COUNT * SIZE)

    def hash_part(part: slice) -> None:
        if part.stop == COUNT:
            sealed.set()

    def move_part(part: slice) -> None:
        assert sealed.wait(30)

    checked._outgoing.move(cut(memory), [Status.OK] * COUNT, hash_part, move_part)


def test_a_dead_pool_is_not_asked_for_all_parts(checked: CheckedBackend, store: Store) -> None:
    store.is_dead = True
    memory = Memory(COUNT * SIZE)
    assert checked.get(KEYS, cut(memory)) == [Status.FAILED] * COUNT
    assert len(store.calls) == 1
    assert not any(checked.put(KEYS, cut(memory)))
    assert len(store.calls) == 2


@pytest.mark.parametrize("hashes_first", [True, False], ids=["put", "get"])
def test_an_exception_is_raised_when_no_thread_uses_the_memory_any_more(hashes_first: bool) -> None:
    """A helper is at work on one part while the store raises for the other."""
    go, at_work, ended = threading.Event(), threading.Event(), threading.Event()
    whole = parts.Parts(hashes_first=hashes_first)
    moved: list[slice] = []
    values = cut(Memory(COUNT * SIZE))

    def hash_part(part: slice) -> None:
        if (part.start >= 4) == hashes_first:  # of the part that only helpers hash as yet
            at_work.set()
            go.wait(30)

    def move_part(part: slice) -> None:
        moved.append(part)
        if len(moved) == (1 if hashes_first else 2):
            assert at_work.wait(30)
            raise RuntimeError("a store that breaks its word")

    def move() -> None:
        with pytest.raises(RuntimeError, match="breaks its word"):
            whole.move(values, [Status.OK] * COUNT, hash_part, move_part)
        ended.set()

    whole.move(values, [Status.OK] * COUNT, lambda _: None, lambda _: None)
    caller = threading.Thread(target=move)
    caller.start()
    assert not ended.wait(0.1)
    go.set()
    caller.join(30)
    assert ended.is_set()


def test_a_call_goes_on_where_others_have_all_helpers(checked: CheckedBackend, store: Store) -> None:
    memory = Memory(COUNT * SIZE)
    assert all(checked.put(KEYS, cut(memory)))
    busy = threading.Event()
    for _ in range(8):
        checked._incoming._helpers.submit(busy.wait, 30)
    try:
        assert all(checked.get(KEYS, cut(memory)))
    finally:
        busy.set()
