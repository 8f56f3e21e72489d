"""The real client on a real master. Closing a client takes seconds: tests share one until one of them closes it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore_backend.backend import StorageBackend
from kvstore_backend.pool import open_store
from tests.conformance.suite import StorageBackendContract
from tests.support.mooncake import MooncakeMaster


@pytest.fixture(scope="module")
def clients() -> Iterator[list[StorageBackend]]:
    opened: list[StorageBackend] = []
    yield opened
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda store: store.close(), opened))


class TestMooncakeStore(StorageBackendContract):
    @pytest.fixture
    def backend(self, mooncake_master: MooncakeMaster, clients: list[StorageBackend]) -> StorageBackend:
        if not clients or not clients[-1].health().ok:
            clients.append(open_store(mooncake_master.config()))
        return clients[-1]
