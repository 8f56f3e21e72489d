"""Registration at a router: parsing of its address, and heartbeats to a small real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from engine.serving.registration import router_url, send_heartbeats
from kvstore_backend import ConfigError
from tests.engine.event_loop import eventually, in_event_loop
from tests.engine.router import Router
from tests.support.ports import free_port

PAYLOAD = {"role": "prefill", "port": 52400}


@pytest.fixture
def router() -> Iterator[Router]:
    running = Router()
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def shorten_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.serving.registration.HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr("engine.serving.registration.RETRY_SECONDS", 0.01)


@contextlib.asynccontextmanager
async def registering(port: int) -> Any:
    task = asyncio.create_task(send_heartbeats(f"http://127.0.0.1:{port}", lambda _: PAYLOAD, asyncio.Event()))
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@in_event_loop
async def test_heartbeats_send_the_payload_with_the_own_address(router: Router) -> None:
    async with registering(router.port):
        await eventually(lambda: len(router.registered) >= 3, "three heartbeats")
    assert router.registered[0] == ("/register", {**PAYLOAD, "host_ip": "127.0.0.1"})


@in_event_loop
async def test_other_software_that_responds_is_not_a_router(router: Router, caplog: pytest.LogCaptureFixture) -> None:
    router.is_other_software = True
    async with registering(router.port):
        await eventually(lambda: "the server is not a router" in caplog.text, "a warning")
    assert "Registered at router" not in caplog.text


@in_event_loop
async def test_the_callback_is_called_after_each_accepted_registration(router: Router) -> None:
    callbacks: list[bool] = []
    router.refuses = True
    url = f"http://127.0.0.1:{router.port}"
    task = asyncio.create_task(
        send_heartbeats(url, lambda _: PAYLOAD, asyncio.Event(), on_registered=lambda: callbacks.append(router.refuses))
    )
    await eventually(lambda: len(router.registered) >= 2, "two refusals")
    assert not callbacks
    router.refuses = False
    await eventually(lambda: bool(callbacks), "an accepted registration")
    assert not any(callbacks)
    task.cancel()


@in_event_loop
async def test_registration_is_tried_until_the_router_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "engine.serving.registration")
    port = free_port()
    async with registering(port):
        await eventually(lambda: "Cannot register" in caplog.text, "a failed try")
        router = Router(port)
        try:
            await eventually(lambda: "Registered at router" in caplog.text, "registration")
            # One message at the first failure, and one at the first success.
            assert caplog.text.count("Cannot register") == 1
        finally:
            await asyncio.to_thread(router.stop)


@in_event_loop
async def test_a_warning_of_a_refusal_has_the_routers_reason(router: Router, caplog: pytest.LogCaptureFixture) -> None:
    router.refuses = True
    async with registering(router.port):
        await eventually(lambda: "the router answered 400" in caplog.text, "the refusal")
        assert "no such role" in caplog.text
        router.refuses = False
        before = len(router.registered)
        await eventually(lambda: len(router.registered) > before + 1, "another try")


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:52700", "http://127.0.0.1:52700"),
        ("0.0.0.0:52700", "http://127.0.0.1:52700"),  # from FastDeploy's examples
        ("router:80", "http://router:80"),
        ("router.example.com:9000", "http://router.example.com:9000"),
        ("http://router:9000", "http://router:9000"),
        ("http://router:9000/", "http://router:9000"),
        ("https://router:443", "https://router:443"),
        ("[::1]:52700", "http://[::1]:52700"),
        ("router_1.example.com.:80", "http://router_1.example.com.:80"),
        (f"{'a' * 63}:80", f"http://{'a' * 63}:80"),
    ],
)
def test_a_router_is_host_and_port_or_a_url(text: str, url: str) -> None:
    assert router_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        *("router", "52700", ":52700", "router:", "router:http", "router:99999", "http://router", "a b:1", "", "::1"),
        *("a..b:9000", ".:9000", f"{'a' * 64}:9000", "[:]:9000", "xn--0:9000"),
    ],
)
def test_an_invalid_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        router_url(text)
    assert str(caught.value).startswith(f"--router {text!r} is not host:port, such as 127.0.0.1:52700")


@pytest.mark.parametrize("text", ["http://router:9000/v1", "ftp://router:9000", "router:9000?x=1"])
def test_a_url_with_unsupported_parts_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port"):
        router_url(text)


@in_event_loop
async def test_registration_is_tried_again_if_the_routers_name_cannot_be_resolved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = asyncio.create_task(send_heartbeats("http://no-such-host.invalid:52700", lambda _: PAYLOAD, asyncio.Event()))
    await eventually(lambda: "trying again: gaierror" in caplog.text, "a failed try")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@in_event_loop
async def test_a_change_is_sent_immediately(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.serving.registration.HEARTBEAT_SECONDS", 3600.0)
    payload, changed = {"is_paused": False}, asyncio.Event()
    task = asyncio.create_task(send_heartbeats(f"http://127.0.0.1:{router.port}", lambda _: dict(payload), changed))
    await eventually(lambda: len(router.registered) == 1, "the first registration")
    payload["is_paused"] = True
    changed.set()
    await eventually(lambda: len(router.registered) == 2, "the registration of the change")
    assert [body["is_paused"] for _, body in router.registered] == [False, True]
    task.cancel()
