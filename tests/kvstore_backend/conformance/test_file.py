from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_backend.backend import StorageBackend
from kvstore_backend.stores.file import FileStore
from tests.kvstore_backend.conformance.suite import StorageBackendContract


class TestFileStore(StorageBackendContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[StorageBackend]:
        store = FileStore(tmp_path / "pool", 64 << 20)
        yield store
        store.close()
