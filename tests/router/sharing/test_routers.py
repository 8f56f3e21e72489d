"""Faults of several routers under 64 concurrent requests: real processes, a real Redis, stand-ins for instances.

A client that loses its connection repeats its request at another router, as behind a load balancer. A table at the
end of a run shows the results of each fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.router.conftest import MakeStandIn
from tests.router.serving.fault_report import REPORTS, Report
from tests.router.stand_in import LoopThread, Received, Responder, StandIn, chat_answer
from tests.support import plain_http
from tests.support.ports import free_port
from tests.support.processes import Child, child
from tests.support.redis import RedisServer, needs_redis
from tests.support.waiting import port_answers, wait_until

pytestmark = needs_redis

StartRouters = Callable[..., "list[Router]"]

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "operations" / "routers.md"
REQUESTS = 64
PROBE_SECONDS = 0.3
# On a busy machine, stand-ins can be slow to answer probes and to send heartbeats.
LONG_TIMEOUTS = ("--health-check-timeout-secs", "30", "--heartbeat-expiry-secs", "600")
STOPPING = "router_stopping"
# The failures after which a client tries again: its connection is lost, or the router stops.
RETRIED_FAILURES = {"ConnectError", "ReadError", "RemoteProtocolError", STOPPING}


class Router(NamedTuple):
    """A router with one worker, connected to others over Redis."""

    process: Child
    url: str

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    def get(self, path: str) -> httpx.Response:
        return plain_http.get(f"{self.url}{path}", timeout=10)

    def list_instances(self) -> dict[str, dict[str, Any]]:
        """Return all instances by ``host:port``."""
        listed = self.get("/registered").json()
        return {f"{each['host_ip']}:{each['port']}": each for each in listed["mixed"]}

    def list_healthy(self) -> set[str]:
        return {key for key, each in self.list_instances().items() if each["state"] == "healthy"}

    def count_requests(self) -> int:
        """Return the number of running requests."""
        return int(float(re.findall(r"^router_running_requests ([\d.]+)$", self.get("/metrics").text, re.MULTILINE)[0]))

    def has_trouble(self) -> bool:
        """Return whether health and metrics report that Redis is lost."""
        is_reported = b"shared_state" in self.get("/health").content
        return is_reported and b"router_shared_state_up 0.0" in self.get("/metrics").content

    def kill(self) -> None:
        """Kill all processes at the same time, as the end of their machine does.

        A killed process ends only when it gets a CPU. If a worker's connections closed before the listener of its
        supervisor, the dead router would accept the next tries of clients.
        """
        pids = list_processes(self.process.pid)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        self.process.kill()
        for pid in pids[1:]:
            os.kill(pid, signal.SIGKILL)


def list_processes(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(each for found in lists for born in found.read_text().split() for each in list_processes(int(born)))]


@pytest.fixture
def start_routers(redis: RedisServer, tmp_path: Path) -> Iterator[StartRouters]:
    """A function that starts routers together, each with its flags: ``start_routers([], ["--policy", "random"])``."""
    with contextlib.ExitStack() as started:

        def start(*flags: Sequence[str]) -> list[Router]:
            processes = [started.enter_context(child(argv(each), choose_log_path(), is_forked=True)) for each in flags]
            for process in processes:
                process.wait_for(partial(is_listening, process), "its start")
            return [
                Router(each, re.findall(r"router listens at (http://[\w.:]+)", each.output)[0]) for each in processes
            ]

        def argv(flags: Sequence[str]) -> list[str]:
            command = [sys.executable, "-m", "router.launch", "--host", "127.0.0.1", "--port", "0", "--workers", "1"]
            command += ["--shared-state", redis.url, "--health-check-interval-secs", str(PROBE_SECONDS)]
            return [*command, "--health-failure-threshold", "1", *LONG_TIMEOUTS, "--access-log", "off", *flags]

        def is_listening(process: Child) -> bool:
            return "router listens at" in process.output

        def choose_log_path() -> Path:
            return tmp_path / f"router-{len(list(tmp_path.glob('router-*')))}.log"

        yield start


class Gate:
    """A behaviour of instances: they send half of a stream, and the rest when the gate is open."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._opened = asyncio.Event()

    def open(self) -> None:
        self._thread.loop.call_soon_threadsafe(self._opened.set)

    async def behave(self, request: Received, respond: Responder) -> None:
        """Answer with the number in the request; a stream has it twice."""
        number, is_stream = request.json["number"], request.json.get("stream")
        event = json.dumps({"choices": [{"delta": {"content": number}}]})
        if is_stream:
            await respond.start_stream()
            await respond.event(event)
        waits, leaves = asyncio.ensure_future(self._opened.wait()), asyncio.ensure_future(respond.peer_left.wait())
        await asyncio.wait([waits, leaves], return_when=asyncio.FIRST_COMPLETED)
        waits.cancel()
        if leaves.done():
            respond.keep_alive = False
            return
        leaves.cancel()
        if is_stream:
            await respond.event(event)
            await respond.event("[DONE]")
            await respond.end_stream()
        else:
            await respond.answer(200, chat_answer(number))


