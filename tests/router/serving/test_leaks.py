"""After any failure within a request, no load, place in a limit, connection, task or request of it is left.

The tests inject one fault after another: each call from ``router/serving`` to other code raises once, and the task that
serves the request is cancelled once at each ``await``. After each fault all counters must be zero, and the next request
must be served. Real routers run over sockets; instances are stand-ins.
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
# These functions release resources, so a fault within them would leak. They only count, or call the event loop.
LAST_RESORTS = {
    *("remove_request", "remove_prefill", "leave", "close", "fail", "discard_open", "abort", "__repr__"),
    *("cut_response", "_complete_response", "end_with", "on_response_complete", "run"),
}
MOST_FAULTS = 400
KEY = {"authorization": "Bearer sk-1"}


class Case(NamedTuple):
    """A request, and the fleet that serves it."""

    start: Callable[[MakeRouter, MakeStandIn, Path], RouterUnderTest]
    body: dict[str, Any]


def start_mixed(make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path) -> RouterUnderTest:
    return make_router(*(stand_in("mixed", answer) for _ in range(2)))


def start_limited(make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path) -> RouterUnderTest:
    instances = [stand_in("mixed", answer) for _ in range(2)]
    (tmp_path / "keys").write_text("alice: sk-1")
    limits = {"max_concurrent_requests": 4, "max_tokens_per_sec_per_key": 1e9}
    return make_router(*instances, sse_keepalive_secs=30.0, api_keys_file=str(tmp_path / "keys"), **limits)


def start_pairs(engine: str) -> Callable[[MakeRouter, MakeStandIn, Path], RouterUnderTest]:
    def start(make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path) -> RouterUnderTest:
        instances = [stand_in("prefill"), stand_in("decode", answer), stand_in("decode", answer)]
        for instance in instances:
            instance.extra_fields["engine"] = engine
        return make_router(*instances, splitwise=True)

    return start


def start_breaking(make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path) -> RouterUnderTest:
    return make_router(*(stand_in("mixed", break_first) for _ in range(2)))


def start_preempting(make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path) -> RouterUnderTest:
    decodes = [stand_in("decode", preempt_first) for _ in range(2)]
    return make_router(stand_in("prefill"), *decodes, splitwise=True)


def event(*ids: int, text: str = "a", finish: str | None = None) -> str:
    choice = {"index": 0, "delta": {"content": text, "completion_token_ids": ids}, "finish_reason": finish}
    return json.dumps({"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})


async def answer(request: Received, respond: Responder) -> None:
    if request.json.get("stream"):
        await streams("a", "b", "c")(request, respond)
    else:
        await answers()(request, respond)


async def break_first(request: Received, respond: Responder) -> None:
    await respond.start_stream()
    await respond.event(event(1))
    await asyncio.sleep(0.002)
    if request.json.get("completion_token_ids"):
        await respond.event(event(2, finish="stop"))
        await respond.event("[DONE]")
        await respond.end_stream()
    else:
        respond.cut()


async def preempt_first(request: Received, respond: Responder) -> None:
    answer = json.loads(chat_answer())
    if not request.json.get("completion_token_ids"):
        answer["choices"][0] |= {"finish_reason": "pd_reschedule"}
        answer["choices"][0]["message"]["completion_token_ids"] = [1]
    await respond.answer(200, json.dumps(answer).encode())


CASES = {
    "whole": Case(start_mixed, {}),
    "stream": Case(start_mixed, {"stream": True}),
    "whole of a pair": Case(start_pairs("fastdeploy"), {}),
    "stream of a pair": Case(start_pairs("fastdeploy"), {"stream": True}),
    "stream of a pair in order": Case(start_pairs("vllm"), {"stream": True}),
    "whole with limits": Case(start_limited, {}),
    "stream with limits": Case(start_limited, {"stream": True}),
    "stream that is resumed": Case(start_breaking, {"stream": True}),
    "whole that is preempted": Case(start_preempting, {}),
}


class Fault(Exception):
    """The injected fault."""


class CallFault:
    """Raises in the ``number``-th call, counted from 1, from serving to other code of the router."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.place = ""

    def __call__(self, frame: FrameType, kind: str, _: object) -> None:
        if kind != "call":
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
        """Watch the calling thread."""
        sys.setprofile(self)

    async def disarm(self) -> None:
        sys.setprofile(None)


