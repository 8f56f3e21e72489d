"""One connection to an instance: bytes to parsed pieces of a response, by httptools."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import httptools

from router.http.errors import BadResponse, ConnectionLost, UpstreamError
from router.http.message import Address, Headers

if TYPE_CHECKING:
    from router.http.exchange import Exchange
    from router.http.pool import Upstream

__all__ = ["Connection"]

# A dead host, which sends no FIN, is noticed after about half a minute.
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_PROBES = 15, 5, 3


class Connection(asyncio.Protocol):
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
