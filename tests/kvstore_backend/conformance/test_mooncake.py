"""Real clients and a real master. A close takes seconds, so tests share a client until one of them closes it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry

from kvstore_backend.backend import StorageBackend
from kvstore_backend.config import PoolConfig
from kvstore_backend.pool import open_backend, open_store
from tests.kvstore_backend.conformance.suite import PATIENT, StackContract, StorageBackendContract, read_value
from tests.support.mooncake import MooncakeMaster
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def clients() -> Iterator[list[StorageBackend]]:
    opened: list[StorageBackend] = []
    yield opened
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda store: store.close(), opened))


class MooncakeContract(StorageBackendContract):
    """The contract, with one exception for Mooncake."""

    def read_back(self, backend: StorageBackend, key: str, content: bytes) -> None:
        """Wait for the value: Mooncake answers a put with 0 while another writer still writes the same key."""
        wait_until(lambda: read_value(backend, key, len(content)) == content, f"{key} to be readable")


class TestMooncakeStore(MooncakeContract):
    @pytest.fixture
    def backend(self, mooncake_master: MooncakeMaster, clients: list[StorageBackend]) -> StorageBackend:
        if not clients or not clients[-1].health().ok:
            clients.append(open_store(mooncake_master.config()))
        return clients[-1]


@pytest.fixture(scope="module")
def stacks() -> Iterator[list[StorageBackend]]:
    opened: list[StorageBackend] = []
    yield opened
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda stack: stack.close(), opened))


class TestMooncakeStack(MooncakeContract, StackContract):
    @pytest.fixture
    def config(self, mooncake_master: MooncakeMaster) -> PoolConfig:
        return mooncake_master.config()

    @pytest.fixture
    def backend(
        self, config: PoolConfig, stacks: list[StorageBackend], monkeypatch: pytest.MonkeyPatch
    ) -> StorageBackend:
        monkeypatch.setattr("kvstore_backend.wrappers.guarded.Deadlines", lambda: PATIENT)
        if not stacks or not stacks[-1].health().ok:
            stacks.append(open_backend(config, CollectorRegistry(), background=False))
        return stacks[-1]
