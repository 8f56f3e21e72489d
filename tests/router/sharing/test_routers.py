"""Several routers, real processes over a real Redis, under 64 requests at once: what a fault costs their clients.

A client that loses its connection asks again at another router, as it does behind a load balancer. Instances are
stand-ins. At the end of a run a table says what each fault cost.
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
# Where the machine is busy, stand-ins are slow to answer probes, and are slow to come back with heartbeats; they live.
PATIENCE = ("--health-check-timeout-secs", "30", "--heartbeat-expiry-secs", "600")
STOPPING = "router_stopping"
# What makes a client ask again: its connection is lost, or the router says that it ends.
CLEAR_ENDS = {"ConnectError", "ReadError", "RemoteProtocolError", STOPPING}


class Router(NamedTuple):
    """A router of one worker, which knows others over Redis."""

    process: Child
    url: str

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    def get(self, path: str) -> httpx.Response:
        return plain_http.get(f"{self.url}{path}", timeout=10)

    def instances(self) -> dict[str, dict[str, Any]]:
        """All that it knows, by ``host:port``."""
        listed = self.get("/registered").json()
        return {f"{each['host_ip']}:{each['port']}": each for each in listed["mixed"]}

    def healthy(self) -> set[str]:
        return {key for key, each in self.instances().items() if each["state"] == "healthy"}

    def count_requests(self) -> int:
        """The requests that it serves now."""
        return int(float(re.findall(r"^router_running_requests ([\d.]+)$", self.get("/metrics").text, re.MULTILINE)[0]))

    def has_trouble(self) -> bool:
        """Whether its health probe says that the shared state is gone."""
        is_said = b"shared_state" in self.get("/health").content
        return is_said and b"router_shared_state_up 0.0" in self.get("/metrics").content

    def kill(self) -> None:
        """Kill all its processes at one moment, as the end of its machine does.

        A process that is killed ends only when it gets a processor. Were a worker's connections closed before the
        listener of its supervisor, those who ask again at once would be taken by a router that is dead already.
        """
        pids = family(self.process.pid)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        self.process.kill()
        for pid in pids[1:]:
            os.kill(pid, signal.SIGKILL)


def family(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(each for found in lists for born in found.read_text().split() for each in family(int(born)))]


@pytest.fixture
def start_routers(redis: RedisServer, tmp_path: Path) -> Iterator[StartRouters]:
    """Starts routers at once: ``start_routers([], ["--policy", "random"])``, with the flags of each."""
    with contextlib.ExitStack() as started:

        def start(*flags: Sequence[str]) -> list[Router]:
            processes = [started.enter_context(child(argv(each), log_file(), is_forked=True)) for each in flags]
            for process in processes:
                process.wait_for(partial(listens, process), "its start")
            return [
                Router(each, re.findall(r"router listens at (http://[\w.:]+)", each.output)[0]) for each in processes
            ]

        def argv(flags: Sequence[str]) -> list[str]:
            command = [sys.executable, "-m", "router.launch", "--host", "127.0.0.1", "--port", "0", "--workers", "1"]
            command += ["--shared-state", redis.url, "--health-check-interval-secs", str(PROBE_SECONDS)]
            return [*command, "--health-failure-threshold", "1", *PATIENCE, "--access-log", "off", *flags]

        def listens(process: Child) -> bool:
            return "router listens at" in process.output

        def log_file() -> Path:
            return tmp_path / f"router-{len(list(tmp_path.glob('router-*')))}.log"

        yield start


class Gate:
    """Lets instances answer half, and the rest once it is open."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._opened = asyncio.Event()

    def open(self) -> None:
        self._thread.loop.call_soon_threadsafe(self._opened.set)

    async def behave(self, request: Received, respond: Responder) -> None:
        """Answer with the request's own number, twice in a stream."""
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
    """What one client got."""

    is_right: bool
    asks: int
    """How often it asked."""
    broken: list[str]
    """How the asks before the last ended."""


