"""One request to one instance and its response.

``Exchange.fail`` lets others (a client that left, the other leg of a pair, a timer) end an exchange from
outside, with their own exception, at any moment: so no task needs to be cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from router.http.connection import Connection
from router.http.errors import ConnectionLost, StaleConnection, UpstreamError
from router.http.message import Address, Headers

__all__ = ["HIGH_WATER", "Exchange", "ExchangeRecord"]

# A body not yet taken by the client is held up to here; then the instance's socket is no longer read.
HIGH_WATER = 256 * 1024
# Of a response that is consumed, so much is kept of its beginning and of its end: enough for an error and for usage
# figures, which may come after the ids of a long prompt.
KEPT_BYTES = 64 * 1024


class Connector(Protocol):
    """The pool that gives an exchange its connection."""

    def take_idle(self, address: Address) -> Connection | None:
        """An open connection without an exchange, if there is one."""

    async def connect(self, address: Address) -> Connection:
        """A new connection; raises ``UpstreamError`` where none can be made."""


class ExchangeRecord:
    """The part of an exchange that outlives it: records of requests keep it, by the thousand.

    ``Exchange.__init__`` sets all of it: a constructor here would be one more call for each leg of each request.
    """

    __slots__ = ("ended_at", "first_byte_at", "is_complete", "sent_at", "status")

    sent_at: float
    """When the request was sent: this and the others on ``time.perf_counter``, and 0 until then."""
    first_byte_at: float
    """When the first byte of the body came."""
    ended_at: float
    """When the response was complete, or the exchange failed."""
    status: int
    is_complete: bool
    """Whether the whole response arrived."""


class Exchange:
    """One request to one instance and its response.

    ``await head()`` sends the request and fills ``status`` and ``headers``; then ``await chunk()`` gives the part of
    the body that has come since the last call, ``b""`` at its end. Or ``consume`` sends it and calls back at its end,
    which needs no task. The maker of an exchange closes it. Its public attributes are for reading.
    """

    __slots__ = (
        "_buffered",
        "_chunks",
        "_connecting",
        "_connection",
        "_is_begun",
        "_may_be_stale",
        "_on_begin",
        "_on_end",
        "_pool",
        "_request",
        "_sink",
        "_waiter",
        "address",
        "bodiless",
        "complete",
        "error",
        "fresh",
        "headers",
        "last_heard",
        "record",
        "status",
    )

    def __init__(
        self, pool: Connector, address: Address, request: Sequence[bytes], bodiless: bool, fresh: bool
    ) -> None:
        self.address = address
        self.bodiless = bodiless
        """Whether the response ends with its head (a response to HEAD)."""
        self.fresh = fresh
        """Whether it has a connection of its own."""
        self.status = 0
        self.headers: Headers = []
        self.complete = False
        """Whether the whole response has arrived (it may not all have been taken yet)."""
        self.error: Exception | None = None
        """Why it ended early, if it did."""
        self.last_heard = 0.0
        """When the last piece of the body came, on ``time.perf_counter``."""
        self.record = record = ExchangeRecord()
        record.sent_at = record.first_byte_at = record.ended_at = 0.0
        record.status, record.is_complete = 0, False
        self._pool = pool
        self._request = request
        self._connection: Connection | None = None
        self._connecting: asyncio.Future[Any] | None = None
        self._is_begun = False
        self._on_begin: Callable[[], None] | None = None
        self._on_end: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], bool] | None = None
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._may_be_stale = False

    def __repr__(self) -> str:
        state = "failed" if self.error else "complete" if self.complete else "open"
        return f"<Exchange {self.address} status={self.status} {state} buffered={self._buffered}>"

    @property
    def is_taken(self) -> bool:
        """Whether the whole response has arrived and been taken."""
        return self.complete and not self._chunks

    def is_silent(self, since: float) -> bool:
        """Whether nothing has come since then, on ``time.perf_counter``, though all that had come was taken."""
        return not self.complete and self.error is None and not self._chunks and self.last_heard < since

    @property
    def kept_body(self) -> bytes:
        """The body of an exchange that was consumed; of a long one its beginning and its end."""
        return b"".join(self._chunks)

    def consume(self, on_end: Callable[[], None]) -> None:
        """Send the request now, and call ``on_end`` once, when the response is complete or the exchange has failed.

        Of the body, ``kept_body`` keeps the beginning and the end.
        """
        self._on_end = on_end
        self._send()

    def begin(self, on_begin: Callable[[], None]) -> None:
        """Send the request now, and call ``on_begin`` once: when the response has begun, or the exchange has failed.

        A response that comes whole with its head is complete then. For any other, ``head`` and ``chunk`` go on.
        """
        self._is_begun, self._on_begin = True, on_begin
        self._send()
        if self.error is not None:
            self._wake()

    async def head(self) -> int:
        """Send the request, unless ``begin`` has; wait for the response's head, and return its status.

        Raises:
            UpstreamError: it failed; or the exception that ``fail`` was called with.
        """
        if not self._is_begun:
            self._send()
        while not self.status and self.error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.error is not None:
            raise self._release_error(self.error)
        return self.status

    async def chunk(self, sink: Callable[[bytes], bool] | None = None) -> bytes:
        """The bytes of the body that were not taken yet, waiting for at least one; ``b""`` at the end.

        Args:
            sink: is given the bytes that arrive while this waits, which saves waking the task that waits. Those that
                it does not take (it answers False), and those that come with the body's end, are returned.

        Raises:
            UpstreamError: it failed before the end; or the exception that ``fail`` was called with.
        """
        while not self._chunks:
            if self.error is not None:
                raise self._release_error(self.error)
            if self.complete:
                return b""
            self._sink = sink
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._sink = self._waiter = None
        chunks, self._chunks = self._chunks, []
        had_too_much, self._buffered = self._buffered > HIGH_WATER, 0
        if had_too_much and self._connection is not None:
            self._connection.resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def take_whole(self) -> bytes:
        """The rest of the body, once the response is complete."""
        chunks, self._chunks = self._chunks, []
        return b"".join(chunks)

    async def read(self, enough: int) -> bytes:
        """The rest of the body, or as much as has come once there are ``enough`` bytes.

        Raises:
            UpstreamError: as ``chunk``.
        """
        parts: list[bytes] = []
        size = 0
        while size < enough and (data := await self.chunk()):
            parts.append(data)
            size += len(data)
        return b"".join(parts)

    def fail(self, error: Exception) -> None:
        """End this exchange now: the task that waits on it gets ``error``. Without effect on a complete response."""
        if self.complete or self.error is not None:
            return
        self.error = error
        self.record.ended_at = time.perf_counter()
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()  # if it has not begun it will not, and could not say by itself that it has ended
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        self._wake()

    def close(self) -> None:
        """Give the connection back, closing it if the response is not complete."""
        if not self.complete and self.error is None:
            self.fail(ConnectionLost(f"the exchange with {self.address} was closed"))

    def on_head(self, status: int, headers: Headers) -> None:
        """Called by the connection, before ``on_data``: the response has begun."""
        self.status, self.headers = status, headers
        self.record.status = status

    def on_data(self, data: bytes, is_whole: bool) -> bool:
        """Called by the connection after each read of its socket, with all that this brought of the body.

        Args:
            data: the next bytes of the body; none where only the head came, or the end.
            is_whole: the response is complete, and the connection free for another exchange.

        Returns:
            Whether more is held than is good: the connection is to stop reading.
        """
        self._may_be_stale = False
        now = time.perf_counter()
        if data:
            self.last_heard = now
            if not self.record.first_byte_at:
                self.record.first_byte_at = now
            if not is_whole and self._sink is not None and not self._chunks and self._sink(data):
                return False
            self._chunks.append(data)
            self._buffered += len(data)
            if self._on_end is not None and self._buffered > 4 * KEPT_BYTES:  # not at every piece
                body = b"".join(self._chunks)
                self._chunks = [body[:KEPT_BYTES], body[-KEPT_BYTES:]]
                self._buffered = 2 * KEPT_BYTES
        if is_whole:
            self.complete = self.record.is_complete = True
            self.record.ended_at = now
            self._connection = None
            if self._on_end is not None:
                self._wake()
                return False
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        elif self._on_begin is not None and self.status:
            self._wake()
        return self._buffered > HIGH_WATER

    def on_lost(self, error: UpstreamError) -> None:
        """Called by the connection: it is gone, and the response is not complete."""
        self._connection = None
        if self._may_be_stale:
            error = StaleConnection(f"{self.address} closed an idle connection as the request was sent on it")
        if not self.complete and self.error is None:
            self.error = error
            self.record.ended_at = time.perf_counter()
        self._wake()

    def _send(self) -> None:
        """Send the request on an idle connection, or on a new one as soon as that is made."""
        if self.error is not None:
            return
        connection = self._connection = None if self.fresh else self._pool.take_idle(self.address)
        if connection is not None:
            self._may_be_stale = True
            self.record.sent_at = time.perf_counter()
            request, self._request = self._request, ()  # it may be large, and the response may take long
            connection.send_request(self, request)
        else:
            self._connecting = asyncio.ensure_future(self._connect_and_send())

    async def _connect_and_send(self) -> None:
        connection: Connection | None = None
        try:
            connection = await self._pool.connect(self.address)
            self._connecting = None  # or else ``fail`` would cancel us
            self._send_on(connection)
        except Exception as exc:  # a mistake of the router's own, too: somebody waits
            self._connecting = None
            if connection is not None:
                connection.abort()
            self.fail(exc.with_traceback(None))  # its traceback leads here: only the collector could free both

    def _send_on(self, connection: Connection) -> None:
        """Send the request on a connection that was just made."""
        if self.error is not None:
            connection.abort()
        elif not connection.is_open:
            self.on_lost(ConnectionLost(f"{self.address} closed the connection"))
        else:
            self._connection, self.record.sent_at = connection, time.perf_counter()
            request, self._request = self._request, ()
            connection.send_request(self, request)

    def _release_error(self, error: Exception) -> Exception:
        """``error``, no longer kept here: once raised its traceback leads here, and only the collector could free both.

        (For the same reason it is no variable of the function that raises it.)
        """
        self.error = ConnectionLost(f"the exchange with {self.address} had failed")
        return error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._on_begin is not None:
            on_begin, self._on_begin = self._on_begin, None
            on_begin()
        if self._on_end is not None and (self.complete or self.error is not None):
            on_end, self._on_end = self._on_end, None
            on_end()
