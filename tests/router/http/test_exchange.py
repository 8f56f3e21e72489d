"""Connections to instances: reuse, stale connections, framing, back-pressure, and ``Exchange.fail``."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from router.http import pool
from router.http.errors import (
    BadResponse,
    ConnectFailed,
    ConnectionLost,
    ConnectRefused,
    NameUnresolved,
    NoRoom,
    StaleConnection,
    TimedOut,
    UpstreamError,
)
from router.http.exchange import HIGH_WATER, Connection, Exchange, ResponseReader
from router.http.message import Address, Response
from router.http.pool import ConnectionPool
from tests.router.conftest import MakeStandIn
from tests.router.stand_in import Behaviour, LoopThread, Received, Responder, StandIn, answers, never_answers
from tests.support.ports import free_port
from tests.support.waiting import wait_until


class Client:
    """A ``ConnectionPool`` in the test's event loop."""

    def __init__(self, thread: LoopThread) -> None:
        self.thread = thread
        self.upstream = thread.run(self._make())

    async def _make(self) -> ConnectionPool:
        return ConnectionPool()

    def run(self, use: Callable[[ConnectionPool], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            return await use(self.upstream)

        return self.thread.run(main())

    def post(self, instance: StandIn, body: bytes = b"{}", method: str = "POST") -> Response:
        """Do one whole exchange over the pool."""

        async def post(upstream: ConnectionPool) -> Response:
            exchange = upstream.exchange(Address("127.0.0.1", instance.port), method, b"/x", [], body)
            try:
                reader = ResponseReader(exchange)
                return Response(await reader.head(), exchange.headers, await reader.read(1 << 30))
            finally:
                exchange.close()

        answer: Response = self.run(post)
        return answer


@pytest.fixture
def client(thread: LoopThread) -> Client:
    return Client(thread)


def send_raw(*pieces: bytes, then_close: bool = False) -> Behaviour:
    """Return a behaviour that sends these bytes unchanged."""

    async def behave(request: Received, respond: Responder) -> None:
        for piece in pieces:
            await respond.raw(piece)
            await asyncio.sleep(0)
        respond.keep_alive = not then_close

    return behave


def test_a_connection_is_reused(client: Client, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    for _ in range(5):
        assert client.post(instance).status == 200
    assert instance.connections == 1


def test_concurrent_exchanges_use_separate_connections(client: Client, stand_in: MakeStandIn) -> None:
    both_received = asyncio.Event()

    async def wait_for_both(request: Received, respond: Responder) -> None:
        if len(instance.received) == 2:
            both_received.set()
        await both_received.wait()
        await respond.answer(200, request.body)

    instance = stand_in("mixed", wait_for_both)

    async def exchange_two(upstream: ConnectionPool) -> list[bytes]:
        async def one(body: bytes) -> bytes:
            exchange = upstream.exchange(Address("127.0.0.1", instance.port), "POST", b"/x", [], body)
            return await ResponseReader(exchange).read(1 << 20)

        return list(await asyncio.gather(one(b"a"), one(b"b")))

    assert client.run(exchange_two) == [b"a", b"b"]
    assert instance.connections == 2


def test_a_connection_that_the_instance_closed_while_idle_is_not_used(client: Client, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    client.post(instance)
    instance.cut_idle()
    assert client.post(instance).status == 200
    assert instance.connections == 2


def test_a_connection_idle_for_long_is_not_used(
    client: Client, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http.pool.IDLE_SECONDS", 0.0)
    instance = stand_in()
    client.post(instance)
    assert client.post(instance).status == 200
    assert instance.connections == 2


def test_idle_connections_are_closed_without_a_further_exchange(
    client: Client, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http.pool.IDLE_SECONDS", 0.05)
    for _ in range(2):
        client.post(stand_in())
        wait_until(lambda: repr(client.upstream) == "<ConnectionPool 0 connections, 0 idle>", "the connection's end")


def test_a_pooled_connection_lost_without_a_byte_has_its_own_error(client: Client, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    client.post(instance)

    async def cut(request: Received, respond: Responder) -> None:
        respond.cut()

    instance.behave = cut
    with pytest.raises(StaleConnection):
        client.post(instance)
    with pytest.raises(ConnectionLost) as second:
        client.post(instance)
    assert not isinstance(second.value, StaleConnection)


def test_a_response_with_connection_close_ends_the_connection(client: Client, stand_in: MakeStandIn) -> None:
    instance = stand_in("mixed", answers(200, b"x", ("connection", "close")))
    for _ in range(2):
        assert client.post(instance).body == b"x"
    assert instance.connections == 2


def test_bytes_after_the_response_end_the_connection(client: Client, stand_in: MakeStandIn) -> None:
    reply = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx"
    instance = stand_in("mixed", send_raw(reply + b"HTTP/1.1 200 OK\r\n"))
    for _ in range(2):
        assert client.post(instance).body == b"x"
    assert instance.connections == 2


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        pytest.param([b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"], b"hello", id="length"),
        pytest.param([b"HTTP/1.1 200 OK\r\ncontent-le", b"ngth: 5\r\n\r", b"\nhel", b"lo"], b"hello", id="pieces"),
        pytest.param(
            [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n", b"3\r\nllo\r\n0\r\n\r\n"],
            b"hello",
            id="chunked",
        ),
        pytest.param([b"HTTP/1.1 204 No Content\r\n\r\n"], b"", id="no content"),
        pytest.param(
            [b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"],
            b"hello",
            id="after 100",
        ),
        pytest.param([b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"], b"", id="empty"),
    ],
)
def test_every_framing_is_parsed(client: Client, stand_in: MakeStandIn, pieces: list[bytes], body: bytes) -> None:
    instance = stand_in("mixed", send_raw(*pieces))
    assert [client.post(instance).body for _ in range(2)] == [body, body]
    assert instance.connections == 1


def test_a_body_without_a_length_ends_with_the_connection(client: Client, stand_in: MakeStandIn) -> None:
    instance = stand_in("mixed", send_raw(b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo", then_close=True))
    assert client.post(instance).body == b"hello"


def test_a_response_to_head_has_no_body(client: Client, stand_in: MakeStandIn) -> None:
    instance = stand_in("mixed", send_raw(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"))
    answer = client.post(instance, b"", method="HEAD")
    assert (answer.status, dict(answer.headers)[b"content-length"], answer.body) == (200, b"5", b"")


def test_header_names_are_lower_case_and_may_repeat(client: Client, stand_in: MakeStandIn) -> None:
    instance = stand_in("mixed", answers(200, b"", ("X-A", "1"), ("X-A", "2")))
    assert [h for h in client.post(instance).headers if h[0] == b"x-a"] == [(b"x-a", b"1"), (b"x-a", b"2")]


@pytest.mark.parametrize(
    ("reply", "error", "reason"),
    [
        pytest.param(b"", ConnectionLost, "", id="nothing"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-", ConnectionLost, "", id="a part of a head"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel", ConnectionLost, "", id="a part of a body"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n", ConnectionLost, "", id="no last chunk"
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nx: " + 300_000 * b"y", BadResponse, "bytes without", id="an endless header"),
        pytest.param(
            b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000, BadResponse, "bytes without", id="endless interim responses"
        ),
        *(
            pytest.param(
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + end, BadResponse, "bytes without", id=name
            )
            for name, end in (
                ("an endless trailer", b"2\r\n{}\r\n0\r\nx: " + 600_000 * b"y"),
                ("endless trailers", b"2\r\n{}\r\n0\r\n" + 100_000 * b"x: y\r\n"),
                ("an endless extension", b"2;x=" + 600_000 * b"y"),
            )
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\n" + 1001 * b"x: y\r\n" + b"content-length: 0\r\n\r\n",
            BadResponse,
            "not valid HTTP: it has more than 1000 headers",
            id="many headers",
        ),
        pytest.param(b"SSH-2.0-OpenSSH\r\n", BadResponse, "not valid HTTP: Expected HTTP/", id="another protocol"),
        pytest.param(
            b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n",
            BadResponse,
            "not valid HTTP: the status is 999",
            id="no such status",
        ),
        pytest.param(
            b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
            BadResponse,
            "switches to another protocol",
            id="an upgrade",
        ),
    ],
)
def test_an_incomplete_or_invalid_response_is_an_error(
    client: Client, stand_in: MakeStandIn, reply: bytes, error: type[UpstreamError], reason: str
) -> None:
    instance = stand_in("mixed", send_raw(reply, then_close=True))
    with pytest.raises(error, match=f"127.0.0.1:{instance.port}.*{reason}"):
        client.post(instance)


def test_a_connection_that_ends_before_the_request_is_sent_is_an_error(
    client: Client, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, connect = stand_in(), ConnectionPool.connect

    async def connect_and_lose(upstream: ConnectionPool, address: Address) -> Connection:
        connection = await connect(upstream, address)
        connection.abort()
        return connection

    monkeypatch.setattr(ConnectionPool, "connect", connect_and_lose)

    async def fetch(upstream: ConnectionPool) -> Response:
        return await upstream.fetch(Address("127.0.0.1", instance.port), "GET", "/x", timeout=5)

    with pytest.raises(ConnectionLost, match="closed the connection"):
        client.run(fetch)


def test_a_port_without_a_listener_has_its_own_error(client: Client, stand_in: MakeStandIn, thread: LoopThread) -> None:
    with pytest.raises(ConnectFailed, match="Connection refused"):
        client.post(StandIn("mixed", thread, port=free_port()))


def test_the_exchange_stops_reading_a_body_that_is_not_consumed(client: Client, stand_in: MakeStandIn) -> None:
    total = 64 * HIGH_WATER

    async def send_much(request: Received, respond: Responder) -> None:
        await respond.raw(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        for _ in range(64):
            await respond.raw(b"x" * HIGH_WATER)

    instance = stand_in("mixed", send_much)

    async def take_late(upstream: ConnectionPool) -> tuple[str, int]:
        exchange = upstream.exchange(Address("127.0.0.1", instance.port), "POST", b"/x", [], b"")
        reader = ResponseReader(exchange)
        await reader.head()
        while reader._size <= HIGH_WATER:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        buffered = reader._size
        return repr(buffered <= 2 * HIGH_WATER), len(await reader.read(total))

    assert client.run(take_late) == ("True", total)


class _Stop(Exception):
    pass


@pytest.mark.parametrize("when", ["before the head", "in the body"])
def test_fail_wakes_the_reader_and_closes_the_connection(client: Client, stand_in: MakeStandIn, when: str) -> None:
    async def begin_response(request: Received, respond: Responder) -> None:
        if when == "in the body":
            await respond.start_stream()
        await respond.peer_left.wait()
        left.set()
        respond.keep_alive = False

    left = asyncio.Event()
    instance = stand_in("mixed", begin_response)

    async def use(upstream: ConnectionPool) -> None:
        exchange = upstream.exchange(Address("127.0.0.1", instance.port), "POST", b"/x", [], b"")
        asyncio.get_running_loop().call_later(0.05, exchange.fail, _Stop())
        try:
            reader = ResponseReader(exchange)
            await reader.head()
            await reader.chunk()
        finally:
            await asyncio.wait_for(left.wait(), 10)

    with pytest.raises(_Stop):
        client.run(use)


class Pieces:
    """A receiver that records each piece of the response, and pauses the exchange after it."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.got: list[tuple[bytes, bool]] = []
        exchange.send(self)

    def on_data(self, data: bytes, is_end: bool) -> None:
        self.got.append((data, is_end))
        self.exchange.pause()

    def on_failed(self, error: Exception) -> None:
        raise error


def test_a_receiver_that_pauses_gets_nothing_more_until_it_resumes(client: Client, stand_in: MakeStandIn) -> None:
    async def one_by_one(request: Received, respond: Responder) -> None:
        await respond.raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in (b"one", b"two", b"last"):
            await respond.raw(b"%x\r\n%s\r\n" % (len(piece), piece) + b"0\r\n\r\n" * (piece == b"last"))
            await asyncio.sleep(0.02)

    instance = stand_in("mixed", one_by_one)

    async def use(upstream: ConnectionPool) -> list[tuple[bytes, bool]]:
        pieces = Pieces(upstream.exchange(Address("127.0.0.1", instance.port), "POST", b"/x", [], b"{}"))
        while not pieces.exchange.complete:
            await asyncio.sleep(0.01)
            if pieces.exchange.is_paused:
                before = list(pieces.got)
                await asyncio.sleep(0.1)
                assert pieces.got == before
                pieces.exchange.resume()
        return pieces.got

    got = client.run(use)
    assert b"".join(data for data, _ in got) == b"onetwolast"
    assert [is_end for _, is_end in got] == [False] * (len(got) - 1) + [True]


def test_fail_wakes_a_reader_while_its_exchange_connects(client: Client, stand_in: MakeStandIn) -> None:
    instance = stand_in()

    async def use(upstream: ConnectionPool) -> None:
        exchange = upstream.exchange(Address("127.0.0.1", instance.port), "POST", b"/x", [], b"")
        asyncio.get_running_loop().call_soon(exchange.fail, _Stop())
        await ResponseReader(exchange).head()

    with pytest.raises(_Stop):
        client.run(use)


def test_fetch_ends_after_its_time_out(client: Client, stand_in: MakeStandIn) -> None:
    instance = stand_in("mixed", never_answers)

    async def fetch(upstream: ConnectionPool) -> Response:
        return await upstream.fetch(Address("127.0.0.1", instance.port), "GET", "/x", timeout=0.05)

    with pytest.raises(TimedOut, match=r"did not answer GET /x within 0\.05 s"):
        client.run(fetch)


def test_an_ipv6_address_is_written_with_brackets() -> None:
    assert str(Address("::1", 80)) == "[::1]:80"


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (OSError(errno.EMFILE, "no"), NoRoom),
        (OSError(errno.ECONNREFUSED, "no"), ConnectRefused),
        (OSError(errno.EHOSTUNREACH, "no"), ConnectFailed),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), NameUnresolved),
        (socket.gaierror(socket.EAI_NONAME, "unknown"), ConnectFailed),
    ],
)
def test_each_cause_of_a_failed_connect_has_its_own_error(
    client: Client, monkeypatch: pytest.MonkeyPatch, failure: OSError, expected: type[UpstreamError]
) -> None:
    async def connect(upstream: ConnectionPool) -> None:
        async def fail(*args: object, **kwargs: object) -> None:
            raise failure

        loop = SimpleNamespace(create_connection=fail)
        monkeypatch.setattr("router.http.pool.asyncio.get_running_loop", lambda: loop)
        try:
            await upstream.connect(Address("127.0.0.1", 1))
        finally:
            monkeypatch.undo()

    with pytest.raises(UpstreamError) as raised:
        client.run(connect)
    assert type(raised.value) is expected


def test_the_number_of_remembered_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_HOSTS", 3)
    upstream = ConnectionPool()
    for number in range(10):
        upstream.exchange(Address("127.0.0.1", number + 1), "GET", b"/", (), b"")
        assert len(upstream._hosts) <= 3


def test_the_connection_of_a_fetch_is_not_reused_even_if_the_instance_leaves_it_open(
    client: Client, stand_in: MakeStandIn
) -> None:
    instance = stand_in()

    async def fetch(upstream: ConnectionPool) -> Response:
        return await upstream.fetch(Address("127.0.0.1", instance.port), "GET", "/x", timeout=5)

    client.run(fetch)
    wait_until(lambda: repr(client.upstream) == "<ConnectionPool 0 connections, 0 idle>", "the connection's end")


def test_an_exchange_that_fails_before_it_connects_is_freed_without_the_garbage_collector(client: Client) -> None:
    async def fail_at_once(upstream: ConnectionPool) -> None:
        exchange = upstream.exchange(Address("127.0.0.1", free_port()), "POST", b"/x", [], b"{}")
        ResponseReader(exchange)
        exchange.fail(TimedOut("too late"))
        await asyncio.sleep(0.01)  # its task ends

    gc.freeze()  # so that get_objects does not list older objects
    gc.disable()
    try:
        client.run(fail_at_once)
        assert not [one for one in gc.get_objects() if type(one) is Exchange and one._pool is client.upstream]
    finally:
        gc.enable()
