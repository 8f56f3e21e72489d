"""HTTP of the endpoints: no redirects, responses to HEAD, request ids, and errors in OpenAI's format."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from engine.apis.completions import Completions
from engine.disaggregation import HandoverReceiver
from engine.generation import Generations, SharedParts
from engine.serving import http_server
from engine.serving.control import Control
from engine.serving.endpoints import create_app
from engine.serving.http_server import InstanceProtocol
from engine.telemetry.metrics import EngineMetrics
from kvcommon.http_limits import HEAD_BYTES
from tests.engine.event_loop import in_event_loop
from tests.engine.running import Engine

CHAT = "/v1/completions"
BODY = {"prompt": [1, 2, 3], "max_tokens": 2}


@contextlib.asynccontextmanager
async def no_lifespan(_: object) -> AsyncIterator[None]:
    yield


@pytest.fixture(scope="module")
def app(tiny_checkpoint: Path, word_tokenizer: Any) -> Iterator[Any]:
    """The endpoints with a running engine."""
    with Engine(tiny_checkpoint) as engine:
        generations = Generations(
            SharedParts(engine.core, word_tokenizer, "mixed", engine.block_size, HandoverReceiver())
        )
        instance: Any = SimpleNamespace(
            run_lifespan=no_lifespan,
            core=engine.core,
            metrics=EngineMetrics(),
            tracer=None,
            generations=generations,
            control=Control(engine.core, engine.runner, generations, lambda: None),
            completions=Completions(generations, word_tokenizer, "tiny", 200, engine.runner.vocab_size),
        )
        yield create_app(instance)


@contextlib.asynccontextmanager
async def open_client(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://instance") as client:
        yield client


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[int]:
    """Serve the endpoints with the instance's protocol class; yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, http=InstanceProtocol, log_config=None))
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await running


def openai_error(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "message"),
    [
        ("GET", "/v1/nothing", 404, "unknown_path", "this instance has no path '/v1/nothing'"),
        ("POST", "/v1/completions/", 404, "unknown_path", "; did you mean /v1/completions?"),
        ("POST", "/v1/chat/completion", 404, "unknown_path", "; did you mean /v1/chat/completions?"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed", "/v1/chat/completions accepts POST, not GET"),
        ("DELETE", "/v1/models/tiny", 405, "method_not_allowed", "/v1/models/tiny accepts GET, not DELETE"),
        ("GET", "/v1/models/other/one", 404, "model_not_found", 'no model "other/one"; it serves "tiny"'),
        ("GET", "/docs", 404, "unknown_path", "no path '/docs'"),
        ("GET", "/openapi.json", 404, "unknown_path", "no path '/openapi.json'"),
    ],
)
@in_event_loop
async def test_an_unknown_path_or_method_is_an_openai_error_and_no_redirect(
    app: Any, method: str, path: str, status: int, code: str, message: str
) -> None:
    async with open_client(app) as client:
        answer = await client.request(method, path)
    assert answer.status_code == status
    assert "location" not in answer.headers
    error = openai_error(answer)
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert message in error["message"]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/models/tiny", "/nothing", CHAT])
@in_event_loop
async def test_a_response_to_head_is_that_of_get_without_a_body(app: Any, path: str) -> None:
    async with (
        serving(app) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False) as client,
    ):
        head, get = await client.head(path), await client.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers.get("content-type") == get.headers.get("content-type")


@pytest.mark.parametrize("stream", [False, True])
@in_event_loop
async def test_the_id_of_the_header_is_the_requests_id_and_is_returned(app: Any, stream: bool) -> None:
    sent = "my-réquest"
    async with open_client(app) as client:
        answer = await client.post(CHAT, json={**BODY, "stream": stream}, headers={b"X-Request-Id": sent.encode()})
        first = json.loads(answer.text.split("\n")[0].removeprefix("data: "))
    assert first["id"] == f"cmpl-{sent}"
    assert answer.headers.get_list("x-request-id") == [sent]


@in_event_loop
async def test_an_id_in_the_body_takes_precedence_and_a_missing_id_is_generated(app: Any) -> None:
    async with open_client(app) as client:
        both = await client.post(CHAT, json={**BODY, "request_id": "inner"}, headers={"X-Request-Id": "outer"})
        inner = await client.post(CHAT, json={**BODY, "request_id": "inner"})
        none = await client.post(CHAT, json=BODY)
    assert (both.json()["id"], both.headers["x-request-id"]) == ("cmpl-inner", "outer")
    assert (inner.json()["id"], inner.headers["x-request-id"]) == ("cmpl-inner", "inner")
    assert none.json()["id"] == f"cmpl-{none.headers['x-request-id']}"


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/models", 200), ("/nothing", 404), ("/tokenize", 405), ("/metrics", 200)]
)
@in_event_loop
async def test_other_responses_return_the_id_of_the_header(app: Any, path: str, status: int) -> None:
    async with open_client(app) as client:
        answer = await client.get(path, headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers.get_list("x-request-id")) == (status, ["mine"])


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"a\x07b", "it must consist of printable characters in UTF-8"),
        (b"\xff", "it must consist of printable characters in UTF-8"),
        (b"a" * 257, "longer than the 256 characters"),
    ],
)
@in_event_loop
async def test_an_invalid_id_is_refused(app: Any, sent: bytes, message: str) -> None:
    async with open_client(app) as client:
        answer = await client.post(CHAT, json=BODY, headers={b"X-Request-Id": sent})
    assert answer.status_code == 400
    assert openai_error(answer)["param"] == "X-Request-Id"
    assert message in openai_error(answer)["message"]


