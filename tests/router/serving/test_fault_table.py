"""64 requests at once over two instances a role, of which one fails in some way: what that costs the clients.

Half of the requests are streams. Instances are stand-ins. At the end of a run a table says what each fault cost.
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
# A sound instance may take its time on a busy machine; one that hangs is given up within a test.
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
        """The instances of a role."""
        return [instance for instance in self.instances if instance.role == role]


# How a sound instance answers: prefill at once, decode when prefill has the same request, as it waits for its KV.


def prefills() -> Behaviour:
    async def behave(request: Received, respond: Responder) -> None:
        await asyncio.sleep(0.01)
        await respond.answer(200, chat_answer())

    return behave


def decodes(fleet: list[StandIn]) -> Behaviour:
    async def behave(request: Received, respond: Responder) -> None:
        while not any(request.body in instance.answered for instance in fleet if instance.role == "prefill"):
            if respond.peer_left.is_set():
                respond.keep_alive = False
                return
            await asyncio.sleep(0.01)
        await answer(request, respond)

    return behave


async def answer(request: Received, respond: Responder) -> None:
    """The request's own number, once whole or ``PIECES`` times in a stream."""
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


# How instances fail.


def refuses(status: int) -> Behaviour:
    async def behave(request: Received, respond: Responder) -> None:
        await respond.answer(status, b'{"error": {"message": "no", "code": "%d"}}' % status)

    return behave


def breaks(after: bytes, after_in_stream: bytes | None = None) -> Behaviour:
    async def behave(request: Received, respond: Responder) -> None:
        is_stream = request.json.get("stream") and after_in_stream is not None
        if data := after_in_stream if is_stream else after:
            await respond.raw(data)
            await asyncio.sleep(0.02)
        respond.cut()

    return behave


def says_pd_error() -> Behaviour:
    async def behave(request: Received, respond: Responder) -> None:
        await respond.answer(200, b'{"error": {"message": "PD Error: the decode instance refused", "code": 500}}')

    return behave


@contextlib.contextmanager
def behaving(instance: StandIn, behave: Behaviour) -> Iterator[None]:
    instance.behave = behave
    yield


@contextlib.contextmanager
def hanging_with_its_probes(instance: StandIn) -> Iterator[None]:
    instance.behave = never_answers
    instance.answers_probes = False
    yield


@contextlib.contextmanager
def accepting_nothing(instance: StandIn) -> Iterator[None]:
    instance.stop()
    with full_backlog(instance.port):
        yield


@contextlib.contextmanager
def dead(instance: StandIn) -> Iterator[None]:
    instance.stop()
    yield


Fault = Callable[[StandIn], contextlib.AbstractContextManager[None]]

FAULTS: dict[str, Fault] = {
    "answers 429": lambda i: behaving(i, refuses(429)),
    "answers 500": lambda i: behaving(i, refuses(500)),
    "answers garbage": lambda i: behaving(i, breaks(b"\x16\x03\x01garbage???\r\n\r\n")),
    "hangs, and its probes too": hanging_with_its_probes,
    "closes before its headers": lambda i: behaving(i, breaks(b"")),
    "breaks off in the middle": lambda i: behaving(i, breaks(MIDDLE_OF_ANSWER, MIDDLE_OF_STREAM)),
    "accepts no connection": accepting_nothing,
    "has died": dead,
}
UNREACHABLE = {"accepts no connection", "has died"}
# What a stream has begun with cannot be taken back.
CUTS_STREAMS = {("decode", "breaks off in the middle"), ("mixed", "breaks off in the middle")}
# Two workers differ from one in what they learn of an instance's health.
AT_TWO_WORKERS = ("hangs, and its probes too", "breaks off in the middle", "has died")


@pytest.fixture
def fleet(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., Fleet]:
    """Starts two instances of each role and a router before them: ``fleet(splitwise=True)``."""
    if "accepts no connection" in request.node.name:  # elsewhere a busy machine may need its time
        monkeypatch.setattr("router.http.pool.CONNECT_SECONDS", 2.0)

    def start(splitwise: bool, **settings: Any) -> Fleet:
        roles = ("prefill", "prefill", "decode", "decode") if splitwise else ("mixed", "mixed")
        instances = [stand_in(role) for role in roles]
        for instance in instances:
            sound = {"prefill": prefills(), "decode": decodes(instances)}
            instance.behave = sound.get(instance.role, answer)
        running = Fleet(make_router(*instances, splitwise=splitwise, **settings), instances)
        for worker in running.router.workers:
            upstream = worker.app.upstream
            monkeypatch.setattr(upstream, "fetch", impatient_with_hanging(instances, upstream.fetch))
        return running

    return start


