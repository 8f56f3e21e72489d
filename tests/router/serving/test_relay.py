"""The parts of requests and responses that the router forwards unchanged. Instances are stand-ins."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from typing import Any

import httpx
import openai
import pytest

from router.http.errors import NoRoom
from router.http.message import NOT_PASSED_BACK, Address
from router.http.pool import ConnectionPool
from tests.router.conftest import MakeRouter, MakeStandIn
from tests.router.stand_in import Received, Responder, answers, chat_answer, cuts, never_answers, streams
from tests.support.waiting import wait_until

ODD_BODY = (
    '{ "messages":[ {"role":"user","content":"caf\\u00e9 \\/ é 🦊"} ],\t"temperature":1.0, "top_p":1e0,'
    ' "seed":12345678901234567890123, "vendor":{"a":[1.50,-0]} }'
)


def make_client() -> Any:
    """Make a client of httpx without a proxy; ``Any``, because openai's types do not accept it."""
    return httpx.Client(trust_env=False, verify=False)


def read_error(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def test_a_body_arrives_unchanged_except_for_its_request_id(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    make_router(instance).client.post("/v1/chat/completions", content=ODD_BODY.encode())
    sent = instance.received[0]
    assert sent.body == ODD_BODY[:-1].encode() + b',"request_id":"%s"}' % sent.json["request_id"].encode()


def test_client_headers_are_forwarded_except_hop_by_hop_ones(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    headers = {
        "Authorization": "Bearer secret",
        "Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "X-Custom": "1",
        "TE": "trailers",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "Keep-Alive": "timeout=5",
        "Expect": "100-continue",
    }
    make_router(instance).client.post("/v1/chat/completions", json={}, headers=headers)
    arrived = dict(instance.received[0].headers)
    assert (arrived["authorization"], arrived["traceparent"], arrived["x-custom"]) == (
        "Bearer secret",
        headers["Traceparent"],
        "1",
    )
    assert not {"te", "connection", "x-hop", "keep-alive", "expect", "transfer-encoding"} & set(arrived)
    assert arrived["host"] == instance.key


def test_a_chunked_body_arrives_whole(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    pieces = iter([b'{"a":', b" [1.0", b"]}"])
    make_router(instance).client.post("/v1/chat/completions", content=pieces)
    assert instance.received[0].body.startswith(b'{"a": [1.0],')


@pytest.mark.parametrize("status", [200, 201, 204, 400, 401, 404, 429, 500, 503])
def test_status_headers_and_body_of_the_response_are_returned(
    make_router: MakeRouter, stand_in: MakeStandIn, status: int
) -> None:
    body = b"" if status == 204 else b'{"x":  1.0}'
    instance = stand_in("mixed", answers(status, body, ("X-Other", "1"), ("Retry-After", "3")))
    response = make_router(instance).chat()
    assert (response.status_code, response.content) == (status, body)
    assert (response.headers["x-other"], response.headers["retry-after"]) == ("1", "3")


def test_hop_by_hop_headers_of_the_response_are_not_returned(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in("mixed", answers(200, b"x", ("Connection", "close, X-Hop"), ("X-Hop", "1")))
    response = make_router(instance).chat()
    assert "x-hop" not in response.headers
    assert response.headers.get("connection") != "close, X-Hop"


def test_a_stale_pooled_connection_does_not_fail_the_request(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance)
    for _ in range(3):
        assert router.chat().status_code == 200
        instance.cut_idle()


def test_a_request_lost_with_its_pooled_connection_is_sent_again_under_a_new_id(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    router = make_router(instance)
    router.chat()

    async def cut_once(request: Any, respond: Any) -> None:
        instance.behave = answers()
        respond.cut()

    instance.behave = cut_once
    assert router.chat(request_id="r").status_code == 200
    assert [got.json["request_id"] for got in instance.received[1:]] == ["r", "r-retry1"]


def test_other_paths_are_forwarded_with_method_query_and_body(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in("mixed", answers(200, b'{"ok": 1.0}'))
    router = make_router(instance)
    response = router.client.post("/v1/rer%61nk?d=e%20f&d=g", content=b"\x00not json")
    assert response.content == b'{"ok": 1.0}'
    got = instance.received[0]
    assert (got.method, got.target, got.body) == ("POST", "/v1/rer%61nk?d=e%20f&d=g", b"\x00not json")


def test_requests_to_other_paths_reach_an_instance_of_a_pair(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode", answers(200, b"from decode"))
    router = make_router(prefill, decode, splitwise=True)
    assert router.client.post("/v1/embeddings", json={}).content == b"from decode"


@pytest.mark.parametrize("stream", [False, True])
def test_an_instance_cannot_set_the_routers_headers_or_cookies(
    make_router: MakeRouter, stand_in: MakeStandIn, stream: bool
) -> None:
    own_names = ("x-router-decode", "X-Router-Mixed", "x-router-prefill", "X-Router-Prefill-URL", "x-router-decode-url")
    names = (*own_names, "x-router-decision", "set-cookie", "x-own")
    lines = "\r\n".join(f"{name}: 1" for name in names)

    async def answer_with_headers(_: Received, respond: Responder) -> None:
        kind = "text/event-stream" if stream else "application/json"
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n{lines}\r\ncontent-length: 14\r\n\r\n"
        await respond.raw(head.encode() + b"data: [DONE]\n\n")

    instance = stand_in("mixed", answer_with_headers)
    router = make_router(instance)
    response = router.client.post("/v1/chat/completions", json={"messages": [], "stream": stream})
    own = {name: value for name, value in response.headers.multi_items() if name.startswith("x-router-")}
    assert own.keys() == {"x-router-request-id", "x-router-mixed", "x-router-decision"}
    assert own["x-router-mixed"] == instance.key
    assert {name.encode() for name in own} <= NOT_PASSED_BACK
    assert ("set-cookie" in response.headers, response.headers["x-own"]) == (False, "1")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_a_client_cannot_send_the_routers_headers_or_choose_an_engines_process(
    make_router: MakeRouter, stand_in: MakeStandIn, path: str
) -> None:
    instance = stand_in()
    headers = {"X-Router-Decode": "h:1", "x-router-new": "1", "X-Data-Parallel-Rank": "3", "X-Own": "1"}
    make_router(instance).client.post(path, json={"messages": []}, headers=headers)
    names = {name for name, _ in instance.received[0].headers}
    assert not {name for name in names if name.startswith("x-router-") or name == "x-data-parallel-rank"}
    assert "x-own" in names


def test_a_head_request_is_forwarded(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    async def answer_head(request: Any, respond: Any) -> None:
        await respond.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")

    response = make_router(stand_in("mixed", answer_head)).client.head("/v1/responses/1")
    assert (response.status_code, response.headers["content-length"]) == (200, "5")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"null", b"\xff"])
def test_a_body_that_is_no_object_is_answered_400(make_router: MakeRouter, stand_in: MakeStandIn, body: bytes) -> None:
    instance = stand_in()
    response = make_router(instance).client.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert read_error(response)["type"] == "invalid_request_error"
    assert instance.received == []


def test_the_400_for_a_request_id_that_is_no_string_names_it(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    response = make_router(stand_in()).chat(request_id=5)
    assert (response.status_code, read_error(response)["param"]) == (400, "request_id")


@pytest.mark.parametrize(("request_id", "header"), [("mine", "mine"), ("é☃", None)])
def test_vllm_gets_an_id_that_is_invalid_in_a_header_only_in_the_body(
    make_router: MakeRouter, stand_in: MakeStandIn, request_id: str, header: str | None
) -> None:
    instance = stand_in()
    instance.extra_fields = {**instance.extra_fields, "engine": "vllm"}
    assert make_router(instance).chat(request_id=request_id).status_code == 200
    (got,) = instance.received
    assert (got.json["request_id"], dict(got.headers).get("x-request-id")) == (request_id, header)


@pytest.mark.parametrize("request_id", ["mine", "é☃"])
def test_another_attempt_at_vllm_has_another_id(
    make_router: MakeRouter, stand_in: MakeStandIn, request_id: str
) -> None:
    bad, good = stand_in("mixed", cuts()), stand_in()
    bad.extra_fields["engine"] = good.extra_fields["engine"] = "vllm"
    router = make_router(bad, good)
    while not bad.received:
        assert router.chat(request_id=request_id).status_code == 200
    sent = bad.received[0], good.received[-1]
    ids = [dict(got.headers).get("x-request-id", got.json["request_id"]) for got in sent]
    assert ids == [request_id, f"{request_id}-retry1"]


def test_get_on_a_completion_path_is_answered_with_405(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    response = make_router(stand_in()).client.get("/v1/chat/completions")
    assert (response.status_code, read_error(response)["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert make_router(stand_in()).client.put("/v1/responses/r").headers["allow"] == "GET, DELETE"


@pytest.mark.parametrize(
    ("splitwise", "registered", "missing", "flag"),
    [
        (False, [], "no mixed instance is registered", "start one with --router HOST:"),
        (True, [], "no prefill instance is registered", "--splitwise-role prefill --router HOST:"),
        (True, ["prefill"], "no decode instance is registered", "--splitwise-role decode --router HOST:"),
        (True, ["decode"], "no prefill instance is registered", "--splitwise-role prefill --router HOST:"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_503_without_an_instance_names_the_role_and_the_command(
    make_router: MakeRouter,
    stand_in: MakeStandIn,
    splitwise: bool,
    registered: list[str],
    missing: str,
    flag: str,
    path: str,
) -> None:
    router = make_router(*(stand_in(role) for role in registered), splitwise=splitwise)
    response = router.client.post(path, json={})
    assert (response.status_code, read_error(response)["code"]) == (503, "no_instance")
    assert missing in read_error(response)["message"]
    assert flag in read_error(response)["message"]


def test_a_paused_instance_is_not_chosen(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(open_ := stand_in())
    (paused := stand_in()).register(router.url, is_paused=True)
    for _ in range(4):
        router.chat()
    assert (len(open_.received), len(paused.received)) == (4, 0)


def test_a_request_that_times_out_is_a_504_and_is_aborted(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in("mixed", never_answers)
    response = make_router(instance, request_timeout_secs=0.2).chat(request_id="r")
    assert (response.status_code, read_error(response)["code"]) == (504, "request_timeout")
    wait_until(lambda: instance.aborted == [{"req_ids": ["chatcmpl-r_0"]}], "the abort")
    wait_until(lambda: instance.running == 0, "the end of the connection")


def test_the_openai_client_works(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(stand_in("prefill"), decode := stand_in("decode"), splitwise=True)
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="k", http_client=make_client()) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        whole = client.chat.completions.create(model="m", messages=messages)
        assert whole.choices[0].message.content == "hello"
        decode.behave = streams("a", "b", "c")
        stream = client.chat.completions.create(model="m", messages=messages, stream=True)
        assert [chunk.choices[0].delta.content for chunk in stream] == ["a", "b", "c"]
        assert [model.id for model in client.models.list()] == ["m"]


def test_the_openai_client_reads_the_routers_own_errors(make_router: MakeRouter) -> None:
    router = make_router()
    with (
        openai.OpenAI(base_url=f"{router.url}/v1", api_key="k", max_retries=0, http_client=make_client()) as client,
        pytest.raises(openai.InternalServerError, match="no mixed instance is registered"),
    ):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_works(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(stand_in())
    argv = ["curl", "-sS", "--noproxy", "*", f"{router.url}/v1/chat/completions", "-d", '{"messages": []}']
    assert subprocess.run(argv, capture_output=True, check=True).stdout == chat_answer()


def test_a_request_id_that_is_too_long_is_answered_with_400(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance)
    assert router.chat(request_id="x" * 256).status_code == 200
    error = read_error(router.chat(request_id="x" * 257))
    assert (error["code"], error["param"]) == ("invalid_body", "request_id")
    assert len(instance.received) == 1


def test_a_request_is_sent_to_another_instance_if_the_body_of_a_refusal_is_missing(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.serving.attempt.REFUSAL_SECONDS", 0.05)

    async def refuse_and_hang(request: Received, respond: Responder) -> None:
        await respond.raw(b"HTTP/1.1 500 X\r\ncontent-length: 9\r\n\r\n")
        await respond.peer_left.wait()
        respond.keep_alive = False

    router = make_router(stand_in("mixed", refuse_and_hang), stand_in())
    assert [router.chat().status_code for _ in range(2)] == [200, 200]


def test_a_response_that_is_no_completion_is_relayed_in_pieces(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    may_continue = asyncio.Event()

    async def answer_in_two_parts(request: Received, respond: Responder) -> None:
        await respond.start_stream("application/x-ndjson")
        await respond.chunk(b"1\n")
        await may_continue.wait()
        await respond.chunk(b"2\n")
        await respond.end_stream()

    router = make_router(stand_in("mixed", answer_in_two_parts))
    with router.client.stream("POST", "/v1/audio/speech", json={}) as response:
        pieces = response.iter_raw()
        assert next(pieces) == b"1\n"
        router.thread.loop.call_soon_threadsafe(may_continue.set)
        assert b"".join(pieces) == b"2\n"


def test_requests_for_completions_accept_no_compressed_response(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance)
    for path in ("/v1/chat/completions", "/v1/embeddings"):
        router.client.post(path, json={}, headers={"accept-encoding": "gzip"})
    assert [request.header("accept-encoding") for request in instance.received] == [None, "gzip"]


def test_an_escaped_path_is_the_same_path(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    decode = stand_in("decode")
    router = make_router(stand_in("prefill"), decode, splitwise=True)
    assert router.client.post("/v1/ch%61t/completions", json={"messages": []}).status_code == 200
    assert "disaggregate_info" in decode.received[0].json


def test_a_response_of_204_has_no_length(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    async def answer_204(request: Received, respond: Responder) -> None:
        await respond.raw(b"HTTP/1.1 204 No Content\r\n\r\n")

    response = make_router(stand_in("mixed", answer_204)).client.delete("/v1/responses/1")
    assert (response.status_code, "content-length" in response.headers) == (204, False)


def test_a_router_that_cannot_open_connections_marks_no_instance_as_failed(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = make_router(stand_in("prefill"), stand_in("decode"), splitwise=True, health_failure_threshold=1)

    async def no_room(upstream: ConnectionPool, address: Address) -> None:
        raise NoRoom("the router cannot open another connection: Too many open files")

    monkeypatch.setattr("router.http.pool.ConnectionPool.connect", no_room)
    response = router.chat()
    router.thread.run(router.app.health.check_all())
    assert (response.status_code, read_error(response)["code"]) == (503, "router_overloaded")
    assert {(each.state, each.breaker.failures) for each in router.app.registry} == {("healthy", 0)}


@pytest.mark.parametrize("splitwise", [False, True])
def test_the_record_of_a_whole_response_has_its_bytes(
    make_router: MakeRouter, stand_in: MakeStandIn, splitwise: bool
) -> None:
    roles = ("prefill", "decode") if splitwise else ("mixed",)
    router = make_router(*map(stand_in, roles), splitwise=splitwise)
    answer = router.chat()
    wait_until(lambda: router.app.audit.records, "the record")
    (record,) = router.app.audit.records
    assert record.bytes_sent == len(answer.content)
