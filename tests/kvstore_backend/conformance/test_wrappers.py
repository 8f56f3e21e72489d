"""Every wrapper fulfils the contract of a backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry

from kvstore_backend.backend import StorageBackend
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.guarded import GuardedBackend
from kvstore_backend.wrappers.metered import MeteredBackend
from kvstore_backend.wrappers.tiered import TieredBackend
from kvstore_backend.wrappers.write_behind import WriteBehindBackend
from tests.kvstore_backend.conformance.suite import PATIENT, StorageBackendContract
from tests.support.strict_registration import Announcing, StrictStore


def open_guarded(store: StorageBackend) -> GuardedBackend:
    guard = GuardedBackend(lambda: store, PATIENT)
    assert guard.wait_ready(30)
    return guard


class WrapperContract(StorageBackendContract):
    """The contract, for ``wrap`` around a memory store."""

    def wrap(self, store: StorageBackend) -> StorageBackend:
        raise NotImplementedError

    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        backend = self.wrap(MemoryStore(64 << 20))
        yield backend
        backend.close()


class TestChecked(WrapperContract):
    def wrap(self, store: StorageBackend) -> StorageBackend:
        return CheckedBackend(store)


class TestGuarded(WrapperContract):
    def wrap(self, store: StorageBackend) -> StorageBackend:
        return open_guarded(store)


class TestMetered(WrapperContract):
    def wrap(self, store: StorageBackend) -> StorageBackend:
        return MeteredBackend(store, CollectorRegistry())


class TestWriteBehind(WrapperContract):
    def wrap(self, store: StorageBackend) -> StorageBackend:
        return WriteBehindBackend(store, arena_bytes=16 << 20)


class TestTieredThrough(WrapperContract):
    def wrap(self, store: StorageBackend) -> StorageBackend:
        return TieredBackend(MemoryStore(1 << 20), store)


class TestTieredBack(WrapperContract):
    def wrap(self, store: StorageBackend) -> StorageBackend:
        return TieredBackend(MemoryStore(1 << 20), store, "back")


class TestAllTogether(WrapperContract):
    def wrap(self, store: StorageBackend) -> StorageBackend:
        return WriteBehindBackend(MeteredBackend(open_guarded(CheckedBackend(store)), CollectorRegistry()))


class TestRegistration(WrapperContract):
    """All wrappers over stores that move only registered memory, as RDMA does; wrappers register their own."""

    @pytest.fixture(params=[False, True], ids=["at once", "in parts"])
    def backend(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StorageBackend]:
        if request.param:
            monkeypatch.setattr("kvstore_backend.wrappers.parts._PART_BYTES", 1)
            monkeypatch.setattr("kvstore_backend.wrappers.parts._QUICK", 0.0)
        stores = [StrictStore(MemoryStore(64 << 20)), StrictStore(MemoryStore(1 << 20))]
        large, fast = (open_guarded(CheckedBackend(store)) for store in stores)
        backend = Announcing(MeteredBackend(TieredBackend(fast, large, "back"), CollectorRegistry()))
        yield backend
        backend.close()
        assert [store.registered.complaints for store in stores] == [[], []]


@pytest.mark.parametrize("wrap", [CheckedBackend, open_guarded])
def test_a_synchronous_stack_has_nothing_to_flush(wrap: Callable[[StorageBackend], StorageBackend]) -> None:
    with contextlib.closing(wrap(MemoryStore(1))) as stack:
        assert stack.flush_writes(0)