@in_event_loop
async def test_a_body_that_is_too_large_is_refused_before_or_while_it_arrives(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_BODY_BYTES", 1000)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b" " * 100

    async with open_client(app) as client:
        for answer in (await client.post(CHAT, content=b" " * 1001), await client.post(CHAT, content=pieces())):
            assert (answer.status_code, openai_error(answer)["code"]) == (413, "body_too_large")
            assert "larger than the 1000 bytes" in openai_error(answer)["message"]


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/abort_requests"])
@in_event_loop
async def test_a_body_with_a_content_encoding_is_refused(app: Any, path: str) -> None:
    async with open_client(app) as client:
        sent = gzip.compress(json.dumps(BODY).encode())
        answer = await client.post(path, content=sent, headers={"content-encoding": "gzip"})
        assert answer.status_code == 415
        assert openai_error(answer)["message"] == (
            "the body has the content encoding gzip; this instance accepts only bodies without one"
        )
        plain = await client.post(CHAT, json=BODY, headers={"content-encoding": "identity"})
        assert plain.status_code == 200


@in_event_loop
async def test_an_incomplete_body_is_refused_after_a_time(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "READ_SECONDS", 0.05)
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"pro')
        head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(
            b"\r\n\r\n"
        )  # until the connection is closed
        writer.close()
    assert head.startswith(b"HTTP/1.1 408 ")
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "request_incomplete")


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"GET /" + b"a" * (HEAD_BYTES - 4), 414, "target_too_long"),
        (b"GET /" + b"a" * HEAD_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, "target_too_long"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * (HEAD_BYTES - 18), 431, "head_too_large"),
        (b"what is this\r\n\r\n", 400, "invalid_http"),
        (b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_http"),
        (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", 405, "method_not_allowed"),
    ],
    ids=["path", "path in a complete head", "head", "no HTTP", "chunk", "CONNECT"],
)
@in_event_loop
async def test_an_invalid_request_is_an_openai_error(app: Any, sent: bytes, status: int, code: str) -> None:
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(body)["error"]["code"] == code


@pytest.mark.parametrize("sent", [b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
@in_event_loop
async def test_a_connection_without_a_request_is_closed(app: Any, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(http_server, "READ_SECONDS", 0.05)
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ") if sent else answer == b""


@in_event_loop
async def test_the_head_of_the_next_request_does_not_end_a_response(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "READ_SECONDS", 0.05)
    body = json.dumps({**BODY, "prompt": "a", "max_tokens": 100, "ignore_eos": True}).encode()
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n%sGET /hea" % (CHAT.encode(), len(body), body))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        writer.close()
    assert head.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("offer", [b"h2c", b"websocket"])
@in_event_loop
async def test_an_offer_of_another_protocol_is_declined(app: Any, offer: bytes) -> None:
    body = json.dumps(BODY).encode()
    head = b"POST %s HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: %s\r\nContent-Length: %d\r\n\r\n"
    request = head % (CHAT.encode(), offer, len(body)) + body
    last = b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n"
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request + request + last)
        answers = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    assert answers.count(b"HTTP/1.1 200 ") == 3
    assert answers.count(b"text_completion") == 2


@pytest.mark.parametrize(
    ("request_", "rest"),
    [(b"GET /v1/models HTTP/1.1\r\n\r\n", b"\r\n"), (b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n", b"a")],
    ids=["empty line", "rest of a body"],
)
@in_event_loop
async def test_bytes_after_a_response_do_not_keep_a_connection_open(
    app: Any, monkeypatch: pytest.MonkeyPatch, request_: bytes, rest: bytes
) -> None:
    monkeypatch.setattr(http_server, "READ_SECONDS", 0.05)
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_)
        await reader.readuntil(b"}")
        writer.write(rest)
        await asyncio.wait_for(reader.read(), 20)
        writer.close()


async def receive(*pieces: bytes) -> bytes:
    """Return what the protocol answers to bytes that arrive in these pieces, if the application never answers."""
    written: list[bytes] = []
    transport: Any = SimpleNamespace(
        get_extra_info=lambda *_: None,
        is_closing=lambda: False,
        write=written.append,
        close=lambda: None,
        pause_reading=lambda: None,
    )

    async def never_answers(scope: object, receive: object, send: object) -> None:
        await asyncio.Event().wait()

    protocol = InstanceProtocol(uvicorn.Config(never_answers, log_config=None), ServerState(), {})
    protocol.connection_made(transport)
    for piece in pieces:
        protocol.data_received(piece)
    protocol.connection_lost(None)
    return b"".join(written)


@in_event_loop
async def test_a_body_does_not_count_as_the_head_of_the_request_after_it() -> None:
    head = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (2 * HEAD_BYTES)
    assert await receive(head, bytes(2 * HEAD_BYTES) + b"GET /hea") == b""


@in_event_loop
async def test_endless_trailers_are_refused() -> None:
    head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    answer = await receive(head, *[b"X: " + b"a" * 999 + b"\r\n"] * (2 * HEAD_BYTES // 1000))
    assert answer.startswith(b"HTTP/1.1 431 ")
