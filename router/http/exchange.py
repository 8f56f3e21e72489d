"""One request to one instance and its response.

``Exchange.fail`` lets others (a client that left, the other leg of a pair, a timer) end an exchange from
outside, with their own exception, whatever it is waiting for: so no task needs to be cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from router.http.errors import ConnectionLost, StaleConnection, UpstreamError
from router.http.message import Address, Headers

if TYPE_CHECKING:
    from router.http.connection import Connection
    from router.http.pool import Upstream

__all__ = ["Exchange"]

# A body not yet taken by the client is held up to here; then the instance's socket is no longer read.
HIGH_WATER = 256 * 1024
# Of a response that is drained, so much is kept of its beginning and of its end: enough for an error and for usage
# figures, which may come after the ids of a long prompt.
DRAINED_BYTES = 64 * 1024


class Exchange:
    """One request to one instance and its response.

    ``await head()`` sends the request and fills ``status`` and ``headers``; then ``await chunk()`` gives what has
    come of the body since the last call, ``b""`` at its end. Or ``drain`` sends it and calls back at its end, which
    needs no task. Whoever made an exchange closes it.
    """

    __slots__ = (
        "_bodiless",
        "_buffered",
        "_chunks",
        "_complete",
        "_connecting",
        "_connection",
        "_error",
        "_may_be_stale",
        "_on_end",
        "_request",
        "_sink",
        "_upstream",
        "_waiter",
        "address",
        "fresh",
        "headers",
        "last_heard",
        "sent",
        "status",
    )

    def __init__(
        self, upstream: Upstream, address: Address, request: Sequence[bytes], *, bodiless: bool, fresh: bool
    ) -> None:
        self.address = address
        self.fresh = fresh
        """Whether it has a connection of its own."""
        self.status = 0
        self.headers: Headers = []
        self.sent = False
        self.last_heard = 0.0
        """When the last piece of the body came, on ``time.monotonic``."""
        self._upstream = upstream
        self._request = request
        self._bodiless = bodiless
        self._connection: Connection | None = None
        self._connecting: asyncio.Future[Any] | None = None
        self._on_end: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], bool] | None = None
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._may_be_stale = False
        self._complete = False
        self._error: Exception | None = None

    def __repr__(self) -> str:
        state = "failed" if self._error else "complete" if self._complete else "open"
        return f"<Exchange {self.address} status={self.status} {state} buffered={self._buffered}>"

    @property
    def complete(self) -> bool:
        """Whether the whole response has arrived (it may not all have been taken yet)."""
        return self._complete

    @property
    def error(self) -> Exception | None:
        """What ended it early, if anything did."""
        return self._error

    @property
    def ended(self) -> bool:
        """Whether the whole response has arrived and been taken."""
        return self._complete and not self._chunks

    async def head(self) -> int:
        """Send the request, wait for the response's head, and return its status.

        Raises:
            UpstreamError: it failed; or whatever ``fail`` was given.
        """
        pooled = None if self.fresh else self._upstream.take(self.address)
        self._may_be_stale = pooled is not None
        self._start(pooled or await self._connect())
        while not self.status and self._error is None:
            await self._wait()
        self._check()
        return self.status

    def drain(self, on_end: Callable[[], None]) -> None:
        """Send the request now, and call ``on_end`` once, when the response is complete or the exchange has failed.

        Of the body, ``drained`` keeps the beginning and the end.
        """
        self._on_end = on_end
        pooled = None if self.fresh else self._upstream.take(self.address)
        if pooled is not None:
            self._may_be_stale = True
            self._start(pooled)
        else:
            self._connecting = asyncio.ensure_future(self._connect_and_start())

    @property
    def drained(self) -> bytes:
        """The body of an exchange that was drained; of a long one its beginning and its end."""
        return b"".join(self._chunks)

    async def chunk(self, sink: Callable[[bytes], bool] | None = None) -> bytes:
        """What has arrived of the body and was not taken yet, waiting for at least one byte; ``b""`` at the end.

        Args:
            sink: is given what arrives while this waits, which saves waking the task that waits; what it does not
                take (it answers False), and what comes with the body's end, is returned.

        Raises:
            UpstreamError: it failed before the end; or whatever ``fail`` was given.
        """
        while not self._chunks:
            self._check()
            if self._complete:
                return b""
            self._sink = sink
            try:
                await self._wait()
            finally:
                self._sink = None
        data = self._arrived()
        self._taken()
        return data

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
        """End this exchange now: whoever waits on it gets ``error``. Without effect on a complete response."""
        if self._complete or self._error is not None:
            return
        self._error = error
        if self._connecting is not None:
            self._connecting.cancel()
        self._drop_connection()
        self._wake()

    def close(self) -> None:
        """Give the connection back, closing it if the response is not complete."""
        self.fail(ConnectionLost(f"the exchange with {self.address} was closed"))

    # What follows is called by the connection this exchange is on.

    def received_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self._wake()

    def received_body(self, data: bytes) -> bool:
        """Keep ``data``; answer whether there is now too much of it."""
        self._chunks.append(data)
        self._buffered += len(data)
        self.last_heard = time.monotonic()
        if self._on_end is not None and self._buffered > 4 * DRAINED_BYTES:  # twice what stays: not at every piece
            whole = b"".join(self._chunks)
            self._chunks = [whole[:DRAINED_BYTES], whole[-DRAINED_BYTES:]]
            self._buffered = 2 * DRAINED_BYTES
        return self._buffered > HIGH_WATER

    def received_piece(self) -> None:
        """All that came at once was given to ``received_body``, and it is not the end."""
        if self._chunks and self._sink is not None and self._sink(self._arrived()):
            self._taken()
        elif self._chunks:
            self._wake()

    def received_all(self) -> None:
        self._complete = True
        self._connection = None
        self._wake()

    def touched(self) -> None:
        self._may_be_stale = False

    def lost(self, error: UpstreamError) -> None:
        self._connection = None
        if self._may_be_stale:
            error = StaleConnection(f"{self.address} closed an idle connection as the request was sent on it")
        if not self._complete and self._error is None:
            self._error = error
        self._wake()

    @property
    def bodiless(self) -> bool:
        """Whether the response ends with its head (an answer to HEAD)."""
        return self._bodiless

    def _start(self, connection: Connection) -> None:
        self._connection = connection
        connection.start(self, self._request)
        self._request = ()  # it may be large, and the response may take long
        self.sent = True

    async def _connect_and_start(self) -> None:
        try:
            connection = await self._upstream.connect(self.address)
        except UpstreamError as exc:
            self._connecting = None  # or else ``fail`` would cancel us
            self.fail(exc)
            return
        finally:
            self._connecting = None
        if self._error is None:
            self._start(connection)
        else:
            connection.abort()

    async def _connect(self) -> Connection:
        self._check()
        self._connecting = asyncio.ensure_future(self._upstream.connect(self.address))
        try:
            connection: Connection = await self._connecting
        except asyncio.CancelledError:
            self._check()  # ``fail`` cancelled it, and not our own task's end
            raise
        finally:
            self._connecting = None
        try:
            self._check()
        except Exception:
            connection.abort()
            raise
        return connection

    def _arrived(self) -> bytes:
        if len(self._chunks) > 1:
            self._chunks = [b"".join(self._chunks)]
        return self._chunks[0]

    def _taken(self) -> None:
        self._chunks.clear()
        self._buffered = 0
        if self._connection is not None:
            self._connection.resume()

    def _check(self) -> None:
        """Raise what ended the exchange early."""
        if self._error is not None:
            raise self._taken_error(self._error)

    def _taken_error(self, error: Exception) -> Exception:
        """``error``, no longer kept here: once raised its traceback leads here, and only the collector could free both.

        (For the same reason it is no variable of the function that raises it.)
        """
        self._error = ConnectionLost(f"the exchange with {self.address} had failed")
        return error

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._on_end is not None and (self._complete or self._error is not None):
            on_end, self._on_end = self._on_end, None
            on_end()

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
