"""Whatever fails within a request, nothing of it stays behind: no load, place, connection, task or request.

A fault is put into each place of a request's way in turn: each call of code outside ``router/serving`` raises once, and
the task that serves the request is cancelled once at each point at which it waits. After each fault all counters must
be zero, and the next request must be served. Real routers run over sockets; instances are stand-ins.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import httpx
import pytest

import router
from router.app import RouterApp
from router.http import ClientRequest
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import Received, Responder, answers, chat_answer, streams
from tests.support.waiting import wait_until

PACKAGE = Path(router.__file__).parent
SERVING = str(PACKAGE / "serving")
# These give back what was taken, or only note something: a fault in them would be one in the last resort itself. They
# are plain arithmetic, or end in calls of the event loop.
LAST_RESORTS = {
    *("remove_request", "remove_prefill", "leave", "close", "fail", "discard_open", "abort", "__repr__"),
    *("cut_response", "_complete_response", "end_with", "on_response_complete", "run"),
}
MOST_FAULTS = 400
KEY = {"authorization": "Bearer sk-1"}


class Way(NamedTuple):
    """A kind of request, and the fleet that serves it."""

    start: Callable[[MakeRouter, MakeStandIn, Path], RouterUnderTest]
    body: dict[str, Any]


def mixed(make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path) -> RouterUnderTest:
    return make_router(*(stand_in("mixed", serves) for _ in range(2)))


def limited(make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path) -> RouterUnderTest:
    instances = [stand_in("mixed", serves) for _ in range(2)]
    (tmp_path / "keys").write_text("alice: sk-1")
    limits = {"max_concurrent_requests": 4, "max_tokens_per_sec_per_key": 1e9}
    return make_router(*instances, sse_keepalive_secs=30.0, api_keys_file=str(tmp_path / "keys"), **limits)


def paired(engine: str) -> Callable[[MakeRouter, MakeStandIn, Path], RouterUnderTest]:
    def start(make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path) -> RouterUnderTest:
        instances = [stand_in("prefill"), stand_in("decode", serves), stand_in("decode", serves)]
        for instance in instances:
            instance.told["engine"] = engine
        return make_router(*instances, splitwise=True)

    return start


def breaking(make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path) -> RouterUnderTest:
    return make_router(*(stand_in("mixed", breaks_first) for _ in range(2)))


def preempting(make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path) -> RouterUnderTest:
    decodes = [stand_in("decode", preempts_first) for _ in range(2)]
    return make_router(stand_in("prefill"), *decodes, splitwise=True)


def event(*ids: int, text: str = "a", finish: str | None = None) -> str:
    choice = {"index": 0, "delta": {"content": text, "completion_token_ids": ids}, "finish_reason": finish}
    return json.dumps({"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})


async def serves(request: Received, respond: Responder) -> None:
    if request.json.get("stream"):
        await streams("a", "b", "c")(request, respond)
    else:
        await answers()(request, respond)


async def breaks_first(request: Received, respond: Responder) -> None:
    await respond.start_stream()
    await respond.event(event(1))
    await asyncio.sleep(0.002)
    if request.json.get("completion_token_ids"):
        await respond.event(event(2, finish="stop"))
        await respond.event("[DONE]")
        await respond.end_stream()
    else:
        respond.cut()


async def preempts_first(request: Received, respond: Responder) -> None:
    answer = json.loads(chat_answer())
    if not request.json.get("completion_token_ids"):
        answer["choices"][0] |= {"finish_reason": "pd_reschedule"}
        answer["choices"][0]["message"]["completion_token_ids"] = [1]
    await respond.answer(200, json.dumps(answer).encode())


WAYS = {
    "whole": Way(mixed, {}),
    "stream": Way(mixed, {"stream": True}),
    "whole of a pair": Way(paired("fastdeploy"), {}),
    "stream of a pair": Way(paired("fastdeploy"), {"stream": True}),
    "stream of a pair in order": Way(paired("vllm"), {"stream": True}),
    "whole with limits": Way(limited, {}),
    "stream with limits": Way(limited, {"stream": True}),
    "stream that is resumed": Way(breaking, {"stream": True}),
    "whole that is preempted": Way(preempting, {}),
}


class Fault(Exception):
    """The fault put in."""


class CallFault:
    """Raises in the call of that number, of those from serving to the rest of the router; counts from 1."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.place = ""

    def __call__(self, frame: FrameType, what: str, _: object) -> None:
        if what != "call":
            return
        code, caller = frame.f_code, frame.f_back
        name = code.co_filename
        if caller is None or not caller.f_code.co_filename.startswith(SERVING) or name.startswith(SERVING):
            return
        if not name.startswith(str(PACKAGE)) or code.co_name in LAST_RESORTS or code.co_name.startswith("<"):
            return
        self.left -= 1
        if not self.left:
            self.place = f"{name}:{code.co_name}"
            raise Fault(self.place)

    async def arm(self) -> None:
        """Watch the thread that runs this."""
        sys.setprofile(self)

    async def disarm(self) -> None:
        sys.setprofile(None)


