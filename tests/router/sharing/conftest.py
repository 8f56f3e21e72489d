"""What the tests of several routers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.redis import RedisServer


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A real redis-server of the test's own."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()
