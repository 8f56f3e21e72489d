"""One connection to an instance: from received bytes to the pieces of a response, with httptools."""

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


# A longer head is not a valid answer of an instance. The limit is the same as for clients' requests (``server.py``).
HEAD_BYTES = 64 * 1024
MAX_HEADERS = 1000

_TELLS_LENGTH = frozenset({b"content-length", b"transfer-encoding"})


class Receiver(Protocol):
    """The exchange that uses a connection."""

    bodiless: bool
    fresh: bool
    status: int

    def on_head(self, status: int, headers: Headers) -> None:
        """Receive the head of the response."""

    def on_data(self, data: bytes, is_whole: bool) -> bool:
        """Receive a piece of the body; return True if the connection must stop reading."""

    def on_lost(self, error: UpstreamError) -> None:
        """Handle a connection that ended before the response was complete."""


class Owner(Protocol):
    """The pool that a connection belongs to."""

    def add_open(self, connection: Connection) -> None:
        """Count a connection that was made."""

    def discard_open(self, connection: Connection) -> None:
        """Remove a closed connection."""

    def give_back(self, connection: Connection) -> None:
        """Take back a connection after a complete response."""


class Connection(asyncio.Protocol):
    """One connection to an instance, and the exchange that uses it.

    httptools calls the methods ``on_...`` while it parses bytes. These only collect data. After each read of the
    socket, the exchange gets all that was collected in one call.
    """

    def __init__(self, pool: Owner, address: Address) -> None:
        self.address = address
        self._pool = pool
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._is_made = False
        self._parser: Any = None
        self._exchange: Receiver | None = None
        self.is_open = True
        """Whether a request may be sent on it, once it is connected. If not, its exchange may still get a response."""
        self._is_paused = False
        self._keep_alive = False
        # State of the response that is being received: its headers, whether one of them defines where its body ends,
        # the pieces of the body not yet passed on, and whether it is complete.
        self._headers: Headers = []
        self._head_bytes = 0  # received bytes of an incomplete head
        self._has_length = False
        self._is_informational = False
        self._pieces: list[bytes] = []
        self._is_whole = False

    def send_request(self, exchange: Receiver, request: Sequence[bytes]) -> None:
        """Begin ``exchange`` by writing the parts of its request. From now on it gets all received bytes.

        The connection must be open.
        """
        self._exchange = exchange
        self._transport.writelines(request)

    def resume_reading(self) -> None:
        """Continue reading, if it was stopped because the exchange had too much data."""
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close it immediately, without notifying its exchange."""
        self._exchange = None
        self.is_open = False
        if self._is_made:
            self._transport.abort()

    def drop(self) -> None:
        """Close it if nothing waits for it any more: uvloop does not report the end of a new connection."""
        self.abort()
        self.connection_lost(None)
        self._transport, self._is_made = cast(asyncio.Transport, None), False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle asyncio's event."""
        self._transport, self._is_made = cast(asyncio.Transport, transport), True
        if not self.is_open:  # nothing waits for it any more
            self._transport.abort()
            return
        self._parser = httptools.HttpResponseParser(self)
        self._pool.add_open(self)
        try:
            _set_options(transport.get_extra_info("socket"))
        except OSError:
            self.abort()  # the instance has already closed it

    def data_received(self, data: bytes) -> None:
        """Handle asyncio's event."""
        if self._exchange is None:
            self.abort()  # unexpected bytes: this connection cannot be trusted with a request
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
        """Handle asyncio's event; asyncio closes the connection then."""
        self.is_open = False

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle asyncio's event."""
        self.is_open = False
        self._parser = None  # breaks a reference cycle that only the garbage collector could free
        self._pool.discard_open(self)
        exchange = self._exchange
        if exchange is None:
            return
        if exc is None and exchange.status and not self._has_length:
            self._exchange = None
            exchange.on_data(b"", True)  # a body without a length ends with the connection
        else:
            self._fail_exchange(ConnectionLost(f"{self.address} closed the connection before its answer was complete"))

    def on_message_begin(self) -> None:
        """Handle httptools's event."""
        if self._is_whole:
            self._keep_alive = False  # more bytes than the response has: the connection must not be reused
        self._headers, self._has_length = [], False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle httptools's event."""
        name = name.lower()
        if name in _TELLS_LENGTH:
            self._has_length = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Handle httptools's event."""
        status = self._parser.get_status_code()
        if not 100 <= status <= 599:
            raise ValueError(f"status {status}")
        if len(self._headers) > MAX_HEADERS:
            raise ValueError(f"more than {MAX_HEADERS} headers")  # the parser passes it on to ``data_received``
        self._is_informational = status < 200
        exchange = self._exchange
        if self._is_informational or self._is_whole or exchange is None:
            return
        self._keep_alive = self._parser.should_keep_alive() and not exchange.fresh
        exchange.on_head(status, self._headers)
        self._headers, self._head_bytes = _DROPPED, 0  # trailers, after a chunked body, are ignored
        if exchange.bodiless:
            self._keep_alive = False  # the parser would regard the next bytes as the body, which a HEAD response lacks
            self._is_whole = True

    def on_body(self, data: bytes) -> None:
        """Handle httptools's event."""
        if not self._is_whole:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """Handle httptools's event."""
        if not self._is_informational:
            self._is_whole = True

    def _end_exchange(self) -> None:
        """End the exchange after a complete response, and release the connection for another one if it is reusable."""
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
