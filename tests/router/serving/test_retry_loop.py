"""The table of retries, cell by cell: the number of attempts of a request that always fails in one way.

Each test runs a real router with eight stand-ins that all fail in the same way, so that attempts do not end for lack
of instances.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from itertools import product
from typing import Any

import httpx
import pytest

from router.serving.attempt import OTHER_LEG_SECONDS, Reached, Trouble
from router.serving.retry_loop import MAX_ATTEMPTS, MAX_DEATHS, Retries, Sent, classify, find_limit
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import Behaviour, Received, Responder, StandIn, answers, cuts, never_answers
from tests.support.waiting import wait_until

INSTANCES = 8
REQUESTS: dict[Sent, tuple[str, str]] = {
    Sent.GENERATION: ("POST", "/v1/chat/completions"),
    Sent.REPEATABLE: ("POST", "/v1/embeddings"),
    Sent.ONCE: ("POST", "/v1/images/generations"),
}
EVENT = {"id": "1", "choices": [{"index": 0, "delta": {"content": "a", "completion_token_ids": [7]}}]}
ENGINE_DEATH = {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}


def streams(*events: dict[str, Any], then: Behaviour) -> Behaviour:
    """Return a behaviour that sends these events of a stream, and continues with ``then``."""

    async def behave(request: Received, respond: Responder) -> None:
        await respond.start_stream()
        for event in events:
            await respond.event(json.dumps(event))
            await asyncio.sleep(0.02)
        await then(request, respond)

    return behave


async def end_stream(request: Received, respond: Responder) -> None:
    await respond.event("[DONE]")
    await respond.end_stream()


# Faults of instances, by the progress of the request and the trouble: of streams, and of other requests.
FAULTS: dict[tuple[Reached, Trouble], list[Behaviour]] = {
    (Reached.SENT, Trouble.DEATH): [cuts(), cuts(b"\x16\x03\x01garbage\r\n\r\n")],
    (Reached.HEAD, Trouble.DEATH): [
        cuts(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"),
        answers(500, json.dumps(ENGINE_DEATH).encode()),
    ],
    (Reached.HEAD, Trouble.ERROR): [answers(status, b"{}") for status in (429, 500, 502, 503)],
    (Reached.HEAD, Trouble.REJECTION): [answers(status, b"{}") for status in (307, 400, 404, 422)],
}
STREAM_FAULTS: dict[tuple[Reached, Trouble], list[Behaviour]] = {
    (Reached.HEAD, Trouble.DEATH): [streams(ENGINE_DEATH, then=end_stream)],
    (Reached.RELAYED, Trouble.DEATH): [streams(EVENT, then=cuts()), streams(EVENT, ENGINE_DEATH, then=end_stream)],
    (Reached.RELAYED, Trouble.STALL): [streams(EVENT, then=never_answers)],
}
OTHER_FAULTS: dict[tuple[Reached, Trouble], list[Behaviour]] = {
    (Reached.RELAYED, Trouble.DEATH): [cuts(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n[1,2")],
}


def list_cells() -> list[Any]:
    """List the possible cells of the table, each with all faults that lead to it."""
    cells = []
    for sent, reached, trouble in product(Sent, Reached, Trouble):
        faults = list(FAULTS.get((reached, trouble), ()))
        if sent is Sent.GENERATION:
            streamed = STREAM_FAULTS.get((reached, trouble), [])
        else:
            streamed, faults = [], faults + OTHER_FAULTS.get((reached, trouble), [])
        for number, (fault, is_stream) in enumerate([(f, False) for f in faults] + [(f, True) for f in streamed]):
            name = f"{sent.value}-{reached.value}-{trouble.value}-{number}"
            cells.append(pytest.param(sent, fault, is_stream, find_limit(sent, reached, trouble), id=name))
    return cells


def ask(router: RouterUnderTest, sent: Sent, **body: Any) -> httpx.Response:
    method, path = REQUESTS[sent]
    return router.client.request(method, path, json={"messages": [], **body})


def count_sent(instances: list[StandIn]) -> int:
    return sum(len(each.received) for each in instances)


@pytest.mark.parametrize(("sent", "fault", "is_stream", "limit"), list_cells())
def test_the_number_of_attempts_of_a_request_that_always_fails_is_that_of_the_table(
    make_router: MakeRouter,
    stand_in: MakeStandIn,
    monkeypatch: pytest.MonkeyPatch,
    sent: Sent,
    fault: Behaviour,
    is_stream: bool,
    limit: int,
) -> None:
    monkeypatch.setattr("router.serving.retry_loop.BACK_OFF_SECONDS", 0.0)
    instances = [stand_in("mixed", fault) for _ in range(INSTANCES)]
    router = make_router(*instances, stream_stall_secs=0.1)
    with contextlib.suppress(httpx.RemoteProtocolError):  # the router cuts a response that has begun and is no stream
        ask(router, sent, **({"stream": True} if is_stream else {}))
    assert count_sent(instances) == limit


@pytest.mark.parametrize("sent", Sent)
def test_a_request_that_no_instance_has_received_is_sent_to_others(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch, sent: Sent
) -> None:
    monkeypatch.setattr("router.serving.retry_loop.BACK_OFF_SECONDS", 0.0)
    instances = [stand_in("mixed") for _ in range(INSTANCES)]
    router = make_router(*instances)
    for instance in instances[:-1]:
        instance.stop()
    statuses = {ask(router, sent).status_code for _ in range(2)}
    assert statuses <= {200, 502}
    assert 200 in statuses  # the second request finds the only open port
    assert max(len(record.attempts) for record in router.app.audit.records) <= MAX_ATTEMPTS
    assert find_limit(sent, Reached.UNSENT, Trouble.UNREACHABLE) == MAX_ATTEMPTS


@pytest.mark.parametrize("is_warm", [False, True], ids=["new connections", "pooled connections"])
@pytest.mark.parametrize("engine", ["fastdeploy", "vllm", "sglang"])
def test_a_request_that_ends_every_instance_of_a_pair_ends_only_two(
    make_router: MakeRouter, stand_in: MakeStandIn, engine: str, is_warm: bool
) -> None:
    died: list[str] = []

    async def die_of_poison(request: Received, respond: Responder) -> None:
        if b"poison" in request.body:
            died.append(request.target)
            respond.cut()
        else:
            await answers()(request, respond)

    instances = [stand_in(role, die_of_poison) for role in ("prefill", "decode") for _ in range(4)]
    for instance in instances:
        instance.extra_fields["engine"] = engine
    router = make_router(*instances, splitwise=True)
    for _ in range(8 if is_warm else 0):
        assert router.chat().status_code == 200
    assert router.chat(user="poison").status_code == 502
    assert len(died) == MAX_DEATHS


def test_a_request_that_ends_instances_ends_three_after_a_stale_connection(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    """The prefill instances die after the router has stopped waiting. Only new connections reach decode instances."""
    died: set[str] = set()

    def die(name: str, *, is_prefill: bool) -> Behaviour:
        async def behave(request: Received, respond: Responder) -> None:
            if b"poison" not in request.body:
                await answers()(request, respond)
                return
            if is_prefill or request.header("connection") == "close":
                died.add(name)
            await asyncio.sleep(3 * OTHER_LEG_SECONDS if is_prefill else 0)
            respond.cut()

        return behave

    instances = [stand_in("prefill", die(f"prefill {number}", is_prefill=True)) for number in range(INSTANCES)]
    instances += [stand_in("decode", die(f"decode {number}", is_prefill=False)) for number in range(4)]
    for instance in instances:
        instance.extra_fields["engine"] = "sglang"
    router = make_router(*instances, splitwise=True, prefill_policy="round_robin", decode_policy="consistent_hash")
    for _ in range(INSTANCES):  # all prefill instances and one decode instance have an idle connection
        assert router.chat(user="u").status_code == 200
    assert router.chat(user="u", stop="poison").status_code == 502
    assert len(died) == 3


def test_deaths_before_and_during_a_response_count_together(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    behaviours = iter([cuts(), streams(EVENT, then=cuts())])

    async def die(request: Received, respond: Responder) -> None:
        await next(behaviours, streams(EVENT, then=end_stream))(request, respond)

    instances = [stand_in("mixed", die) for _ in range(INSTANCES)]
    text = make_router(*instances).chat(stream=True).text
    assert "instances failed 2 times while they served this request, so it is not sent again" in text
    assert count_sent(instances) == MAX_DEATHS


def test_the_death_of_one_of_a_pair_counts_although_the_other_was_not_reached() -> None:
    retries = Retries(Sent.GENERATION)
    for _ in range(MAX_DEATHS - 1):
        assert not retries.find_end(Reached.UNSENT, Trouble.UNREACHABLE, 1, "a:1")
    assert "instances failed 2 times" in retries.find_end(Reached.UNSENT, Trouble.UNREACHABLE, 1, "b:1")


@pytest.mark.parametrize(("second", "ends"), [("a:1", False), ("b:1", True)])
def test_an_instance_that_breaks_an_idle_and_then_a_new_connection_counts_as_one_death(second: str, ends: bool) -> None:
    retries = Retries(Sent.GENERATION)
    assert not retries.find_end(Reached.SENT, Trouble.DEATH, 1, "a:1", is_stale=True)
    assert bool(retries.find_end(Reached.SENT, Trouble.DEATH, 1, second)) == ends
    if not ends:
        assert "instances failed 2 times" in retries.find_end(Reached.SENT, Trouble.DEATH, 1, "c:1")


def test_a_death_in_a_pair_counts_if_the_other_instance_had_broken_an_idle_connection_and_is_not_reached_now() -> None:
    retries = Retries(Sent.GENERATION)
    assert not retries.find_end(Reached.SENT, Trouble.DEATH, 1, "a:1", is_stale=True)
    assert "instances failed 2 times" in retries.find_end(Reached.UNSENT, Trouble.UNREACHABLE, 1, "a:1")


@pytest.mark.parametrize(("status", "code"), [(500, "500"), (429, "429")])
def test_the_instance_that_stores_a_response_gets_a_failed_request_only_once(
    make_router: MakeRouter, stand_in: MakeStandIn, status: int, code: str
) -> None:
    async def answer_first_request(request: Received, respond: Responder) -> None:
        if request.json.get("previous_response_id"):
            await respond.answer(status, b'{"error": {"code": "%s"}}' % code.encode())
        else:
            await respond.answer(200, b'{"id": "resp_1"}')

    instances = [stand_in("mixed", answer_first_request) for _ in range(2)]
    router = make_router(*instances)
    assert router.client.post("/v1/responses", json={"input": "a"}).status_code == 200
    assert router.client.post("/v1/responses", json={"previous_response_id": "resp_1"}).status_code == status
    assert count_sent(instances) == 2


def test_an_engines_error_about_its_death_counts_as_a_broken_connection(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in("mixed", streams(EVENT, ENGINE_DEATH, then=end_stream))
    router = make_router(instance, stream_resume_count=0)
    text = router.chat(stream=True).text
    assert text.count('"error"') == 1
    assert "EngineCore encountered an issue." in text
    assert text.endswith("data: [DONE]\n\n")
    (known,) = router.app.registry
    assert known.breaker.failures == 1
    (record,) = wait_until(lambda: router.app.audit.records, "the record")
    assert record.error == "mixed_failed"


@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": "too long", "code": 400}},
        {"error": {"message": "no", "type": "invalid_request_error", "code": None}},
        {"error": "no"},
        {"choices": [{"index": 0, "delta": {"content": "b"}}], "error": {"code": 500}},
    ],
)
def test_an_error_that_is_no_failure_of_the_engine_is_forwarded(
    make_router: MakeRouter, stand_in: MakeStandIn, error: dict[str, Any]
) -> None:
    instances = [stand_in("mixed", streams(EVENT, error, then=end_stream)) for _ in range(2)]
    router = make_router(*instances)
    text = router.chat(stream=True).text
    assert json.dumps(error) in text
    assert count_sent(instances) == 1
    assert [known.breaker.failures for known in router.app.registry] == [0, 0]


@pytest.mark.parametrize(
    ("method", "path", "sent"),
    [
        ("POST", "/v1/chat/completions", Sent.GENERATION),
        ("POST", "/v1/messages", Sent.GENERATION),
        ("GET", "/v1/responses/resp_1", Sent.REPEATABLE),
        ("DELETE", "/v1/responses/resp_1", Sent.REPEATABLE),
        ("POST", "/tokenize", Sent.REPEATABLE),
        ("POST", "/v1/responses/resp_1/cancel", Sent.ONCE),
        ("POST", "/v1/batches", Sent.ONCE),
        ("PATCH", "/v1/embeddings/1", Sent.ONCE),
    ],
)
def test_method_and_path_decide_how_a_request_may_be_repeated(method: str, path: str, sent: Sent) -> None:
    assert classify(method, path) is sent
