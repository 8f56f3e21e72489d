"""HTTP/1.1 to instances: pooled connections, one exchange at a time on each. Nothing else here talks to instances.

What a call raises::

    UpstreamError
    ├── NoRoom            this machine cannot open one more connection, to whichever instance
    ├── ConnectFailed     no connection was made, so the instance has not seen the request
    │   └── ConnectRefused    nobody listens there: not yet, or no more, and then what was accepted may still go on
    ├── ConnectionLost    the connection ended before the response did
    │   └── StaleConnection   a pooled connection ended without one byte of response: most likely, but not
    │                         certainly, the instance closed it while idle and never saw the request
    ├── BadResponse       the bytes received are not an HTTP/1.1 response
    └── TimedOut          the time given was over

``Exchange.fail`` lets others (a client that left, the other leg of a pair, a timer) end an exchange from
outside, with their own exception, whatever it is waiting for: so no task needs to be cancelled.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import httptools

__all__ = [
    "Address",
    "Answer",
    "BadResponse",
    "ConnectFailed",
    "ConnectRefused",
    "ConnectionLost",
    "Exchange",
    "Headers",
    "NoRoom",
    "PreparedHead",
    "StaleConnection",
    "TimedOut",
    "Upstream",
    "UpstreamError",
    "prepare_head",
]

Headers = list[tuple[bytes, bytes]]

CONNECT_SECONDS = 3.0
# uvicorn closes a connection idle for 5 s; using none older than this avoids the race with its closing.
IDLE_SECONDS = 4.0
IDLE_CONNECTIONS = 256
# A body not yet taken by the client is held up to here; then the instance's socket is no longer read.
HIGH_WATER = 256 * 1024
# Up to here, one copy of a body is cheaper than one more piece to write.
JOINED_BYTES = 16 * 1024
# Of a response that is drained, so much is kept of its beginning and of its end: enough for an error and for usage
# figures, which may come after the ids of a long prompt.
DRAINED_BYTES = 64 * 1024
# An answer to a probe or a listing is not read further than this.
FETCH_BYTES = 16 * 1024 * 1024
# What connect() fails with when this machine, and not the instance, has run out of something.
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EAGAIN})
# A dead host, which sends no FIN, is noticed after about half a minute.
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_PROBES = 15, 5, 3


class UpstreamError(Exception):
    """An exchange with an instance failed; the text is one sentence that names the instance."""


class ConnectFailed(UpstreamError):
    """No connection was made, so the instance has not seen the request."""


class ConnectRefused(ConnectFailed):
    """Nobody listens there. A process that ends may still finish what it has accepted."""


class NoRoom(UpstreamError):
    """This machine has no room for one more connection; no instance is to blame."""


class ConnectionLost(UpstreamError):
    """The connection ended before the response did."""


class StaleConnection(ConnectionLost):
    """A pooled connection ended without one byte of response: most likely the instance never saw the request."""


class BadResponse(UpstreamError):
    """The bytes received are not an HTTP/1.1 response."""


class TimedOut(UpstreamError):
    """The time given to the exchange was over."""


class Address(NamedTuple):
    """Where an instance listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PreparedHead(NamedTuple):
    """Request line and headers, as far as they do not depend on the instance."""

    start: bytes
    needs_length: bool
    bodiless: bool


