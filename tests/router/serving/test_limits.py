"""Limits of clients: tokens a second, priorities, aborts in the queue, and separate caches."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from router.access import Admission
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import Behaviour, Received, Responder, StandIn, answers, chat_answer, stalls
from tests.support.toy_model import Asked
from tests.support.waiting import wait_until

KEYS = "alice: sk-1\nbob: {key: sk-2, tokens_per_sec: 0, priority: 5}\n"


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Return the setting of a file with the keys of alice and bob."""
    (tmp_path / "keys").write_text(KEYS)
    return {"api_keys_file": str(tmp_path / "keys")}


@pytest.fixture
def send_chat() -> Iterator[Callable[..., Future[httpx.Response]]]:
    """Return a function that sends a chat from a separate thread."""
    with ThreadPoolExecutor(8) as threads:

        def ask(router: RouterUnderTest, headers: dict[str, str], **body: Any) -> Future[httpx.Response]:
            members = {"messages": [], **body}
            return threads.submit(router.client.post, "/v1/chat/completions", json=members, headers=headers)

        yield ask


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def answer_with_usage(prompt: int, completion: int) -> Behaviour:
    """Return a behaviour that answers with these token counts."""
    answer = json.loads(chat_answer())
    answer["usage"] = {"prompt_tokens": prompt, "completion_tokens": completion}
    return answers(200, json.dumps(answer).encode())


def make_gate() -> tuple[Behaviour, Callable[[int], None]]:
    """Return a behaviour that answers requests in order of arrival, and a function that lets it answer further ones."""
    admitted = 0

    async def behave(request: Received, respond: Responder) -> None:
        number = len(order)
        order.append(request)
        while number >= admitted:
            await asyncio.sleep(0.005)
        await answers()(request, respond)

    def let_answer(number: int) -> None:
        nonlocal admitted
        admitted += number

    order: list[Received] = []
    return behave, let_answer


def test_a_client_that_has_used_its_tokens_gets_openais_429(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str]
) -> None:
    router = make_router(stand_in("mixed", answer_with_usage(90, 1000)), max_tokens_per_sec_per_key=10.0, **keys)
    assert router.client.post("/v1/chat/completions", json={}, headers=bearer("sk-1")).status_code == 200
    refused = router.client.post("/v1/chat/completions", json={}, headers=bearer("sk-1"))
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert error["message"].startswith("this API key has used its 10 tokens per second; try again in 9")
    assert 90 < int(refused.headers["retry-after"]) <= 100  # from 100, minus 1090 used
    client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="sk-1", max_retries=0)
    with client, pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="m", messages=[])
    for _ in range(3):  # bob has no limit
        assert router.client.post("/v1/chat/completions", json={}, headers=bearer("sk-2")).status_code == 200
    assert 'router_refused_requests_total{reason="rate_limit_exceeded"} 2.0' in router.client.get("/metrics").text


def test_tokens_that_were_estimated_but_not_used_are_returned(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str]
) -> None:
    instance = stand_in("mixed", answer_with_usage(1, 1))
    router = make_router(instance, max_tokens_per_sec_per_key=10.0, **keys)
    body = {"prompt": "long " * 1000}
    for behave, status in ((answer_with_usage(1, 1), 200), (answers(400, b"{}"), 400), (answer_with_usage(1, 1), 200)):
        instance.behave = behave
        answer = router.client.post("/v1/completions", json=body, headers=bearer("sk-1"))
        assert answer.status_code == status


def test_a_stream_that_is_refused_after_its_head_uses_no_tokens(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str]
) -> None:
    async def refuse_late(request: Received, respond: Responder) -> None:
        await asyncio.sleep(0.2)
        await answers(400, b"{}")(request, respond)

    limits = {"max_tokens_per_sec_per_key": 10.0, "sse_keepalive_secs": 0.05}
    router = make_router(stand_in("mixed", refuse_late), **limits, **keys)
    for _ in range(3):
        body = {"prompt": "long " * 1000, "stream": True}
        answer = router.client.post("/v1/completions", json=body, headers=bearer("sk-1"))
        assert (answer.status_code, answer.text[:12]) == (200, ": keep-alive")