@pytest.fixture
def gate(thread: LoopThread) -> Gate:
    return Gate(thread)


class Ended(NamedTuple):
    """The result of one client."""

    is_right: bool
    tries: int
    """The number of its tries."""
    failures: list[str]
    """The failures of the tries before the last one."""


async def send_request(client: httpx.AsyncClient, routers: Sequence[Router], number: int) -> Ended:
    """Send a request to one router after another, until one answers. Half of the requests are streams."""
    failures: list[str] = []
    for router in routers:
        body = {"messages": [], "number": str(number), "stream": number % 4 < 2, "asked_at": router.url}
        try:
            response = await client.post(f"{router.url}/v1/chat/completions", json=body)
        except httpx.TransportError as exc:
            failures.append(type(exc).__name__)
            continue
        if body["stream"]:
            text = "".join(re.findall(r'"content": ?"(\d+)"', response.text))
            is_right = text == 2 * str(number) and response.text.endswith("data: [DONE]\n\n")
        else:
            is_right = response.json().get("choices", [{}])[0].get("message", {}).get("content") == str(number)
        if is_right and response.status_code == 200:
            return Ended(True, len(failures) + 1, failures)
        failures.append(
            STOPPING if f'"code":"{STOPPING}"' in response.text else f"{response.status_code} {response.text}"
        )
    return Ended(False, len(failures), failures)


class Clients:
    """The clients of several routers. Every second client tries the second router first."""

    def __init__(self, thread: LoopThread, routers: Sequence[Router]) -> None:
        self._thread = thread
        self._routers = routers
        self.ended: list[Ended] = []

    @contextlib.contextmanager
    def run_requests(self, instances: Sequence[StandIn]) -> Iterator[None]:
        """Send ``REQUESTS`` at the same time. Wait until all run at instances and, after the block, for the answers."""
        arrived = sum(len(each.received) for each in instances) + REQUESTS
        results = asyncio.run_coroutine_threadsafe(self._send_all(), self._thread.loop)
        wait_until(lambda: sum(len(each.received) for each in instances) >= arrived, "all requests at the instances")
        yield
        self.ended += results.result(60)

    def send_all(self) -> None:
        """Send ``REQUESTS`` at the same time, and wait for their answers."""
        self.ended += self._thread.run(self._send_all(), deadline_s=60)

    async def _send_all(self) -> list[Ended]:
        limits = httpx.Limits(max_connections=2 * REQUESTS)
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=30, limits=limits) as client:
            reversed_routers = list(reversed(self._routers))
            work = [
                send_request(client, reversed_routers if number % 2 else self._routers, number)
                for number in range(REQUESTS)
            ]
            return list(await asyncio.gather(*work))


def add_report(fault: str, clients: Clients, instances: Sequence[StandIn], routers: Sequence[Router]) -> Report:
    """Add the clients' results to the table. ``routers`` are those that still run."""
    lost = sum(not one.is_right for one in clients.ended)
    served = len(clients.ended) - lost
    wrong = sum(one.is_right and bool(set(one.failures) - RETRIED_FAILURES) for one in clients.ended)
    print("failures of tries:", Counter(end for one in clients.ended for end in one.failures))  # shown if a test fails
    row = Report(f"routers: {fault}", len(clients.ended), served, lost, wrong, 0)
    REPORTS.append(row)
    with contextlib.suppress(AssertionError):  # the load of a lost router counts until its loss is detected
        wait_until(lambda: not count_running(instances, routers), "the end of all counts", deadline_s=15)
    row.left_running = count_running(instances, routers)
    return row


def count_running(instances: Sequence[StandIn], routers: Sequence[Router]) -> int:
    """Return the number of requests that run at the instances, plus those that routers count there."""
    counted = [each["running_requests"] for router in routers for each in router.list_instances().values()]
    return int(sum(counted)) + sum(each.running for each in instances)


def wait_for_fleet(routers: Sequence[Router], *instances: StandIn) -> None:
    """Wait until exactly these instances are healthy at all routers."""
    keys = {instance.key for instance in instances}
    wait_until(lambda: all(router.list_healthy() == keys for router in routers), f"{keys} at all routers")


def test_the_other_router_serves_the_requests_of_a_killed_one(
    start_routers: StartRouters, stand_in: MakeStandIn, thread: LoopThread, gate: Gate
) -> None:
    first, second = start_routers([], [])
    instances = [stand_in(behave=gate.behave), stand_in(behave=gate.behave)]
    for instance, router in zip(instances, (first, second), strict=True):
        instance.register(router.url)
    wait_for_fleet((first, second), *instances)
    clients = Clients(thread, (first, second))
    with clients.run_requests(instances):
        first.kill()
        gate.open()
    clients_of_first, clients_of_second = clients.ended[::2], clients.ended[1::2]
    clients.send_all()
    row = add_report("one is killed", clients, instances, [second])
    assert (row.served, row.lost, row.wrong, row.left_running) == (2 * REQUESTS, 0, 0, 0)
    assert {one.tries for one in clients_of_first} == {2}
    assert {one.tries for one in clients_of_second} == {1}
    (again,) = start_routers([])
    assert again.list_healthy() == {instance.key for instance in instances}  # at its first request


