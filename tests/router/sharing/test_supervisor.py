"""A router with two workers in real processes that die, hang and are stopped."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import httpx
import pytest

from router.access import Admission
from router.app import RouterApp
from router.launch import worker
from router.launch.server import RouterServer
from router.settings import RouterSettings
from router.sharing import Link
from router.sharing.channels import open_channel, send_connection
from router.sharing.supervisor import Supervisor
from tests.router.conftest import MakeStandIn
from tests.router.sharing.links import until
from tests.router.stand_in import Received, Responder
from tests.support import plain_http
from tests.support.processes import Child, child
from tests.support.waiting import wait_until

NUM_STREAMS = 64


class Router(NamedTuple):
    process: Child
    url: str

    def list_workers(self) -> list[int]:
        """Return the ids of the workers' processes, which are the children of the process that forks them."""
        return [worker for forkserver in list_children(self.process.pid) for worker in list_children(forkserver)]

    def is_healthy(self) -> bool:
        return plain_http.answers_ok(f"{self.url}/health")


def list_children(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in lists for child in each.read_text().split()]


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    argv = [sys.executable, "-m", "router.launch", "--host", "127.0.0.1", "--port", "0", "--workers", "2"]
    with child(argv, tmp_path / "router.log", is_forked=True) as process:
        process.wait_for(lambda: "router listens at" in process.output, "its start")
        found = re.search(r"router listens at (http://\S+:\d+), 2 workers", process.output)
        assert found, process.output
        yield Router(process, found.group(1))


def test_the_death_of_a_worker_ends_only_its_own_streams(router: Router, stand_in: MakeStandIn) -> None:
    instance = stand_in(behave=stream_until(event := asyncio.Event()))
    instance.register(router.url)

    async def run() -> tuple[list[str], list[str]]:
        limits = httpx.Limits(max_connections=2 * NUM_STREAMS)
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=30, limits=limits) as client:
            streams = [asyncio.ensure_future(read_stream(client, router.url, n)) for n in range(NUM_STREAMS)]
            while len(instance.received) < NUM_STREAMS:
                await asyncio.sleep(0.01)
            os.kill(router.list_workers()[0], signal.SIGKILL)
            while not any(stream.done() for stream in streams):
                await asyncio.sleep(0.01)
            instance.thread.loop.call_soon_threadsafe(event.set)
            later = [read_stream(client, router.url, n) for n in range(NUM_STREAMS, 2 * NUM_STREAMS)]
            return await asyncio.gather(*streams), await asyncio.gather(*later)

    during, after = asyncio.run(run())
    assert NUM_STREAMS // 2 - 4 <= during.count("complete") <= NUM_STREAMS // 2 + 4
    assert during.count("complete") + during.count("connection lost") == NUM_STREAMS
    assert after == ["complete"] * NUM_STREAMS
    wait_until(lambda: len(router.list_workers()) == 2, "another worker")
    assert "was killed by SIGKILL; another worker replaces it" in router.process.output


def test_killed_workers_are_replaced_know_the_instances_and_end_with_the_router(
    router: Router, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    instance.register(router.url)
    killed = router.list_workers()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, killed)), "the end of the killed workers")
    answers = [
        plain_http.post(f"{router.url}/v1/chat/completions", json={"messages": []}, timeout=30) for _ in range(8)
    ]
    assert {answer.status_code for answer in answers} == {200}
    router.process.signal(signal.SIGTERM)  # the second worker may still start
    assert router.process.wait(25) == 0  # requests could run for 30 s


def test_workers_are_replaced_after_the_death_of_the_process_that_forks_them(
    router: Router, stand_in: MakeStandIn
) -> None:
    stand_in().register(router.url)
    before = router.list_workers()
    (forkserver,) = [pid for pid in list_children(router.process.pid) if set(before) <= set(list_children(pid))]
    os.kill(forkserver, signal.SIGKILL)
    wait_until(lambda: len(router.list_workers()) == 2 and not set(router.list_workers()) & set(before), "new workers")
    answer = plain_http.post(f"{router.url}/v1/chat/completions", json={"messages": []}, timeout=30)
    assert answer.status_code == 200
    wait_until(lambda: not any(map(is_alive, before)), "the end of the old workers")


def test_a_worker_that_hangs_gets_no_more_connections(router: Router) -> None:
    hanging = router.list_workers()[0]
    os.kill(hanging, signal.SIGSTOP)
    try:
        # Connections that were passed to it before the supervisor detected its silence wait there.
        wait_until(lambda: all(router.is_healthy() for _ in range(4)), "answers of the other worker only", pause_s=0.1)
    finally:
        os.kill(hanging, signal.SIGCONT)


def test_connections_wait_while_the_queues_of_all_workers_are_full(router: Router) -> None:
    workers = router.list_workers()
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    host, port = router.url.removeprefix("http://").split(":")
    answers = select.poll()
    with contextlib.ExitStack() as opened:
        clients = []
        for _ in range(2 * count_queue_places() + 20):
            client = opened.enter_context(socket.create_connection((host, int(port)), 30))
            client.sendall(b"GET /health HTTP/1.1\r\nHost: router\r\n\r\n")
            clients.append(client)
            answers.register(client, select.POLLIN)
        assert answers.poll(500) == []
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        assert {client.recv(12) for client in clients} == {b"HTTP/1.1 200"}


