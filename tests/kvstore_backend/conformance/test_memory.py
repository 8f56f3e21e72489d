from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore_backend.backend import StorageBackend
from kvstore_backend.config import MemorySettings, PoolConfig
from kvstore_backend.stores.memory import MemoryStore
from tests.kvstore_backend.conformance.suite import StackContract, StorageBackendContract


class TestMemoryStore(StorageBackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        store = MemoryStore(64 << 20)
        yield store
        store.close()


class TestMemoryStack(StackContract):
    @pytest.fixture(params=[False, True], ids=["at once", "write-behind"])
    def config(self, request: pytest.FixtureRequest) -> PoolConfig:
        return PoolConfig(MemorySettings(64 << 20), async_write=request.param)
