from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_backend.backend import StorageBackend
from kvstore_backend.config import FileSettings, MemorySettings, PoolConfig
from kvstore_backend.stores.file import FileStore
from tests.kvstore_backend.conformance.suite import StackContract, StorageBackendContract


class TestFileStore(StorageBackendContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[StorageBackend]:
        store = FileStore(tmp_path / "pool", 64 << 20)
        yield store
        store.close()


class TestFileStack(StackContract):
    @pytest.fixture
    def config(self, tmp_path: Path) -> PoolConfig:
        return PoolConfig(FileSettings(tmp_path / "pool", 64 << 20))


class TestTieredStack(StackContract):
    @pytest.fixture(params=[False, True], ids=["through", "back"])
    def config(self, tmp_path: Path, request: pytest.FixtureRequest) -> PoolConfig:
        shared = FileSettings(tmp_path / "pool", 64 << 20)
        return PoolConfig(shared, async_write=request.param, fast=MemorySettings(1 << 20))