def impatient_with_hanging(instances: list[StandIn], fetch: Callable[..., Any]) -> Callable[..., Any]:
    """A pool's ``fetch`` that gives up those that do not answer probes soon after all requests have come to their role.

    Before, it would be too early: requests are to meet them. The others may take their time.
    """

    async def fetch_soon(address: Address, method: str, target: str, *, timeout: float, **options: Any) -> Any:
        asked = next(instance for instance in instances if instance.port == address.port)
        if not asked.answers_probes:
            mates = [instance for instance in instances if instance.role == asked.role]
            while sum(len(mate.received) for mate in mates) < REQUESTS:
                await asyncio.sleep(0.01)
            timeout = HUNG_SECONDS
        return await fetch(address, method, target, timeout=timeout, **options)

    return fetch_soon


@pytest.mark.parametrize(
    ("fault", "workers"), [*((fault, 1) for fault in FAULTS), *((fault, 2) for fault in AT_TWO_WORKERS)]
)
@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_one_of_two(fleet: Callable[..., Fleet], role: str, fault: str, workers: int) -> None:
    running = fleet(role != "mixed", workers=workers, **PROBES)
    failing = running.of(role)[0]
    with FAULTS[fault](failing):
        ended = ask_all(running)
        name = f"one of two {role}: {fault}" + (", two workers" if workers == 2 else "")
        row = report(running, name, ended, failing, may_cut=(role, fault) in CUTS_STREAMS)
    assert (row.lost, row.wrong, row.left_running) == (0, 0, 0)
    assert failing.received or fault in UNREACHABLE
    if (role, fault) not in CUTS_STREAMS:
        assert row.served == REQUESTS


