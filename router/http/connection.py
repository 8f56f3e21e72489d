"""One connection to an instance: received bytes to the pieces of a response, by httptools."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, cast

import httptools

from router.http.errors import BadResponse, ConnectionLost, UpstreamError
from router.http.message import Address, Headers

__all__ = ["Connection"]

# A dead host, which sends no FIN, is noticed after about half a minute.
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_PROBES = 15, 5, 3


# A head that goes on for longer is no answer of an instance; as of clients' requests (``server.py``).
HEAD_BYTES = 64 * 1024
MAX_HEADERS = 1000

_TELLS_LENGTH = frozenset({b"content-length", b"transfer-encoding"})


class Receiver(Protocol):
    """The exchange that a connection carries."""

    bodiless: bool
    fresh: bool
    status: int

    def on_head(self, status: int, headers: Headers) -> None:
        """Take the head of the response."""

    def on_data(self, data: bytes, is_whole: bool) -> bool:
        """Take a piece of the body; True if the connection must stop reading."""

    def on_lost(self, error: UpstreamError) -> None:
        """The connection ended before the response was complete."""


class Owner(Protocol):
    """The pool that a connection belongs to."""

    def add_open(self, connection: Connection) -> None:
        """Count a connection that was made."""

    def discard_open(self, connection: Connection) -> None:
        """Forget a connection that is closed."""

    def give_back(self, connection: Connection) -> None:
        """Take a connection whose response is complete."""


class Connection(asyncio.Protocol):
    """One connection to an instance, and the exchange that it carries.

    httptools calls the methods ``on_...`` while bytes are fed to it. They only collect: the exchange is told once of
    all that one read of the socket brought.
    """

    def __init__(self, pool: Owner, address: Address) -> None:
        self.address = address
        self._pool = pool
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._is_made = False
        self._parser: Any = None
        self._exchange: Receiver | None = None
        self.is_open = True
        """Whether a request may be sent on it, once it was made; its exchange may still get a response where not."""
        self._is_paused = False
        self._keep_alive = False
        # The response that is being received: its headers, whether one of them says where its body ends, the pieces of
        # the body not yet handed on, and whether it is whole.
        self._headers: Headers = []
        self._head_bytes = 0  # received of a head that is not complete
        self._has_length = False
        self._is_informational = False
        self._pieces: list[bytes] = []
        self._is_whole = False

    def send_request(self, exchange: Receiver, request: Sequence[bytes]) -> None:
        """Begin ``exchange``, which from now on is told of all bytes that come, by writing the parts of its request.

        The connection is open.
        """
        self._exchange = exchange
        self._transport.writelines(request)

    def resume_reading(self) -> None:
        """Go on reading, if the exchange had too much to take."""
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close it at once, without a word to its exchange."""
        self._exchange = None
        self.is_open = False
        if self._is_made:
            self._transport.abort()

    def drop(self) -> None:
        """Close it, which nobody waits for any more: where it was just made, uvloop does not tell that it ends."""
        self.abort()
        self.connection_lost(None)
        self._transport, self._is_made = cast(asyncio.Transport, None), False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport, self._is_made = cast(asyncio.Transport, transport), True
        if not self.is_open:  # nobody waits for it any more
            self._transport.abort()
            return
        self._parser = httptools.HttpResponseParser(self)
        self._pool.add_open(self)
        try:
            _set_options(transport.get_extra_info("socket"))
        except OSError:
            self.abort()  # the instance has cut it already

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        if self._exchange is None:
            self.abort()  # bytes that nobody asked for: this connection cannot be trusted with a request
            return
        error = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            error = BadResponse(f"{self.address} did not answer in HTTP: {exc}")
        exchange, pieces = self._exchange, self._pieces
        if not exchange.status and error is None:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                error = BadResponse(f"{self.address} sent more than {HEAD_BYTES} bytes without a whole head")
        body = b""
        if pieces:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            self._pieces = []
        if self._is_whole:
            self._exchange, self._is_whole = None, False
            exchange.on_data(body, True)
            self._end_exchange()
        elif exchange.on_data(body, False) and not self._is_paused and self.is_open:
            self._is_paused = True
            self._transport.pause_reading()
        if error is not None:
            self._fail_exchange(error)
            self.abort()

    def eof_received(self) -> None:
        """Called by asyncio, which closes the connection then."""
        self.is_open = False

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self.is_open = False
        self._parser = None  # it holds us, and only the collector could free both
        self._pool.discard_open(self)
        exchange = self._exchange
        if exchange is None:
            return
        if exc is None and exchange.status and not self._has_length:
            self._exchange = None
            exchange.on_data(b"", True)  # a body without a length ends where the connection does
        else:
            self._fail_exchange(ConnectionLost(f"{self.address} closed the connection before its answer was complete"))

    def on_message_begin(self) -> None:
        """Called by httptools."""
        if self._is_whole:
            self._keep_alive = False  # more bytes than the response has: not to be used again
        self._headers, self._has_length = [], False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by httptools."""
        name = name.lower()
        if name in _TELLS_LENGTH:
            self._has_length = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Called by httptools."""
        status = self._parser.get_status_code()
        if not 100 <= status <= 599:
            raise ValueError(f"status {status}")
        if len(self._headers) > MAX_HEADERS:
            raise ValueError(f"more than {MAX_HEADERS} headers")  # goes to ``data_received`` as the parser's error
        self._is_informational = status < 200
        exchange = self._exchange
        if self._is_informational or self._is_whole or exchange is None:
            return
        self._keep_alive = self._parser.should_keep_alive() and not exchange.fresh
        exchange.on_head(status, self._headers)
        self._headers, self._head_bytes = _DROPPED, 0  # trailers, after a chunked body, are no headers
        if exchange.bodiless:
            self._keep_alive = False  # the parser would take the next bytes for the body that HEAD does not get
            self._is_whole = True

    def on_body(self, data: bytes) -> None:
        """Called by httptools."""
        if not self._is_whole:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """Called by httptools."""
        if not self._is_informational:
            self._is_whole = True

    def _end_exchange(self) -> None:
        """The response is whole: let another exchange have the connection, if it may be used again."""
        if not self.is_open:
            return
        if self._is_paused:
            self.resume_reading()
        if self._keep_alive and not self._transport.is_closing():
            self._pool.give_back(self)
        else:
            self.abort()

    def _fail_exchange(self, error: UpstreamError) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.on_lost(error)


_DROPPED: Any = deque(maxlen=0)


def _set_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
