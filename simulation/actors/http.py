"""A small HTTP/1.1 server and client for actors. They share only the parser, httptools, with the router."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httptools

from simulation.world.network import Endpoint

__all__ = ["Answer", "Asked", "ClientConnection", "Reply", "ServerConnection", "format_request"]

PRIVATE = "set-cookie: tenant=1\r\n"
"""A header that instances send to their client, the router. It must not reach the router's clients."""


class Asked:
    """A request that a server has received."""

    def __init__(self, method: str, target: str, headers: dict[str, str], body: bytes, sent_at: int) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.sent_at = sent_at
        """Virtual time in nanoseconds at which the sender has sent the last byte."""

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    def json(self) -> dict[str, Any]:
        """Return the parsed body.

        Raises:
            ValueError: the body is not JSON.
        """
        value: dict[str, Any] = json.loads(self.body)
        return value


class Reply:
    """Sends the response to a request; a handler uses it."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self.sent = 0
        """Number of bytes that were sent."""
        self.cut_at: int | None = None
        """Number of bytes after which the connection is cut; None: it is not cut."""
        self.has_begun = False

    @property
    def is_peer_gone(self) -> bool:
        """Whether the connection has ended."""
        return self._connection.is_lost

    async def raw(self, data: bytes) -> None:
        """Send bytes. Wait while the other end does not read.

        Raises:
            ConnectionError: the connection has ended, or was cut because of ``cut_at``.
        """
        self.has_begun = True
        if self.cut_at is not None and self.sent + len(data) >= self.cut_at:
            self._connection.transport.write(data[: self.cut_at - self.sent])
            await asyncio.sleep(0.001)
            self._connection.transport.abort()
            raise ConnectionError("cut as planned")
        self.sent += len(data)
        await self._connection.send(data)

    async def answer(self, status: int, value: Any, *, close: bool = False) -> None:
        """Send a complete response."""
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\n{PRIVATE}content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        await self.raw(head.encode() + (b"connection: close\r\n" if close else b"") + b"\r\n" + body)

    async def begin_stream(self) -> None:
        """Send the head of an event stream."""
        kind = "content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        await self.raw(f"HTTP/1.1 200 OK\r\n{PRIVATE}{kind}".encode())

    async def chunk(self, data: bytes) -> None:
        """Send a piece of the event stream."""
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        """End the event stream."""
        await self.raw(b"0\r\n\r\n")

    def cut(self) -> None:
        """Cut the connection."""
        self._connection.transport.abort()


Handler = Callable[[Asked, Reply], Awaitable[None]]


class ServerConnection(asyncio.Protocol):
    """One connection of a server. Its requests are handled one after another.

    Args:
        handle: handles a request.
        connections: all connections of the server; this one adds itself while it is open.
        idle_seconds: time after which a connection without a request is closed.
    """

    transport: asyncio.Transport
    _endpoint: Endpoint

    def __init__(self, handle: Handler, connections: dict[ServerConnection, None], idle_seconds: float) -> None:
        self._idle_seconds = idle_seconds
        self._idle: asyncio.TimerHandle | None = None
        self._handle = handle
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Asked] = deque()
        self._task: asyncio.Task[None] | None = None
        self._is_writable = asyncio.Event()
        self._is_writable.set()
        self.is_lost = False
        self.on_lost: list[Callable[[], None]] = []
        self._target, self._headers, self._body = b"", {}, bytearray()  # type: ignore[var-annotated]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._endpoint = transport.get_extra_info("socket").endpoint
        self._connections[self] = None
        self._watch_idle()

    def _watch_idle(self) -> None:
        self._idle = asyncio.get_running_loop().call_later(self._idle_seconds, self.transport.close)

    def data_received(self, data: bytes) -> None:
        if self._idle is not None:
            self._idle.cancel()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self._idle is not None:
            self._idle.cancel()
        if self._task is None:
            self._connections.pop(self, None)
        self._is_writable.set()
        for callback in self.on_lost:
            callback()

    def pause_writing(self) -> None:
        self._is_writable.clear()

    def resume_writing(self) -> None:
        self._is_writable.set()

    async def send(self, data: bytes) -> None:
        await self._is_writable.wait()
        if self.is_lost:
            raise ConnectionError("the peer has left")
        self.transport.write(data)

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode()
        asked = Asked(method, self._target.decode(), self._headers, bytes(self._body), self._endpoint.peer.sent_at)
        self._target, self._headers, self._body = b"", {}, bytearray()
        self._waiting.append(asked)
        if self._task is None:
            self._task = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        try:
            while self._waiting and not self.is_lost:
                asked = self._waiting.popleft()
                await self._handle(asked, Reply(self))
                if asked.headers.get("connection") == "close":
                    self.transport.close()
            if not self.is_lost:
                self._watch_idle()
        except ConnectionError:
            self.transport.abort()
        finally:
            self._task = None
            if self.is_lost:
                self._connections.pop(self, None)


class Answer:
    """A response that a client has received, completely or in part."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.is_whole = False
        self.head_at: float | None = None

    @property
    def is_stream(self) -> bool:
        """Whether it is an event stream."""
        return self.headers.get("content-type", "").startswith("text/event-stream")


class ClientConnection(asyncio.Protocol):
    """One connection of a client. Responses arrive in the order of the requests."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.answers: deque[Answer] = deque()
        self._current: Answer | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.is_lost = False
        self.keep_alive = True
        self.changed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, request: bytes) -> Answer:
        """Send a request, and return its response, which is filled when data arrives."""
        answer = Answer()
        self.answers.append(answer)
        self.transport.write(request)
        return answer

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()
        self.changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self._current is not None and "content-length" not in self._current.headers:
            is_chunked = "transfer-encoding" in self._current.headers
            self._current.is_whole |= not is_chunked and exc is None
        self.changed.set()

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() >= 200 and self.answers:
            self._current = self.answers.popleft()
            self._current.status = self._parser.get_status_code()
            self._current.headers = self._headers
            self._current.head_at = asyncio.get_running_loop().time()
            self.keep_alive = self._parser.should_keep_alive()

    def on_message_begin(self) -> None:
        self._headers: dict[str, str] = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        if self._current is not None:
            self._current.body += body

    def on_message_complete(self) -> None:
        if self._current is not None:
            self._current.is_whole, self._current = True, None


def format_request(
    method: str, target: str, body: bytes = b"", headers: Sequence[tuple[str, str]] = (), host: str = "router"
) -> bytes:
    """Return the bytes of a request."""
    lines = [f"{method} {target} HTTP/1.1", f"host: {host}", *(f"{name}: {value}" for name, value in headers)]
    if body or method == "POST":
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body
