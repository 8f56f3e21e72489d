"""Every layer keeps the contract of what it is wrapped around."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from kvstore_backend.backend import StorageBackend
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend
from kvstore_backend.wrappers.metered import MeteredBackend
from kvstore_backend.wrappers.tiered import TieredBackend
from kvstore_backend.wrappers.write_behind import WriteBehindBackend
from tests.kvstore_backend.conformance.suite import StorageBackendContract

# The machine may be busy: no call of these tests is ever too late.
PATIENT = Deadlines(lookup_seconds=60, transfer_seconds=60)


def guarded(store: StorageBackend) -> GuardedBackend:
    guard = GuardedBackend(lambda: store, PATIENT)
    assert guard.wait_ready(30)
    return guard


class LayerContract(StorageBackendContract):
    """The contract, for ``layer`` around a memory store."""

    def layer(self, store: StorageBackend) -> StorageBackend:
        raise NotImplementedError

    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        layer = self.layer(MemoryStore(64 << 20))
        yield layer
        layer.close()


class TestChecked(LayerContract):
    def layer(self, store: StorageBackend) -> StorageBackend:
        return CheckedBackend(store)


class TestGuarded(LayerContract):
    def layer(self, store: StorageBackend) -> StorageBackend:
        return guarded(store)


class TestMetered(LayerContract):
    def layer(self, store: StorageBackend) -> StorageBackend:
        return MeteredBackend(store, CollectorRegistry())


class TestWriteBehind(LayerContract):
    def layer(self, store: StorageBackend) -> StorageBackend:
        return WriteBehindBackend(store, arena_bytes=16 << 20)


class TestTieredThrough(LayerContract):
    def layer(self, store: StorageBackend) -> StorageBackend:
        return TieredBackend(MemoryStore(1 << 20), store)


class TestTieredBack(LayerContract):
    def layer(self, store: StorageBackend) -> StorageBackend:
        return TieredBackend(MemoryStore(1 << 20), store, "back")


class TestAllTogether(LayerContract):
    def layer(self, store: StorageBackend) -> StorageBackend:
        return WriteBehindBackend(MeteredBackend(guarded(CheckedBackend(store)), CollectorRegistry()))