async def ask(client: httpx.AsyncClient, routers: Sequence[Router], number: int) -> Ended:
    """One request, asked at one router after another until one answers; half of them are streams."""
    broken: list[str] = []
    for router in routers:
        body = {"messages": [], "number": str(number), "stream": number % 4 < 2, "asked_at": router.url}
        try:
            response = await client.post(f"{router.url}/v1/chat/completions", json=body)
        except httpx.TransportError as exc:
            broken.append(type(exc).__name__)
            continue
        if body["stream"]:
            text = "".join(re.findall(r'"content": ?"(\d+)"', response.text))
            is_right = text == 2 * str(number) and response.text.endswith("data: [DONE]\n\n")
        else:
            is_right = response.json().get("choices", [{}])[0].get("message", {}).get("content") == str(number)
        if is_right and response.status_code == 200:
            return Ended(True, len(broken) + 1, broken)
        broken.append(
            STOPPING if f'"code":"{STOPPING}"' in response.text else f"{response.status_code} {response.text}"
        )
    return Ended(False, len(broken), broken)


class Clients:
    """The clients of several routers: odd ones ask at the second router first."""

    def __init__(self, thread: LoopThread, routers: Sequence[Router]) -> None:
        self._thread = thread
        self._routers = routers
        self.ended: list[Ended] = []

    @contextlib.contextmanager
    def asking(self, instances: Sequence[StandIn]) -> Iterator[None]:
        """Have asked ``REQUESTS`` at once, all of which have reached an instance; wait for their answers at the end."""
        arrived = sum(len(each.received) for each in instances) + REQUESTS
        asked = asyncio.run_coroutine_threadsafe(self._ask_all(), self._thread.loop)
        wait_until(lambda: sum(len(each.received) for each in instances) >= arrived, "all requests at the instances")
        yield
        self.ended += asked.result(60)

    def ask_all(self) -> None:
        """Ask ``REQUESTS`` at once, and wait for their answers."""
        self.ended += self._thread.run(self._ask_all(), deadline_s=60)

    async def _ask_all(self) -> list[Ended]:
        limits = httpx.Limits(max_connections=2 * REQUESTS)
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=30, limits=limits) as client:
            turned = list(reversed(self._routers))
            work = [ask(client, turned if number % 2 else self._routers, number) for number in range(REQUESTS)]
            return list(await asyncio.gather(*work))


def report(fault: str, clients: Clients, instances: Sequence[StandIn], routers: Sequence[Router]) -> Report:
    """Judge what the clients got, and keep it for the table.

    Args:
        routers: those that live.
    """
    lost = sum(not one.is_right for one in clients.ended)
    served = len(clients.ended) - lost
    wrong = sum(one.is_right and bool(set(one.broken) - CLEAR_ENDS) for one in clients.ended)
    print("how asks ended:", Counter(end for one in clients.ended for end in one.broken))  # shown where a test fails
    row = Report(f"routers: {fault}", len(clients.ended), served, lost, wrong, 0)
    REPORTS.append(row)
    with contextlib.suppress(AssertionError):  # the load of a router that is gone counts until that is noticed
        wait_until(lambda: not count_running(instances, routers), "all to be counted down", deadline_s=15)
    row.left_running = count_running(instances, routers)
    return row


def count_running(instances: Sequence[StandIn], routers: Sequence[Router]) -> int:
    """The requests that run at the instances, and those that routers count there."""
    counted = [each["running_requests"] for router in routers for each in router.instances().values()]
    return int(sum(counted)) + sum(each.running for each in instances)


def wait_for_fleet(routers: Sequence[Router], *instances: StandIn) -> None:
    """Wait until all routers have these instances, and no others, for healthy."""
    keys = {instance.key for instance in instances}
    wait_until(lambda: all(router.healthy() == keys for router in routers), f"{keys} at all routers")


def test_a_router_that_is_killed_takes_its_own_requests_with_it_and_the_other_serves_them(
    start_routers: StartRouters, stand_in: MakeStandIn, thread: LoopThread, gate: Gate
) -> None:
    first, second = start_routers([], [])
    instances = [stand_in(behave=gate.behave), stand_in(behave=gate.behave)]
    for instance, router in zip(instances, (first, second), strict=True):
        instance.register(router.url)
    wait_for_fleet((first, second), *instances)
    clients = Clients(thread, (first, second))
    with clients.asking(instances):
        first.kill()
        gate.open()
    clients_of_first, clients_of_second = clients.ended[::2], clients.ended[1::2]
    clients.ask_all()
    row = report("one is killed", clients, instances, [second])
    assert (row.served, row.lost, row.wrong, row.left_running) == (2 * REQUESTS, 0, 0, 0)
    assert {one.asks for one in clients_of_first} == {2}
    assert {one.asks for one in clients_of_second} == {1}
    (again,) = start_routers([])
    assert again.healthy() == {instance.key for instance in instances}  # at its first request


