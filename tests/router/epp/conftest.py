"""Fixtures: an Envoy in front of stand-ins, with a picker in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.conftest import RouterUnderTest
from tests.router.stand_in import LoopThread, StandIn
from tests.support.envoy import Envoy, make_config, running_envoy
from tests.support.ports import free_port


class Gateway:
    """An Envoy and its picker."""

    def __init__(self, envoy: Envoy, router: RouterUnderTest, picker_port: int) -> None:
        self.envoy = envoy
        self.router = router
        self.picker_port = picker_port
        self.client = httpx.Client(base_url=envoy.url, trust_env=False, timeout=20)

    def chat(self, **body: Any) -> httpx.Response:
        """Send a chat completion that is not streamed."""
        return self.client.post("/v1/chat/completions", json={"messages": [], **body})

    def stream(self, **body: Any) -> Any:
        """Send a streamed chat completion; a context manager like ``httpx.Client.stream``."""
        return self.client.stream("POST", "/v1/chat/completions", json={"messages": [], "stream": True, **body})


@pytest.fixture
def make_gateway(
    make_router: Callable[..., RouterUnderTest], thread: LoopThread, tmp_path: Path
) -> Iterator[Callable[..., Gateway]]:
    """A function that starts an Envoy and a picker: ``make_gateway(*stand_ins, ext_proc={...}, **settings)``."""
    from router.epp import Picker

    with contextlib.ExitStack() as started:

        def start(
            *instances: StandIn,
            ext_proc: dict[str, Any] | None = None,
            change_listener: Callable[[Any], None] | None = None,
            **settings: Any,
        ) -> Gateway:
            router = make_router(*instances, **settings)

            async def open_picker() -> Picker:
                picker = Picker(router.app)
                await picker.start()
                return picker

            picker = thread.run(open_picker())
            started.callback(lambda: thread.run(picker.stop(0)))
            port = free_port()
            ports = [instance.port for instance in instances if instance.role != "prefill"]
            config = make_config(port, picker.port, ports, change_listener, **(ext_proc or {}))
            envoy = started.enter_context(running_envoy(tmp_path, config, port))
            gateway = Gateway(envoy, router, picker.port)
            started.callback(gateway.client.close)
            return gateway

        yield start
