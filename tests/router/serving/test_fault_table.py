"""Concurrent requests to two instances of each role, of which one fails: the results of the clients.

Half of the requests are streams. Instances are stand-ins. At the end of a test run, a table shows the results.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from router.app import RouterApp
from router.http import Address, Exchange, RouterProtocol
from router.http.exchange import Connection
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.serving.dialects.pair_fleet import ClientResult, read_answer
from tests.router.serving.fault_report import REPORTS, Report
from tests.router.stand_in import Behaviour, Received, Responder, StandIn, chat_answer, full_backlog, never_answers

REQUESTS = 32
PIECES = 3
# An instance without a fault may be slow on a busy machine; one that hangs fails its probes within a test.
PROBES = {"health_check_interval_secs": 0.1, "health_check_timeout_secs": 30.0, "health_failure_threshold": 1}
HUNG_SECONDS = 0.5
MIDDLE_OF_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n{"
FIRST_EVENT = b'data: {"choices": [{"delta": {"content": "0"}}]}\n\n'
MIDDLE_OF_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    + b"%x\r\n%s\r\n" % (len(FIRST_EVENT), FIRST_EVENT)
    + b'fff\r\ndata: {"cho'
)


class Fleet(NamedTuple):
    """Instances of one mode; the first of each role is the one that may fail."""

    router: RouterUnderTest
    instances: list[StandIn]

    def of(self, role: str) -> list[StandIn]:
        """List the instances of a role."""
        return [instance for instance in self.instances if instance.role == role]


# An instance without a fault: prefill answers at once, decode when prefill has answered the same request.


def behave_as_prefill() -> Behaviour:
    async def behave(request: Received, respond: Responder) -> None:
        await asyncio.sleep(0.01)
        await respond.answer(200, chat_answer())

    return behave


def behave_as_decode(fleet: list[StandIn]) -> Behaviour:
    async def behave(request: Received, respond: Responder) -> None:
        while not any(request.body in instance.answered for instance in fleet if instance.role == "prefill"):
            if respond.peer_left.is_set():
                respond.keep_alive = False
                return
            await asyncio.sleep(0.01)
        await answer(request, respond)

    return behave


async def answer(request: Received, respond: Responder) -> None:
    """Answer with the request's number, once in a whole response or ``PIECES`` times in a stream."""
    number = request.json["number"]
    if not request.json.get("stream"):
        await respond.answer(200, chat_answer(number))
        return
    await respond.start_stream()
    for _ in range(PIECES):
        await respond.event(json.dumps({"choices": [{"delta": {"content": number}}]}))
        await asyncio.sleep(0.005)
    respond.succeeded = True
    await respond.event("[DONE]")
    await respond.end_stream()


# Instances with faults.


def refuse(status: int) -> Behaviour:
    async def behave(request: Received, respond: Responder) -> None:
        await respond.answer(status, b'{"error": {"message": "no", "code": "%d"}}' % status)

    return behave


def break_off(after: bytes, after_in_stream: bytes | None = None) -> Behaviour:
    async def behave(request: Received, respond: Responder) -> None:
        is_stream = request.json.get("stream") and after_in_stream is not None
        if data := after_in_stream if is_stream else after:
            await respond.raw(data)
            await asyncio.sleep(0.02)
        respond.cut()

    return behave


def answer_pd_error() -> Behaviour:
    async def behave(request: Received, respond: Responder) -> None:
        await respond.answer(200, b'{"error": {"message": "PD Error: the decode instance refused", "code": 500}}')

    return behave


@contextlib.contextmanager
def behave_with(instance: StandIn, behave: Behaviour) -> Iterator[None]:
    instance.behave = behave
    yield


@contextlib.contextmanager
def hang_with_probes(instance: StandIn) -> Iterator[None]:
    instance.behave = never_answers
    instance.answers_probes = False
    yield


@contextlib.contextmanager
def accept_nothing(instance: StandIn) -> Iterator[None]:
    instance.stop()
    with full_backlog(instance.port):
        yield


@contextlib.contextmanager
def stop(instance: StandIn) -> Iterator[None]:
    instance.stop()
    yield


Fault = Callable[[StandIn], contextlib.AbstractContextManager[None]]

