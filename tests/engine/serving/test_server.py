"""The server around an instance."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from engine.serving.server import InstanceServer

GO_SECONDS, HTTPX_SECONDS = 90, 5
"""How long clients keep idle connections: Go's, and Python's."""


@contextlib.asynccontextmanager
async def no_lifespan(_: object) -> AsyncIterator[None]:
    yield


def test_an_idle_connection_is_the_clients_to_close() -> None:
    parts = {"generations": None, "completions": None, "core": None, "tracer": None}
    instance: Any = SimpleNamespace(run_lifespan=no_lifespan, **parts)
    server = InstanceServer(instance)
    assert server.config.timeout_keep_alive > GO_SECONDS > HTTPX_SECONDS
