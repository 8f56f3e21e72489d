"""After failures and cancellations at any point, no counts, queries or descriptors remain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from router.access import Admission, AdmissionClient
from router.settings import RouterSettings
from router.sharing import link as link_module
from router.sharing.admission_server import AdmissionServer
from router.sharing.channels import MessageChannel, receive_connections, send_connection
from router.sharing.supervisor import Supervisor
from tests.router.sharing.links import LinkedHub, join_all, run_linked, until

# More than the sends and awaits of each operation below.
MANY = 12


class Parts:
    """A hub with a limit of one request, and two workers."""

    def __init__(self, hub: LinkedHub, links: list[Any], admission: Admission) -> None:
        self.hub, self.links, self.admission = hub, links, admission
        self.limits = [AdmissionClient(link.wait_for_entry, link.report_end) for link in links]

    @classmethod
    async def start(cls, hub: LinkedHub) -> Parts:
        admission = Admission(RouterSettings(max_concurrent_requests=1))
        hub.hub.admission = AdmissionServer(admission, hub.hub.send_limits)
        links = await join_all(hub, 2)
        links[1].answer_topic("sum", lambda content: 3)
        return cls(hub, links, admission)

    def count_all(self) -> dict[str, int]:
        server = self.hub.hub.admission
        assert server is not None
        return {
            "asked": sum(len(link._asked) for link in self.links),
            "entering": sum(len(link._entering) for link in self.links),
            "answering": sum(len(link._answering) for link in self.links),
            "queries": len(self.hub.hub._queries),
            "entering at the server": len(server._entering),
            "running": self.admission.running + sum(each.running for each in self.limits),
            "waiting": self.admission.waiting + sum(each.waiting for each in self.limits),
        }


async def send_query(parts: Parts) -> None:
    await parts.links[0].ask_peers("sum", 1)


async def enter_and_leave(parts: Parts) -> None:
    await parts.limits[0].enter("client", 0, 5)
    parts.limits[0].leave("client", 5)


async def wait_in_queue(parts: Parts) -> None:
    await parts.limits[1].enter("client", 0, 5)
    try:
        await asyncio.wait_for(parts.limits[0].enter("client", 0, 5), 0.02)
    except asyncio.TimeoutError:
        return
    finally:
        parts.limits[1].leave("client", 5)
    parts.limits[0].leave("client", 5)


OPERATIONS: dict[str, Callable[[Parts], Awaitable[None]]] = {
    "a query": send_query,
    "a request that is admitted": enter_and_leave,
    "a request that leaves the queue": wait_in_queue,
}


@pytest.fixture(autouse=True)
def shorten_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr("router.sharing.hub.ANSWER_SECONDS", 0.05)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("iterations", range(MANY))
def test_after_a_cancellation_at_any_iteration_of_the_loop_nothing_remains(
    operation: Callable[[Parts], Awaitable[None]], iterations: int
) -> None:
    async def run(hub: LinkedHub) -> None:
        parts = await Parts.start(hub)
        work = asyncio.ensure_future(operation(parts))
        for _ in range(iterations):
            await asyncio.sleep(0)
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        await until(lambda: not any(parts.count_all().values()))

    run_linked(run)


@pytest.mark.parametrize("failure", [ValueError("nested too deeply"), TypeError("no plain value")])
@pytest.mark.parametrize("kind", ["ask", "enter"])
def test_after_a_message_that_cannot_be_sent_nothing_remains(
    monkeypatch: pytest.MonkeyPatch, kind: str, failure: Exception
) -> None:
    send_message = MessageChannel.send_message

    def fail(channel: MessageChannel, *message: Any) -> None:
        if message[0] == kind:
            raise failure
        send_message(channel, *message)

    async def run(hub: LinkedHub) -> None:
        parts = await Parts.start(hub)
        monkeypatch.setattr(MessageChannel, "send_message", fail)
        operation = send_query if kind == "ask" else enter_and_leave
        with pytest.raises(type(failure)):
            await operation(parts)
        monkeypatch.undo()
        await until(lambda: not any(parts.count_all().values()))

    run_linked(run)


def test_content_that_cannot_be_encoded_is_refused_and_nothing_remains() -> None:
    async def run(hub: LinkedHub) -> None:
        parts = await Parts.start(hub)
        for content in (object(), 1 << 70, -(1 << 70)):
            with pytest.raises((ValueError, TypeError)):
                await parts.links[0].ask_peers("sum", content)
        assert not any(parts.count_all().values())
        assert await parts.links[0].ask_peers("sum", "\ud800") == [3]

    run_linked(run)


def test_a_worker_drops_its_queries_if_the_supervisor_hangs() -> None:
    async def run(hub: LinkedHub) -> None:
        parts = await Parts.start(hub)
        parts.hub.hub.on_message = lambda *_: None  # type: ignore[method-assign]
        assert await parts.links[0].ask_peers("sum", 1) == []
        assert not any(parts.count_all().values())

    run_linked(run)


def test_nothing_of_a_dead_worker_remains_at_the_admission_server() -> None:
    async def run(hub: LinkedHub) -> None:
        parts = await Parts.start(hub)
        await parts.limits[0].enter("client", 0, 5)
        waiting = asyncio.ensure_future(parts.links[0].wait_for_entry("client", 0, 5))
        await until(lambda: parts.admission.waiting == 1)
        parts.links[0].disconnect()
        await until(lambda: parts.admission.running == parts.admission.waiting == 0)
        waiting.cancel()

    run_linked(run)


def count_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_passed_connections_are_counted_and_not_leaked_if_descriptors_are_missing() -> None:
    before = count_descriptors()
    with contextlib.ExitStack() as opened:
        ours, theirs = map(opened.enter_context, socket.socketpair(type=socket.SOCK_DGRAM))
        theirs.setblocking(False)
        client, _ = map(opened.enter_context, socket.socketpair())
        for _ in range(3):
            assert send_connection(ours, client)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
        try:
            count, received = receive_connections(theirs)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (count, len(received)) == (3, 1)
        for each in received:
            each.close()
        assert receive_connections(theirs) == (0, [])
    assert count_descriptors() == before


def test_a_failed_start_of_a_worker_leaves_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        settings = RouterSettings(workers=1)
        graces = {signal.SIGTERM: 1.0}
        supervisor = Supervisor(settings, listener, lambda task: None, graces, Admission(settings))

        class Process:
            def __init__(self, **_: Any) -> None:
                pass

            def start(self) -> None:
                raise OSError("no more processes")

        supervisor._context = Process  # type: ignore[assignment]
        Process.Process = Process  # type: ignore[attr-defined]
        opened: list[socket.socket] = []
        socketpair = socket.socketpair

        def note_pair(*arguments: Any, **options: Any) -> tuple[socket.socket, socket.socket]:
            pair = socketpair(*arguments, **options)
            opened.extend(pair)
            return pair

        monkeypatch.setattr(socket, "socketpair", note_pair)
        with pytest.raises(OSError, match="no more processes"):
            await supervisor._start_worker(0, is_replacement=True)
        assert [each.fileno() for each in opened] == [-1] * 4
        listener.close()

    asyncio.run(run())