FAULTS: dict[str, Fault] = {
    "answers 429": lambda i: behave_with(i, refuse(429)),
    "answers 500": lambda i: behave_with(i, refuse(500)),
    "answers garbage": lambda i: behave_with(i, break_off(b"\x16\x03\x01garbage???\r\n\r\n")),
    "hangs, and its probes too": hang_with_probes,
    "closes before its headers": lambda i: behave_with(i, break_off(b"")),
    "breaks off in the middle": lambda i: behave_with(i, break_off(MIDDLE_OF_ANSWER, MIDDLE_OF_STREAM)),
    "accepts no connection": accept_nothing,
    "has died": stop,
}
UNREACHABLE = {"accepts no connection", "has died"}
# A stream that has begun cannot be sent again.
CUTS_STREAMS = {("decode", "breaks off in the middle"), ("mixed", "breaks off in the middle")}
# Only these faults depend on the health of instances, which two workers share.
AT_TWO_WORKERS = ("hangs, and its probes too", "breaks off in the middle", "has died")


@pytest.fixture
def fleet(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., Fleet]:
    """Return a function that starts two instances of each role and a router: ``fleet(splitwise=True)``."""
    if "accepts no connection" in request.node.name:  # other tests need the longer time on a busy machine
        monkeypatch.setattr("router.http.pool.CONNECT_SECONDS", 2.0)

    def start(splitwise: bool, **settings: Any) -> Fleet:
        roles = ("prefill", "prefill", "decode", "decode") if splitwise else ("mixed", "mixed")
        instances = [stand_in(role) for role in roles]
        for instance in instances:
            normal = {"prefill": behave_as_prefill(), "decode": behave_as_decode(instances)}
            instance.behave = normal.get(instance.role, answer)
        running = Fleet(make_router(*instances, splitwise=splitwise, **settings), instances)
        for worker in running.router.workers:
            upstream = worker.app.upstream
            monkeypatch.setattr(upstream, "fetch", shorten_hanging_probes(instances, upstream.fetch))
        return running

    return start


