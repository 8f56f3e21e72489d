"""The strict stores detect uses of unregistered memory."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from kvstore_backend.backend import Span, Status
from kvstore_backend.config import FileSettings, PoolConfig
from kvstore_backend.pool import open_store
from kvstore_backend.stores.memory import MemoryStore
from tests.support.memory import Memory
from tests.support.mooncake import MooncakeMaster
from tests.support.strict_registration import Announcing, StrictStore, use_strict_stores

OK, FAILED = Status.OK, Status.FAILED


def test_a_value_must_be_in_one_registered_region() -> None:
    store, memory = StrictStore(MemoryStore(1 << 20)), Memory(100)
    store.register(memory.address, 50)
    inside, across = [Span(memory.address + 10, 40)], [Span(memory.address + 10, 41)]
    assert store.put(["a", "b"], [inside, across]) == [OK, FAILED]
    assert store.keep(["a", "b"], [inside, across], 1.0) == [OK, FAILED]
    assert store.get(["a", "a"], [inside, [Span(memory.address + 60, 40)]]) == [OK, FAILED]
    assert len(store.registered.complaints) == 3
    store.unregister(memory.address, 50)
    assert store.get(["a"], [inside]) == [FAILED]


def test_memory_is_registered_once_and_unregistered_by_its_address() -> None:
    store, memory = StrictStore(MemoryStore(1 << 20)), Memory(100)
    store.register(memory.address, 50)
    store.register(memory.address + 49, 10)
    store.unregister(memory.address + 1, 49)
    assert len(store.registered.complaints) == 2
    assert store.registered.regions == {memory.address: 50}


def test_registered_values_of_a_caller_are_stored() -> None:
    strict, memory = StrictStore(MemoryStore(1 << 20)), Memory(100)
    store = Announcing(strict)
    assert store.put(["a"], [memory.spans(10, 0, 90)]) == [OK]
    store.register(memory.address, 100)
    assert store.get(["a"], [memory.value]) == [OK]
    store.unregister(memory.address, 100)
    assert not strict.registered.complaints
    assert not strict.registered.regions


def test_each_opened_store_is_strict(
    tmp_path: Path, mooncake_master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = use_strict_stores(monkeypatch)
    memory = Memory(100)
    for config in (PoolConfig(FileSettings(tmp_path / "pool", 1 << 20)), mooncake_master.config()):
        with contextlib.closing(open_store(config)) as store:
            assert store.put(["strict"], [memory.value]) == [FAILED]
            store.register(memory.address, 100)
            assert store.put(["strict"], [memory.value]) == [OK]
            assert store.keep(["strict"], [memory.value], 1.0) == [OK]
            assert store.get(["strict"], [memory.value]) == [OK]
            store.unregister(memory.address, 100)
            assert store.get(["strict"], [memory.value]) == [FAILED]
            store.remove(["strict"], force=True)
    assert [bool(each.complaints) for each in opened] == [True, True]