def test_a_stream_without_usage_uses_tokens_for_its_text(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str]
) -> None:
    async def send_one_event(_: Received, respond: Responder) -> None:
        await respond.start_stream()
        await respond.event("x" * 100)
        await respond.event("[DONE]")
        await respond.end_stream()

    router = make_router(stand_in("mixed", send_one_event), max_tokens_per_sec_per_key=0.1, **keys)
    headers = bearer("sk-1")
    body = {"stream": True, "messages": []}
    assert router.client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    assert router.client.post("/v1/chat/completions", json=body, headers=headers).status_code == 429


def test_the_priority_of_the_key_and_the_header_order_the_queue(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str], send_chat: Callable[..., Any]
) -> None:
    behave, let_answer = make_gate()
    instance = stand_in("mixed", behave)
    router = make_router(instance, max_concurrent_requests=1, **keys)
    asked = [send_chat(router, bearer("sk-1"), request_id="first")]
    wait_until(lambda: instance.received, "the first request")
    for name, headers in (
        ("alice", bearer("sk-1")),
        ("alice with a raised priority", bearer("sk-1") | {"X-Priority": "10"}),
        ("bob with a lower priority", bearer("sk-2") | {"X-Priority": "-1"}),
        ("bob", bearer("sk-2")),
    ):
        asked.append(send_chat(router, headers, request_id=name))
        wait_until(lambda: router.app.admission.waiting == len(asked) - 1, "a request in the queue")
    text = router.client.get("/metrics").text
    for priority, number in ((5, 1), (0, 2), (-1, 1)):
        assert f'router_queued_requests_by_priority{{priority="{priority}"}} {number}.0' in text
    let_answer(len(asked))
    assert [each.result().status_code for each in asked] == [200] * 5
    order = [received.json["request_id"].rpartition("-")[0] for received in instance.received]
    assert order == ["first", "bob", "alice", "alice with a raised priority", "bob with a lower priority"]


