"""One request to one instance and its response.

``Exchange.fail`` ends an exchange from outside at any moment, with an exception that the caller chooses. It is used
when the client leaves, the other leg of a pair fails, or a timer fires. So no task has to be cancelled.
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

# Limit of buffered body bytes that the client has not taken yet; beyond it, the instance's socket is not read.
HIGH_WATER = 256 * 1024
# How much of a consumed response is retained of its beginning and of its end: enough for an error and for the token
# usage, which may come after the ids of a long prompt.
KEPT_BYTES = 64 * 1024


class Connector(Protocol):
    """The pool that provides the exchange's connection."""

    def take_idle(self, address: Address) -> Connection | None:
        """Return an open connection without an exchange, if there is one."""

    async def connect(self, address: Address) -> Connection:
        """Return a new connection; raise ``UpstreamError`` if it cannot be made."""


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

    ``await head()`` sends the request and fills ``status`` and ``headers``. Then ``await chunk()`` returns the part of
    the body received since the last call, and ``b""`` at its end. Alternatively, ``consume`` sends it and calls back at
    its end, which needs no task. The creator of an exchange closes it. Callers only read its public attributes.
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
        """Whether it uses its own connection."""
        self.status = 0
        self.headers: Headers = []
        self.complete = False
        """Whether the whole response has arrived (it may not have been taken completely)."""
        self.error: Exception | None = None
        """Why it ended early, if it did."""
        self.last_heard = 0.0
        """When the last piece of the body arrived, from ``time.perf_counter``."""
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
        """Return whether nothing has arrived since this time of ``time.perf_counter``, although all data was taken."""
        return not self.complete and self.error is None and not self._chunks and self.last_heard < since

    @property
    def kept_body(self) -> bytes:
        """Return the body of a consumed exchange; if it is long, only its beginning and its end."""
        return b"".join(self._chunks)

    def consume(self, on_end: Callable[[], None]) -> None:
        """Send the request now, and call ``on_end`` once, when the response is complete or the exchange has failed.

        ``kept_body`` retains the beginning and the end of the body.
        """
        self._on_end = on_end
        self._send()

    def begin(self, on_begin: Callable[[], None]) -> None:
        """Send the request now, and call ``on_begin`` once: when the response has begun, or the exchange has failed.

        A response that arrives together with its head is complete then. For any other, use ``head`` and ``chunk``.
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
        """Return the bytes of the body that were not taken yet, waiting for at least one; ``b""`` at the end.

        Args:
            sink: called with the bytes that arrive while this waits, to avoid waking the waiting task. Bytes that it
                rejects (by returning False), and those that arrive with the body's end, are returned.

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
        """Return the rest of the body, once the response is complete."""
        chunks, self._chunks = self._chunks, []
        return b"".join(chunks)

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

    def fail(self, error: Exception) -> None:
        """End this exchange now: the waiting task gets ``error``. This has no effect on a complete response."""
        if self.complete or self.error is not None:
            return
        self.error = error
        self.record.ended_at = time.perf_counter()
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()  # if it has not started yet, it never will, and cannot report its end itself
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        self._wake()

    def close(self) -> None:
        """Release the connection; close it if the response is not complete."""
        if not self.complete and self.error is None:
            self.fail(ConnectionLost(f"the exchange with {self.address} was closed"))

    def forget_error(self) -> None:
        """Nobody waits for it any more: of several exchanges that fail with the same exception only one raises it."""
        if self.error is not None:
            self._release_error(self.error)

    def on_head(self, status: int, headers: Headers) -> None:
        """Receive the head from the connection, before ``on_data``: the response has begun."""
        self.status, self.headers = status, headers
        self.record.status = status

    def on_data(self, data: bytes, is_whole: bool) -> bool:
        """Receive the new body bytes from the connection, once after each read of its socket.

        Args:
            data: the next bytes of the body; empty if only the head or the end arrived.
            is_whole: whether the response is complete. Then the connection is free for another exchange.

        Returns:
            Whether the buffer is too full: the connection has to stop reading.
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
        """Handle the loss of the connection before the response is complete; called by the connection."""
        self._connection = None
        if self._may_be_stale:
            error = StaleConnection(f"{self.address} closed an idle connection as the request was sent on it")
        if not self.complete and self.error is None:
            self.error = error
            self.record.ended_at = time.perf_counter()
        self._wake()

    def _send(self) -> None:
        """Send the request on an idle connection, or on a new one as soon as it is made."""
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
            self._connecting = None  # else ``fail`` would cancel this task
            self._send_on(connection)
        except Exception as exc:  # also a bug in the router: a task waits for the result
            self._connecting = None
            if connection is not None:
                connection.abort()
            self.fail(exc.with_traceback(None))  # its traceback would form a reference cycle

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
        """Return ``error`` and remove it here: once raised, its traceback refers to this exchange, which would form a
        reference cycle that only the garbage collector could free.

        (For the same reason, the function that raises it does not store it in a variable.)
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
