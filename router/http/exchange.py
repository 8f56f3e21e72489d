"""One request to one instance and its response, and the connection that it uses.

An exchange reports to one ``Receiver``, without a task. Code that waits in a task uses a ``ResponseReader``.
``Exchange.fail`` ends an exchange from outside at any moment, with an exception that the caller chooses. It is used
when the other leg of a pair fails or a timer fires. So no task has to be cancelled.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, cast

import httptools

from router.http.errors import BadResponse, ConnectionLost, StaleConnection, UpstreamError
from router.http.message import NOT_PASSED_BACK, Address, Headers, end_to_end

__all__ = ["HIGH_WATER", "Connection", "Exchange", "ExchangeRecord", "Receiver", "ResponseReader"]

# Limit of body bytes that a reader buffers until its task takes them; beyond it, the instance's socket is not read.
HIGH_WATER = 256 * 1024
# A dead host, which sends no FIN, is noticed after about half a minute.
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_PROBES = 15, 5, 3
# A longer head is not a valid answer of an instance. The limit is the same as for clients' requests (``server.py``).
HEAD_BYTES = 64 * 1024
MAX_HEADERS = 1000

_USUAL_OPTIONS = frozenset(b"close keep-alive".split())


class Receiver(Protocol):
    """The object that an exchange reports to. It may call ``pause`` and ``resume`` of the exchange at any time."""

    def on_data(self, data: bytes, is_end: bool) -> None:
        """Receive the body's bytes of one read of the socket. The exchange has the status and the headers by then.

        One call reports head, data and end together, because a short response arrives in one read.

        Args:
            data: the next bytes of the body; empty if only the head or the end arrived.
            is_end: whether the response is complete. Then this is the last call.
        """

    def on_failed(self, error: Exception) -> None:
        """Handle the failure of the exchange: an ``UpstreamError``, or what ``fail`` was called with. The last call."""


class Pool(Protocol):
    """The pool that connections belong to."""

    def take_idle(self, address: Address) -> Connection | None:
        """Return an open connection without an exchange, if there is one."""

    async def connect(self, address: Address) -> Connection:
        """Return a new connection; raise ``UpstreamError`` if it cannot be made."""

    def add_open(self, connection: Connection) -> None:
        """Count a connection that was made."""

    def discard_open(self, connection: Connection) -> None:
        """Remove a closed connection."""

    def give_back(self, connection: Connection) -> None:
        """Take back a connection after a complete response."""


class ExchangeRecord:
    """The part of an exchange that outlives it: records of requests retain thousands of these.

    ``Exchange.__init__`` sets all attributes. A constructor here would cost one more call per leg of each request.
    """

    __slots__ = ("ended_at", "first_byte_at", "is_complete", "sent_at", "status")

    sent_at: float
    """When the request was sent. All times here are from ``time.perf_counter``, and 0 before the event."""
    first_byte_at: float
    """When the first byte of the body arrived."""
    ended_at: float
    """When the response was complete, or the exchange failed."""
    status: int
    is_complete: bool
    """Whether the whole response arrived."""


class Exchange:
    """One request to one instance and its response.

    ``send`` sends the request; from then on ``receiver`` gets the response. The creator of an exchange closes it.
    Callers only read its public attributes, except ``receiver``.
    """

    __slots__ = (
        "_connecting",
        "_connection",
        "_may_be_stale",
        "_pool",
        "_request",
        "address",
        "bodiless",
        "complete",
        "fresh",
        "headers",
        "is_closed",
        "is_paused",
        "last_heard",
        "receiver",
        "record",
        "status",
    )

    def __init__(self, pool: Pool, address: Address, request: Sequence[bytes], bodiless: bool, fresh: bool) -> None:
        self.address = address
        self.bodiless = bodiless
        """Whether the response ends with its head (a response to HEAD)."""
        self.fresh = fresh
        """Whether it uses its own connection."""
        self.status = 0
        self.headers: Headers = []
        """The headers that a client may get: those in ``NOT_PASSED_BACK`` are missing."""
        self.complete = False
        """Whether the whole response has arrived."""
        self.is_closed = False
        """Whether it failed, or was closed before the response was complete."""
        self.is_paused = False
        """Whether the receiver has stopped the reading."""
        self.last_heard = 0.0
        """When the last piece of the body arrived, from ``time.perf_counter``."""
        self.receiver: Receiver | None = None
        """The object that gets the response. None once the exchange has ended, which avoids a reference cycle."""
        self.record = record = ExchangeRecord()
        record.sent_at = record.first_byte_at = record.ended_at = 0.0
        record.status, record.is_complete = 0, False
        self._pool = pool
        self._request = request
        self._connection: Connection | None = None
        self._connecting: asyncio.Future[Any] | None = None
        self._may_be_stale = False

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "complete" if self.complete else "open"
        return f"<Exchange {self.address} status={self.status} {state}>"

    def is_silent(self, since: float) -> bool:
        """Return whether nothing has arrived since this time of ``time.perf_counter``, although it is read."""
        return not (self.complete or self.is_closed or self.is_paused) and self.last_heard < since

    def send(self, receiver: Receiver) -> None:
        """Send the request on an idle connection, or on a new one as soon as it is made."""
        if self.is_closed:
            return
        self.receiver = receiver
        connection = self._connection = None if self.fresh else self._pool.take_idle(self.address)
        if connection is not None:
            self._may_be_stale = True
            self.record.sent_at = time.perf_counter()
            request, self._request = self._request, ()  # it may be large, and the response may take long
            connection.send_request(self, request)
        else:
            self._connecting = asyncio.ensure_future(self._connect_and_send())

    def pause(self) -> None:
        """Stop reading the response, because its receiver cannot take more."""
        if self._connection is not None and not self.is_paused:
            self.is_paused = True
            self._connection.pause_reading()

    def resume(self) -> None:
        """Continue reading the response."""
        if self.is_paused:
            self.is_paused = False
            self.last_heard = time.perf_counter()
            if self._connection is not None:
                self._connection.resume_reading()

    def fail(self, error: Exception) -> None:
        """End this exchange now, and report ``error``. This has no effect on an exchange that has ended."""
        receiver = self.receiver
        self.close()
        if receiver is not None:
            receiver.on_failed(error)

    def close(self) -> None:
        """Release the connection; close it if the response is not complete. The receiver gets no report."""
        if self.complete or self.is_closed:
            return
        self.is_closed, self.receiver = True, None
        self.record.ended_at = time.perf_counter()
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()  # if it has not started yet, it never will, and cannot report its end itself
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def on_head(self, status: int, headers: Headers) -> None:
        """Receive the head from the connection, before ``on_read``."""
        self.status, self.headers = status, headers
        self.record.status = status

    def on_read(self, data: bytes, is_end: bool) -> None:
        """Receive the new body bytes from the connection, once after each read of its socket; as ``Receiver.on_data``.

        With ``is_end``, the connection is free for another exchange.
        """
        self._may_be_stale = False
        receiver = self.receiver
        if data or is_end:
            now = time.perf_counter()
            if data:
                self.last_heard = now
                if not self.record.first_byte_at:
                    self.record.first_byte_at = now
            if is_end:
                self.complete = self.record.is_complete = True
                self.record.ended_at = now
                self._connection = self.receiver = None
        if self.status and receiver is not None:
            receiver.on_data(data, is_end)

    def on_lost(self, error: UpstreamError) -> None:
        """Handle the loss of the connection before the response is complete; called by the connection."""
        self._connection = None
        if self._may_be_stale:
            error = StaleConnection(f"{self.address} closed an idle connection as the request was sent on it")
        self.fail(error)

    async def _connect_and_send(self) -> None:
        connection: Connection | None = None
        try:
            connection = await self._pool.connect(self.address)
            self._connecting = None  # else ``close`` would cancel this task
            self._send_on(connection)
        except Exception as exc:  # also a bug in the router: somebody waits for the result
            self._connecting = None
            if connection is not None:
                connection.abort()
            self.fail(exc.with_traceback(None))  # its traceback would form a reference cycle

    def _send_on(self, connection: Connection) -> None:
        """Send the request on a connection that was just made."""
        if self.is_closed:
            connection.abort()
        elif not connection.is_open:
            self.on_lost(ConnectionLost(f"{self.address} closed the connection"))
        else:
            self._connection, self.record.sent_at = connection, time.perf_counter()
            request, self._request = self._request, ()
            connection.send_request(self, request)


class ResponseReader:
    """Receiver for a task that waits for the response. It sends the request of its exchange."""

    __slots__ = ("_chunks", "_error", "_exchange", "_size", "_waiter")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._chunks: list[bytes] = []
        self._size = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        exchange.send(self)

    async def head(self) -> int:
        """Wait for the response's head, and return its status.

        Raises:
            UpstreamError: the exchange failed; or the exception that ``Exchange.fail`` was called with.
        """
        while not self._exchange.status and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._take_error(self._error)
        return self._exchange.status

    async def chunk(self) -> bytes:
        """Return the bytes of the body that were not taken yet, waiting for at least one; ``b""`` at the end.

        Raises:
            UpstreamError: the exchange failed before the end; or the exception that ``Exchange.fail`` was called with.
        """
        while not self._chunks:
            if self._error is not None:
                raise self._take_error(self._error)
            if self._exchange.complete:
                return b""
            await self._wait()
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._size = 0
        self._exchange.resume()
        return data

    async def read(self, enough: int) -> bytes:
        """Return the rest of the body, or what has arrived as soon as there are ``enough`` bytes.

        Raises:
            UpstreamError: as in ``chunk``.
        """
        parts: list[bytes] = []
        size = 0
        while size < enough and (data := await self.chunk()):
            parts.append(data)
            size += len(data)
        return b"".join(parts)

    def on_data(self, data: bytes, is_end: bool) -> None:
        """See ``Receiver``."""
        if data:
            self._chunks.append(data)
            self._size += len(data)
            if self._size > HIGH_WATER and not is_end:
                self._exchange.pause()
        self._wake()

    def on_failed(self, error: Exception) -> None:
        """See ``Receiver``."""
        self._error = error
        self._wake()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take_error(self, error: Exception) -> Exception:
        """Return ``error`` and remove it here: once raised, its traceback refers to this reader, which would form a
        reference cycle that only the garbage collector could free.
        """
        self._error = ConnectionLost(f"the exchange with {self._exchange.address} had failed")
        return error


class Connection(asyncio.Protocol):
    """One connection to an instance, and the exchange that uses it.

    httptools calls the methods ``on_...`` while it parses bytes. These only collect data. After each read of the
    socket, the exchange gets all that was collected in one call.
    """

    def __init__(self, pool: Pool, address: Address) -> None:
        self.address = address
        self._pool = pool
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._is_made = False
        self._parser: Any = None
        self._exchange: Exchange | None = None
        self.is_open = True
        """Whether a request may be sent on it, once it is connected. If not, its exchange may still get a response."""
        self._is_paused = False
        self._keep_alive = False
        # State of the response that is being received: its headers, whether one of them defines where its body ends,
        # the pieces of the body not yet passed on, and whether it is complete.
        self._headers: Headers = []
        self._head_bytes = 0  # received bytes of an incomplete head
        self._has_length = False
        self._has_options = False  # whether its head names headers that concern this connection
        self._is_informational = False
        self._pieces: list[bytes] = []
        self._is_whole = False

    def send_request(self, exchange: Exchange, request: Sequence[bytes]) -> None:
        """Begin ``exchange`` by writing the parts of its request. From now on it gets all received bytes.

        The connection must be open.
        """
        self._exchange = exchange
        self._transport.writelines(request)

    def pause_reading(self) -> None:
        """Stop reading, because the exchange has too much data."""
        if self.is_open and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Continue reading, if it was stopped."""
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
            exchange.on_read(body, True)
            self._end_exchange()
        else:
            exchange.on_read(body, False)
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
            exchange.on_read(b"", True)  # a body without a length ends with the connection
        else:
            self._fail_exchange(ConnectionLost(f"{self.address} closed the connection before its answer was complete"))

    def on_message_begin(self) -> None:
        """Handle httptools's event."""
        if self._is_whole:
            self._keep_alive = False  # more bytes than the response has: the connection must not be reused
        self._headers, self._has_length, self._has_options = [], False, False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle httptools's event."""
        name = name.lower()
        if name == b"content-length":
            self._has_length = True
        elif name in NOT_PASSED_BACK:
            if name == b"transfer-encoding":
                self._has_length = True
            if name != b"connection" or value.lower() in _USUAL_OPTIONS:
                return
            self._has_options = True
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
        exchange.on_head(status, end_to_end(self._headers, NOT_PASSED_BACK) if self._has_options else self._headers)
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
