"""Sends one request to one instance and reads its response; both together are an exchange.

A connection carries one exchange after another. An exchange calls the methods of one ``Receiver`` and needs no task.
Code that waits in a task uses a ``ResponseReader``. ``Exchange.fail`` ends an exchange from outside at any moment, with
an exception that the caller chooses, for example when the other leg of a pair fails or a timer fires. So no task has to
be cancelled.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, cast

import httptools

from kvcommon.http_limits import HEAD_BYTES, MAX_HEADERS
from router.http.errors import BadResponse, ConnectionLost, StaleConnection, UpstreamError
from router.http.message import NOT_PASSED_BACK, Address, Headers, PreparedHead, end_to_end

__all__ = ["HIGH_WATER", "Connection", "Exchange", "ExchangeMaker", "ExchangeRecord", "Receiver", "ResponseReader"]

# A ``ResponseReader`` that has buffered more body bytes than this stops reading the instance's socket.
HIGH_WATER = 256 * 1024
# Times of TCP keep-alive: the death of a host, which sends no FIN, is detected after about half a minute.
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_PROBES = 15, 5, 3

_USUAL_OPTIONS = frozenset(b"close keep-alive".split())


class Receiver(Protocol):
    """Receives the response of an exchange, or its failure.

    The receiver may call the exchange's ``pause`` and ``resume`` at any time.
    """

    def on_data(self, data: bytes, is_end: bool) -> None:
        """Receive the body bytes that one read of the socket brought. The exchange already has status and headers.

        One call reports head, data and end together if one read brought them, as for a short response.

        Args:
            data: the next bytes of the body; empty if only the head or the end arrived.
            is_end: whether the response is complete. Then this is the last call.
        """

    def on_failed(self, error: Exception) -> None:
        """Handle the failure of the exchange; no further call follows.

        Args:
            error: an ``UpstreamError``, or the exception that ``Exchange.fail`` was called with.
        """


class ExchangeMaker(Protocol):
    """Makes the exchanges with instances: the connection pool, or a gateway."""

    def prepare_exchange(
        self, address: Address, head: PreparedHead, body: bytes | tuple[bytes, ...], fresh: bool = False
    ) -> Exchange:
        """Return an exchange with the instance at ``address``.

        Args:
            address: address of the instance.
            head: head of the request. Several requests can share it.
            body: body of the request, or its parts.
            fresh: whether to open a new connection, and close it after the exchange.
        """


class Pool(Protocol):
    """The methods of a connection pool that its connections and exchanges call."""

    def take_idle(self, address: Address) -> Connection | None:
        """Return an open connection to ``address`` that no exchange uses; None if there is none."""

    async def connect(self, address: Address) -> Connection:
        """Open a new connection to ``address``; raise ``UpstreamError`` if that fails."""

    def add_open(self, connection: Connection) -> None:
        """Add a newly opened connection to the open connections of the pool."""

    def discard_open(self, connection: Connection) -> None:
        """Remove a closed connection from the open connections of the pool."""

    def give_back(self, connection: Connection) -> None:
        """Store a connection for another exchange; its response is complete."""


class ExchangeRecord:
    """Times and status of an exchange. The record of a request stores them after the end of the exchange.

    ``Exchange.__init__`` sets all attributes, because a constructor here would cost one more call for each leg.
    """

    __slots__ = ("ended_at", "first_byte_at", "is_complete", "sent_at", "status")

    sent_at: float
    """Time at which the request was sent. All times are values of ``time.perf_counter``, and 0 before the event."""
    first_byte_at: float
    """Time at which the first byte of the body arrived."""
    ended_at: float
    """Time at which the response was complete, or the exchange failed."""
    status: int
    is_complete: bool
    """Whether the whole response has arrived."""


class Exchange:
    """One request to one instance and its response.

    ``send`` sends the request. After that, ``receiver`` gets the response. The code that made the exchange closes it.
    Other code may set ``receiver``, and only reads the other public attributes.
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
        """Whether the response has no body, because the request's method is HEAD."""
        self.fresh = fresh
        """Whether this exchange opens a new connection, which is closed afterwards."""
        self.status = 0
        self.headers: Headers = []
        """Headers of the response that a client may get, without those in ``NOT_PASSED_BACK``."""
        self.complete = False
        """Whether the whole response has arrived."""
        self.is_closed = False
        """Whether this exchange failed, or was closed before the response was complete."""
        self.is_paused = False
        """Whether the receiver has paused reading."""
        self.last_heard = 0.0
        """Time at which the last piece of the body arrived, a value of ``time.perf_counter``."""
        self.receiver: Receiver | None = None
        """The object that gets the response; None after the exchange has ended, which avoids a reference cycle."""
        self.record = record = ExchangeRecord()
        record.sent_at = record.first_byte_at = record.ended_at = 0.0
        record.status, record.is_complete = 0, False
        self._pool = pool
        self._request = request
        self._connection: Connection | None = None
        self._connecting: asyncio.Future[Any] | None = None
        self._may_be_stale = False

    def is_silent(self, since: float) -> bool:
        """Return whether no data has arrived since the time ``since``, although the router is reading the connection.

        Args:
            since: a value of ``time.perf_counter``.
        """
        return not (self.complete or self.is_closed or self.is_paused) and self.last_heard < since

    def send(self, receiver: Receiver) -> None:
        """Send the request: at once on an idle connection, else on a new connection as soon as it is open."""
        if self.is_closed:
            return
        self.receiver = receiver
        connection = self._connection = None if self.fresh else self._pool.take_idle(self.address)
        if connection is not None:
            self._may_be_stale = True
            self.record.sent_at = time.perf_counter()
            request, self._request = self._request, ()  # frees the memory of a large request before its response ends
            connection.send_request(self, request)
        else:
            self._connecting = asyncio.ensure_future(self._connect_and_send())

    def pause(self) -> None:
        """Stop reading the response, because its receiver cannot accept more data."""
        if self._connection is not None and not self.is_paused:
            self.is_paused = True
            self._connection.pause_reading()

    def resume(self) -> None:
        """Continue reading the response after ``pause``."""
        if self.is_paused:
            self.is_paused = False
            self.last_heard = time.perf_counter()
            if self._connection is not None:
                self._connection.resume_reading()

    def fail(self, error: Exception) -> None:
        """End this exchange now, and pass ``error`` to its receiver. Does nothing if the exchange has already ended."""
        receiver = self.receiver
        self.close()
        if receiver is not None:
            receiver.on_failed(error)

    def close(self) -> None:
        """Release the connection, and close it if the response is not complete. Do not notify ``receiver``."""
        if self.complete or self.is_closed:
            return
        self.is_closed, self.receiver = True, None
        self.record.ended_at = time.perf_counter()
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()  # a task that is cancelled before it starts never runs, so it cannot report its own end
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def on_head(self, status: int, headers: Headers) -> None:
        """Store the head of the response. The connection calls this before ``on_read``."""
        self.status, self.headers = status, headers
        self.record.status = status

    def on_read(self, data: bytes, is_end: bool) -> None:
        """Pass new bytes of the body to the receiver. The connection calls this once after each read of its socket.

        Args:
            data: the new bytes; empty if only the head or the end arrived.
            is_end: whether the response is complete. Then another exchange may use the connection.
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
        """Fail, because the connection was lost before the response was complete. The connection calls this method."""
        self._connection = None
        if self._may_be_stale:
            error = StaleConnection(f"{self.address} closed an idle connection while the router sent the request on it")
        self.fail(error)

    async def _connect_and_send(self) -> None:
        connection: Connection | None = None
        try:
            connection = await self._pool.connect(self.address)
            self._connecting = None  # otherwise ``close`` would cancel this task
            self._send_on(connection)
        except Exception as exc:  # also after a bug in the router, because the receiver waits for a result
            self._connecting = None
            if connection is not None:
                connection.abort()
            self.fail(exc.with_traceback(None))  # the traceback would form a reference cycle

    def _send_on(self, connection: Connection) -> None:
        """Send the request on a newly opened connection."""
        if self.is_closed:
            connection.abort()
        elif not connection.is_open:
            self.on_lost(ConnectionLost(f"{self.address} closed the connection"))
        else:
            self._connection, self.record.sent_at = connection, time.perf_counter()
            request, self._request = self._request, ()
            connection.send_request(self, request)


class ResponseReader:
    """Receiver for a task that waits for the response. The constructor sends the request of the exchange."""

    __slots__ = ("_chunks", "_error", "_exchange", "_size", "_waiter")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._chunks: list[bytes] = []
        self._size = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        exchange.send(self)

    async def head(self) -> int:
        """Wait for the head of the response, and return its status.

        Raises:
            UpstreamError: the exchange failed; or another exception that ``Exchange.fail`` was called with.
        """
        while not self._exchange.status and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._take_error(self._error)
        return self._exchange.status

    async def chunk(self) -> bytes:
        """Return the body bytes that arrived since the last call; wait for at least one. Return ``b""`` at the end.

        Raises:
            UpstreamError: as in ``head``.
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
        """Return the rest of the body; stop as soon as at least ``enough`` bytes have arrived.

        Raises:
            UpstreamError: as in ``head``.
        """
        parts: list[bytes] = []
        size = 0
        while size < enough and (data := await self.chunk()):
            parts.append(data)
            size += len(data)
        return b"".join(parts)

    def on_data(self, data: bytes, is_end: bool) -> None:
        """Store the body bytes that one read of the socket brought, and wake the task that waits for them."""
        if data:
            self._chunks.append(data)
            self._size += len(data)
            if self._size > HIGH_WATER and not is_end:
                self._exchange.pause()
        self._wake()

    def on_failed(self, error: Exception) -> None:
        """Store the error of the failed exchange, and wake the task that waits for the response."""
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
        """Return ``error``, and replace it in this reader by another one.

        A raised exception refers to this reader through its traceback. If the reader also referred to the exception,
        only the garbage collector could free both.
        """
        self._error = ConnectionLost(f"the exchange with {self._exchange.address} had failed")
        return error


