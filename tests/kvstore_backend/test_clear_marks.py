"""Marks of a clear, as an instance reads them; ``test_refill.py`` tests their effect."""

from __future__ import annotations

import threading
import weakref
from contextlib import closing
from pathlib import Path

import pytest

from kvstore_backend import clear_marks
from kvstore_backend.backend import Status
from kvstore_backend.clear_marks import ALL, MARK_PREFIX, ClearMarks, make_mark, mark_key
from kvstore_backend.config import FileSettings, MemorySettings, PoolConfig
from kvstore_backend.namespace import BLOCK_PREFIX
from kvstore_backend.pool import BlockPool, open_pool
from kvstore_backend.stores.file import FileStore
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.checked import CheckedBackend, find_fault
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend
from kvstore_backend.wrappers.tiered import TieredBackend
from tests.faults.blocks import NAMESPACE
from tests.faults.held import Held
from tests.support.memory import Memory
from tests.support.strict_registration import use_strict_stores
from tests.support.waiting import wait_until

KEY = mark_key(NAMESPACE.digest)


def put_bytes(store: MemoryStore, key: str, data: bytes) -> None:
    memory = Memory(data)
    store.remove([key], force=True)
    assert store.put([key], [memory.value]) == [Status.OK]


@pytest.fixture
def store() -> MemoryStore:
    """The store that the instances share."""
    return MemoryStore(1 << 20)


@pytest.fixture
def marks(store: MemoryStore) -> ClearMarks:
    """The marks, as an instance with its own fast tier reads them."""
    tiers = TieredBackend(CheckedBackend(MemoryStore(1 << 20)), CheckedBackend(store))
    return ClearMarks(BlockPool(tiers, NAMESPACE), [NAMESPACE.digest])


@pytest.mark.parametrize("key", [KEY, mark_key(ALL)])
def test_a_mark_is_new_until_it_is_accepted_and_the_next_mark_is_new(
    store: MemoryStore, marks: ClearMarks, key: str
) -> None:
    assert marks.look() is False
    for _ in range(3):
        put_bytes(store, key, make_mark(key).tobytes())
        assert marks.look() is True
        assert marks.look() is True
        marks.accept()
        assert marks.look() is False
    store.remove([key])
    assert marks.look() is False


def test_a_mark_that_is_lost_and_written_again_is_not_new(store: MemoryStore, marks: ClearMarks) -> None:
    mark = make_mark(KEY).tobytes()
    put_bytes(store, KEY, mark)
    marks.look()
    marks.accept()
    store.remove([KEY])
    marks.look()
    marks.accept()
    put_bytes(store, KEY, mark)
    assert marks.look() is False


def test_the_memory_of_a_late_look_is_kept_until_the_look_has_ended(store: MemoryStore) -> None:
    held = Held(CheckedBackend(store))
    with closing(GuardedBackend(lambda: held, Deadlines(transfer_seconds=0.1))) as guard:
        assert guard.wait_ready(30)
        marks = ClearMarks(BlockPool(guard, NAMESPACE), [NAMESPACE.digest])
        memory = weakref.ref(marks._memory)
        held.hold()
        assert marks.look() is None
        marks.close()
        del marks
        assert memory() is not None
        held.let_go()
        wait_until(lambda: memory() is None, "the release of the memory")


def test_marks_of_other_namespaces_are_ignored(store: MemoryStore, marks: ClearMarks) -> None:
    other = mark_key("0" * 32)
    put_bytes(store, other, make_mark(other).tobytes())
    assert marks.look() is False


def test_the_answer_is_unknown_if_the_pool_does_not_answer(store: MemoryStore, marks: ClearMarks) -> None:
    store.close()
    assert marks.look() is None


@pytest.mark.parametrize("text", [b"g" * 32, b" " * 32])
def test_a_value_that_is_not_an_id_is_not_a_mark(store: MemoryStore, marks: ClearMarks, text: bytes) -> None:
    memory = Memory(text)
    assert CheckedBackend(store).put([KEY], [memory.value]) == [Status.OK]
    assert marks.look() is False


def test_marks_are_not_blocks_and_are_all_different() -> None:
    assert not KEY.startswith(BLOCK_PREFIX)
    assert KEY.startswith(MARK_PREFIX)
    one, other = make_mark(KEY), make_mark(KEY)
    assert find_fault(KEY, one) is None
    assert one.tobytes() != other.tobytes()
    assert one.nbytes == 128 + 32


def test_a_fast_tier_drops_its_copies_after_a_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clear_marks, "_PERIOD_SECONDS", 0.01)
    name, source = bytes(32), Memory(b"x" * 64)
    config = PoolConfig(FileSettings(tmp_path, 1 << 20), fast=MemorySettings(1 << 20))
    with open_pool(config, NAMESPACE, background=False) as pool, closing(FileStore(tmp_path, 1 << 20)) as shared:
        assert pool.save([name], [source.value]) == [Status.OK]
        mark = Memory(make_mark(KEY).tobytes())
        assert shared.put([KEY], [mark.value]) == [Status.OK]
        shared.remove([NAMESPACE.key(name)], force=True)
        wait_until(lambda: pool.exists([name]) == [Status.ABSENT], "the removal of the copy in the fast tier")


def test_a_closed_pool_leaves_no_memory_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = use_strict_stores(monkeypatch)
    is_looking, go_on = threading.Event(), threading.Event()

    def look(_: ClearMarks) -> None:
        is_looking.set()
        assert go_on.wait(30)

    monkeypatch.setattr(ClearMarks, "look", look)
    monkeypatch.setattr(clear_marks, "_PERIOD_SECONDS", 0.01)
    config = PoolConfig(FileSettings(tmp_path, 1 << 20), fast=MemorySettings(1 << 20))
    with open_pool(config, NAMESPACE, background=False):
        assert is_looking.wait(30)
        threading.Timer(0.1, go_on.set).start()
    assert [each.regions for each in opened if each.regions] == []
