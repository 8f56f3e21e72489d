"""Comments while a stream waits for its first token, and the end of streams that get no more data."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from typing import Any

import httpx
import openai
import pytest

from tests.router.conftest import MakeRouter, MakeStandIn
from tests.router.serving.resume.test_preemption_http import Preempting
from tests.router.stand_in import Behaviour, Received, Responder, answers, stalls, streams
from tests.support.waiting import wait_until

SECONDS = 0.05
COMMENT = ": keep-alive\n\n"


def delay(behave: Behaviour, seconds: float = 4 * SECONDS) -> Behaviour:
    """Return a behaviour that pauses before ``behave``."""

    async def wait_first(request: Received, respond: Responder) -> None:
        await asyncio.sleep(seconds)
        await behave(request, respond)

    return wait_first


def split_comments(response: httpx.Response) -> str:
    """Return the stream after its comments, of which there must be at least one."""
    assert response.headers["content-type"] == "text/event-stream"
    text = response.text
    assert text.startswith(COMMENT), text
    while text.startswith(COMMENT):
        text = text.removeprefix(COMMENT)
    assert COMMENT not in text
    return text


def read_error(text: str) -> dict[str, Any]:
    """Return the error of the only event."""
    assert text.startswith("data: {")
    assert text.endswith("}\n\n")
    assert text.count("data:") == 1
    error: dict[str, Any] = json.loads(text.removeprefix("data: "))["error"]
    return error


def test_a_stream_that_waits_for_its_first_token_gets_comments(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(stand_in("mixed", delay(streams("hello"))), sse_keepalive_secs=SECONDS)
    response = router.chat(stream=True, request_id="r1")
    assert (response.status_code, response.headers["x-router-request-id"]) == (200, "r1")
    text = split_comments(response)
    assert json.loads(text.split("\n\n")[0].removeprefix("data: "))["choices"][0]["delta"] == {"content": "hello"}
    assert text.endswith("data: [DONE]\n\n")
    wait_until(lambda: router.app.audit.records, "the record")
    record = router.app.audit.records[-1]
    assert (record.status, record.streamed, record.error) == (200, True, "")
    assert record.first_byte_ms >= 2 * SECONDS * 1e3  # a comment is no token


def test_clients_of_openai_and_curl_accept_comments(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(stand_in("mixed", delay(streams("hello"))), sse_keepalive_secs=SECONDS)
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="-", max_retries=0) as client:
        chunks = list(client.chat.completions.create(model="m", messages=[], stream=True))
        assert [chunk.choices[0].delta.content for chunk in chunks] == ["hello"]
    curl = shutil.which("curl")
    assert curl is not None
    url = f"{router.url}/v1/chat/completions"
    command = [curl, "-sN", "--noproxy", "*", "--http1.0", url, "-d", '{"stream": true, "messages": []}']
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith(COMMENT)


@pytest.mark.parametrize("settings", [{}, {"sse_keepalive_secs": 1000.0}])
def test_a_stream_that_is_fast_enough_gets_no_comments(
    make_router: MakeRouter, stand_in: MakeStandIn, settings: dict[str, float]
) -> None:
    router = make_router(stand_in("mixed", delay(streams("hello"))), **settings)
    assert "keep-alive" not in router.chat(stream=True).text


def test_a_response_that_is_no_stream_gets_no_comments(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(stand_in("mixed", delay(answers())), sse_keepalive_secs=SECONDS)
    assert router.chat().json()["choices"][0]["message"]["content"] == "hello"


def test_another_instance_may_serve_a_stream_after_its_comments(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    answered_by: list[str] = []

    def fail_first(name: str) -> Behaviour:
        async def behave(request: Received, respond: Responder) -> None:
            answered_by.append(name)
            await delay(answers(500, b"broken") if len(answered_by) == 1 else streams("hello"))(request, respond)

        return behave

    router = make_router(*(stand_in("mixed", fail_first(n)) for n in "ab"), sse_keepalive_secs=SECONDS)
    assert split_comments(router.chat(stream=True)).endswith("data: [DONE]\n\n")
    assert sorted(answered_by) == ["a", "b"]


@pytest.mark.parametrize(
    ("behave", "code", "message"),
    [
        (answers(400, b'{"error": {"message": "too long",\n "code": "context_length"}}'), "context_length", "too long"),
        (answers(400, b"no JSON"), "instance_refused", "no JSON"),
        (answers(500, b'{"error": {"message": "broken", "code": "oom"}}'), "oom", "broken"),
        (answers(200), "cannot_continue", "did not respond with a stream"),
        (answers(307, b"", ("location", "/")), "instance_redirects", "answered with 307"),
    ],
)
def test_an_error_after_the_head_is_the_only_event(
    make_router: MakeRouter, stand_in: MakeStandIn, behave: Behaviour, code: str, message: str
) -> None:
    router = make_router(stand_in("mixed", delay(behave)), sse_keepalive_secs=SECONDS)
    error = read_error(split_comments(router.chat(stream=True)))
    assert error["code"] == code
    assert message in error["message"]
    assert router.app.audit.records[-1].error in (code, "instance_refused")
    client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="-", max_retries=0)
    with client, pytest.raises(openai.APIError):
        list(client.chat.completions.create(model="m", messages=[], stream=True))


def test_an_error_before_the_first_comment_has_its_own_status(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(stand_in("mixed", answers(400, b"{}")), sse_keepalive_secs=1000.0)
    assert router.chat(stream=True).status_code == 400


def test_a_queued_stream_gets_comments_and_then_its_response_or_an_error(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    limits = {"max_concurrent_requests": 1, "sse_keepalive_secs": SECONDS}
    router = make_router(stand_in("mixed", delay(streams("hello"))), **limits)
    with router.stream() as running:
        assert split_comments(router.chat(stream=True)).endswith("data: [DONE]\n\n")
        running.read()
    router = make_router(stand_in("mixed", stalls("{}")), **limits, queue_timeout_secs=4 * SECONDS)
    with router.stream():
        error = read_error(split_comments(router.chat(stream=True)))
        assert error["code"] == "queue_timeout"


def test_a_preempted_stream_is_merged_after_its_comments(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    decode = stand_in("decode")
    router = make_router(stand_in("prefill"), decode, splitwise=True, sse_keepalive_secs=SECONDS)
    decode.behave = Preempting([])
    whole = router.chat(stream=True, max_tokens=50, request_id="r").text
    decode.behave = delay(Preempting([0, 3]))
    merged = split_comments(router.chat(stream=True, max_tokens=50, request_id="r"))

    def join_text(stream: str) -> str:
        chunks = [json.loads(event.removeprefix("data: ")) for event in stream.split("\n\n")[:-2]]
        return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])

    assert join_text(merged) == join_text(whole) != ""


def test_comments_end_when_the_client_leaves(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in("mixed", delay(streams("hello"), 1000))
    router = make_router(instance, sse_keepalive_secs=SECONDS)
    with router.stream() as response:
        assert next(response.iter_text()).startswith(COMMENT)
    wait_until(lambda: instance.aborted, "the abort")
    wait_until(lambda: router.app.proxy.num_requests == 0, "the request's end")
    assert router.app.audit.records[-1].status == 499


def test_a_stream_that_stalls_is_ended_and_aborted(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in("mixed", stalls('{"choices": []}'))
    router = make_router(instance, stream_stall_secs=0.2)
    first, error, done, nothing = router.chat(stream=True, request_id="r").text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"] == {
        "message": f"{instance.key} has sent no data of the stream for 0.2 s; the stream was not resumed: no other "
        "instance can take the request",
        "type": "timeout",
        "param": None,
        "code": "stream_stalled",
    }
    assert (first, done, nothing) == ('data: {"choices": []}', "data: [DONE]", "")
    wait_until(lambda: instance.aborted == [{"req_ids": ["chatcmpl-r_0"]}], "the abort")
    wait_until(lambda: instance.left == 1, "the end of the connection")


def test_neither_a_wait_for_the_first_token_nor_a_slow_client_is_a_stall(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    size = 8 * 1024 * 1024

    async def send_much(_: Received, respond: Responder) -> None:
        await asyncio.sleep(1.2)
        await respond.start_stream()
        for _piece in range(size // 65536):
            await respond.event("x" * 65536)
        await respond.end_stream()

    instance = stand_in("mixed", send_much)
    router = make_router(instance, stream_stall_secs=1)
    with router.stream() as response:
        pieces = response.iter_bytes()
        received = len(next(pieces))
        (serving,) = router.app.proxy._live
        attempt = serving.attempt
        assert attempt is not None
        # The client reads on only after the router has checked the clock several times.
        exchange = attempt.answering.exchange
        wait_until(lambda: time.perf_counter() - exchange.last_heard > 2.2, "a silence of the instance")
        received += sum(map(len, pieces))
    assert received >= size