def count_queue_places() -> int:
    """Return the number of connections that can wait for a worker that accepts none."""
    with contextlib.ExitStack() as opened:
        channel, other = map(opened.enter_context, socket.socketpair(type=socket.SOCK_DGRAM))
        channel.setblocking(False)
        return next(n for n in itertools.count() if not send_connection(channel, other))


@pytest.mark.parametrize("to_all", [True, False])
def test_after_sigterm_streams_end_and_then_all_processes(router: Router, stand_in: MakeStandIn, to_all: bool) -> None:
    instance = stand_in(behave=stream_until(event := asyncio.Event()))
    instance.register(router.url)
    processes = [router.process.pid, *list_children(router.process.pid), *router.list_workers()]

    async def run() -> list[str]:
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=30) as client:
            streams = [asyncio.ensure_future(read_stream(client, router.url, n)) for n in range(4)]
            while len(instance.received) < 4:
                await asyncio.sleep(0.01)
            for pid in processes if to_all else processes[:1]:  # a service manager sends it to all of them
                os.kill(pid, signal.SIGTERM)
            while router.is_healthy():
                await asyncio.sleep(0.01)
            instance.thread.loop.call_soon_threadsafe(event.set)
            return await asyncio.gather(*streams)

    assert asyncio.run(run()) == ["complete"] * 4
    assert router.process.wait() == 0
    wait_until(lambda: not any(map(is_alive, processes)), "the end of all processes")
    assert "another worker replaces it" not in router.process.output


@pytest.mark.parametrize(("delay", "graces"), [(0.0, [60.0, 0.0]), (30.0, [0.0])])
def test_a_second_signal_sets_the_grace_to_0(
    monkeypatch: pytest.MonkeyPatch, delay: float, graces: list[float]
) -> None:
    sent: list[float] = []

    async def run() -> None:
        settings, grace_of = RouterSettings(shutdown_delay_secs=delay), {signal.SIGTERM: 60.0}
        with socket.create_server(("127.0.0.1", 0)) as listener:
            supervisor = Supervisor(settings, listener, lambda task: None, grace_of, Admission(settings))
            monkeypatch.setattr(supervisor._hub, "send_to_workers", lambda kind, *grace: sent.extend(grace))
            for _ in range(2):
                supervisor._on_signal(signal.SIGTERM)

    asyncio.run(run())
    assert sent == graces


def test_a_worker_reports_its_connections_at_changes_and_periodically(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "COUNT_SECONDS", 0.001)
    reports: list[list[object]] = []

    async def run() -> None:
        (ours, theirs), (connections, passed) = socket.socketpair(), socket.socketpair(type=socket.SOCK_DGRAM)
        is_lost = asyncio.Event()
        channel = await open_channel(ours, reports.append, is_lost.set)
        channel.send_message("state", "")
        link, server = Link("0"), RouterServer(RouterApp(RouterSettings()))
        await link.connect(theirs)
        server.started = True
        taking = asyncio.ensure_future(worker._take_connections(connections, server, link))
        await until(lambda: len(reports) >= 2)
        server.server_state.connections.add(cast(Any, "a connection"))
        await until(lambda: len(reports) >= 3)
        assert reports == [["ready"], ["count", 0, 0], ["count", 1, 0]]
        monkeypatch.setattr(worker, "ALIVE_SECONDS", 0.01)
        await until(lambda: len(reports) >= 5)
        assert reports[3:5] == 2 * [["count", 1, 0]]
        taking.cancel()
        await asyncio.wait([taking])
        link.disconnect()
        await is_lost.wait()
        connections.close()
        passed.close()

    asyncio.run(run())


def test_workers_end_with_their_supervisor(router: Router) -> None:
    processes = [*list_children(router.process.pid), *router.list_workers()]
    router.process.kill()
    wait_until(lambda: not any(map(is_alive, processes)), "the end of all processes")


def test_the_error_for_an_invalid_setting_of_a_worker_is_one_sentence(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "router.launch", "--port", "0", "--workers", "2", "--api-keys-file", "/no/such"]
    with child(argv, tmp_path / "router.log") as process:
        assert process.wait() == 2
        assert process.output == "router: server.api-keys-file /no/such cannot be read: No such file or directory\n"


def stream_until(may_end: asyncio.Event) -> Callable[[Received, Responder], object]:
    """Begin a stream, and end it when ``may_end`` is set."""

    async def behave(request: Received, respond: Responder) -> None:
        await respond.start_stream()
        await respond.event(json.dumps({"choices": [{"delta": {"content": "a"}}]}))
        leaves = asyncio.ensure_future(respond.peer_left.wait())
        waits = asyncio.ensure_future(may_end.wait())
        await asyncio.wait([leaves, waits], return_when=asyncio.FIRST_COMPLETED)
        if waits.done():
            await respond.event("[DONE]")
            await respond.end_stream()
        else:
            waits.cancel()

    return behave


async def read_stream(client: httpx.AsyncClient, url: str, number: int) -> str:
    """Read a stream, and return how it ended for its client."""
    body = {"messages": [], "stream": True, "request_id": f"r{number}"}
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            data = await response.aread()
    except httpx.TransportError:
        return "connection lost"
    return "complete" if data.endswith(b"data: [DONE]\n\n") else f"{response.status_code}: {data!r}"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