def shorten_hanging_probes(instances: list[StandIn], fetch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``fetch`` that fails the probes of hanging instances soon after their role has got all requests.

    An earlier failure would keep requests away from these instances. Other instances have the usual time.
    """

    async def fetch_soon(address: Address, method: str, target: str, *, timeout: float, **options: Any) -> Any:
        probed = next(instance for instance in instances if instance.port == address.port)
        if not probed.answers_probes:
            mates = [instance for instance in instances if instance.role == probed.role]
            while sum(len(mate.received) for mate in mates) < REQUESTS:
                await asyncio.sleep(0.01)
            timeout = HUNG_SECONDS
        return await fetch(address, method, target, timeout=timeout, **options)

    return fetch_soon


@pytest.mark.parametrize(
    ("fault", "workers"), [*((fault, 1) for fault in FAULTS), *((fault, 2) for fault in AT_TWO_WORKERS)]
)
@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_a_failing_instance_loses_no_request(fleet: Callable[..., Fleet], role: str, fault: str, workers: int) -> None:
    running = fleet(role != "mixed", workers=workers, **PROBES)
    failing = running.of(role)[0]
    with FAULTS[fault](failing):
        results = ask_all(running)
        name = f"one of two {role}: {fault}" + (", two workers" if workers == 2 else "")
        row = report(running, name, results, failing, may_cut=(role, fault) in CUTS_STREAMS)
    assert (row.lost, row.wrong, row.left_running) == (0, 0, 0)
    assert failing.received or fault in UNREACHABLE
    if (role, fault) not in CUTS_STREAMS:
        assert row.served == REQUESTS


def test_a_pd_error_of_prefill_does_not_reach_clients(fleet: Callable[..., Fleet]) -> None:
    running = fleet(True)
    failing = running.of("prefill")[0]
    failing.behave = answer_pd_error()
    row = report(running, "one of two prefill: 'PD Error' in an answer of 200", ask_all(running), failing)
    assert (row.served, row.lost, row.wrong, row.left_running) == (REQUESTS, 0, 0, 0)


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_the_time_out_ends_requests_at_an_instance_that_hangs_unnoticed(fleet: Callable[..., Fleet], role: str) -> None:
    running = fleet(role != "mixed", request_timeout_secs=4.0)
    failing = running.of(role)[0]
    failing.behave = never_answers
    results = ask_all(running)
    row = report(running, f"one of two {role}: hangs, though its probes pass", results, failing, late=True)
    assert (row.lost, row.wrong, row.left_running) == (0, 0, 0)


CLEAR_ERRORS = [
    ("prefill", "answers 429", 429, "429"),
    ("decode", "answers 429", 429, "429"),
    ("mixed", "answers 429", 429, "429"),
    ("prefill", "answers 500", 502, "prefill_failed"),
    ("decode", "answers 500", 500, "500"),
    ("mixed", "answers 500", 500, "500"),
    ("prefill", "closes before its headers", 502, "prefill_failed"),
    ("decode", "closes before its headers", 502, "decode_failed"),
    ("mixed", "closes before its headers", 502, "mixed_failed"),
    ("prefill", "hangs, and its probes too", 502, "prefill_failed"),
    ("decode", "hangs, and its probes too", 502, "decode_failed"),
    ("mixed", "hangs, and its probes too", 502, "mixed_failed"),
]


@pytest.mark.parametrize(
    ("role", "fault", "status", "code", "workers"),
    [(*row, workers) for workers in (1, 2) for row in CLEAR_ERRORS if workers == 1 or row[1] in AT_TWO_WORKERS],
)
def test_each_client_gets_one_clear_error_if_all_instances_of_a_role_fail(
    fleet: Callable[..., Fleet], role: str, fault: str, status: int, code: str, workers: int
) -> None:
    running = fleet(role != "mixed", workers=workers, **PROBES)
    with contextlib.ExitStack() as faults:
        for failing in running.of(role):
            faults.enter_context(FAULTS[fault](failing))
        left = faults.enter_context(collect_garbage(running.router.app))
        results = ask_all(running)
        wrong = sum((one.status, one.error) != (status, code) for one in results)
        row = Report(f"all of {role}: {fault}", REQUESTS, 0, 0, wrong, count_left_running(running, running.of(role)))
        REPORTS.append(row)
    assert {(one.status, one.error) for one in results} == {(status, code)}
    assert row.left_running == 0
    assert left == [], "only the garbage collector frees objects of failed requests"


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("splitwise", [True, False])
def test_all_legs_end_when_clients_leave(fleet: Callable[..., Fleet], splitwise: bool, workers: int) -> None:
    running = fleet(splitwise, workers=workers)
    slow = {"prefill": behave_as_prefill(), "decode": answer_staying(running.instances), "mixed": answer_staying([])}
    for instance in running.instances:
        instance.behave = slow[instance.role]
    with collect_garbage(running.router.app) as freed_by_collector:
        results = ask_all(running, leaving=True)
        left = count_left_running(running, [])
    stayed = [one for one in results if one is not None]
    served = sum(one.status == 200 and not one.error for one in stayed)
    mode = "prefill and decode" if splitwise else "mixed"
    REPORTS.append(Report(f"{mode}: half of the clients leave", REQUESTS, served, len(stayed) - served, 0, left))
    assert (len(stayed), served, left) == (REQUESTS // 2, REQUESTS // 2, 0)
    assert freed_by_collector == []


def test_requests_of_clients_that_leave_during_prefill_are_freed_without_the_garbage_collector(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instances = [stand_in("prefill", answer_staying([])), stand_in("decode", answer)]
    for instance in instances:
        instance.extra_fields = {"engine": "openai"}
    running = Fleet(make_router(*instances, splitwise=True), instances)
    with collect_garbage(running.router.app) as left:
        ask_all(running, leaving=True)
        count_left_running(running, instances)  # they do not accept aborts
    assert left == []


def test_requests_that_time_out_in_the_queue_need_no_garbage_collector(fleet: Callable[..., Fleet]) -> None:
    running = fleet(False, max_concurrent_requests=1, queue_timeout_secs=0.05)
    with collect_garbage(running.router.app) as left:
        results = ask_all(running)
        count_left_running(running, [])
    assert "queue_timeout" in {one.error for one in results}
    assert left == []


@contextlib.contextmanager
def collect_garbage(router: RouterApp) -> Iterator[list[str]]:
    """Collect the types of a router's objects that only the garbage collector can free after the block.

    The types come from the collector's own list, because running requests free other objects at the same time.
    """
    types: list[str] = []
    gc.freeze()  # so that the collector does not search older objects
    gc.disable()
    try:
        yield types
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        types += [type(one).__name__ for one in gc.garbage if belongs_to_requests(one, router)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def belongs_to_requests(one: object, router: RouterApp) -> bool:
    """Return whether an object is a connection or an exchange of this router; these hold all other objects of requests.

    Clients, stand-ins and routers of earlier tests in this process leave garbage, too.
    """
    if isinstance(one, RouterProtocol):
        return one._data_plane is router.proxy
    if isinstance(one, Exchange | Connection):
        return one._pool is router.upstream
    return False


def answer_staying(fleet: list[StandIn]) -> Behaviour:
    """Return a behaviour that answers only clients that stay, and waits until the others have left."""
    normal = behave_as_decode(fleet) if fleet else answer

    async def behave(request: Received, respond: Responder) -> None:
        if request.json["leaves"]:
            if request.json.get("stream"):
                await respond.start_stream()
                await respond.event("{}")
            await respond.peer_left.wait()
            respond.keep_alive = False
        else:
            await normal(request, respond)

    return behave


def ask_all(fleet: Fleet, leaving: bool = False) -> list[Any]:
    """Send all requests at once and return the results. With ``leaving``, half of the clients leave and get None."""

    async def ask(client: httpx.AsyncClient, number: int) -> ClientResult | None:
        leaves = leaving and number % 2 == 0
        body = {"request_id": f"r{number}", "number": str(number), "stream": number % 4 < 2, "leaves": leaves}
        workers = fleet.router.workers
        url = f"{workers[number // 4 % len(workers)].url}/v1/chat/completions"
        if not leaves:
            response = await client.post(url, json=body)
            return read_answer("/v1/chat/completions", response)
        with contextlib.suppress(httpx.TimeoutException):
            await client.post(url, json=body, timeout=httpx.Timeout(20, read=0.3))
        return None

    async def ask_concurrently() -> list[ClientResult | None]:
        async with httpx.AsyncClient(
            trust_env=False, verify=False, timeout=30, limits=httpx.Limits(max_connections=REQUESTS)
        ) as client:
            return list(await asyncio.gather(*(ask(client, i) for i in range(REQUESTS))))

    return fleet.router.thread.run(ask_concurrently(), deadline_s=60)


def report(
    fleet: Fleet, name: str, results: list[ClientResult], failing: StandIn, *, may_cut: bool = False, late: bool = False
) -> Report:
    """Count the clients' results, and add them to the table.

    Args:
        may_cut: streams may end with an error event where their instance broke off.
        late: requests that reached the failing instance may end with 504.
    """
    row = Report(name, REQUESTS, 0, 0, 0, 0)
    taken = {request.json["number"] for request in failing.received}
    for number, one in enumerate(results):
        right = str(number) * (PIECES if number % 4 < 2 else 1)
        if one.status == 200 and not one.error:
            row.served += one.text == right
            row.wrong += one.text != right
        elif may_cut and one.begun:
            row.wrong += (one.status, one.error) != (200, f"{failing.role}_failed")
        elif late and str(number) in taken:
            row.wrong += (one.status, one.error) != (504, "request_timeout")
        else:
            row.lost += 1
    row.left_running = count_left_running(fleet, [failing])
    REPORTS.append(row)
    return row


def count_left_running(fleet: Fleet, failing: list[StandIn], deadline_s: float = 20.0) -> int:
    """Wait for the end of all legs; count those that still run, or that a working instance lost without an abort."""
    give_up_at = time.monotonic() + deadline_s
    while (left := _count_left_running(fleet, failing)) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    return left


def _count_left_running(fleet: Fleet, failing: list[StandIn]) -> int:
    instances = fleet.instances
    candidates = [instance.load for worker in fleet.router.workers for instance in worker.app.registry]
    left: int = sum(abs(c.requests) + abs(c.tokens) + abs(round(c.queued)) for c in candidates)
    for instance in instances:
        left += instance.running
        if instance not in failing:
            given_up = {_engine_id(request) for request in instance.received if request.body not in instance.answered}
            left += len(given_up - {req_id for abort in instance.aborted for req_id in abort["req_ids"]})
    return left


def _engine_id(request: Received) -> str:
    return f"chatcmpl-{request.json['request_id']}_0"