class Cancelling:
    """Awaits a coroutine, and cancels the task it runs in as it waits for the time of that number; counts from 1."""

    def __init__(self, number: int) -> None:
        self.left = number

    async def run(self, serving: Awaitable[None]) -> None:
        await _Steps(serving, self)

    def on_wait(self) -> None:
        self.left -= 1
        if not self.left:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_soon(task.cancel)


class _Steps:
    def __init__(self, serving: Awaitable[None], fault: Cancelling) -> None:
        self._serving = serving
        self._fault = fault

    def __await__(self) -> Generator[Any, Any, None]:
        steps = self._serving.__await__()
        step, sent = steps.send, None
        while True:
            try:
                waited_for = step(sent)
            except StopIteration:
                return
            self._fault.on_wait()
            try:
                step, sent = steps.send, (yield waited_for)
            except BaseException as exc:
                step, sent = steps.throw, exc


def ask(under_test: RouterUnderTest, body: dict[str, Any]) -> int:
    """The status of one request; 0 where the connection ended."""
    try:
        return under_test.client.post(
            "/v1/chat/completions", json={"messages": [], **body}, headers=KEY, timeout=10
        ).status_code
    except httpx.RemoteProtocolError:
        return 0


def list_leaks(app: RouterApp) -> list[str]:
    """What is counted though no request is served."""
    idle = sum(map(len, app.upstream._idle.values()))
    counted = {
        "requests that live": app.proxy.num_requests,
        "requests let in": app.admission.running,
        "requests in line": app.admission.waiting,
        "connections in use": len(app.upstream._open) - idle,
    }
    for instance in app.registry:
        load = instance.load
        counted |= {f"{name} of {instance.key}": getattr(load, name) for name in ("requests", "tokens", "queued")}
    return [f"{number} {name}" for name, number in counted.items() if abs(number) > 1e-6]


async def list_tasks() -> list[str]:
    """The tasks in which requests are served."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return [name for name in names if "ServingRequest" in name or "Cancelling" in name]


def check_that_nothing_is_left(under_test: RouterUnderTest, place: str) -> None:
    try:
        wait_until(lambda: not list_leaks(under_test.app), "zero counters", deadline_s=10, pause_s=0.001)
    except AssertionError:
        pytest.fail(f"a fault in {place} leaves {list_leaks(under_test.app)}")
    wait_until(lambda: not under_test.thread.run(list_tasks()), f"the end of all tasks after {place}", 10, 0.001)
    for instance in under_test.app.registry:  # a fault may have been put down to an instance
        instance.breaker.record_success()
        instance.mark_healthy(0.0)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture
def under_test(
    way: Way, make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> RouterUnderTest:
    monkeypatch.setattr("router.serving.attempt.PREFILL_GRACE_SECONDS", 0.05)
    monkeypatch.setattr("router.serving.attempt.SILENCE_SECONDS", 0.05)
    monkeypatch.setattr("router.serving.attempt.OTHER_LEG_SECONDS", 0.001)
    monkeypatch.setattr("router.serving.retry_loop.BACK_OFF_SECONDS", 0.0)
    started = way.start(make_router, stand_in, tmp_path)
    for _ in range(2):
        assert ask(started, way.body) == 200
    return started


def test_a_call_that_raises_leaves_nothing_behind(way: Way, under_test: RouterUnderTest) -> None:
    for number in range(1, MOST_FAULTS):
        fault = CallFault(number)
        under_test.thread.run(fault.arm())
        ask(under_test, way.body)
        under_test.thread.run(fault.disarm())
        check_that_nothing_is_left(under_test, fault.place)
        assert ask(under_test, way.body) == 200, fault.place
        if not fault.place:
            break
    assert 10 < number < MOST_FAULTS - 1


def test_a_task_that_is_cancelled_leaves_nothing_behind(
    way: Way, under_test: RouterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ClientRequest.run
    faults: list[Cancelling] = []

    def run_with_fault(self: ClientRequest, serving: Coroutine[Any, Any, None]) -> None:
        run(self, faults[-1].run(serving))

    monkeypatch.setattr(ClientRequest, "run", run_with_fault)
    for number in range(1, MOST_FAULTS):
        faults.append(Cancelling(number))
        ask(under_test, way.body)
        was_put_in = faults[-1].left <= 0
        faults.append(Cancelling(0))
        check_that_nothing_is_left(under_test, f"wait {number}")
        assert ask(under_test, way.body) == 200, number
        if not was_put_in:
            break
    assert number < MOST_FAULTS - 1
