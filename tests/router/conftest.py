"""Fixtures: routers in this process, and stand-ins for instances."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn

from router.access import Admission, Auth
from router.app import RouterApp
from router.http import ListenerContext
from router.http.server import RouterProtocol
from router.settings import RouterSettings, load_certificate
from router.sharing import Link
from router.sharing.admission_server import AdmissionServer
from tests.router.serving.fault_report import REPORTS, table
from tests.router.sharing.links import LinkedHub, join_all
from tests.router.stand_in import Behaviour, LoopThread, StandIn
from tests.support.waiting import wait_until

__all__ = ["MakeRouter", "MakeStandIn", "RouterUnderTest"]


class RouterUnderTest:
    """The router's application served by uvicorn on a loopback port."""

    def __init__(self, thread: LoopThread, settings: RouterSettings, link: Link | None = None) -> None:
        self.app = RouterApp(settings, link)
        self.workers = [self]
        """All workers of this router."""
        self.thread = thread
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"{'https' if settings.ssl_certfile else 'http'}://127.0.0.1:{self.port}"
        config = uvicorn.Config(self.app, http=RouterProtocol, ws="none", log_config=None, access_log=False)
        config.server_header = config.date_header = False
        config.load()
        verify: ssl.SSLContext | bool = False
        if settings.ssl_certfile:
            config.ssl = ListenerContext()
            load_certificate(config.ssl, settings.ssl_certfile, settings.ssl_keyfile)
            verify = ssl.create_default_context(cafile=settings.ssl_certfile)
        self._server = uvicorn.Server(config)
        self._serving: asyncio.Future[None] | None = None
        self.client = httpx.Client(base_url=self.url, trust_env=False, timeout=20, verify=verify)

    def start(self) -> None:
        async def serve() -> None:
            self._serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))

        self.thread.run(serve())
        wait_until(lambda: self._server.started, "the router")

    def stop(self) -> None:
        """End the requests. uvicorn ends during the tests that follow."""

        async def stop() -> None:
            self.app.proxy.stop()
            self._server.should_exit = True
            assert self._serving is not None
            self.thread.ending.append(self._serving)

        self.client.close()
        self.thread.run(stop())

    def chat(self, **body: Any) -> httpx.Response:
        """Send a chat completion that is not streamed."""
        return self.client.post("/v1/chat/completions", json={"messages": [], **body})

    def stream(self, **body: Any) -> Any:
        """Send a streamed chat completion; a context manager like ``httpx.Client.stream``."""
        return self.client.stream("POST", "/v1/chat/completions", json={"messages": [], "stream": True, **body})


MakeRouter = Callable[..., RouterUnderTest]
MakeStandIn = Callable[..., StandIn]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if REPORTS:
        terminalreporter.section("the effects of instances' faults on requests")
        for line in table():
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def thread() -> Iterator[LoopThread]:
    """The thread with the event loop of routers and stand-ins."""
    running = LoopThread()
    yield running
    running.close()


@pytest.fixture
def stand_in(thread: LoopThread) -> Iterator[MakeStandIn]:
    """A function that starts stand-ins: ``stand_in("prefill", behaviour)``."""
    with contextlib.ExitStack() as stack:

        def start(role: str = "mixed", behave: Behaviour | None = None, tls: ssl.SSLContext | None = None) -> StandIn:
            instance = StandIn(role, thread, tls=tls)
            if behave is not None:
                instance.behave = behave
            instance.start()
            stack.callback(instance.stop)
            return instance

        yield start


@pytest.fixture
def make_router(thread: LoopThread) -> Iterator[MakeRouter]:
    """A function that starts a router and registers stand-ins: ``make_router(*stand_ins, splitwise=True)``.

    With ``workers=2`` it starts two that share state as two processes do, and registers at the first one.
    """
    with contextlib.ExitStack() as stack:

        def start(*instances: StandIn, **settings: Any) -> RouterUnderTest:
            # Only the tests of probes have rounds of probes.
            made = RouterSettings(**{"health_check_interval_secs": 1000.0, **settings})
            links = [Link()]
            if made.workers > 1:
                linked = LinkedHub()
                if (admission := Admission(made, Auth(made).token_rates)).is_limited:
                    linked.hub.admission = AdmissionServer(admission, linked.hub.send_limits)
                links = thread.run(join_all(linked, made.workers))
                stack.callback(lambda: thread.run(linked.close()))
            routers = [RouterUnderTest(thread, made, link) for link in links]
            for router in routers:
                router.workers = routers
                router.start()
                stack.callback(router.stop)
            for instance in instances:
                wait_until(partial(_has_registered, instance, routers[0]), f"the registration of {instance.key}")
            return routers[0]

        yield start


def _has_registered(instance: StandIn, router: RouterUnderTest) -> bool:
    """Try to register. On a busy machine, the first probe can fail."""
    return instance.register(router.url).status_code == 200
