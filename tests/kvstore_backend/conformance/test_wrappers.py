"""Every wrapper keeps the contract of the backend it is wrapped around."""

from __future__ import annotations

from collections.abc import Iterator

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


def guarded(store: StorageBackend) -> GuardedBackend:
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
        return guarded(store)


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
        return WriteBehindBackend(MeteredBackend(guarded(CheckedBackend(store)), CollectorRegistry()))