def test_an_invalid_priority_is_refused_if_requests_are_limited(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    limited = make_router(stand_in(), max_concurrent_requests=1)
    refused = limited.client.post("/v1/chat/completions", json={}, headers={"X-Priority": "urgent"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "the header X-Priority must be a whole number from -10 to 10"
    assert limited.client.post("/v1/chat/completions", json={}, headers={"X-Priority": "10"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "body", "asked"),
    [
        ({"X-Request-Id": "r1"}, {}, ["r1"]),
        ({}, {"request_id": "r1"}, ["chatcmpl-r1"]),
        ({"X-Request-Id": "other"}, {"request_id": "r1", "n": 2}, ["chatcmpl-r1_1"]),
        ({}, {"request_id": "é/1"}, ["é/1"]),
        ({}, {"prompt": "word " * 100_000, "request_id": "r1"}, ["chatcmpl-r1_0"]),
    ],
)
@pytest.mark.parametrize("keepalive", [0.0, 1000.0])
def test_an_abort_ends_a_queued_request(
    make_router: MakeRouter,
    stand_in: MakeStandIn,
    send_chat: Callable[..., Any],
    headers: dict[str, str],
    body: dict[str, Any],
    asked: list[str],
    keepalive: float,
) -> None:
    instance = stand_in("mixed", stalls())
    router = make_router(instance, max_concurrent_requests=1, sse_keepalive_secs=keepalive)
    running = send_chat(router, {}, request_id="runs")
    wait_until(lambda: instance.received, "the first request")
    waiting = send_chat(router, headers, **body)
    unaffected = send_chat(router, {}, request_id="r10")
    wait_until(lambda: router.app.admission.waiting == 2, "two in the queue")
    answer = router.client.post("/v1/abort_requests", json={"req_ids": [*asked, "nobody"]}).json()
    assert answer["result"]["not_found"] == ["nobody"]
    assert waiting.result().status_code == 409
    assert waiting.result().json()["error"]["code"] == "aborted"
    assert (
        waiting.result().headers["x-router-request-id"]
        == (body.get("request_id") or "r1").encode("ascii", "backslashreplace").decode()
    )
    assert router.app.admission.waiting == 1
    router.client.post("/v1/abort_requests", json={"abort_all": True})
    assert unaffected.result().status_code == 409
    instance.cut_idle()
    running.result()


def test_completions_have_a_salt_of_their_key_and_of_their_own_salt(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str]
) -> None:
    instance = stand_in()
    router = make_router(instance, cache_salt_per_key=True, **keys)

    def salt(key: str, **body: Any) -> Any:
        answer = router.client.post("/v1/chat/completions", json={"messages": [], **body}, headers=bearer(key))
        assert answer.status_code == 200
        sent = instance.received[-1]
        assert sent.body.count(b'"cache_salt"') == 1
        return sent.json["cache_salt"]

    alice, bob, mixed = salt("sk-1"), salt("sk-2"), salt("sk-1", cache_salt="tenant")
    assert salt("sk-1", cache_salt=None) == salt("sk-1", cache_salt="") == alice
    assert len({alice, bob, mixed, "tenant", salt("sk-2", cache_salt="tenant")}) == 5
    refused = router.client.post("/v1/chat/completions", json={"cache_salt": 1}, headers=bearer("sk-1"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


def test_equal_prompts_of_two_clients_have_no_common_prefix_for_the_router(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str]
) -> None:
    router = make_router(stand_in("mixed", answer_with_usage(500, 1)), cache_salt_per_key=True, **keys)
    predicted = []
    for key in ("sk-1", "sk-1", "sk-2", "sk-2"):
        answer = router.client.post("/v1/completions", json={"prompt": "word " * 500}, headers=bearer(key))
        predicted.append(answer.headers["x-router-decision"].rpartition("cached=")[2] != "0")
    assert predicted == [False, True, False, True]


@pytest.mark.parametrize("limit", ["max_concurrent_requests", "max_concurrent_requests_per_key"])
def test_a_background_response_is_refused_if_requests_are_limited(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str], limit: str
) -> None:
    instance = stand_in()
    asked = {"input": "x", "background": True}
    limited = make_router(instance, **{limit: 5}, **keys)
    refused = limited.client.post("/v1/responses", json=asked, headers=bearer("sk-1"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")
    assert not instance.received
    assert make_router(instance).client.post("/v1/responses", json=asked).status_code == 200


def test_a_background_response_is_refused_to_a_client_with_a_token_limit(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str]
) -> None:
    router = make_router(stand_in(), max_tokens_per_sec_per_key=1000.0, **keys)
    asked = {"input": "x", "background": True}
    refused = router.client.post("/v1/responses", json=asked, headers=bearer("sk-1"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")
    assert router.client.post("/v1/responses", json=asked, headers=bearer("sk-2")).status_code == 200


def test_options_nested_too_deeply_are_refused(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str]
) -> None:
    instance = stand_in()
    instance.extra_fields["engine"] = "vllm"
    router = make_router(instance, max_tokens_per_sec_per_key=1000.0, **keys)
    body = '{"messages":[],"stream":true,"stream_options":{"include_usage":false,"x":%s}}' % ("[" * 280 + "]" * 280)
    refused = router.client.post("/v1/chat/completions", content=body, headers=bearer("sk-1"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_options")


PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "what is a limit"}]},
    "/v1/completions": {"prompt": "what is a limit"},
}


def make_engine(engine: str) -> Callable[[StandIn], StandIn]:
    """Return a function that makes a stand-in answer as this engine, with usage if the request asks for it."""

    async def behave(request: Received, respond: Responder) -> None:
        asked = Asked.read(request.target, request.json)
        if not request.json.get("stream"):
            await respond.answer(200, asked.whole("p", 0, asked.generate()))
            return
        await respond.start_stream()
        for event in asked.events("1", 0, asked.generate()):
            await respond.chunk(event.encode())
        await respond.end_stream()

    def make(instance: StandIn) -> StandIn:
        instance.extra_fields["engine"], instance.behave = engine, behave
        return instance

    return make


@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("engine", ["fastdeploy", "vllm", "sglang", "openai"])
def test_a_stream_of_a_limited_client_has_the_same_bytes_and_its_tokens_are_counted(
    make_router: MakeRouter,
    stand_in: MakeStandIn,
    keys: dict[str, str],
    engine: str,
    path: str,
    options: dict[str, Any],
) -> None:
    instance = make_engine(engine)(stand_in())
    limited = make_router(instance, max_tokens_per_sec_per_key=100.0, **keys)
    buckets = stop_refill(limited)
    free = make_router(instance)
    body = {**PROMPTS[path], "stream": True, "max_tokens": 20, **options}
    responses = [router.client.post(path, json=body, headers=bearer("sk-1")) for router in (limited, free)]
    assert responses[0].content == responses[1].content
    assert b"usage" not in responses[0].content
    used = Asked.read(path, {**body}).prompt_tokens + 20
    asked_usage = bool((instance.received[0].json.get("stream_options") or {}).get("include_usage"))
    assert asked_usage is (engine != "openai")
    assert not (instance.received[1].json.get("stream_options") or {}).get("include_usage")
    left, _ = buckets["alice"]
    if asked_usage:
        assert 1000 - left == used
        (record,) = limited.app.audit.records
        assert record.completion_tokens == 20
        assert record.bytes_sent == len(responses[0].content)
    else:
        assert 1000 - left >= 20


def test_a_client_that_asks_for_usage_gets_it(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str]
) -> None:
    instance = make_engine("vllm")(stand_in())
    router = make_router(instance, max_tokens_per_sec_per_key=100.0, **keys)
    body = {"messages": [], "stream": True, "max_tokens": 5, "stream_options": {"include_usage": True}}
    answer = router.client.post("/v1/chat/completions", json=body, headers=bearer("sk-1"))
    assert answer.text.count('"usage"') == 1


@pytest.mark.parametrize(
    "options", [{}, {"continuous_usage_stats": False}, {"include_usage": False, "continuous_usage_stats": True}]
)
def test_options_of_a_limited_client_that_usage_would_affect_are_not_changed(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str], options: dict[str, Any]
) -> None:
    instance = make_engine("vllm")(stand_in())
    router = make_router(instance, max_tokens_per_sec_per_key=100.0, **keys)
    body = {"messages": [], "stream": True, "max_tokens": 5, "stream_options": options}
    assert router.client.post("/v1/chat/completions", json=body, headers=bearer("sk-1")).status_code == 200
    assert instance.received[0].json["stream_options"] == options


