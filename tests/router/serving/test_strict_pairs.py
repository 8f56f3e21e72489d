"""Pairs of vLLM and SGLang that check each rule of their dialect, behind the router: sound, and through all faults.

Requests come by four APIs, half of them as streams. The rules are in ``tests/support/strict_vllm.py`` and
``strict_sglang.py``; that no room and no transfer id is used twice is one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import pytest

from tests.router.conftest import RouterUnderTest
from tests.router.serving.fault_report import REPORTS, Report
from tests.router.serving.test_fault_table import (
    CUTS_STREAMS,
    FAULTS,
    PATIENT_PROBES,
    PROBES,
    UNREACHABLE,
    behaving,
    hangs,
)
from tests.router.stand_in import Received, Responder, StandIn
from tests.support.strict_sglang import StrictSglang
from tests.support.strict_vllm import StrictVllm
from tests.support.toy_model import PATHS, Asked, answer_text
from tests.support.waiting import wait_until

DIALECTS = ("nixl", "mooncake", "kvstore", "sglang")
REQUESTS = 16
# Of the two dialects that differ least from the others, the faults by which one leg leaves the other alone.
ONE_LEG_FAILS = ("answers 500", "closes before its headers", "breaks off in the middle", "has died")
FAULTS_OF = {dialect: FAULTS if dialect in ("nixl", "sglang") else ONE_LEG_FAILS for dialect in DIALECTS}

Strict = StrictVllm | StrictSglang


class Ended(NamedTuple):
    """What one client got."""

    status: int
    text: str
    error: bool
    cached: int | None
    """The prompt's tokens that usage says were cached, where it says so."""


@dataclass
class Fleet:
    """Two prefill and two decode instances of one dialect; the first of each role is the one that may fail."""

    strict: Strict
    router: RouterUnderTest
    instances: list[StandIn]
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def of(self, role: str) -> list[StandIn]:
        return [instance for instance in self.instances if instance.role == role]

    def ask(self, bodies: list[tuple[str, dict[str, Any]]]) -> list[Ended]:
        """All at once; what each client got."""
        self.strict.asked.update((str(body["number"]), body) for _, body in bodies)

        async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Ended:
            return read(path, await client.post(self.router.url + path, json=body))

        async def ask_all() -> list[Ended]:
            limits = httpx.Limits(max_connections=REQUESTS)
            async with httpx.AsyncClient(trust_env=False, timeout=60, limits=limits, verify=False) as client:
                return list(await asyncio.gather(*(ask(client, *body) for body in bodies)))

        return self.router.thread.run(ask_all(), deadline_s=90)

    def left(self) -> int:
        """What still runs, anywhere."""
        loads = [instance.load for instance in self.router.app.registry]
        counted = sum(abs(load.requests) + abs(load.tokens) + abs(round(load.queued)) for load in loads)
        return counted + self.strict.waiting + sum(instance.running for instance in self.instances)

    def check_all_ended(self) -> None:
        wait_until(lambda: not self.left(), "all legs to end")
        assert self.strict.violations == []