def test_requests_are_served_while_redis_hangs_and_routers_agree_afterwards(
    redis: RedisServer, start_routers: StartRouters, stand_in: MakeStandIn, thread: LoopThread, gate: Gate
) -> None:
    routers = start_routers([], [])
    instances = [stand_in(behave=gate.behave), stand_in(behave=gate.behave)]
    for instance, router in zip(instances, routers, strict=True):
        instance.register(router.url)
    wait_for_fleet(routers, *instances)
    clients = Clients(thread, routers)
    with clients.run_requests(instances):
        redis.hang()
        gate.open()
    clients.send_all()
    wait_until(lambda: all(router.has_trouble() for router in routers), "the report of both routers")
    newcomer = stand_in(behave=gate.behave)
    newcomer.register(routers[0].url)
    wait_for_fleet(routers[:1], *instances, newcomer)
    clients.send_all()
    redis.resume()
    wait_for_fleet(routers, *instances, newcomer)
    wait_until(lambda: not any(router.has_trouble() for router in routers), "the end of both reports")
    clients.send_all()
    row = add_report("Redis hangs, and comes back", clients, instances, routers)
    assert (row.served, row.lost, row.wrong, row.left_running) == (4 * REQUESTS, 0, 0, 0)
    assert {one.tries for one in clients.ended} == {1}


def test_a_new_router_and_a_replaced_worker_choose_the_same_instances_for_prompts(
    start_routers: StartRouters, stand_in: MakeStandIn
) -> None:
    (first,) = start_routers(["--policy", "cache_aware"])
    instances = [stand_in() for _ in range(4)]
    for instance in instances:
        instance.register(first.url)
    wait_for_fleet([first], *instances)
    prompts = [{"messages": [{"role": "user", "content": f"prompt {number} " * 400}]} for number in range(4)]
    chosen = [choose_instance(first, prompt) for prompt in prompts]
    (second,) = start_routers(["--policy", "cache_aware"])
    assert [choose_instance(second, prompt) for prompt in reversed(prompts)] == chosen[::-1]
    (worker,) = list_processes(second.process.pid)[-1:]
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: second.process.output.count("another worker replaces it") == 1, "the detection of its death")

    def chooses_as_before() -> bool:
        return [choose_instance(second, prompt) for prompt in prompts] == chosen

    wait_until(chooses_as_before, "the prefixes")


def choose_instance(router: Router, prompt: dict[str, Any]) -> str:
    """Send a prompt to a router, and return the instance that the router chooses."""
    answer = httpx.post(f"{router.url}/v1/chat/completions", json=prompt, trust_env=False, timeout=30)
    return answer.headers["x-router-mixed"]


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")
def test_haproxy_serves_its_address_after_the_death_of_a_router(
    start_routers: StartRouters, stand_in: MakeStandIn, thread: LoopThread, gate: Gate, tmp_path: Path
) -> None:
    first, second = start_routers([], [])
    (config,) = re.findall(r"^```haproxy\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    port = free_port()
    for ours, example in (
        (f"127.0.0.1:{port}", ":9000"),
        (first.address, "10.0.0.1:9000"),
        (second.address, "10.0.0.2:9000"),
    ):
        assert config.count(f" {example}\n") == 1
        config = config.replace(f" {example}\n", f" {ours}\n")
    (tmp_path / "haproxy.cfg").write_text(config)
    with child(["haproxy", "-db", "-f", tmp_path / "haproxy.cfg"], tmp_path / "haproxy.log") as haproxy:
        balancer = Router(haproxy, f"http://127.0.0.1:{port}")
        haproxy.wait_for(lambda: port_answers(port), "its start")
        instances = [stand_in(behave=gate.behave), stand_in(behave=gate.behave)]
        for instance in instances:
            assert instance.register(balancer.url).json() == {"status": "success"}
        wait_for_fleet((first, second), *instances)
        clients = Clients(thread, (balancer, balancer))
        with clients.run_requests(instances):
            interrupted, undisturbed = first.count_requests(), second.count_requests()
            first.kill()
            gate.open()
        # New requests go to the other router, or fail once until haproxy marks this one as down.
        clients.send_all()
        haproxy.wait_for(lambda: "router1 is DOWN" in haproxy.output, "the detection of the dead router")
        for instance in instances:
            assert instance.register(balancer.url).json() == {"status": "success"}
        clients.send_all()
        print(haproxy.output)  # which router is down, and why
        row = add_report("one of two behind haproxy is killed", clients, instances, [second])
    assert (row.served, row.lost, row.wrong, row.left_running) == (3 * REQUESTS, 0, 0, 0)
    assert interrupted > 0
    assert interrupted + undisturbed == REQUESTS
    before, _, after = (clients.ended[start : start + REQUESTS] for start in range(0, 3 * REQUESTS, REQUESTS))
    assert Counter(one.tries for one in before) == {1: undisturbed, 2: interrupted}
    assert {one.tries for one in after} == {1}
