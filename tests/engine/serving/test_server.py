"""The HTTP server of an instance."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from engine.serving.server import InstanceServer

GO_SECONDS, HTTPX_SECONDS = 90, 5
"""Times for which clients of Go and of Python keep idle connections."""


@contextlib.asynccontextmanager
async def no_lifespan(_: object) -> AsyncIterator[None]:
    yield


def test_the_server_closes_an_idle_connection_later_than_clients_do() -> None:
    parts = {"generations": None, "completions": None, "core": None, "tracer": None}
    instance: Any = SimpleNamespace(run_lifespan=no_lifespan, **parts)
    server = InstanceServer(instance)
    assert server.config.timeout_keep_alive > GO_SECONDS > HTTPX_SECONDS