def bodies(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Requests by each API in turn, half of them streams."""
    listed: list[tuple[str, dict[str, Any]]] = []
    for number in range(count):
        path, stream = PATHS[number // 2 % len(PATHS)], bool(number % 2)
        text = " ".join(f"n{number}.{word}" for word in range(40))
        body: dict[str, Any] = {"model": "m", "number": str(number), "temperature": 0, "stream": stream}
        if path == "/v1/completions":
            body |= {"prompt": text, "max_tokens": 5}
        elif path == "/v1/responses":
            body |= {"input": text, "max_output_tokens": 5}
        else:
            body |= {"messages": [{"role": "user", "content": text}], "max_tokens": 5}
        if path == "/v1/chat/completions":
            body |= {"max_completion_tokens": 5}
        if stream and path.endswith("completions"):
            body |= {"stream_options": {"include_usage": True}, "min_tokens": 2}
        listed.append((path, body))
    return listed


def read(path: str, response: httpx.Response) -> Ended:
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        answered = response.json()
        if response.status_code != 200 or answered.get("error"):
            return Ended(response.status_code, "", True, None)
        if path == "/v1/messages":
            text = answered["content"][0]["text"]
        elif path == "/v1/responses":
            text = answered["output"][0]["content"][0]["text"]
        else:
            choice = answered["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
        return Ended(200, text, False, _cached(answered["usage"]))
    text, error, cached = "", False, None
    for line in response.text.split("\n"):
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            error |= "error" in event
            if usage := event.get("usage") or (event.get("response") or {}).get("usage"):
                cached = _cached(usage)
            if event.get("type") in ("content_block_delta", "response.output_text.delta"):
                delta = event["delta"]
                text += delta if isinstance(delta, str) else delta["text"]
            for choice in event.get("choices", ()):
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return Ended(response.status_code, text, error, cached)


def _cached(usage: dict[str, Any]) -> int | None:
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return None if details is None else int(details["cached_tokens"])


@pytest.fixture
def fleet(
    make_router: Callable[..., RouterUnderTest],
    stand_in: Callable[..., StandIn],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Callable[..., Fleet]]:
    """Starts a fleet: ``fleet("nixl")``; at the end every leg must have ended, and no rule been broken."""
    if any(fault in request.node.name for fault in UNREACHABLE):  # elsewhere a busy machine may need its time
        monkeypatch.setattr("router.http.pool.CONNECT_SECONDS", 3.0)
    started: list[Fleet] = []

    def start(dialect: str, **settings: Any) -> Fleet:
        instances = [stand_in(role) for role in ("prefill", "prefill", "decode", "decode")]
        strict: Strict
        if dialect == "sglang":
            strict = StrictSglang()
            for number, instance in enumerate(instances):
                strict.serve(instance, 9001 + number)
        else:
            strict = StrictVllm(dialect)  # type: ignore[arg-type]
            for instance in instances:
                has_bootstrap = dialect == "mooncake" and instance.role == "prefill"
                strict.serve(instance, stand_in("mixed") if has_bootstrap else None)
        router = make_router(*instances, splitwise=True, **settings)
        started.append(Fleet(strict, router, instances))
        return started[-1]

    yield start
    for one in started:
        one.check_all_ended()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_api_goes_through_a_pair_in_its_dialect(fleet: Callable[..., Fleet], dialect: str) -> None:
    running = fleet(dialect)
    asked = bodies(16)
    for one, (path, body) in zip(running.ask(asked), asked, strict=True):
        assert (one.status, one.text, one.error) == (200, answer_text(path, body), False), path
    # MooncakeConnector's prefill must not end before its one token is cut off, and /v1/messages cannot say so.
    alone = sum(path == "/v1/messages" for path, _ in asked) if dialect == "mooncake" else 0
    assert running.strict.transfers == len(asked) - alone
    if isinstance(running.strict, StrictVllm):
        assert (running.strict.alone, running.strict.stranded) == (alone, 0)


@pytest.mark.parametrize(
    ("dialect", "fault"), [(dialect, fault) for dialect in DIALECTS for fault in FAULTS_OF[dialect]]
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_of_two_fails(fleet: Callable[..., Fleet], dialect: str, role: str, fault: str) -> None:
    running = fleet(dialect, **(PROBES if "hangs" in fault else PATIENT_PROBES))
    failing = running.of(role)[0]
    asked = bodies(REQUESTS)
    with FAULTS[fault](failing):
        judge(running, f"{dialect}, one of two {role}: {fault}", asked, (role, fault) in CUTS_STREAMS)
        wait_until(lambda: not running.left(), "all legs to end")


@pytest.mark.parametrize("dialect", ["nixl", "mooncake"])
def test_a_prefill_that_was_started_again_costs_no_request(fleet: Callable[..., Fleet], dialect: str) -> None:
    running = fleet(dialect)
    strict, failing = running.strict, running.of("prefill")[0]
    assert isinstance(strict, StrictVllm)
    judge(running, f"{dialect}, sound", bodies(8))
    strict.restart(failing)
    judge(running, f"{dialect}, prefill was started again", bodies(REQUESTS))
    sound, count = failing.behave, 0

    async def restart_now_and_then(request: Received, respond: Responder) -> None:
        nonlocal count
        await sound(request, respond)
        count += 1
        if count % 2:
            strict.restart(failing)  # what it has just given out is gone

    with behaving(failing, restart_now_and_then):
        judge(running, f"{dialect}, prefill loses what it gave out", bodies(REQUESTS))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_several_prompts_and_several_answers(fleet: Callable[..., Fleet], dialect: str) -> None:
    running = fleet(dialect)
    prompts = ["one two three", "four five six"]
    batch = {"model": "m", "number": "1", "prompt": prompts, "max_tokens": 3}
    several = {"model": "m", "number": "2", "prompt": prompts[0], "max_tokens": 3, "n": 2, "temperature": 1}
    running.strict.asked.update({"1": batch, "2": several})
    answered = running.router.client.post("/v1/completions", json=batch)
    expected = [Asked.read("/v1/completions", {**batch, "prompt": prompt}) for prompt in prompts]
    texts = [choice["text"] for choice in answered.json()["choices"]]
    assert texts == [answer_text(one.path, one.body) for one in expected]
    answered = running.router.client.post("/v1/completions", json=several)
    if dialect == "sglang":  # all answers would share one room, and neither of a pair's instances serves alone
        assert (answered.status_code, answered.json()["error"]["code"]) == (400, "not_as_pair")
    else:
        assert len(answered.json()["choices"]) == 2


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_clients_that_leave_take_both_legs_with_them(fleet: Callable[..., Fleet], dialect: str, role: str) -> None:
    running = fleet(dialect)
    for instance in running.of(role):
        instance.behave = hangs()
    asked = [(path, body) for path, body in bodies(8) if path != "/v1/messages" or dialect != "mooncake"]

    async def leave() -> None:
        limits = httpx.Limits(max_connections=8)
        async with httpx.AsyncClient(trust_env=False, timeout=60, limits=limits, verify=False) as client:
            posts = [asyncio.ensure_future(client.post(running.router.url + path, json=body)) for path, body in asked]
            while sum(instance.running for instance in running.of(role)) < len(posts):
                await asyncio.sleep(0.01)
            for post in posts:
                post.cancel()
            await asyncio.gather(*posts, return_exceptions=True)

    with contextlib.suppress(asyncio.CancelledError):
        running.router.thread.run(leave(), deadline_s=30)


def judge(running: Fleet, fault: str, asked: list[tuple[str, dict[str, Any]]], may_cut: bool = False) -> None:
    """Ask all, keep a row for the table, and see that none was lost that another pair could serve."""
    ended = running.ask(asked)
    served = lost = wrong = 0
    for one, (path, body) in zip(ended, asked, strict=True):
        right = answer_text(path, body)
        if one.status == 200 and not one.error:
            served += one.text == right
            wrong += one.text != right
        elif not (may_cut and body["stream"] and one.status == 200):
            lost += 1
    REPORTS.append(Report(fault, len(asked), served, lost, wrong, 0))
    assert (lost, wrong) == (0, 0), [one for one in ended if one.error or one.status != 200][:2]
    assert served == len(asked) or may_cut