def test_prefill_gets_no_request_for_the_usage_of_a_stream(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str]
) -> None:
    prefill, decode = (make_engine("vllm")(stand_in(role)) for role in ("prefill", "decode"))
    router = make_router(prefill, decode, splitwise=True, max_tokens_per_sec_per_key=100.0, **keys)
    body = {"messages": [], "stream": True, "max_tokens": 5}
    answer = router.client.post("/v1/chat/completions", json=body, headers=bearer("sk-1"))
    assert (answer.status_code, "usage" in answer.text) == (200, False)
    assert "stream_options" not in prefill.received[0].json
    assert decode.received[0].json["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("form", ["ids", "text", "events"])
def test_the_tokens_of_a_stream_without_usage_count_in_segments_of_any_size(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str], form: str
) -> None:
    """A TCP segment has 2000 tokens: as ids in one event, as text in one event, or as 2000 events."""
    deltas: list[dict[str, Any]] = [{"content": "a" * 8000, "completion_token_ids": [7] * 2000}]
    if form == "text":
        del deltas[0]["completion_token_ids"]
    elif form == "events":
        deltas = [{"content": "a"}] * 2000
    events = [f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n" for delta in deltas]

    async def send_burst(_: Received, respond: Responder) -> None:
        await respond.start_stream()
        await respond.chunk("".join(events).encode())
        await respond.event("[DONE]")
        await respond.end_stream()

    router = make_router(stand_in("mixed", send_burst), max_tokens_per_sec_per_key=5.0, **keys)
    body = {"stream": True, "messages": []}
    assert router.client.post("/v1/chat/completions", json=body, headers=bearer("sk-1")).status_code == 200
    refused = router.client.post("/v1/chat/completions", json=body, headers=bearer("sk-1"))
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) == pytest.approx(1950 / 5, rel=0.05)