def prepare_head(method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> PreparedHead:
    """The head of a request.

    Args:
        target: path and query as they stand in the request line.
        headers: without ``host``, ``connection`` and ``content-length``, which are added later.
    """
    parts = [b"%s %s HTTP/1.1\r\n" % (method.encode(), target)]
    parts += [b"%s: %s\r\n" % header for header in headers]
    return PreparedHead(b"".join(parts), method not in ("GET", "HEAD"), method == "HEAD")


class Answer(NamedTuple):
    """A whole response, read to its end."""

    status: int
    headers: Headers
    body: bytes


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
        self._connection: _Connection | None = None
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

    def _start(self, connection: _Connection) -> None:
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

    async def _connect(self) -> _Connection:
        self._check()
        self._connecting = asyncio.ensure_future(self._upstream.connect(self.address))
        try:
            connection: _Connection = await self._connecting
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


class Upstream:
    """The pool of connections to all instances."""

    def __init__(self) -> None:
        self._idle: dict[Address, deque[tuple[float, _Connection]]] = {}
        self._open: set[_Connection] = set()
        self._hosts: dict[Address, bytes] = {}
        self._closing_old: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        idle = sum(map(len, self._idle.values()))
        return f"<Upstream {len(self._open)} connections, {idle} idle>"

    def exchange(
        self,
        address: Address,
        method: str,
        target: bytes,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes,
        *,
        fresh: bool = False,
    ) -> Exchange:
        """A request to ``address``, sent by ``Exchange.head``.

        Args:
            target: path and query as they stand in the request line.
            headers: without ``host``, ``connection`` and ``content-length``, which are added here.
            fresh: use a connection of its own, closed afterwards.
        """
        return self.send_prepared(address, prepare_head(method, target, headers), body, fresh=fresh)

    def send_prepared(self, address: Address, head: PreparedHead, body: bytes, *, fresh: bool = False) -> Exchange:
        """As ``exchange``, with a head that several requests share."""
        host = self._hosts.get(address)
        if host is None:
            host = self._hosts[address] = b"host: %s\r\n" % str(address).encode()
        parts = [head.start, host]
        if body or head.needs_length:
            parts.append(b"content-length: %d\r\n" % len(body))
        parts.append(b"connection: close\r\n\r\n" if fresh else b"\r\n")
        parts.append(body)
        if len(body) < JOINED_BYTES:
            parts = [b"".join(parts)]
        return Exchange(self, address, parts, bodiless=head.bodiless, fresh=fresh)

    async def fetch(
        self,
        address: Address,
        method: str,
        target: str,
        *,
        headers: Iterable[tuple[bytes, bytes]] = (),
        body: bytes = b"",
        timeout: float,
    ) -> Answer:
        """A whole small exchange on a connection of its own: probes, aborts, listings.

        Args:
            timeout: seconds from now to the end of the response.

        Raises:
            UpstreamError: it failed.
        """
        exchange = self.exchange(address, method, target.encode(), headers, body, fresh=True)
        message = f"{address} did not answer {method} {target} within {timeout:g} s"
        timer = asyncio.get_running_loop().call_later(timeout, exchange.fail, TimedOut(message))
        try:
            status = await exchange.head()
            return Answer(status, exchange.headers, await exchange.read(FETCH_BYTES))
        finally:
            timer.cancel()
            exchange.close()

    def close(self) -> None:
        """Close every connection; exchanges in progress fail."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()
        if self._closing_old is not None:
            self._closing_old.cancel()

    # What follows is called by exchanges and connections.

    def take(self, address: Address) -> _Connection | None:
        """The idle connection to ``address`` that was used last, if it is fresh enough."""
        idle = self._idle.get(address)
        now = asyncio.get_running_loop().time()
        while idle:
            since, connection = idle.pop()
            if now - since < IDLE_SECONDS and connection.usable:
                return connection
            connection.abort()
        return None

    async def connect(self, address: Address) -> _Connection:
        loop = asyncio.get_running_loop()
        opening = loop.create_connection(lambda: _Connection(self, address), address.host, address.port)
        try:
            _, connection = await asyncio.wait_for(opening, CONNECT_SECONDS)
        except asyncio.TimeoutError:
            raise ConnectFailed(f"{address} did not accept a connection within {CONNECT_SECONDS:g} s") from None
        except OSError as exc:
            if exc.errno in _NO_ROOM:
                raise NoRoom(f"the router cannot open one more connection: {exc.strerror}") from exc
            failed = ConnectRefused if isinstance(exc, ConnectionRefusedError) else ConnectFailed
            raise failed(f"cannot connect to {address}: {exc.strerror or exc}") from exc
        except UnicodeError as exc:
            raise ConnectFailed(f"cannot connect to {address}: it is no host's name") from exc
        return connection

    def opened(self, connection: _Connection) -> None:
        self._open.add(connection)

    def closed(self, connection: _Connection) -> None:
        self._open.discard(connection)

    def give_back(self, connection: _Connection) -> None:
        idle = self._idle.setdefault(connection.address, deque(maxlen=IDLE_CONNECTIONS))
        if len(idle) == IDLE_CONNECTIONS:
            idle.popleft()[1].abort()
        loop = asyncio.get_running_loop()
        idle.append((loop.time(), connection))
        if self._closing_old is None:
            self._closing_old = loop.call_later(IDLE_SECONDS, self._close_old)

    def _close_old(self) -> None:
        """Close the connections that are too old to be used, and come back when there may be more."""
        loop = asyncio.get_running_loop()
        for address, idle in list(self._idle.items()):
            while idle and loop.time() - idle[0][0] >= IDLE_SECONDS:
                idle.popleft()[1].abort()
            if not idle:
                del self._idle[address]
        self._closing_old = loop.call_later(IDLE_SECONDS, self._close_old) if self._idle else None


class _Connection(asyncio.Protocol):
    """One connection to an instance; the callbacks named ``on_...`` are httptools'."""

    def __init__(self, upstream: Upstream, address: Address) -> None:
        self.address = address
        self._upstream = upstream
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._parser: Any = None
        self._exchange: Exchange | None = None
        self._headers: Headers = []
        self._framed = False
        self._informational = False
        self._keep_alive = False
        self._paused = False
        self._dropped = False

    @property
    def usable(self) -> bool:
        return not self._dropped and not self._transport.is_closing()

    def start(self, exchange: Exchange, request: Sequence[bytes]) -> None:
        self._exchange = exchange
        if self.usable:
            self._transport.writelines(request)
        else:
            self._end(ConnectionLost(f"{self.address} closed the connection"))

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        self._exchange = None
        self._dropped = True
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)
        self._upstream.opened(self)
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:
            self.abort()  # bytes that nobody asked for: this connection cannot be trusted with a request
            return
        self._exchange.touched()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._end(BadResponse(f"{self.address} did not answer in HTTP: {exc}"))
            self.abort()
            return
        self._after_feeding()

    def connection_lost(self, exc: Exception | None) -> None:
        self._dropped = True
        self._parser = None  # it holds us, and only the collector could free both
        self._upstream.closed(self)
        exchange = self._exchange
        if exchange is None:
            return
        if exc is None and exchange.status and not self._framed:
            self._exchange = None
            exchange.received_all()  # a body without a length ends where the connection does
        else:
            self._end(ConnectionLost(f"{self.address} closed the connection before its answer was complete"))

    def on_message_begin(self) -> None:
        self._headers, self._framed = [], False
        if self._exchange is None:
            self._keep_alive = False  # more bytes than the answer has: not to be used again

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._framed = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not 100 <= status <= 599:
            raise ValueError(f"status {status}")
        self._informational = 100 <= status < 200
        if self._informational or self._exchange is None:
            return
        self._keep_alive = self._parser.should_keep_alive() and not self._exchange.fresh
        self._exchange.received_head(status, self._headers)
        if self._exchange.bodiless:
            self._keep_alive = False  # the parser would take what follows for the body that HEAD does not get
            self.on_message_complete()

    def on_body(self, data: bytes) -> None:
        if self._exchange is not None and self._exchange.received_body(data) and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._informational or self._exchange is None:
            return
        exchange, self._exchange = self._exchange, None
        exchange.received_all()

    def _after_feeding(self) -> None:
        if self._exchange is not None:
            self._exchange.received_piece()
            return
        if self._dropped:
            return
        self.resume()
        if self._keep_alive and self.usable:
            self._upstream.give_back(self)
        else:
            self.abort()

    def _end(self, error: UpstreamError) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.lost(error)