def test_while_redis_is_gone_every_request_is_served_and_afterwards_routers_know_all_again(
    redis: RedisServer, start_routers: StartRouters, stand_in: MakeStandIn, thread: LoopThread, gate: Gate
) -> None:
    routers = start_routers([], [])
    instances = [stand_in(behave=gate.behave), stand_in(behave=gate.behave)]
    for instance, router in zip(instances, routers, strict=True):
        instance.register(router.url)
    wait_for_fleet(routers, *instances)
    clients = Clients(thread, routers)
    with clients.asking(instances):
        redis.hang()
        gate.open()
    clients.ask_all()
    wait_until(lambda: all(router.has_trouble() for router in routers), "both to say so")
    newcomer = stand_in(behave=gate.behave)
    newcomer.register(routers[0].url)
    wait_for_fleet(routers[:1], *instances, newcomer)
    clients.ask_all()
    redis.resume()
    wait_for_fleet(routers, *instances, newcomer)
    wait_until(lambda: not any(router.has_trouble() for router in routers), "both to be well")
    clients.ask_all()
    row = report("Redis hangs, and comes back", clients, instances, routers)
    assert (row.served, row.lost, row.wrong, row.left_running) == (4 * REQUESTS, 0, 0, 0)
    assert {one.asks for one in clients.ended} == {1}


def test_a_router_that_starts_sends_a_prompt_where_the_other_did_and_so_does_a_worker_in_the_place_of_its_only_one(
    start_routers: StartRouters, stand_in: MakeStandIn
) -> None:
    (first,) = start_routers(["--policy", "cache_aware"])
    instances = [stand_in() for _ in range(4)]
    for instance in instances:
        instance.register(first.url)
    wait_for_fleet([first], *instances)
    prompts = [{"messages": [{"role": "user", "content": f"prompt {number} " * 400}]} for number in range(4)]
    placed = [place(first, prompt) for prompt in prompts]
    (second,) = start_routers(["--policy", "cache_aware"])
    assert [place(second, prompt) for prompt in reversed(prompts)] == placed[::-1]
    (worker,) = family(second.process.pid)[-1:]
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: second.process.output.count("another worker replaces it") == 1, "its death to be noticed")

    def places_as_before() -> bool:
        return [place(second, prompt) for prompt in prompts] == placed

    wait_until(places_as_before, "the prefixes to be there again")


def place(router: Router, prompt: dict[str, Any]) -> str:
    """The instance to which a router sends a prompt."""
    answer = httpx.post(f"{router.url}/v1/chat/completions", json=prompt, trust_env=False, timeout=30)
    return answer.headers["x-router-mixed"]


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")
def test_behind_haproxy_one_address_outlives_a_router(
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
        with clients.asking(instances):
            broken_off, left_alone = first.count_requests(), second.count_requests()
            first.kill()
            gate.open()
        # Who comes now is given to the other router, or cut once as haproxy marks this one down.
        clients.ask_all()
        haproxy.wait_for(lambda: "router1 is DOWN" in haproxy.output, "its leaving out of the router")
        for instance in instances:
            assert instance.register(balancer.url).json() == {"status": "success"}
        clients.ask_all()
        print(haproxy.output)  # which router it left out, and why
        row = report("one of two behind haproxy is killed", clients, instances, [second])
    assert (row.served, row.lost, row.wrong, row.left_running) == (3 * REQUESTS, 0, 0, 0)
    assert broken_off > 0
    assert broken_off + left_alone == REQUESTS
    before, _, after = (clients.ended[start : start + REQUESTS] for start in range(0, 3 * REQUESTS, REQUESTS))
    assert Counter(one.asks for one in before) == {1: left_alone, 2: broken_off}
    assert {one.asks for one in after} == {1}