class Connection(asyncio.Protocol):
    """One connection to an instance, and the exchange that uses it.

    httptools calls the methods ``on_...`` while it parses bytes; they only collect data. After each read of the socket,
    one call passes everything that was collected to the exchange.
    """

    def __init__(self, pool: Pool, address: Address) -> None:
        self.address = address
        self._pool = pool
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._is_made = False
        self._parser: Any = None
        self._exchange: Exchange | None = None
        self.is_open = True
        """Whether a request may be sent on this connection. If not, an earlier exchange may still get its response."""
        self._is_paused = False
        self._keep_alive = False
        # State of the response that is being received:
        self._headers: Headers = []
        self._undigested = 0  # bytes received since the head, or since the last piece of the body
        self._has_length = False  # whether a header says where the body ends
        self._has_options = False  # whether the header "connection" names further headers
        self._is_informational = False  # whether the status is 1xx, so that another head follows
        self._pieces: list[bytes] = []  # pieces of the body that the exchange has not got yet
        self._is_whole = False

    def send_request(self, exchange: Exchange, request: Sequence[bytes]) -> None:
        """Write the parts of the request of ``exchange``, which gets all bytes that are received from now on.

        The connection must be open.
        """
        self._exchange = exchange
        self._transport.writelines(request)

    def pause_reading(self) -> None:
        """Stop reading the socket, because the exchange has too much data."""
        if self.is_open and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Continue reading the socket after ``pause_reading``."""
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close the connection immediately. Its exchange is not notified."""
        self._exchange = None
        self.is_open = False
        if self._is_made:
            self._transport.abort()

    def drop(self) -> None:
        """Close a connection that was given up while it was being opened. uvloop would not report its end."""
        self.abort()
        self.connection_lost(None)
        self._transport, self._is_made = cast(asyncio.Transport, None), False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle asyncio's event: the connection is open."""
        self._transport, self._is_made = cast(asyncio.Transport, transport), True
        if not self.is_open:  # no exchange waits for this connection any more
            self._transport.abort()
            return
        self._parser = httptools.HttpResponseParser(self)
        self._pool.add_open(self)
        try:
            _set_options(transport.get_extra_info("socket"))
        except OSError:
            self.abort()  # the instance has already closed it

    def data_received(self, data: bytes) -> None:
        """Handle asyncio's event: data has arrived."""
        if self._exchange is None:
            self.abort()  # after bytes that no request asked for, the connection is not safe to use
            return
        error = None
        self._undigested += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            error = BadResponse(f"{self.address} sent a response that switches to another protocol")
        except httptools.HttpParserError as exc:
            # The context is an error that ``on_headers_complete`` raised.
            error = BadResponse(f"{self.address} sent a response that is not valid HTTP: {exc.__context__ or exc}")
        exchange, pieces = self._exchange, self._pieces
        if self._undigested > HEAD_BYTES and error is None:
            missing = "the end of its body" if exchange.status else "a complete response head"
            error = BadResponse(f"{self.address} sent more than {HEAD_BYTES} bytes without {missing}")
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
        """Handle asyncio's event: the instance sends nothing more. asyncio then closes the connection."""
        self.is_open = False

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle asyncio's event: the connection is closed."""
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
            self._fail_exchange(
                ConnectionLost(f"{self.address} closed the connection before its response was complete")
            )

    def on_message_begin(self) -> None:
        """Handle httptools's event: a response begins."""
        if self._is_whole:
            self._keep_alive = False  # bytes follow the complete response, so the connection must not be reused
        self._headers, self._has_length, self._has_options = [], False, False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle httptools's event: a header is complete."""
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
        """Handle httptools's event: the head of the response is complete."""
        status = self._parser.get_status_code()
        if not 100 <= status <= 599:
            raise ValueError(f"the status is {status}")
        if len(self._headers) > MAX_HEADERS:
            raise ValueError(f"it has more than {MAX_HEADERS} headers")
        self._is_informational = status < 200
        exchange = self._exchange
        if self._is_informational or self._is_whole or exchange is None:
            return
        self._keep_alive = self._parser.should_keep_alive() and not exchange.fresh
        exchange.on_head(status, end_to_end(self._headers, NOT_PASSED_BACK) if self._has_options else self._headers)
        self._headers, self._undigested = _DROPPED, 0  # trailers, after a chunked body, are ignored
        if exchange.bodiless:
            self._keep_alive = False  # the parser expects a body, which a response to HEAD does not have
            self._is_whole = True

    def on_body(self, data: bytes) -> None:
        """Handle httptools's event: a piece of the body has arrived."""
        self._undigested = 0
        if not self._is_whole:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """Handle httptools's event: the response is complete."""
        if not self._is_informational:
            self._is_whole, self._undigested = True, 0

    def _end_exchange(self) -> None:
        """Return the connection to the pool after a complete response, or close it if it cannot be reused."""
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
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