class Cancelling:
    """Awaits a coroutine, and cancels its task at the ``number``-th ``await``, counted from 1."""

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
                awaited = step(sent)
            except StopIteration:
                return
            self._fault.on_wait()
            try:
                step, sent = steps.send, (yield awaited)
            except BaseException as exc:
                step, sent = steps.throw, exc


def ask(under_test: RouterUnderTest, body: dict[str, Any]) -> int:
    """Send a request, and return its status, or 0 if the connection ended."""
    try:
        return under_test.client.post(
            "/v1/chat/completions", json={"messages": [], **body}, headers=KEY, timeout=10
        ).status_code
    except httpx.RemoteProtocolError:
        return 0


def list_leaks(app: RouterApp) -> list[str]:
    """List the counters that are not zero while no request is served."""
    idle = sum(map(len, app.upstream._idle.values()))
    counted = {
        "live requests": app.proxy.num_requests,
        "admitted requests": app.admission.running,
        "queued requests": app.admission.waiting,
        "connections in use": len(app.upstream._open) - idle,
    }
    for instance in app.registry:
        load = instance.load
        counted |= {f"{name} of {instance.key}": getattr(load, name) for name in ("requests", "tokens", "queued")}
    return [f"{number} {name}" for name, number in counted.items() if abs(number) > 1e-6]


async def list_tasks() -> list[str]:
    """List the tasks that serve requests."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return [name for name in names if "ServingRequest" in name or "Cancelling" in name]


def check_counters(under_test: RouterUnderTest, place: str) -> None:
    try:
        wait_until(lambda: not list_leaks(under_test.app), "zero counters", deadline_s=10, pause_s=0.001)
    except AssertionError:
        pytest.fail(f"a fault in {place} leaves {list_leaks(under_test.app)}")
    wait_until(lambda: not under_test.thread.run(list_tasks()), f"the end of all tasks after {place}", 10, 0.001)
    for instance in under_test.app.registry:  # the fault may have counted as a failure of an instance
        instance.breaker.record_success()
        instance.mark_healthy(0.0)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def under_test(
    case: Case, make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> RouterUnderTest:
    monkeypatch.setattr("router.serving.attempt.PREFILL_GRACE_SECONDS", 0.05)
    monkeypatch.setattr("router.serving.attempt.SILENCE_SECONDS", 0.05)
    monkeypatch.setattr("router.serving.attempt.OTHER_LEG_SECONDS", 0.001)
    monkeypatch.setattr("router.serving.retry_loop.BACK_OFF_SECONDS", 0.0)
    started = case.start(make_router, stand_in, tmp_path)
    for _ in range(2):
        assert ask(started, case.body) == 200
    return started


def test_a_call_that_raises_leaks_nothing(case: Case, under_test: RouterUnderTest) -> None:
    for number in range(1, MOST_FAULTS):
        fault = CallFault(number)
        under_test.thread.run(fault.arm())
        ask(under_test, case.body)
        under_test.thread.run(fault.disarm())
        check_counters(under_test, fault.place)
        assert ask(under_test, case.body) == 200, fault.place
        if not fault.place:
            break
    assert 10 < number < MOST_FAULTS - 1


def test_a_task_that_is_cancelled_leaks_nothing(
    case: Case, under_test: RouterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ClientRequest.run
    faults: list[Cancelling] = []

    def run_with_fault(self: ClientRequest, serving: Coroutine[Any, Any, None]) -> None:
        run(self, faults[-1].run(serving))

    monkeypatch.setattr(ClientRequest, "run", run_with_fault)
    for number in range(1, MOST_FAULTS):
        faults.append(Cancelling(number))
        ask(under_test, case.body)
        was_injected = faults[-1].left <= 0
        faults.append(Cancelling(0))
        check_counters(under_test, f"wait {number}")
        assert ask(under_test, case.body) == 200, number
        if not was_injected:
            break
    assert number < MOST_FAULTS - 1
