"""The HTTP server for clients: uvicorn's protocol, with a shorter path for the data plane.

uvicorn parses the head and body of each request, and runs the control plane as an ASGI application. A data-plane
request avoids the costs of ASGI: messages as dictionaries, a task that waits until the client disconnects, and checks
of response headers against patterns. Together with a prefill leg that needs no task, this reduced the router's time
for a request to a pair from 174 to 103 microseconds (``benchmarks/router_overhead.py``).
"""

from __future__ import annotations

import asyncio
import fcntl
import re
import socket
import struct
import sys
import termios
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, cast

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvcommon.http_limits import HEAD_BYTES, MAX_HEADERS, READ_SECONDS, refuse_long_head, refuse_unreadable
from router.http.api_error import ApiError, Refused
from router.http.cors import Cors
from router.http.exchange import ExchangeMaker
from router.http.message import Headers
from router.http.request_id import echo_request_id

__all__ = ["ClientRequest", "DataPlane", "RouterProtocol", "is_normal_path", "path_of"]


# Limit of the requests of one connection that wait for the response to an earlier request (HTTP pipelining).
MAX_PIPELINED = 4
# Received bytes are parsed in pieces of this size, because they may be many small requests or chunks. The router serves
# other connections between the pieces.
PIECE_BYTES = 16 * 1024
# A refused client that is still sending gets this time to finish. If the connection were closed immediately, the
# client's system could discard the response before the client reads it.
LINGER_SECONDS = 2.0
# When the server stops, it waits this long for the closing message of an idle client with a TLS connection.
GOODBYE_SECONDS = 1.0
# A client that accepts no byte of its response for this time is disconnected; as in nginx.
SEND_SECONDS = 60.0
_TLS_HANDSHAKE = b"\x16\x03"


class DataPlane(Protocol):
    """Handles all requests that are not for the control plane."""

    max_body_bytes: int
    is_leaving: bool
    """Whether clients should close their connections, because this process will stop."""
    known_targets: Mapping[bytes, str]
    """Maps request targets that need no further check to their paths."""

    def takes(self, path: str) -> bool:
        """Return whether a request for this path belongs to the data plane."""

    def find_refusal(self, headers: Headers) -> Refused | None:
        """Return why the router refuses a request, judged by its headers before its body arrives; else None."""

    def hold_bytes(self, request: ClientRequest, num_bytes: int) -> Refused | None:
        """Count bytes of a body that arrives in several pieces. Return why the request is refused; else None."""

    def release_bytes(self, request: ClientRequest) -> None:
        """Stop counting the bytes of a request's body, because it is served or refused, or its client is gone."""

    def serve(self, request: ClientRequest) -> None:
        """Respond to a request that was read completely. Work that has to wait runs in ``ClientRequest.run``."""

    def on_refused(self, method: str, path: str, error: ApiError, request_id: str = "") -> None:
        """Record a request that was refused with ``error`` before it was read to its end; unknown values are ``""``."""


class Gateway(ExchangeMaker, Protocol):
    """A gateway that sends a request to the instance that the router chooses, and reports the response."""

    on_served: Callable[[Any], None] | None
    """Called with the instance that served the request, if it is not the one that the router chose."""

    def list_excluded(self) -> frozenset[str]:
        """Return the keys of the instances to which the gateway cannot send this request."""


class _NobodyWaits:
    """Stands in for the event that uvicorn sets when data has arrived. In this server no task waits for it."""

    def set(self) -> None:
        pass


class _Flow(FlowControl):
    """Flow control of a connection. Unlike uvicorn's, it does not resume reading while received data is unparsed."""

    has_unread = False

    def resume_reading(self) -> None:
        if not self.has_unread:
            super().resume_reading()


