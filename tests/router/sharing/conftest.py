"""A fixture for the tests of several routers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.redis import RedisServer


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A real redis-server for one test."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()