def test_prefill_tells_pd_error_to_its_own_client_only(fleet: Callable[..., Fleet]) -> None:
    running = fleet(True)
    failing = running.of("prefill")[0]
    failing.behave = says_pd_error()
    row = report(running, "one of two prefill: 'PD Error' in an answer of 200", ask_all(running), failing)
    assert (row.served, row.lost, row.wrong, row.left_running) == (REQUESTS, 0, 0, 0)


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_a_hang_that_probes_do_not_show_is_ended_by_the_time_out(fleet: Callable[..., Fleet], role: str) -> None:
    running = fleet(role != "mixed", request_timeout_secs=4.0)
    failing = running.of(role)[0]
    failing.behave = never_answers
    ended = ask_all(running)
    row = report(running, f"one of two {role}: hangs, though its probes pass", ended, failing, late=True)
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
def test_where_all_of_a_role_fail_each_client_gets_one_clear_error(
    fleet: Callable[..., Fleet], role: str, fault: str, status: int, code: str, workers: int
) -> None:
    running = fleet(role != "mixed", workers=workers, **PROBES)
    with contextlib.ExitStack() as faults:
        for failing in running.of(role):
            faults.enter_context(FAULTS[fault](failing))
        left = faults.enter_context(garbage(running.router.app))
        ended = ask_all(running)
        wrong = sum((one.status, one.error) != (status, code) for one in ended)
        row = Report(f"all of {role}: {fault}", REQUESTS, 0, 0, wrong, left_running(running, running.of(role)))
        REPORTS.append(row)
    assert {(one.status, one.error) for one in ended} == {(status, code)}
    assert row.left_running == 0
    assert left == [], "only the garbage collector frees what failed requests left"


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("splitwise", [True, False])
def test_clients_that_leave_take_their_legs_with_them(
    fleet: Callable[..., Fleet], splitwise: bool, workers: int
) -> None:
    running = fleet(splitwise, workers=workers)
    slow = {"prefill": prefills(), "decode": slowly(running.instances), "mixed": slowly([])}
    for instance in running.instances:
        instance.behave = slow[instance.role]
    with garbage(running.router.app) as freed_by_collector:
        ended = ask_all(running, leaving=True)
        left = left_running(running, [])
    stayed = [one for one in ended if one is not None]
    served = sum(one.status == 200 and not one.error for one in stayed)
    mode = "prefill and decode" if splitwise else "mixed"
    REPORTS.append(Report(f"{mode}: half of the clients leave", REQUESTS, served, len(stayed) - served, 0, left))
    assert (len(stayed), served, left) == (REQUESTS // 2, REQUESTS // 2, 0)
    assert freed_by_collector == []


def test_what_clients_leave_that_go_while_prefill_is_asked_first_is_freed_without_the_garbage_collector(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instances = [stand_in("prefill", slowly([])), stand_in("decode", answer)]
    for instance in instances:
        instance.told = {"engine": "openai"}
    running = Fleet(make_router(*instances, splitwise=True), instances)
    with garbage(running.router.app) as left:
        ask_all(running, leaving=True)
        left_running(running, instances)  # which know no aborts
    assert left == []


def test_what_waits_in_line_for_too_long_is_freed_without_the_garbage_collector(fleet: Callable[..., Fleet]) -> None:
    running = fleet(False, max_concurrent_requests=1, queue_timeout_secs=0.05)
    with garbage(running.router.app) as left:
        ended = ask_all(running)
        left_running(running, [])
    assert "queue_timeout" in {one.error for one in ended}
    assert left == []


@contextlib.contextmanager
def garbage(router: RouterApp) -> Iterator[list[str]]:
    """The types of a router's objects that only the garbage collector could free, once the block is left.

    The collector is asked for what it found, not for how many are gone after it: what still runs ends meanwhile.
    """
    types: list[str] = []
    gc.freeze()  # what is there already would take most of its time
    gc.disable()
    try:
        yield types
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        types += [type(one).__name__ for one in gc.garbage if of_requests(one, router)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def of_requests(one: object, router: RouterApp) -> bool:
    """Whether it serves a router's requests: clients' connections, exchanges, instances' connections hold all the rest.

    Not everybody's: clients and stand-ins of this process leave garbage too, and so do routers of tests before.
    """
    if isinstance(one, RouterProtocol):
        return one._data_plane is router.proxy
    if isinstance(one, Exchange | Connection):
        return one._pool is router.upstream
    return False


def slowly(fleet: list[StandIn]) -> Behaviour:
    """Answer those that stay; the others only once they have left."""
    sound = decodes(fleet) if fleet else answer

    async def behave(request: Received, respond: Responder) -> None:
        if request.json["leaves"]:
            if request.json.get("stream"):
                await respond.start_stream()
                await respond.event("{}")
            await respond.peer_left.wait()
            respond.keep_alive = False
        else:
            await sound(request, respond)

    return behave


def ask_all(fleet: Fleet, leaving: bool = False) -> list[Any]:
    """All requests at once; what each client got. Of ``leaving`` ones, every other leaves and gets None."""

    async def ask(client: httpx.AsyncClient, number: int) -> ClientResult | None:
        leaves = leaving and number % 2 == 0
        asked = {"request_id": f"r{number}", "number": str(number), "stream": number % 4 < 2, "leaves": leaves}
        workers = fleet.router.workers
        url = f"{workers[number // 4 % len(workers)].url}/v1/chat/completions"
        if not leaves:
            response = await client.post(url, json=asked)
            return read_answer("/v1/chat/completions", response)
        with contextlib.suppress(httpx.TimeoutException):
            await client.post(url, json=asked, timeout=httpx.Timeout(20, read=0.3))
        return None

    async def all_of_them() -> list[ClientResult | None]:
        async with httpx.AsyncClient(
            trust_env=False, verify=False, timeout=30, limits=httpx.Limits(max_connections=REQUESTS)
        ) as client:
            return list(await asyncio.gather(*(ask(client, i) for i in range(REQUESTS))))

    return fleet.router.thread.run(all_of_them(), deadline_s=60)


def report(
    fleet: Fleet, fault: str, ended: list[ClientResult], failing: StandIn, *, may_cut: bool = False, late: bool = False
) -> Report:
    """Judge what the clients got, and keep it for the table.

    Args:
        may_cut: streams may end with an error event where their instance broke off.
        late: requests that the failing instance took may end with 504.
    """
    row = Report(fault, REQUESTS, 0, 0, 0, 0)
    taken = {request.json["number"] for request in failing.received}
    for number, one in enumerate(ended):
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
    row.left_running = left_running(fleet, [failing])
    REPORTS.append(row)
    return row


def left_running(fleet: Fleet, failing: list[StandIn], deadline_s: float = 20.0) -> int:
    """Legs that still run, or were given up without an abort at a sound instance; after waiting for them to end."""
    give_up_at = time.monotonic() + deadline_s
    while (left := _left_running(fleet, failing)) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    return left


def _left_running(fleet: Fleet, failing: list[StandIn]) -> int:
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
