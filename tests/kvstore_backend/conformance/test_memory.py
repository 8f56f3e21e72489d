from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore_backend.backend import StorageBackend
from kvstore_backend.stores.memory import MemoryStore
from tests.kvstore_backend.conformance.suite import StorageBackendContract


class TestMemoryStore(StorageBackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        store = MemoryStore(64 << 20)
        yield store
        store.close()