class ClientRequest:
    """One client's request, and its response. It replaces uvicorn's ``RequestResponseCycle``.

    The attributes without a docstring are uvicorn's.
    """

    __slots__ = (
        "_chunked",
        "_left_to_send",
        "_protocol",
        "added_head",
        "arriving",
        "body",
        "disconnected",
        "gateway",
        "headers",
        "held",
        "keep_alive",
        "known_head",
        "message_event",
        "method",
        "more_body",
        "on_leave",
        "on_ready",
        "path",
        "refusal",
        "response_complete",
        "response_started",
        "target",
        "task",
        "version",
    )

    def __init__(
        self,
        protocol: RouterProtocol,
        method: str,
        target: bytes,
        path: str,
        headers: Headers,
        version: str,
        keep_alive: bool,
    ) -> None:
        self._protocol = protocol
        self.method = method
        self.target = target
        """Path and query as in the request line."""
        self.path = path
        """The path in ``target``, without query and escapes."""
        self.headers = headers
        """All headers except ``content-length``."""
        self.known_head: object = None
        """The parsed head of an earlier request of this connection; see ``keep_head``."""
        self.version = version
        self.gateway: Gateway | None = None
        """The gateway that sends the request to an instance; None if the router sends it. See ``router.epp``."""
        self.added_head = b""
        """Header lines that are added to each response to this request."""
        self.body = b""
        self.arriving: bytearray | None = None
        """The part of the body that has arrived, if the body arrives in several pieces."""
        self.held: tuple[str, int] | None = None
        """The client and the number of bytes that ``DataPlane.hold_bytes`` has counted; None if it has counted none."""
        self.refusal: Refused | None = None
        """The reason why the request is refused and its body discarded; None if it is not refused."""
        self.on_leave: Callable[[], None] | None = None
        """Called when the client disconnects before its response is complete."""
        self.on_ready: Callable[[], None] | None = None
        """Called after ``is_ready`` was false, when the client has read most of the bytes that were sent."""
        self.task: asyncio.Task[None] | None = None
        """The last task that served this request; None if the request never had to wait."""
        self.disconnected = False
        self.keep_alive = keep_alive
        self.more_body = True
        self.message_event = _NOBODY_WAITS
        self.response_started = False
        self.response_complete = False
        self._chunked = False
        self._left_to_send = 0

    def send_response(self, status: int, headers: Headers, body: bytes, lines: bytes = b"") -> None:
        """Send a complete response. A ``content-length`` in ``headers`` is replaced, except for HEAD.

        Args:
            lines: additional header lines, encoded.
        """
        is_head = self.method == "HEAD"
        head = [STATUS_LINE[status], self.added_head, lines]
        for header in headers:
            if is_head or header[0] != b"content-length":
                head.append(b"%s: %s\r\n" % header)
        if not is_head and status not in _BODILESS:
            head.append(b"content-length: %d\r\n" % len(body))
        if not self.keep_alive:
            head.append(b"connection: close\r\n")
        self.response_started = True
        head += (b"\r\n", b"" if is_head else body)
        self._write(b"".join(head))
        self._complete_response()

    def start_response(self, status: int, headers: Headers, lines: bytes = b"") -> None:
        """Send the status line and the headers of a response. The caller then sends the body, in pieces.

        Args:
            status: the response's status.
            headers: the response's headers.
            lines: additional header lines, encoded.
        """
        head, length = [STATUS_LINE[status], self.added_head, lines], None
        for header in headers:
            head.append(b"%s: %s\r\n" % header)
            if header[0] == b"content-length" and length is None:
                length = int(header[1])
        if length is not None:
            self._left_to_send = length
        elif self.method == "HEAD" or status in _BODILESS:
            pass
        elif self.version == "1.1":
            self._chunked = True
            head.append(b"transfer-encoding: chunked\r\n")
        else:
            self._left_to_send = -1  # the end of the connection marks the end of the body
            self.keep_alive = False
        if not self.keep_alive:
            head.append(b"connection: close\r\n")
        self.response_started = True
        head.append(b"\r\n")
        self._write(b"".join(head))

    def run(self, serving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine of this request in a task, for work that has to wait. A stopping server waits for it."""
        # The task has no callback for its end, because that would cost one more turn of the event loop.
        if self.task is not None:
            self._protocol.tasks.discard(self.task)
        self.task = self._protocol.loop.create_task(serving)
        self._protocol.tasks.add(self.task)
        return self.task

    def keep_head(self, head: object) -> None:
        """Store this request's parsed head for later requests on the same connection."""
        self._protocol.known_head = head

    @property
    def is_ready(self) -> bool:
        """Return whether the router may send more: the write buffer of the connection is not full."""
        return not self._protocol.flow.write_paused

    def write_piece(self, data: bytes) -> None:
        """Send a piece of the body. The caller pauses while ``is_ready`` is false."""
        if data and self.method != "HEAD":
            self._left_to_send -= len(data)
            self._write(b"%x\r\n%s\r\n" % (len(data), data) if self._chunked else data)

    def finish_response(self, data: bytes) -> None:
        """Send ``data`` as the last piece of the body, and complete the response."""
        if self._chunked:
            self._write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n")
        else:
            self._left_to_send -= len(data)
            if data and self.method != "HEAD":
                self._write(data)
            if self._left_to_send > 0 and self.method != "HEAD":
                self.keep_alive = False  # the closed connection shows the client that the body is incomplete
        self._complete_response()

    def cut_response(self) -> None:
        """End a response that cannot be completed. The closed connection shows the client that it is incomplete."""
        self.keep_alive = False
        self._complete_response()

    def on_client_gone(self) -> None:
        """Record that the client has disconnected, and call ``on_leave`` if its response is not complete."""
        self.disconnected = True
        on_leave, self.on_leave = self.on_leave, None
        if on_leave is not None and not self.response_complete:
            on_leave()

    def _write(self, data: bytes) -> None:
        if not self.disconnected and not self._protocol.transport.is_closing():
            self._protocol.transport.write(data)

    def _complete_response(self) -> None:
        if self.response_complete:
            return
        self.response_complete = True
        self.on_leave = self.on_ready = None
        self.body = b""  # an idle connection still refers to its last request
        if self.task is not None:
            self._protocol.tasks.discard(self.task)
            self.task = None
        if not self.keep_alive:
            self._protocol.hang_up(self)
        self._protocol.on_response_complete()


class RouterProtocol(HttpToolsProtocol):
    """One client's connection. The application is a ``RouterApp``, and its ``proxy`` handles the data plane."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        application: Any = self.config.app
        self._data_plane: DataPlane = application.proxy
        self._cors: Cors | None = application.cors
        self._served: Any = None
        # Bytes received since the parser last completed a head or a piece of a body; bytes of the current body.
        self._undigested = 0
        self._body_bytes = 0
        self._content_length = b""
        self.known_head: object = None
        self._has_sent_eof = False
        # Time at which data of a request last arrived, or at which the last response was complete.
        self._active_at = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._unread = b""
        # Number of sent bytes that the client had not received at the last check, and the timer of the next check.
        self._untaken = 0
        self._send_watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Handle a new connection, and start the time limit for its first request."""
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport)
        self._active_at = self.loop.time()
        self._watch_for(READ_SECONDS)

    def data_received(self, data: bytes, is_piece: bool = False) -> None:
        """Parse bytes that the client has sent.

        Args:
            is_piece: whether to parse all of ``data`` in one step.
        """
        if not is_piece and (len(data) > PIECE_BYTES or self._unread):
            self._unread += data
            if not self.flow.has_unread:
                self._read_piece()
            return
        while data:
            self._undigested += len(data)
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._decline_upgrade(data[upgrade.args[0] :])
                continue
            except httptools.HttpParserError:
                self._refuse_unreadable(data)
                return
            if self._undigested > HEAD_BYTES:
                self._refuse_request(ApiError(*refuse_long_head(len(self.url), "this router")))
            self._active_at = self.loop.time()
            return

    def _read_piece(self) -> None:
        """Parse one piece of the received data. Schedule the next piece, unless too many requests are waiting.

        A body of known length is parsed together with the piece in which it begins, because it cannot contain many
        requests or chunks.
        """
        if self.transport.is_closing():
            self._unread = b""
            return
        self._parse_unread(max(PIECE_BYTES, self._count_rest()))
        if self._unread and not self.transport.is_closing() and (rest := self._count_rest()):
            self._parse_unread(rest)
        self.flow.has_unread = bool(self._unread)
        if not self._unread:
            if len(self.pipeline) < MAX_PIPELINED and not self._has_untaken_body:
                self.flow.resume_reading()
            return
        self.flow.pause_reading()
        if len(self.pipeline) < MAX_PIPELINED:
            self.loop.call_soon(self._read_piece)

    def _parse_unread(self, size: int) -> None:
        piece, self._unread = self._unread[:size], self._unread[size:]
        self.data_received(piece, is_piece=True)

    def _count_rest(self) -> int:
        """Return how many bytes of the current request's body are missing; 0 if its length is unknown."""
        request: Any = self.cycle
        if not self._content_length or request is None or not request.more_body:
            return 0
        return int(self._content_length) - self._body_bytes

    def _refuse_unreadable(self, data: bytes) -> None:
        """Refuse a request whose bytes are not HTTP, and close the connection."""
        if data.startswith(_TLS_HANDSHAKE):
            self._refuse_request(
                ApiError(400, "this port serves plain HTTP; use http:// instead of https://", "tls_at_plain_port")
            )
        elif len(self.headers or ()) > MAX_HEADERS:
            message = f"the head has more than the {MAX_HEADERS} headers that this router accepts"
            self._refuse_request(ApiError(431, message, "head_too_large"))
        else:
            self._refuse_request(ApiError(*refuse_unreadable(len(self.url), "this router")))

    def pause_writing(self) -> None:
        """Pause the response, because the client reads it more slowly than it arrives."""
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        """Continue the response, because the client has read most of the bytes that were sent."""
        super().resume_writing()
        self._untaken = sys.maxsize
        if isinstance(self._served, ClientRequest) and self._served.on_ready is not None:
            self._served.on_ready()

    def _watch_sending(self) -> None:
        """Start a timer that disconnects the client if it receives none of the sent bytes for ``SEND_SECONDS``."""
        if self._send_watch is None:
            self._untaken = self._count_untaken()
            self._send_watch = self.loop.call_later(SEND_SECONDS, self._check_sending)

    def _check_sending(self) -> None:
        self._send_watch = None
        if not self.flow.write_paused and not self.transport.is_closing():
            return
        if self._count_untaken() >= self._untaken:
            self.transport.abort()
        else:
            self._watch_sending()

    def _count_untaken(self) -> int:
        """Return the number of sent bytes that the client's system has not acknowledged."""
        sock: socket.socket = self.transport.get_extra_info("socket")
        in_kernel = bytearray(4)
        try:
            fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, in_kernel)
        except OSError:
            return self.transport.get_write_buffer_size()  # the connection has ended
        return self.transport.get_write_buffer_size() + int(struct.unpack("i", in_kernel)[0])

    @property
    def _has_untaken_body(self) -> bool:
        """Return whether uvicorn has paused reading, because the control plane has not yet processed much of a body."""
        request: Any = self.cycle
        is_control = request is not None and not isinstance(request, ClientRequest)
        return is_control and not request.response_complete and len(request.body) > HIGH_WATER_LIMIT

    @property
    def _is_reading(self) -> bool:
        """Return whether the router waits for the rest of a request, or for the first request of the connection."""
        request: Any = self.cycle  # uvicorn's type has no None
        return self._undigested > 0 or request is None or (request.more_body and not request.response_complete)

    @property
    def _is_answering(self) -> bool:
        """Return whether the router is responding to a request that was read completely."""
        return any(
            not request.response_complete and (request.response_started or not request.more_body)
            for request in self._own_requests
        )

    @property
    def _own_requests(self) -> list[Any]:
        """Return the request being served, the waiting requests, and the last request that was read."""
        requests = [self._served, *(cycle for cycle, _ in self.pipeline), self.cycle]
        return [request for request in requests if request is not None]

    def _check_activity(self) -> None:
        """Disconnect a client that stops in the middle of a request, or is idle for too long; schedule the next check.

        One timer for each connection is enough: a request does not set or cancel timers.
        """
        if self.transport.is_closing():
            self._watch_sending()
            return
        is_reading = self._is_reading
        patience = READ_SECONDS if is_reading else self.timeout_keep_alive
        left = self._active_at + patience - self.loop.time()
        if left > 0 or self._is_answering:
            self._watch_for(left if left > 0 else patience)
        elif is_reading and (self._undigested or cast(object, self.cycle) is not None):
            message = f"the rest of the request did not arrive within {READ_SECONDS:g} s"
            self._refuse_request(ApiError(408, message, "request_incomplete"))
        else:
            self.transport.close()
        if self.transport.is_closing():
            self._watch_sending()  # the transport stays open until the client has received everything

    def _watch_for(self, seconds: float) -> None:
        """Schedule the next check after ``seconds``, or earlier if a time limit that begins now could expire before."""
        seconds = min(seconds, READ_SECONDS, self.timeout_keep_alive)
        self._watch = self.loop.call_later(seconds, self._check_activity)

    def on_message_begin(self) -> None:
        """Prepare for the head of a request. The rest of uvicorn's preparation is done only for the control plane."""
        self.url, self.headers, self.expect_100_continue, self._content_length = b"", [], False, b""

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; ``content-length`` separately, as the others are usually equal in a client's requests."""
        name = name.lower()
        if name == b"content-length":
            self._content_length = value
            return
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Create a ``ClientRequest`` for the data plane, or let uvicorn handle a control-plane request."""
        self._undigested = self._body_bytes = 0
        if len(self.headers) > MAX_HEADERS:
            raise ValueError("too many headers")  # the parser passes it on to ``data_received``
        if self.parser.should_upgrade():
            return
        existing = self.cycle
        path = self._data_plane.known_targets.get(self.url, "")
        if not path and not self._data_plane.takes(path := self._find_path()):
            url, headers, expects = self.url, self.headers, self.expect_100_continue
            super().on_message_begin()
            self.url, self.expect_100_continue = url, expects
            self.headers += headers
            if self._content_length:
                self.headers.append((b"content-length", self._content_length))
            super().on_headers_complete()
            return
        version = self.parser.get_http_version()
        keep_alive = version != "1.0" and not self._data_plane.is_leaving and self.parser.should_keep_alive()
        method = self.parser.get_method().decode("ascii")
        request = ClientRequest(self, method, self.url, path, self.headers, version, keep_alive)
        request.known_head = self.known_head
        if self._cors is not None:
            for header in self._cors.answer_headers(self.headers):
                request.added_head += b"%s: %s\r\n" % header
        self.headers = _DROPPED  # type: ignore[assignment]  # trailers, after a chunked body, are ignored
        self.cycle = request  # type: ignore[assignment]
        if existing is not None and not existing.response_complete:
            self.pipeline.appendleft((request, self._data_plane))  # type: ignore[arg-type]
            if len(self.pipeline) >= MAX_PIPELINED:
                self.flow.pause_reading()  # while paused, the router cannot notice that the client disconnects
        elif self.expect_100_continue:
            self._answer_expectation(request)

    def _answer_expectation(self, request: ClientRequest) -> None:
        """Respond to a client that waits for permission to send the body of its request (``Expect: 100-continue``)."""
        if int(self._content_length or 0) > self._data_plane.max_body_bytes:
            self._refuse_body(request, Refused(self._too_large()))
        elif (refused := self._data_plane.find_refusal(request.headers)) is not None:
            self._refuse_body(request, refused)
        else:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Store a piece of the body."""
        self._undigested = 0
        self._body_bytes += len(body)
        is_too_large = self._body_bytes > self._data_plane.max_body_bytes
        request: Any = self.cycle
        if not isinstance(request, ClientRequest):
            if not is_too_large:
                super().on_body(body)
            elif not request.response_complete:
                self._refuse_request(self._too_large())
            return
        if request.refusal is not None:
            return
        if is_too_large:
            self._refuse_body(request, Refused(self._too_large()))
        elif request.arriving is None and not request.body:
            request.body = body
        elif (refused := self._data_plane.hold_bytes(request, len(request.body) + len(body))) is not None:
            self._refuse_body(request, refused)  # otherwise a client could fill the memory
        else:
            if request.arriving is None:
                request.arriving, request.body = bytearray(request.body), b""
            request.arriving += body

    def on_message_complete(self) -> None:
        """Serve the request, which has arrived completely, unless it has to wait for the response to an earlier one."""
        self._undigested = 0
        request: Any = self.cycle
        if self.parser.should_upgrade():
            return
        if not isinstance(request, ClientRequest):
            super().on_message_complete()
            return
        request.more_body = False
        if request.response_complete:
            if not request.keep_alive:
                self.transport.close()
            return
        if request.arriving is not None:
            # The body stays a bytearray, because a copy would block the router. It does not change any more.
            request.body, request.arriving = cast(bytes, request.arriving), None
        if not self.pipeline or self._has_its_turn(request):
            self._start_asgi_task(request, self._data_plane)

    def on_response_complete(self) -> None:
        """Serve the next pipelined request, if there is one, after a response was completed."""
        if self.transport.is_closing():
            return
        self._active_at = self.loop.time()
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self.loop.call_soon(self._start_next)

    def _start_next(self) -> None:
        """Serve the next pipelined request. ``call_soon`` runs this, so that short responses do not block the
        router.
        """
        if self.pipeline and not self.transport.is_closing():
            was_full = len(self.pipeline) >= MAX_PIPELINED
            self._start_asgi_task(*self.pipeline.pop())
            if was_full and self._unread and len(self.pipeline) < MAX_PIPELINED:
                self._read_piece()

    def hang_up(self, request: ClientRequest) -> None:
        """Close the connection after ``request``, as soon as its body has arrived or ``LINGER_SECONDS`` have passed."""
        if request.more_body and not self.transport.is_closing():
            if self.transport.can_write_eof():  # not with TLS, where the length of the response marks its end
                self.transport.write_eof()
                self._has_sent_eof = True
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """Close the connection after its present request. A TLS client gets one second to confirm the end."""
        super().shutdown()
        if self.scheme == "https" and self.transport.is_closing():
            self.loop.call_later(GOODBYE_SECONDS, self._cut_goodbye_short)

    def _cut_goodbye_short(self) -> None:
        if not self.transport.get_write_buffer_size():
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify every request of this connection that the client has disconnected."""
        requests = self._own_requests
        super().connection_lost(exc)
        # This breaks a reference cycle, which only the garbage collector could free.
        self.cycle = self._served = None  # type: ignore[assignment]
        self._unread = b""
        for watch in (self._watch, self._send_watch):
            if watch is not None:
                watch.cancel()
        for request in requests:
            if isinstance(request, ClientRequest):
                self._data_plane.release_bytes(request)
                request.on_client_gone()

    def _find_path(self) -> str:
        """Return the path of the request; ``""`` if the control plane has to refuse it."""
        if not self.url.startswith((b"/", b"*")):
            self.url = _origin_form(self.url)
        path = path_of(self.url)
        if path[-1] == "/" or "//" in path or "/." in path or "#" in path:
            path = self._normalize_target()
        return path

    def _normalize_target(self) -> str:
        """Remove a final slash and a fragment from the target, and return the path.

        Return ``""`` if the path still has parts such as ``..`` or ``//``. An instance might interpret them in another
        way than the router, or redirect the client to its own address. So the control plane refuses the request.
        """
        target, question_mark, query = self.url.partition(b"#")[0].partition(b"?")
        if path_of(target)[1:].endswith("/"):
            target = target[:-1] if target.endswith(b"/") else target[: -len(b"%2F")]
        self.url = target + question_mark + query
        path = path_of(target)
        return path if is_normal_path(path) else ""

    def _decline_upgrade(self, rest: bytes) -> bytes:
        """Return the head of a request that offers another protocol, without that offer, and the bytes after the head.

        For example, Java's client offers HTTP/2. The parser reads no body after such a head, so it gets the changed
        head again.
        """
        if self.parser.get_method() == b"CONNECT":
            self._refuse_request(ApiError(405, "this router does not support CONNECT", "method_not_allowed"))
            return b""
        start = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = [*self.headers, (b"content-length", self._content_length)] if self._content_length else self.headers
        head = [b"%s: %s\r\n" % header for header in headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        return b"".join([start, *head, b"\r\n", rest])

    def _refuse_body(self, request: ClientRequest, refused: Refused) -> None:
        """Discard the body of a request, and send the refusal as soon as earlier requests have their responses."""
        request.body, request.arriving = b"", None
        self._data_plane.release_bytes(request)
        request.refusal = refused
        if not request.response_complete and self._has_its_turn(request):
            request.keep_alive = False
            error = refused.error
            echo = echo_request_id(request.headers)
            self._data_plane.on_refused(request.method, request.path, error, echo[0][1].decode() if echo else "")
            headers = [(b"content-type", b"application/json"), *refused.headers, *echo]
            request.send_response(error.status, headers, error.body(request.path))

    def _has_its_turn(self, request: Any) -> bool:
        """Return whether ``request``, which is being read, need not wait for the response to an earlier request."""
        return not self.pipeline or self.pipeline[0][0] is not request

    def _too_large(self) -> ApiError:
        limit = self._data_plane.max_body_bytes
        return ApiError(413, f"the body is larger than the {limit} bytes that this router accepts", "body_too_large")

    def _refuse_request(self, error: ApiError) -> None:
        """Send an error without reading the request to its end, and close the connection."""
        is_answering = self._is_answering
        for request in self._own_requests:
            if request is self.cycle or not isinstance(request, ClientRequest):
                request.disconnected = True  # uvicorn's own request object would write to the closed connection
        if self._has_sent_eof:
            self.transport.close()  # the request has its response, and the rest of it is not HTTP
        elif is_answering:
            self._data_plane.on_refused("", "", error)
            self.transport.close()  # the client would take an error within another response for a part of that response
        elif not self.transport.is_closing():
            self._data_plane.on_refused("", "", error)
            latest: Any = self.cycle
            is_known = isinstance(latest, ClientRequest) and not latest.response_complete
            start = STATUS_LINE[error.status] + (latest.added_head if is_known else b"")
            head = b"%scontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            body = error.body(latest.path if is_known else "")
            self.transport.write(head % (start, len(body)) + body)
            self.transport.close()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if not isinstance(cycle, ClientRequest):
            self._served = cycle
            super()._start_asgi_task(cycle, app)
        elif cycle.refusal is not None:
            self._refuse_body(cycle, cycle.refusal)
        elif not cycle.more_body:
            self._served = cycle
            self._data_plane.release_bytes(cycle)
            if cycle.method == "OPTIONS" and self._answer_preflight(cycle):
                return
            self._data_plane.serve(cycle)
        elif self.expect_100_continue and not self._body_bytes:
            self._answer_expectation(cycle)

    def _answer_preflight(self, request: ClientRequest) -> bool:
        """Respond to a CORS preflight. Return False if the request is not a preflight."""
        answer = self._cors.answer_preflight(request.headers) if self._cors is not None else None
        if answer is not None:
            request.send_response(*answer)
        return answer is not None


_NOBODY_WAITS = _NobodyWaits()
_BODILESS = frozenset({204, 304})
# Successive escapes in a path, which ``_unescape`` decodes together; ``urllib.parse.unquote`` is slower.
_ESCAPES = re.compile("(?:%[0-9a-fA-F]{2})+")
_DROPPED: deque[tuple[bytes, bytes]] = deque(maxlen=0)


def path_of(target: bytes) -> str:
    """Return the path in a request's target, without the query and with escapes decoded."""
    path = target.partition(b"?")[0].decode("latin-1")
    return _ESCAPES.sub(_unescape, path) if "%" in path else path


def _unescape(found: re.Match[str]) -> str:
    return bytes.fromhex(found[0].replace("%", "")).decode("utf-8", "replace")


def is_normal_path(path: str) -> bool:
    """Return whether no segment of the path is empty, ``.`` or ``..``. All servers read such a path in the same way."""
    return path == "/" or {"", ".", ".."}.isdisjoint(path.split("/")[1:])


def _origin_form(target: bytes) -> bytes:
    """Return path and query of a target that has scheme and host. Every server must accept it (RFC 9112, 3.2.2)."""
    parsed = httptools.parse_url(target)
    path: bytes = parsed.path or b"/"
    return path if parsed.query is None else b"%s?%s" % (path, parsed.query)
