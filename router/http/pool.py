"""The pool of HTTP/1.1 connections to instances. Each connection carries one exchange at a time."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterable

from router.http.errors import ConnectFailed, ConnectRefused, NameUnresolved, NoRoom, TimedOut
from router.http.exchange import Connection, Exchange, ResponseReader
from router.http.message import Address, PreparedHead, Response, prepare_head

__all__ = ["ConnectionPool"]

CONNECT_SECONDS = 3.0
# uvicorn closes a connection that was idle for 5 s. The router uses no connection that was idle for longer than this,
# so that it sends no request on a connection that is just being closed.
IDLE_SECONDS = 4.0
IDLE_CONNECTIONS = 256
# Maximum number of cached ``host`` header lines.
MAX_HOSTS = 4096
# A body below this size is copied behind the head, which is cheaper than writing it as another piece.
JOINED_BYTES = 16 * 1024
# Limit of the bytes that ``ConnectionPool.fetch`` reads of a response.
FETCH_BYTES = 16 * 1024 * 1024
# Errors of connect() after which the router's machine, not the instance, has run out of a resource.
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EAGAIN})


class ConnectionPool:
    """Opens connections to all instances, and stores idle connections for later exchanges."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        """
        Args:
            tls: context with the trusted certificate authorities, or None for those of the system.
        """
        self._tls = tls
        self._idle: dict[Address, deque[tuple[float, Connection]]] = {}
        self._open: set[Connection] = set()
        self._hosts: dict[Address, bytes] = {}
        self._closing_old: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        idle = sum(map(len, self._idle.values()))
        return f"<ConnectionPool {len(self._open)} connections, {idle} idle>"

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
        """Return an exchange with the instance at ``address``; ``Exchange.send`` sends its request.

        Args:
            target: path and query as in the request line.
            headers: all headers except ``host``, ``connection`` and ``content-length``; this method adds those.
            fresh: whether to open a new connection, and close it after the exchange.
        """
        return self.prepare_exchange(address, prepare_head(method, target, headers), body, fresh)

    def prepare_exchange(
        self, address: Address, head: PreparedHead, body: bytes | tuple[bytes, ...], fresh: bool = False
    ) -> Exchange:
        """Return an exchange like ``exchange``. Several requests can share ``head``; ``body`` may consist of parts."""
        host = self._hosts.get(address)
        if host is None:
            if len(self._hosts) >= MAX_HOSTS:
                self._hosts.clear()  # removes addresses that are not used any more; the others are added again
            host = self._hosts[address] = b"host: %s\r\n" % str(address).encode()
        bodies = body if type(body) is tuple else (body,)
        size = sum(map(len, bodies))
        length = b"content-length: %d\r\n" % size if size or head.needs_length else b""
        parts = (head.start, host, length, b"connection: close\r\n\r\n" if fresh else b"\r\n", *bodies)
        return Exchange(self, address, parts if size >= JOINED_BYTES else (b"".join(parts),), head.bodiless, fresh)

    async def fetch(
        self,
        address: Address,
        method: str,
        target: str,
        *,
        headers: Iterable[tuple[bytes, bytes]] = (),
        body: bytes = b"",
        timeout: float,
    ) -> Response:
        """Send a small request on a new connection, and return the response. Used for probes, aborts and listings.

        Args:
            timeout: limit of the seconds until the response is complete.

        Raises:
            UpstreamError: the exchange failed.
        """
        exchange = self.exchange(address, method, target.encode(), headers, body, fresh=True)
        message = f"{address} did not answer {method} {target} within {timeout:g} s"
        timer = asyncio.get_running_loop().call_later(timeout, exchange.fail, TimedOut(message))
        try:
            reader = ResponseReader(exchange)
            return Response(await reader.head(), exchange.headers, await reader.read(FETCH_BYTES))
        finally:
            timer.cancel()
            exchange.close()

    def close(self) -> None:
        """Close every connection. Exchanges in progress fail."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()
        if self._closing_old is not None:
            self._closing_old.cancel()

    def take_idle(self, address: Address) -> Connection | None:
        """Return the idle connection to ``address`` that was used last; None if none was used recently."""
        idle = self._idle.get(address)
        now = time.monotonic()
        while idle:
            since, connection = idle.pop()
            if now - since < IDLE_SECONDS and connection.is_open:
                return connection
            connection.abort()
        return None

    def give_back(self, connection: Connection) -> None:
        """Store ``connection`` for another exchange; its response is complete."""
        idle = self._idle.get(connection.address)
        if idle is None:
            idle = self._idle[connection.address] = deque(maxlen=IDLE_CONNECTIONS)
        elif len(idle) == IDLE_CONNECTIONS:
            idle.popleft()[1].abort()
        idle.append((time.monotonic(), connection))
        if self._closing_old is None:
            self._closing_old = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._close_old)

    async def connect(self, address: Address) -> Connection:
        """Open a new connection to ``address``.

        Raises:
            NoRoom: the router's machine cannot open another connection.
            ConnectFailed: the instance did not accept the connection.
        """
        loop = asyncio.get_running_loop()
        if address.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        connection = Connection(self, address)
        opening = loop.create_connection(
            lambda: connection, address.host, address.port, ssl=self._tls if address.tls else None
        )
        try:
            try:
                await asyncio.wait_for(opening, CONNECT_SECONDS)
            except BaseException:
                connection.drop()  # it may just have been opened, and no other code refers to it
                del connection  # avoids a reference cycle through the traceback
                raise
        except asyncio.TimeoutError:
            raise ConnectFailed(f"{address} did not accept a connection within {CONNECT_SECONDS:g} s") from None
        except ssl.SSLError as exc:
            raise ConnectFailed(f"cannot connect to {address.url}: {_describe_tls_failure(exc)}") from exc
        except socket.gaierror as exc:  # its error codes are not those of connect()
            error: type[ConnectFailed] = NameUnresolved if exc.errno == socket.EAI_AGAIN else ConnectFailed
            raise error(f"cannot connect to {address}: {exc.strerror}") from exc
        except OSError as exc:
            if exc.errno in _NO_ROOM:
                raise NoRoom(f"the router cannot open another connection: {exc.strerror}") from exc
            error = ConnectRefused if isinstance(exc, ConnectionRefusedError) else ConnectFailed
            raise error(f"cannot connect to {address}: {exc.strerror or exc}") from exc
        except UnicodeError as exc:
            raise ConnectFailed(f"cannot connect to {address}: it is not a valid host name") from exc
        return connection

    def add_open(self, connection: Connection) -> None:
        """Add a newly opened connection to the open connections of the pool."""
        self._open.add(connection)

    def discard_open(self, connection: Connection) -> None:
        """Remove a closed connection from the open connections of the pool."""
        self._open.discard(connection)

    def _close_old(self) -> None:
        """Close the connections that have been idle for too long, and schedule the next check."""
        loop = asyncio.get_running_loop()
        for address, idle in list(self._idle.items()):
            while idle and time.monotonic() - idle[0][0] >= IDLE_SECONDS:
                idle.popleft()[1].abort()
            if not idle:
                del self._idle[address]
        self._closing_old = loop.call_later(IDLE_SECONDS, self._close_old) if self._idle else None


def _describe_tls_failure(exc: ssl.SSLError) -> str:
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"its certificate was rejected: {exc.verify_message.removesuffix('.')}"
    if exc.reason == "WRONG_VERSION_NUMBER":
        return "the server there does not use TLS; register it without https://"
    return f"the TLS handshake failed: {(exc.reason or str(exc)).replace('_', ' ').lower()}"