def stop_refill(router: RouterUnderTest) -> dict[str, tuple[float, float]]:
    """Stop the refill of the clients' buckets, and return these with their levels."""
    assert isinstance(router.app.admission, Admission)
    rates = router.app.admission._rates
    assert rates is not None
    rates._clock = lambda: 1000.0
    return rates._buckets


@pytest.mark.parametrize("engines_first", [True, False])
def test_a_long_repeated_part_of_the_request_does_not_hide_the_usage(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str], engines_first: bool
) -> None:
    repeated: dict[str, Any] = {"metadata": {"usage": {"input_tokens": 1, "output_tokens": 1}, "x": "x" * 2_000_000}}
    usage: dict[str, Any] = {"usage": {"input_tokens": 50, "output_tokens": 5000}}
    answer = {"id": "resp_1", **(usage | repeated if engines_first else repeated | usage)}
    instance = stand_in("mixed", answers(200, json.dumps(answer).encode()))
    router = make_router(instance, max_tokens_per_sec_per_key=100.0, **keys)
    buckets = stop_refill(router)
    assert router.client.post("/v1/responses", json={"input": "x"}, headers=bearer("sk-1")).status_code == 200
    assert 1000 - buckets["alice"][0] == 5050


def test_a_client_that_leaves_uses_the_tokens_of_all_choices_if_a_usage_counts_one(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str]
) -> None:
    async def send_eight_choices(_: Received, respond: Responder) -> None:
        await respond.start_stream()
        for number in range(1, 101):
            for index in range(8):
                choice = {"index": index, "delta": {"content": "a"}}
                usage = {"prompt_tokens": 3, "completion_tokens": number}
                await respond.event(json.dumps({"choices": [choice], "usage": usage}))
        await respond.peer_left.wait()
        respond.keep_alive = False

    router = make_router(stand_in("mixed", send_eight_choices), max_tokens_per_sec_per_key=100.0, **keys)
    buckets = stop_refill(router)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": [], "n": 8, "stream": True, "stream_options": options}
    with router.client.stream("POST", "/v1/chat/completions", json=body, headers=bearer("sk-1")) as response:
        assert len(list(itertools.islice(response.iter_lines(), 1600))) == 1600
    wait_until(lambda: router.app.audit.records, "the end of the request")
    assert 1000 - buckets["alice"][0] >= 803


def test_a_large_image_does_not_count_as_text_tokens(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str], send_chat: Callable[..., Any]
) -> None:
    behave, let_answer = make_gate()
    instance = stand_in("mixed", behave)
    router = make_router(instance, max_tokens_per_sec_per_key=50.0, **keys)
    url = {"url": f"data:image/png;base64,{'QUJD' * 500_000}"}
    content = [{"type": "text", "text": "what is it"}, {"type": "image_url", "image_url": url}]
    running = send_chat(router, bearer("sk-1"), messages=[{"role": "user", "content": content}])
    wait_until(lambda: instance.received, "the request with the image")
    (known,) = router.app.registry
    assert known.load.tokens < 100
    let_answer(2)
    assert router.client.post("/v1/chat/completions", json={}, headers=bearer("sk-1")).status_code == 200
    assert running.result().status_code == 200
