"""The server for clients, over raw sockets. Instances are stand-ins."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.server import ServerState

from kvcommon.http_limits import HEAD_BYTES, MAX_HEADERS
from router.http.api_error import ApiError
from router.http.server import MAX_PIPELINED, PIECE_BYTES, ClientRequest, RouterProtocol, _Flow, path_of
from router.serving import proxy
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import Received, Responder, answers, never_answers, stalls
from tests.support import plain_http
from tests.support.certificates import make_certificate
from tests.support.waiting import wait_until

LIMIT = 100_000
CHAT = "/v1/chat/completions"


def request(
    body: bytes = b"{}", *headers: bytes, method: str = "POST", path: str = CHAT, version: str = "1.1"
) -> bytes:
    """Make a request with a content-length header."""
    head = [f"{method} {path} HTTP/{version}".encode(), b"host: x", *headers, b"content-length: %d" % len(body)]
    return b"\r\n".join([*head, b"", body])


def head(*headers: bytes, path: str = CHAT) -> bytes:
    """Make the head of a POST without a body."""
    return b"\r\n".join([f"POST {path} HTTP/1.1".encode(), b"host: x", *headers, b"", b""])


class Client:
    """A socket to the router, and the bytes received from it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.unread = b""

    def send(self, data: bytes) -> None:
        """Send, even if the router has closed the connection."""
        with contextlib.suppress(ConnectionError):
            self.sock.sendall(data)

    def answer(self, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
        """Read the next response: status, headers, body."""
        while b"\r\n\r\n" not in self.unread:
            assert self._receive(), f"the connection was closed after {self.unread!r}"
        start, _, self.unread = self.unread.partition(b"\r\n\r\n")
        status, *lines = start.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = int(headers.get("content-length", 0)) if has_body else 0
        while len(self.unread) < length:
            assert self._receive(), f"the connection was closed after {self.unread!r}"
        body, self.unread = self.unread[:length], self.unread[length:]
        return int(status.split()[1]), headers, body

    def status(self) -> int:
        """Read the next response and return its status."""
        return self.answer()[0]

    def error(self) -> tuple[int, str]:
        """Read the next response, which is an error, and return its status and code."""
        status, _, body = self.answer()
        return status, json.loads(body)["error"]["code"]

    def rest(self) -> bytes:
        """Read until the router closes the connection."""
        while self._receive():
            pass
        return self.unread

    def _receive(self) -> bool:
        data = self.sock.recv(65536)
        self.unread += data
        return bool(data)


@pytest.fixture
def connect() -> Iterator[Callable[[RouterUnderTest], Client]]:
    """Return a function that connects a client to a router."""
    with contextlib.ExitStack() as stack:

        def connect_to(router: RouterUnderTest) -> Client:
            return Client(stack.enter_context(socket.create_connection(("127.0.0.1", router.port), timeout=20)))

        yield connect_to


Connect = Callable[[RouterUnderTest], Client]


@contextlib.contextmanager
def connect_slow_reader(router: RouterUnderTest) -> Iterator[Client]:
    """Connect a client with a small receive buffer."""
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(20)
        sock.connect(("127.0.0.1", router.port))
        if router.url.startswith("https"):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            sock = stack.enter_context(context.wrap_socket(sock))
        yield Client(sock)


@pytest.fixture
def router(make_router: MakeRouter, stand_in: MakeStandIn) -> RouterUnderTest:
    """Start a router that accepts only small bodies, with an instance that echoes each request's number."""
    return make_router(stand_in("mixed", echo), max_body_bytes=LIMIT)


@pytest.fixture
def keys(tmp_path: Path) -> str:
    """A file with one client's API key."""
    path = tmp_path / "keys"
    path.write_text("alice: sk-alice\n")
    path.chmod(0o600)
    return str(path)


async def echo(request: Received, respond: Responder) -> None:
    """Answer with the request's ``number``, the first one last."""
    number = json.loads(request.body).get("number", 0) if request.body else 0
    await asyncio.sleep(0.05 if number == 1 else 0)
    await respond.answer(200, str(number).encode())


def test_pipelined_requests_are_answered_in_their_order(router: RouterUnderTest, connect: Connect) -> None:
    client = connect(router)
    control = request(b"", method="GET", path="/health")
    client.send(request(b'{"number": 1}') + request(b'{"number": 2}') + control + request(b'{"number": 3}'))
    assert [client.answer()[2] for _ in range(4)] == [b"1", b"2", b"", b"3"]


def test_a_pipelined_body_that_is_too_large_is_refused_in_its_turn(router: RouterUnderTest, connect: Connect) -> None:
    client = connect(router)
    client.send(request(b'{"number": 1}') + request(b" " * (LIMIT + 1)))
    assert client.answer()[2] == b"1"
    assert client.error() == (413, "body_too_large")
    assert client.rest() == b""


def test_a_client_that_leaves_ends_all_its_pipelined_requests(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect
) -> None:
    instance = stand_in("mixed", never_answers)
    router = make_router(instance)
    client = connect(router)
    client.send(request(b'{"request_id": "a"}') + request(b'{"request_id": "b"}'))
    wait_until(lambda: instance.running == 1, "the first request")
    client.sock.close()
    wait_until(lambda: instance.aborted == [{"req_ids": ["chatcmpl-a_0"]}], "the abort")
    wait_until(lambda: instance.running == 0, "the end of the leg")
    assert len(instance.received) == 1


@pytest.mark.parametrize("headers", [(), (b"connection: keep-alive",)])
def test_a_client_of_http_1_0_gets_its_response_and_the_connection_is_closed(
    router: RouterUnderTest, connect: Connect, headers: tuple[bytes, ...]
) -> None:
    client = connect(router)
    client.send(request(b'{"number": 7}', *headers, version="1.0"))
    status, answered, body = client.answer()
    assert (status, answered["connection"], body, client.rest()) == (200, "close", b"7", b"")


def test_a_client_of_http_1_0_gets_a_stream_that_ends_with_the_connection(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect
) -> None:
    async def two_events(request: Received, respond: Responder) -> None:
        await respond.start_stream()
        await respond.event("1")
        await asyncio.sleep(0.01)
        await respond.event("2")
        await respond.end_stream()

    client = connect(make_router(stand_in("mixed", two_events)))
    client.send(request(b'{"stream": true}', version="1.0"))
    _, answered, _ = client.answer()
    assert "transfer-encoding" not in answered
    assert client.rest() == b"data: 1\n\ndata: 2\n\n"


def test_a_client_that_expects_100_continue_gets_it(router: RouterUnderTest, connect: Connect) -> None:
    client = connect(router)
    client.send(head(b"expect: 100-continue", b"content-length: 13"))
    assert client.answer() == (100, {}, b"")
    client.send(b'{"number": 4}')
    assert client.answer()[2] == b"4"


def test_a_pipelined_request_gets_100_continue_after_the_response_to_the_first(
    router: RouterUnderTest, connect: Connect
) -> None:
    client = connect(router)
    client.send(request(b'{"number": 3}') + head(b"expect: 100-continue", b"content-length: 13"))
    assert client.answer()[2] == b"3"
    assert client.answer() == (100, {}, b"")
    client.send(b'{"number": 4}')
    assert client.answer()[2] == b"4"


def test_a_client_without_its_key_gets_401_instead_of_100_continue(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: sk-1\n")
    client = connect(make_router(stand_in(), api_keys_file=str(keys)))
    client.send(head(b"expect: 100-continue", b"content-length: 13"))
    assert client.answer()[0] == 401


def test_the_unfinished_bodies_of_one_client_are_limited(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("alice: sk-1\nbob: sk-2\n")
    monkeypatch.setattr(proxy, "MAX_HELD_BYTES", 1000)
    router = make_router(
        stand_in(), api_keys_file=str(tmp_path / "keys"), max_concurrent_requests_per_key=1, max_body_bytes=5000
    )

    buffered = router.app.proxy._held

    def begin(key: bytes) -> Client:
        """Send the first 800 bytes of a body, in two chunks."""
        client = connect(router)
        client.send(head(b"authorization: Bearer " + key, b"transfer-encoding: chunked"))
        client.send(b'8\r\n{"pad":"\r\n%x\r\n%s\r\n' % (792, b"x" * 792))
        return client

    first = begin(b"sk-1")
    wait_until(lambda: buffered["alice"] == 800, "the bytes to arrive")
    assert begin(b"sk-1").error() == (429, "queue_full")
    for client in (first, begin(b"sk-2")):  # a single body may be larger than the limit
        client.send(b'%x\r\n%s\r\n2\r\n"}\r\n0\r\n\r\n' % (1200, b"x" * 1200))
        assert client.status() == 200
    assert not +buffered
    leaving = begin(b"sk-1")
    wait_until(lambda: buffered["alice"] == 800, "the bytes to arrive")
    leaving.sock.close()
    wait_until(lambda: not +buffered, "the end of the connection")


def test_reading_pauses_while_the_control_plane_has_unread_bytes_of_a_body() -> None:
    """uvicorn resumes reading as soon as the application reads the body."""
    paused: list[str] = []
    transport = SimpleNamespace(
        is_closing=lambda: False,
        pause_reading=lambda: paused.append("pause"),
        resume_reading=lambda: paused.append("resume"),
    )
    protocol: Any = RouterProtocol.__new__(RouterProtocol)
    protocol.transport, protocol.flow = transport, _Flow(cast(asyncio.Transport, transport))
    protocol.cycle = SimpleNamespace(body=bytearray(HIGH_WATER_LIMIT + 1), more_body=True, response_complete=False)
    protocol.pipeline, protocol._unread, protocol._content_length = deque(), b"x", b""
    protocol.data_received = lambda data, is_piece: protocol.flow.pause_reading()
    protocol._read_piece()
    assert paused == ["pause"]
    protocol.cycle.body.clear()
    protocol._unread = b"x"
    protocol._read_piece()
    assert paused == ["pause", "resume"]


def test_a_body_is_parsed_in_the_same_turn_of_the_event_loop_as_its_head() -> None:
    """The work of other connections would come before a later turn of the event loop."""
    sizes: list[int] = []

    def serve(request: ClientRequest) -> None:
        sizes.append(len(request.body))
        request.send_response(200, [], b"")

    plane = SimpleNamespace(
        known_targets={},
        max_body_bytes=LIMIT,
        is_leaving=False,
        takes=lambda path: True,
        find_refusal=lambda headers: None,
        hold_bytes=lambda request, num_bytes: None,
        release_bytes=lambda request: None,
        serve=serve,
    )
    app: Any = SimpleNamespace(proxy=plane, cors=None)
    transport: Any = SimpleNamespace(
        get_extra_info=lambda name: None,
        is_closing=lambda: False,
        write=lambda data: None,
        pause_reading=lambda: None,
        resume_reading=lambda: None,
    )

    async def receive() -> None:
        protocol = RouterProtocol(uvicorn.Config(app, interface="asgi3", log_config=None), ServerState(), {})
        protocol.connection_made(transport)
        protocol.data_received(request(b"{}") + request(bytes(LIMIT)) + request(bytes(LIMIT)))
        assert sizes == [2, LIMIT]  # the third request is parsed in a later turn
        await asyncio.sleep(0)
        assert sizes == [2, LIMIT, LIMIT]

    asyncio.run(receive())


def test_a_request_with_too_large_a_length_gets_413_instead_of_100_continue(
    router: RouterUnderTest, connect: Connect
) -> None:
    client = connect(router)
    client.send(head(b"expect: 100-continue", b"content-length: %d" % (LIMIT + 1)))
    assert client.error() == (413, "body_too_large")


def test_a_chunked_body_with_trailers_arrives_without_them(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect
) -> None:
    instance = stand_in()
    client = connect(make_router(instance))
    trailers = b"authorization: Bearer late\r\nx-late: 1\r\n"
    client.send(head(b"transfer-encoding: chunked") + b'1\r\n{\r\n5\r\n"a":1\r\n1\r\n}\r\n0\r\n' + trailers + b"\r\n")
    assert client.status() == 200
    assert instance.received[0].body.startswith(b'{"a":1,')
    assert not {"authorization", "x-late"} & set(dict(instance.received[0].headers))


def test_the_response_to_head_has_no_body(router: RouterUnderTest, connect: Connect) -> None:
    client = connect(router)
    client.send(request(b"", method="HEAD", path="/v1/responses/a"))
    assert client.answer(has_body=False)[0] == 200
    client.send(request(b'{"number": 5}'))
    assert client.answer()[2] == b"5"


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
def test_an_upgrade_is_declined_and_the_request_served(
    router: RouterUnderTest, connect: Connect, upgrade: bytes
) -> None:
    # The HTTP client of Java's standard library requests HTTP/2 like this in its first request.
    client = connect(router)
    asks = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: " + upgrade, b"http2-settings: AAEAAEAAAAIAAAAB")
    client.send(request(b'{"number": 6}', *asks) + request(b'{"number": 7}'))
    assert [client.answer()[2] for _ in range(2)] == [b"6", b"7"]


def test_an_invalid_chunk_after_the_response_ends_the_connection(
    router: RouterUnderTest, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(router)
    client.send(head(b"transfer-encoding: chunked") + b"%x\r\n%s\r\n" % (LIMIT + 1, b" " * (LIMIT + 1)))
    assert client.answer()[0] == 413
    client.send(b"no number of bytes\r\n")
    assert client.rest() == b""
    wait_until(lambda: is_reset(client), "the end of the connection")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def is_reset(client: Client) -> bool:
    """Return whether the router has closed its side for reading, too."""
    try:
        client.sock.sendall(b"x")
    except ConnectionError:
        return True
    return False


@pytest.mark.parametrize("target", ["x:80", CHAT])
def test_connect_is_refused(router: RouterUnderTest, connect: Connect, target: str) -> None:
    client = connect(router)
    client.send(request(b"{}", method="CONNECT", path=target))
    assert client.error() == (405, "method_not_allowed")


def test_the_body_of_a_control_request_with_an_upgrade_is_read(router: RouterUnderTest, connect: Connect) -> None:
    client = connect(router)
    asks = (b"connection: Upgrade", b"upgrade: h2c")
    client.send(request(b'{"req_ids": ["a"]}', *asks, path="/v1/abort_requests"))
    assert client.status() == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/register", "/v1/abort_requests"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_over_the_limit_is_refused_and_the_connection_closed(
    router: RouterUnderTest, connect: Connect, path: str, is_chunked: bool
) -> None:
    client = connect(router)
    if is_chunked:
        client.send(head(b"transfer-encoding: chunked", path=path))
        for _ in range(LIMIT // 10_000 + 2):
            client.send(b"%x\r\n%s\r\n" % (10_000, b" " * 10_000))
    else:
        client.send(request(b" " * (LIMIT + 1), path=path))
    status, answered, body = client.answer()
    assert (status, answered["connection"], json.loads(body)["error"]["code"]) == (413, "close", "body_too_large")


@pytest.mark.parametrize("path", [CHAT, "/health"])
def test_a_target_may_contain_the_host(router: RouterUnderTest, connect: Connect, path: str) -> None:
    client = connect(router)
    client.send(request(method="POST" if path == CHAT else "GET", path=f"http://router:8000{path}?a=b"))
    assert client.answer()[0] == 200


@pytest.mark.parametrize("target", [f"{CHAT}/", f"{CHAT}/?a=b", f"{CHAT}%2F", f"{CHAT}#part", "http://a" + CHAT + "/"])
def test_a_trailing_slash_and_a_fragment_are_ignored(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect, target: str
) -> None:
    instance = stand_in()
    client = connect(make_router(instance))
    client.send(request(path=target))
    status, answered, _ = client.answer()
    assert status == 200
    assert "x-router-request-id" in answered
    assert instance.received[0].target.partition("?")[0] == CHAT


@pytest.mark.parametrize("path", ["/v1/abort_requests/", "/v1/abort_requests#", "/v1/abort_requests?x", "/register/"])
def test_an_unusual_form_of_a_path_needs_the_same_token(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect, tmp_path: Path, path: str
) -> None:
    instance = stand_in()
    (tmp_path / "token").write_text("secret\n")
    router = make_router(admin_token_file=str(tmp_path / "token"))
    client = connect(router)
    client.send(request(b'{"abort_all": true}', path=path))
    assert client.error() == (401, "missing_admin_token")
    assert not instance.received


@pytest.mark.parametrize(
    "path",
    [
        *("//v1/chat/completions", "/v1//chat/completions", f"{CHAT}//", "/v1/./chat/completions", "/v1/../register"),
        *("/v1/%2e%2e/health", "/v1/chat%2F%2Fcompletions", "/v1/..", "//", "/./health", "/health//", "/v1/"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_path_that_servers_parse_differently_is_answered_with_404(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect, path: str, method: str
) -> None:
    instance = stand_in()
    client = connect(make_router(instance))
    client.send(request(method=method, path=path))
    status, _, body = client.answer()
    error = json.loads(body)["error"]
    assert (status, error["type"], error["code"]) == (404, "invalid_request_error", "unknown_path")
    assert not instance.received


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
def test_an_instances_redirection_is_answered_with_502(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect, status: int, path: str
) -> None:
    elsewhere = ("location", "http://10.0.0.1/v1/chat/completions")
    instance = stand_in("mixed", answers(status, b"", elsewhere))
    router = make_router(instance)
    client = connect(router)
    client.send(request(path=path))
    answered, headers, body = client.answer()
    assert (answered, json.loads(body)["error"]["code"]) == (502, "instance_redirects")
    assert f"{instance.key} answered with {status}, a redirection" in json.loads(body)["error"]["message"]
    assert "location" not in headers
    (registered,) = router.app.registry
    assert registered.breaker.failures == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_neither_instance_of_a_pair_may_redirect(make_router: MakeRouter, stand_in: MakeStandIn, role: str) -> None:
    redirects = answers(307, b"", ("location", "http://10.0.0.1/"))
    pair = [stand_in(each, redirects if each == role else None) for each in ("prefill", "decode")]
    response = make_router(*pair, splitwise=True).chat()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "instance_redirects")


@pytest.mark.parametrize("status", [200, 201, 400, 404])
def test_headers_that_name_other_addresses_are_not_forwarded(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect, status: int
) -> None:
    names = ("location", "content-location", "refresh", "alt-svc")
    client = connect(make_router(stand_in("mixed", answers(status, b"{}", *((name, "http://x/") for name in names)))))
    client.send(request())
    answered, headers, _ = client.answer()
    assert answered == status
    assert not set(names) & headers.keys()


@pytest.mark.parametrize("target", ["http://", "x:y", "v1/chat/completions", "http://a:b:c/v1"])
def test_an_invalid_target_is_refused(router: RouterUnderTest, connect: Connect, target: str) -> None:
    client = connect(router)
    client.send(request(path=target))
    assert client.answer()[0] in (400, 404)


def test_requests_that_are_refused_before_they_are_read_are_counted(router: RouterUnderTest, connect: Connect) -> None:
    for refused in (request(b" " * (LIMIT + 1)), b"nonsense\r\n\r\n"):
        client = connect(router)
        client.send(refused)
        client.answer()
    metrics = plain_http.get(f"{router.url}/metrics").text
    assert 'http_requests_total{endpoint="/v1/chat/completions",method="POST",status_code="413"} 1.0' in metrics
    assert 'http_requests_total{endpoint="other",method="",status_code="400"} 1.0' in metrics


def test_a_client_that_is_refused_while_it_sends_can_read_the_error(router: RouterUnderTest, connect: Connect) -> None:
    client = connect(router)
    client.send(request(b" " * (20 * LIMIT)))
    assert client.error() == (413, "body_too_large")
    assert client.rest() == b""


@pytest.mark.parametrize(
    "endless",
    [
        pytest.param(head()[:-2] + b"x: " + b"a" * 4 * HEAD_BYTES, id="a header"),
        pytest.param(head()[:-2] + b"x: 1\r\n" * HEAD_BYTES, id="headers"),
        pytest.param(head(b"transfer-encoding: chunked") + b"0\r\nx: " + b"a" * 4 * HEAD_BYTES, id="a trailer"),
        pytest.param(head(b"transfer-encoding: chunked") + b"0\r\n" + b"x: 1\r\n" * HEAD_BYTES, id="trailers"),
        pytest.param(head(b"transfer-encoding: chunked") + b"1;" + b"a" * 4 * HEAD_BYTES, id="a chunk's extension"),
    ],
)
def test_an_endless_head_is_refused(router: RouterUnderTest, connect: Connect, endless: bytes) -> None:
    client = connect(router)
    client.send(endless)
    assert client.error() == (431, "head_too_large")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (403, "permission_error"),
        (408, "timeout"),
        (414, "invalid_request_error"),
        (431, "invalid_request_error"),
        (499, "invalid_request_error"),
        (500, "internal_error"),
        (503, "service_unavailable"),
    ],
)
def test_each_status_has_its_error_type(status: int, kind: str) -> None:
    assert json.loads(ApiError(status, "message", "code").body())["error"]["type"] == kind


@pytest.mark.parametrize("end", [b"", b" HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["without-end", "of-a-whole-head"])
@pytest.mark.parametrize("times", [1, 4])
def test_a_target_that_is_too_long_is_answered_with_414(
    router: RouterUnderTest, connect: Connect, end: bytes, times: int
) -> None:
    client = connect(router)
    client.send(b"GET /" + b"a" * times * HEAD_BYTES + end)
    status, _, body = client.answer()
    error = json.loads(body)["error"]
    assert (status, error["type"], error["code"]) == (414, "invalid_request_error", "target_too_long")


@pytest.mark.parametrize("bad", [b"not json", b"[]", b'{"request_id": 5}'])
def test_a_connection_stays_open_after_an_error(router: RouterUnderTest, connect: Connect, bad: bytes) -> None:
    client = connect(router)
    client.send(request(bad))
    assert client.status() == 400
    client.send(request(b'{"number": 8}'))
    assert client.answer()[2] == b"8"


def test_a_connection_stays_open_after_an_instances_error(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect
) -> None:
    client = connect(make_router(stand_in("mixed", answers(500, b"boom"))))
    for _ in range(2):
        client.send(request())
        assert client.answer()[0::2] == (500, b"boom")


@pytest.mark.parametrize("path", [CHAT, "/register"])
def test_a_client_that_leaves_while_it_sends_its_body_causes_no_error(
    router: RouterUnderTest, connect: Connect, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(router)
    client.send(head(b"content-length: 1000", path=path) + b"{")
    client.sock.close()
    after = connect(router)
    after.send(request(b'{"number": 9}'))
    assert after.answer()[2] == b"9"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_client_that_leaves_while_it_is_queued_leaves_the_queue(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect
) -> None:
    instance = stand_in("mixed", never_answers)
    router = make_router(instance, max_concurrent_requests=1)
    first, second, third = (connect(router) for _ in range(3))
    first.send(request(b'{"request_id": "a"}'))
    wait_until(lambda: instance.running == 1, "the first request")
    second.send(request(b'{"request_id": "b"}'))
    wait_until(lambda: router.app.admission.waiting == 1, "the second request in the queue")
    third.send(request(b'{"request_id": "c"}'))
    wait_until(lambda: router.app.admission.waiting == 2, "the third request in the queue")
    second.sock.close()
    wait_until(lambda: router.app.admission.waiting == 1, "the second request to leave the queue")
    first.sock.close()
    wait_until(lambda: len(instance.received) == 2, "the third request's turn")
    assert [got.json["request_id"] for got in instance.received] == ["a", "c"]


@pytest.mark.parametrize(
    ("settings", "code"),
    [({"max_queued_requests": 0}, "queue_full"), ({"queue_timeout_secs": 0.1}, "queue_timeout")],
)
def test_a_full_queue_or_a_queue_timeout_is_answered_with_a_retry_after_header(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect, settings: dict[str, Any], code: str
) -> None:
    instance = stand_in("mixed", never_answers)
    router = make_router(instance, max_concurrent_requests=1, **settings)
    connect(router).send(request())
    wait_until(lambda: instance.running == 1, "the first request")
    client = connect(router)
    client.send(request())
    status, answered, body = client.answer()
    assert (status, json.loads(body)["error"]["code"]) == (429, code)
    assert int(answered["retry-after"]) >= 1
    assert "connection" not in answered


def test_a_client_that_does_not_read_is_served_no_longer_than_the_timeout(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect
) -> None:
    async def send_without_end(request: Received, respond: Responder) -> None:
        await respond.start_stream()
        while not respond.peer_left.is_set():
            await respond.event("x" * 60_000)
        respond.keep_alive = False

    instance = stand_in("mixed", send_without_end)
    router = make_router(instance, request_timeout_secs=0.4)
    client = connect(router)
    client.send(request(b'{"stream": true}'))
    wait_until(lambda: router.app.admission.running == 1, "the request")
    wait_until(lambda: router.app.admission.running == 0, "the end of the request")
    wait_until(lambda: instance.running == 0, "the end of the leg")


def test_a_request_without_a_valid_key_is_answered_with_401_and_the_scheme(
    keys: str, make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect
) -> None:
    instance = stand_in()
    client = connect(make_router(instance, api_keys_file=keys))
    for sent in ((), (b"authorization: Bearer sk-mallory",), (b"authorization: Basic c2s=",)):
        client.send(request(b"{}", *sent))
        status, answered, _ = client.answer()
        assert (status, answered["www-authenticate"]) == (401, "Bearer")
    client.send(request(b"{}", b"authorization: Bearer sk-alice"))
    assert client.status() == 200
    assert len(instance.received) == 1


def error_body(body: bytes) -> tuple[str, str]:
    """Return code and param of an error."""
    error = json.loads(body)["error"]
    return error["code"], error["param"]


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/v1/models", "/nothing", "/v1/chat//completions"])
def test_the_id_in_a_header_is_returned(
    router: RouterUnderTest, stand_in: MakeStandIn, connect: Connect, path: str
) -> None:
    client = connect(router)
    client.send(request(b"{}", b"X-Request-Id: mine-1", path=path))
    assert client.answer()[1]["x-request-id"] == "mine-1"


def test_a_request_without_an_id_in_its_body_has_the_id_of_its_header(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect
) -> None:
    instance = stand_in("mixed", answers(200, None, ("x-request-id", "the instance's")))
    router = make_router(instance)
    client = connect(router)
    for body, id_of_request in ((b"{}", "mine"), (b'{"request_id": "body"}', "body")):
        client.send(request(body, b"X-Request-Id: mine"))
        _, headers, _ = client.answer()
        assert (headers["x-router-request-id"], headers["x-request-id"]) == (id_of_request, "mine")
    assert [got.json["request_id"] for got in instance.received] == ["mine", "body"]
    assert all(got.header("x-request-id") is None for got in instance.received)
    assert router.client.get("/admin/explain/mine").json()["request_id"] == "mine"


def test_a_request_without_an_id_gets_one_under_both_names(router: RouterUnderTest, connect: Connect) -> None:
    client = connect(router)
    client.send(request())
    _, headers, _ = client.answer()
    assert headers["x-request-id"] == headers["x-router-request-id"] != ""


@pytest.mark.parametrize("sent", [b"x" * 257, b"a\tb", b"\xff"])
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
def test_a_header_with_an_invalid_id_is_refused(
    router: RouterUnderTest, connect: Connect, sent: bytes, path: str
) -> None:
    client = connect(router)
    client.send(request(b"{}", b"X-Request-Id: " + sent, path=path))
    status, headers, body = client.answer()
    assert (status, *error_body(body)) == (400, "invalid_header", "X-Request-Id")
    assert "x-request-id" not in headers


@pytest.mark.parametrize("body", [b"{", b'{"request_id": 5}', b" " * (LIMIT + 1)])
def test_the_response_to_a_refused_request_has_its_id(router: RouterUnderTest, connect: Connect, body: bytes) -> None:
    client = connect(router)
    client.send(request(body, b"X-Request-Id: mine"))
    status, headers, _ = client.answer()
    assert (status >= 400, headers["x-request-id"]) == (True, "mine")


def test_the_error_without_a_key_has_the_requests_id(make_router: MakeRouter, connect: Connect, keys: str) -> None:
    client = connect(make_router(api_keys_file=keys))
    for path in (CHAT, "/v1/models"):
        client.send(request(b"{}", b"X-Request-Id: mine", path=path))
        status, headers, _ = client.answer()
        assert (status, headers["x-request-id"]) == (401, "mine")


def test_a_trace_is_forwarded_and_recorded(router: RouterUnderTest, stand_in: MakeStandIn) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "tracestate": "a=b"}
    (instance := stand_in()).register(router.url)
    answered = [router.client.post(CHAT, json={"request_id": f"r{i}"}, headers=headers) for i in range(8)]
    assert {response.status_code for response in answered} == {200}
    assert {got.header("traceparent") for got in instance.received} == {headers["traceparent"]}
    assert {got.header("tracestate") for got in instance.received} == {"a=b"}
    assert router.client.get("/admin/explain/r0").json()["trace_id"] == trace


def test_a_response_names_its_instances_and_the_policy(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    headers = make_router(prefill, decode, splitwise=True).chat(request_id="r").headers
    assert (headers["x-router-prefill"], headers["x-router-decode"]) == (prefill.key, decode.key)
    assert (headers["x-router-prefill-url"], headers["x-router-decode-url"]) == (prefill.url, decode.url)
    assert (headers["x-router-request-id"], headers["x-router-decision"]) == ("r", "pool_aware; cached=0")


def test_only_responses_of_pairs_have_urls_of_instances(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    headers = make_router(stand_in()).chat().headers
    assert not {"x-router-prefill-url", "x-router-decode-url", "x-router-mixed-url"} & set(headers)


def test_an_attempt_of_a_client_that_left_is_explained(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in("mixed", never_answers)
    router = make_router(instance)
    with pytest.raises(httpx.ReadTimeout):
        router.client.post("/v1/chat/completions", json={"request_id": "r1"}, timeout=0.2)
    wait_until(lambda: router.client.get("/admin/explain/r1").status_code == 200, "the record")
    (attempt,) = router.client.get("/admin/explain/r1").json()["attempts"]
    assert attempt["ended"] == "the client left"


def test_a_connection_without_a_request_is_closed(
    router: RouterUnderTest, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http.server.READ_SECONDS", 0.1)
    assert connect(router).rest() == b""


@pytest.mark.parametrize("data", [b"POST /v1/chat", head(b"content-length: 5"), head(b"content-length: 5") + b"{}"])
def test_an_incomplete_request_is_answered_with_408_after_a_time(
    router: RouterUnderTest, connect: Connect, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr("router.http.server.READ_SECONDS", 0.1)
    client = connect(router)
    client.send(data)
    assert client.error() == (408, "request_incomplete")
    assert client.rest() == b""


def test_the_read_timeout_does_not_run_while_a_client_waits_for_a_response(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer_late(request: Received, respond: Responder) -> None:
        await asyncio.sleep(0.4)
        await respond.answer(200, b"{}")

    monkeypatch.setattr("router.http.server.READ_SECONDS", 0.1)
    client = connect(make_router(stand_in("mixed", answer_late)))
    client.send(request(b"{}") + b"POST /v1/chat")
    assert client.status() == 200


def test_an_idle_connection_stays_open_for_a_time_after_each_response(
    router: RouterUnderTest, connect: Connect
) -> None:
    router._server.config.timeout_keep_alive = 1
    client = connect(router)
    for _ in range(2):
        client.send(request(b"{}"))
        assert client.status() == 200
    began = time.monotonic()
    assert client.rest() == b""
    assert time.monotonic() - began > 0.5


@pytest.mark.parametrize(
    ("silent_for", "next_check", "is_closed"), [(1.0, 4.0, False), (4.5, 0.5, False), (5.0, None, True)]
)
def test_a_silent_client_is_disconnected_at_its_timeout_and_not_sooner(
    monkeypatch: pytest.MonkeyPatch, silent_for: float, next_check: float | None, is_closed: bool
) -> None:
    monkeypatch.setattr("router.http.server.READ_SECONDS", 5.0)
    checks: list[float] = []
    closings: list[None] = []
    protocol: Any = object.__new__(RouterProtocol)  # with the attributes that _check_activity reads
    protocol.loop = SimpleNamespace(time=lambda: 100.0, call_later=lambda seconds, _: checks.append(seconds))
    protocol.transport = SimpleNamespace(is_closing=lambda: False, close=lambda: closings.append(None))
    protocol.timeout_keep_alive, protocol._active_at = 60.0, 100.0 - silent_for
    protocol._served = protocol.cycle = None
    protocol.pipeline, protocol._undigested = [], 0
    protocol._check_activity()
    assert checks == ([] if next_check is None else [next_check])
    assert bool(closings) is is_closed


def test_invalid_bytes_during_a_response_end_the_connection_without_an_error_response(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect
) -> None:
    instance = stand_in("mixed", stalls("1"))
    client = connect(make_router(instance))
    client.send(request(b'{"stream": true}'))
    assert client.answer()[0] == 200
    client.send(b"\x00\x01garbage\r\n\r\n")
    assert b"HTTP/1.1" not in client.rest()
    wait_until(lambda: instance.running == 0, "the end of the leg")


def test_the_body_of_a_request_without_a_key_is_not_buffered(
    keys: str, make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect
) -> None:
    client = connect(make_router(stand_in(), api_keys_file=keys))
    client.send(head(b"content-length: 10000000") + b" " * 1_000_000)  # more than one read
    status, answered, _ = client.answer()
    assert (status, answered["www-authenticate"]) == (401, "Bearer")


def test_a_thousand_pipelined_requests_that_ask_for_an_upgrade_are_served(
    router: RouterUnderTest, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(router)
    ask = request(b"", b"connection: upgrade", b"upgrade: h2c", method="GET", path="/health")
    client.send(ask * 1000)
    assert {client.status() for _ in range(1000)} == {200}
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_thousand_preflights_may_wait_behind_a_slow_request(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(make_router(stand_in("mixed", echo), cors_allowed_origins=("*",)))
    asks = (b"origin: https://chat.example.com", b"access-control-request-method: POST")
    preflight = b"\r\n".join([b"OPTIONS /v1/x HTTP/1.1", *asks, b"", b""])
    client.send(request(b'{"number": 1}') + preflight * 1000)
    assert client.status() == 200
    assert {client.status() for _ in range(1000)} == {204}
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_the_number_of_pipelined_requests_that_wait_is_bounded(
    make_router: MakeRouter, stand_in: MakeStandIn, connect: Connect
) -> None:
    may_answer = threading.Event()

    async def answer_on_event(request: Received, respond: Responder) -> None:
        while not may_answer.is_set():
            await asyncio.sleep(0.01)
        await respond.answer(200, b"")

    router = make_router(stand_in("mixed", answer_on_event))
    client = connect(router)
    short = b"GET /v1/responses/x HTTP/1.1\r\n\r\n"
    client.send(request(b"{}") + short * 2000)
    connections = router._server.server_state.connections

    def find_waiting() -> list[int]:
        """List the lengths of full queues; the connection of the registration may still be open."""
        lengths = [len(each.pipeline) for each in list(connections) if isinstance(each, RouterProtocol)]
        return [length for length in lengths if length >= MAX_PIPELINED]

    wait_until(find_waiting, "the next requests")
    assert max(find_waiting()) <= MAX_PIPELINED + PIECE_BYTES // len(short)
    may_answer.set()
    assert {client.status() for _ in range(2001)} == {200}


@pytest.mark.parametrize("path", [CHAT, "/health"])
def test_a_head_with_too_many_headers_is_refused(router: RouterUnderTest, connect: Connect, path: str) -> None:
    client = connect(router)
    client.send(request(b"{}", *[b"a: b"] * (MAX_HEADERS - 1), path=CHAT))
    assert client.status() == 200
    client.send(request(b"{}", *[b"a: b"] * MAX_HEADERS, path=path))
    assert client.error() == (431, "head_too_large")
    assert client.rest() == b""


def test_the_control_plane_refuses_a_long_query(router: RouterUnderTest, connect: Connect) -> None:
    client = connect(router)
    for size, status in ((8 * 1024, 200), (8 * 1024 + 1, 414)):
        client.send(request(b"", method="GET", path="/health?" + "a" * size))
        assert client.status() == status


@pytest.mark.parametrize("body", [b'{"number": 4}', b'{"number": 4%s}' % (b" " * 50_000)])
def test_the_request_after_a_body_of_many_chunks_is_read(
    router: RouterUnderTest, connect: Connect, body: bytes
) -> None:
    client = connect(router)
    chunks = b"".join(b"1\r\n%c\r\n" % each for each in body)
    client.send(head(b"transfer-encoding: chunked") + chunks + b"0\r\n\r\n" + request(b'{"number": 5}'))
    assert [client.answer()[2] for _ in range(2)] == [b"4", b"5"]


async def send_much(request: Received, respond: Responder) -> None:
    """Send a stream that is larger than all buffers between here and a client that reads nothing."""
    await respond.start_stream()
    for _ in range(1000):
        await respond.event("x" * 60_000)
        if respond.peer_left.is_set():
            respond.keep_alive = False
            return
    await respond.end_stream()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_client_that_reads_nothing_for_a_time_is_disconnected(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr("router.http.server.SEND_SECONDS", 0.2)
    instance = stand_in("mixed", send_much)
    settings: dict[str, str] = {}
    if scheme == "https":
        certificate, key = make_certificate(tmp_path)
        settings = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    router = make_router(instance, **settings)
    with connect_slow_reader(router) as client:
        client.send(request(b'{"stream": true}'))
        wait_until(lambda: instance.running == 1, "the request")
        wait_until(lambda: not router._server.server_state.connections, "the end of the connection")
        wait_until(lambda: instance.running == 0, "the end of the leg")
        wait_until(lambda: router.app.admission.running == 0, "the end of the request")


def test_a_client_that_reads_slowly_gets_the_whole_response(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = threading.Event()
    check = RouterProtocol._check_sending

    def check_and_note(connection: RouterProtocol) -> None:
        check(connection)
        checked.set()

    monkeypatch.setattr("router.http.server.SEND_SECONDS", 0.05)
    monkeypatch.setattr(RouterProtocol, "_check_sending", check_and_note)
    body = b"x" * 8_000_000
    router = make_router(stand_in("mixed", answers(200, body)))
    with connect_slow_reader(router) as client:
        client.send(request(b"{}", b"connection: close"))
        for _ in range(5):
            checked.clear()
            for _ in range(4):
                assert client._receive()
            assert checked.wait(20)
        assert client.rest().endswith(b"\r\n\r\n" + body)


def test_a_client_that_reads_no_response_is_disconnected_when_the_connection_should_close(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http.server.SEND_SECONDS", 0.2)
    router = make_router(stand_in("mixed", answers(200, b"x" * 3_000_000)))
    router._server.config.timeout_keep_alive = 0.1  # type: ignore[assignment]  # uvicorn's type is int
    with connect_slow_reader(router) as client:
        client.send(request(b"{}"))
        wait_until(lambda: router._server.server_state.connections, "the connection")
        wait_until(lambda: not router._server.server_state.connections, "the end of the connection")


@given(st.lists(st.sampled_from(["%41", "%e4%B8%ad", "%e4", "%", "%4", "a", "\xe9", "/", "%2F", "%%41"])).map("".join))
def test_the_escapes_of_a_path_are_decoded_like_in_urllib(path: str) -> None:
    assert path_of(path.encode("latin-1") + b"?%41") == urllib.parse.unquote(path)
