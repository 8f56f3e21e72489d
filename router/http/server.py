"""The HTTP server for clients: uvicorn's protocol, with a shorter path for the data plane.

uvicorn parses each request's head and body, and runs the control plane as an ASGI application. A data-plane request
avoids the costs of ASGI: messages as dictionaries, a task that waits until the client leaves, and matching response
headers against patterns. Together with a prefill leg that needs no task, this reduced the time for a P/D request from
174 to 103 microseconds (``benchmarks/router_overhead.py``).
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

from router.http.api_error import ApiError, Refused
from router.http.cors import Cors
from router.http.message import Headers
from router.http.request_id import echo_request_id

__all__ = ["ClientRequest", "DataPlane", "RouterProtocol", "is_normal_path", "path_of"]


# Limit for a head, or anything else that is not a body; as in most servers.
HEAD_BYTES = 64 * 1024
MAX_HEADERS = 1000
LONGEST_URL = 0xFFFF  # limit of httptools, which does not regard a longer one as HTTP
MAX_PIPELINED = 4
# Received bytes are parsed in pieces of this size, because they may be many small requests or chunks. Other connections
# run between the pieces.
PIECE_BYTES = 16 * 1024
# A refused client that is still sending gets this time to finish. If the connection were closed immediately, the
# client's system could discard the answer before the client reads it.
LINGER_SECONDS = 2.0
# When the server stops, it waits this long for an idle client's closing message, which ends a TLS connection.
GOODBYE_SECONDS = 1.0
# Read time-out for a request that has begun, and for a new connection; as in nginx.
READ_SECONDS = 60.0
# Write time-out for a response; as in nginx.
SEND_SECONDS = 60.0
_TLS_HANDSHAKE = b"\x16\x03"


class DataPlane(Protocol):
    """Handles all requests that are not for the control plane."""

    max_body_bytes: int
    is_leaving: bool
    known_targets: Mapping[bytes, str]
    """Checked targets of its requests, and their paths."""

    def takes(self, path: str) -> bool:
        """Return whether a request for this path belongs to the data plane."""

    def find_refusal(self, headers: Headers) -> Refused | None:
        """Return why the sender of these headers may not send a body; None if it may."""

    def serve(self, request: ClientRequest) -> None:
        """Answer a completely read request. If the answer has to wait, it does so in ``ClientRequest.run``."""

    def on_refused(self, method: str, path: str, error: ApiError, request_id: str = "") -> None:
        """Note a request that was answered with ``error`` without being read; unknown parts are ``""``."""


class _NobodyWaits:
    """Replaces the event that uvicorn sets when data has arrived: here no task waits for it."""

    def set(self) -> None:
        pass


class _Flow(FlowControl):
    """Flow control of a connection, in place of uvicorn's: reading pauses while received data is still unprocessed."""

    has_unread = False

    def resume_reading(self) -> None:
        if not self.has_unread:
            super().resume_reading()


class ClientRequest:
    """One client's request, read to its end, and its response.

    It replaces uvicorn's ``RequestResponseCycle``. The attributes without a docstring are uvicorn's.
    """

    __slots__ = (
        "_chunked",
        "_left_to_send",
        "_protocol",
        "added_head",
        "arriving",
        "body",
        "disconnected",
        "headers",
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
        """Headers without ``content-length``, which depends on the body."""
        self.known_head: object = None
        """See ``keep_head``."""
        self.version = version
        self.added_head = b""
        """Header lines that every response to this request gets."""
        self.body = b""
        self.arriving: bytearray | None = None
        """The body received so far, if it arrives in several pieces."""
        self.refusal: Refused | None = None
        """Why its body is discarded."""
        self.on_leave: Callable[[], None] | None = None
        """Called when the client leaves before its answer is complete."""
        self.on_ready: Callable[[], None] | None = None
        """Called when the client has taken most of what was sent, after ``is_ready`` was false."""
        self.task: asyncio.Task[None] | None = None
        """The last task that served it, if serving it had to wait."""
        self.disconnected = False
        self.keep_alive = keep_alive
        self.more_body = True
        self.message_event = _NOBODY_WAITS
        self.response_started = False
        self.response_complete = False
        self._chunked = False
        self._left_to_send = 0

    def send_response(self, status: int, headers: Headers, body: bytes, lines: bytes = b"") -> None:
        """Send a whole response. A ``content-length`` in ``headers`` is replaced, except for HEAD.

        Args:
            lines: additional header lines.
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
        """Send the head of a response, before pieces of its body; arguments as in ``send_response``."""
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
            self._left_to_send = -1  # the end of the connection ends the body
            self.keep_alive = False
        if not self.keep_alive:
            head.append(b"connection: close\r\n")
        self.response_started = True
        head.append(b"\r\n")
        self._write(b"".join(head))

    def run(self, serving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a step of serving it that has to wait. The server stops only after the answer to this request."""
        # No callback at its end, which would cost one more turn of the event loop: the next steps are done immediately.
        if self.task is not None:
            self._protocol.tasks.discard(self.task)
        self.task = self._protocol.loop.create_task(serving)
        self._protocol.tasks.add(self.task)
        return self.task

    def keep_head(self, head: object) -> None:
        """Cache this request's parsed head for the next requests of this connection."""
        self._protocol.known_head = head

    @property
    def is_ready(self) -> bool:
        """Return whether the client has taken everything sent so far."""
        return not self._protocol.flow.write_paused

    def write_piece(self, data: bytes) -> None:
        """Send a piece of the body. The sender pauses while the client is not ``is_ready``."""
        if data and self.method != "HEAD":
            self._left_to_send -= len(data)
            self._write(b"%x\r\n%s\r\n" % (len(data), data) if self._chunked else data)

    def finish_response(self, data: bytes) -> None:
        """Send the last piece of the body."""
        if self._chunked:
            self._write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n")
        else:
            self._left_to_send -= len(data)
            if data and self.method != "HEAD":
                self._write(data)
            if self._left_to_send > 0 and self.method != "HEAD":
                self.keep_alive = False  # shorter than its length: the client must notice that it is incomplete
        self._complete_response()

    def cut_response(self) -> None:
        """End an answer that cannot be completed, in a way that the client notices."""
        self.keep_alive = False
        self._complete_response()

    def on_client_gone(self) -> None:
        """Handle that the client has disconnected."""
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
    """One client's connection. The application is a ``RouterApp``; its ``proxy`` handles the data plane."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        application: Any = self.config.app
        self._data_plane: DataPlane = application.proxy
        self._cors: Cors | None = application.cors
        self._served: Any = None
        # Number of received bytes since the parser last completed anything, and size of the body of the request being
        # read.
        self._undigested = 0
        self._body_bytes = 0
        self._content_length = b""
        self.known_head: object = None
        # When data of a request last arrived, or the last answer ended.
        self._active_at = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._unread = b""
        # Number of bytes that the client had not taken at the last check, and the time of the next check.
        self._untaken = 0
        self._send_watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Handle a new connection; the client must send data in time."""
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport)
        self._active_at = self.loop.time()
        self._watch_for(READ_SECONDS)

    def data_received(self, data: bytes, is_piece: bool = False) -> None:
        """Parse the bytes that the client sends.

        Args:
            is_piece: whether they are to be parsed in one step.
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
                self._refuse_request(self._head_too_large())
            self._active_at = self.loop.time()
            return

    def _read_piece(self) -> None:
        """Parse a piece of the received data. Schedule the next piece for after other work, when there is capacity.

        A body of known length is read in one step, because it cannot contain many requests or chunks.
        """
        if self.transport.is_closing():
            self._unread = b""
            return
        size = PIECE_BYTES
        request: Any = self.cycle
        if self._content_length and request is not None and request.more_body:
            size = max(size, int(self._content_length) - self._body_bytes)
        piece, self._unread = self._unread[:size], self._unread[size:]
        self.data_received(piece, is_piece=True)
        self.flow.has_unread = bool(self._unread)
        if not self._unread:
            if len(self.pipeline) < MAX_PIPELINED and not self._has_untaken_body:
                self.flow.resume_reading()
            return
        self.flow.pause_reading()
        if len(self.pipeline) < MAX_PIPELINED:
            self.loop.call_soon(self._read_piece)

    def _refuse_unreadable(self, data: bytes) -> None:
        """Refuse data that is not HTTP."""
        if data.startswith(_TLS_HANDSHAKE):
            self._refuse_request(ApiError(400, "this port speaks plain HTTP, not HTTPS", "tls_at_plain_port"))
        elif len(self.headers or ()) > MAX_HEADERS:
            message = f"the head has more than the {MAX_HEADERS} headers this router takes"
            self._refuse_request(ApiError(431, message, "head_too_large"))
        elif len(self.url) > LONGEST_URL:
            self._refuse_request(self._head_too_large())
        else:
            self._refuse_request(ApiError(400, "this is no HTTP/1.1 request", "invalid_http"))

    def pause_writing(self) -> None:
        """Note that the client takes its answer more slowly than it is generated."""
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        """Note that the client has taken most of what was sent."""
        super().resume_writing()
        self._untaken = sys.maxsize
        if isinstance(self._served, ClientRequest) and self._served.on_ready is not None:
            self._served.on_ready()

    def _watch_sending(self) -> None:
        """Close the connection of a client that takes nothing of what was sent for some time."""
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
        """Return whether uvicorn has paused reading, because the control plane still has to take much of a body."""
        request: Any = self.cycle
        is_control = request is not None and not isinstance(request, ClientRequest)
        return is_control and not request.response_complete and len(request.body) > HIGH_WATER_LIMIT

    @property
    def _is_reading(self) -> bool:
        """Return whether a request has arrived in part, or none at all yet."""
        request: Any = self.cycle  # uvicorn's type has no None
        return self._undigested > 0 or request is None or (request.more_body and not request.response_complete)

    @property
    def _is_answering(self) -> bool:
        """Return whether a fully received request is being answered."""
        return any(
            not request.response_complete and (request.response_started or not request.more_body)
            for request in self._own_requests
        )

    @property
    def _own_requests(self) -> list[Any]:
        """Return the request being served, the waiting ones, and the last one that was read. Some may have ended."""
        requests = [self._served, *(cycle for cycle, _ in self.pipeline), self.cycle]
        return [request for request in requests if request is not None]

    def _check_activity(self) -> None:
        """Close the connection of a client that stops sending its request, or sends nothing; schedule the next check.

        One timer per connection is sufficient: requests neither set nor cancel timers.
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
            message = f"nothing more of the request came within {READ_SECONDS:g} s"
            self._refuse_request(ApiError(408, message, "request_incomplete"))
        else:
            self.transport.close()
        if self.transport.is_closing():
            self._watch_sending()  # because it closes only once the client has taken everything

    def _watch_for(self, seconds: float) -> None:
        """Check again after this time, or earlier if a time-out of something that begins now could expire."""
        seconds = min(seconds, READ_SECONDS, self.timeout_keep_alive)
        self._watch = self.loop.call_later(seconds, self._check_activity)

    def on_message_begin(self) -> None:
        """Prepare for a request's head. The rest of uvicorn's preparation is done only for the control plane."""
        self.url, self.headers, self.expect_100_continue, self._content_length = b"", [], False, b""

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. ``content-length`` is separate, because it differs between requests of one client."""
        name = name.lower()
        if name == b"content-length":
            self._content_length = value
            return
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Pass the request to the data plane, or to uvicorn's own handling."""
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
                self.flow.pause_reading()  # meanwhile it is not noticed if the client leaves
        elif self.expect_100_continue:
            self._answer_expectation(request)

    def _answer_expectation(self, request: ClientRequest) -> None:
        """Answer a client that waits for permission to send the body of its request (``Expect: 100-continue``)."""
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
        elif request.arriving is not None:
            request.arriving += body
        elif not request.body:
            request.body = body
        elif (refused := self._data_plane.find_refusal(request.headers)) is not None:
            self._refuse_body(request, refused)  # else any client could fill the memory
        else:
            request.arriving = bytearray(request.body)
            request.arriving += body

    def on_message_complete(self) -> None:
        """Serve the request, which is complete now."""
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
            # Not copied, which would block the router; it does not change any more.
            request.body, request.arriving = cast(bytes, request.arriving), None
        if not self.pipeline or self._has_its_turn(request):
            self._start_asgi_task(request, self._data_plane)

    def on_response_complete(self) -> None:
        """Serve the next waiting request after an answer has ended, if there is one."""
        if self.transport.is_closing():
            return
        self._active_at = self.loop.time()
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self.loop.call_soon(self._start_next)

    def _start_next(self) -> None:
        """Serve the next pipelined request in a later turn of the event loop, because answers may need no task or
        wait.
        """
        if self.pipeline and not self.transport.is_closing():
            was_full = len(self.pipeline) >= MAX_PIPELINED
            self._start_asgi_task(*self.pipeline.pop())
            if was_full and self._unread and len(self.pipeline) < MAX_PIPELINED:
                self._read_piece()

    def hang_up(self, request: ClientRequest) -> None:
        """Close the connection after ``request``, once its client has sent all of it, or a time limit is exceeded."""
        if request.more_body and not self.transport.is_closing():
            if self.transport.can_write_eof():  # not with TLS: there the answer's length marks its end
                self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """End the connection when the server stops: after its request; with TLS even if the client does not respond."""
        super().shutdown()
        if self.scheme == "https" and self.transport.is_closing():
            self.loop.call_later(GOODBYE_SECONDS, self._cut_goodbye_short)

    def _cut_goodbye_short(self) -> None:
        if not self.transport.get_write_buffer_size():
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify every request of this connection that its client has disconnected."""
        requests = self._own_requests
        super().connection_lost(exc)
        # Breaks a reference cycle that only the garbage collector could free.
        self.cycle = self._served = None  # type: ignore[assignment]
        self._unread = b""
        for watch in (self._watch, self._send_watch):
            if watch is not None:
                watch.cancel()
        for request in requests:
            if isinstance(request, ClientRequest):
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
        """Remove a slash at the path's end, and a fragment. Return the path, "" if the control plane has to refuse it.

        Otherwise an instance might interpret the path differently from the router, or redirect the client to itself.
        """
        target, question_mark, query = self.url.partition(b"#")[0].partition(b"?")
        if path_of(target)[1:].endswith("/"):
            target = target[:-1] if target.endswith(b"/") else target[: -len(b"%2F")]
        self.url = target + question_mark + query
        path = path_of(target)
        return path if is_normal_path(path) else ""

    def _decline_upgrade(self, rest: bytes) -> bytes:
        """Return the bytes of a request that offers another protocol, without the offer, and the bytes after it.

        Java's client offers HTTP/2. The parser reads no body after such a head, so it gets the head again without the
        offer.
        """
        if self.parser.get_method() == b"CONNECT":
            self._refuse_request(ApiError(405, "this router opens no tunnels", "method_not_allowed"))
            return b""
        start = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = [*self.headers, (b"content-length", self._content_length)] if self._content_length else self.headers
        head = [b"%s: %s\r\n" % header for header in headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        return b"".join([start, *head, b"\r\n", rest])

    def _refuse_body(self, request: ClientRequest, refused: Refused) -> None:
        """Answer with a refusal when it is the request's turn; discard its body."""
        request.body, request.arriving = b"", None
        request.refusal = refused
        if not request.response_complete and self._has_its_turn(request):
            request.keep_alive = False
            error = refused.error
            echo = echo_request_id(request.headers)
            self._data_plane.on_refused(request.method, request.path, error, echo[0][1].decode() if echo else "")
            headers = [(b"content-type", b"application/json"), *refused.headers, *echo]
            request.send_response(error.status, headers, error.body(request.path))

    def _has_its_turn(self, request: Any) -> bool:
        """Return whether the request being read does not have to wait for the answer to an earlier one."""
        return not self.pipeline or self.pipeline[0][0] is not request

    def _head_too_large(self) -> ApiError:
        if len(self.url) < HEAD_BYTES // 2:
            message = f"the head is larger than the {HEAD_BYTES} bytes this router takes"
            return ApiError(431, message, "head_too_large")
        message = f"the path and its query are longer than the {HEAD_BYTES} bytes this router takes"
        return ApiError(414, message, "target_too_long")

    def _too_large(self) -> ApiError:
        limit = self._data_plane.max_body_bytes
        return ApiError(413, f"the body is larger than the {limit} bytes this router takes", "body_too_large")

    def _refuse_request(self, error: ApiError) -> None:
        """Answer a request without reading it to its end, and close the connection."""
        is_answering = self._is_answering
        for request in self._own_requests:
            if request is self.cycle or not isinstance(request, ClientRequest):
                request.disconnected = True  # uvicorn's own request object would write to the closed connection
        if is_answering:
            self._data_plane.on_refused("", "", error)
            self.transport.close()  # within another answer, this one could not be distinguished from it
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
            if cycle.method == "OPTIONS" and self._answer_preflight(cycle):
                return
            self._data_plane.serve(cycle)
        elif self.expect_100_continue and not self._body_bytes:
            self._answer_expectation(cycle)

    def _answer_preflight(self, request: ClientRequest) -> bool:
        """Answer a preflight (whether a page's script may send a request). Return False for other requests."""
        answer = self._cors.answer_preflight(request.headers) if self._cors is not None else None
        if answer is not None:
            request.send_response(*answer)
        return answer is not None


_NOBODY_WAITS = _NobodyWaits()
_BODILESS = frozenset({204, 304})
# ``urllib.parse.unquote`` processes them one by one, which is slower.
_ESCAPES = re.compile("(?:%[0-9a-fA-F]{2})+")
_DROPPED: deque[tuple[bytes, bytes]] = deque(maxlen=0)


def path_of(target: bytes) -> str:
    """Return the path in a request's target, without query and escapes."""
    path = target.partition(b"?")[0].decode("latin-1")
    return _ESCAPES.sub(_unescape, path) if "%" in path else path


def _unescape(found: re.Match[str]) -> str:
    return bytes.fromhex(found[0].replace("%", "")).decode("utf-8", "replace")


def is_normal_path(path: str) -> bool:
    """Return whether no segment of the path is empty, ``.`` or ``..``, so that all servers read it equally."""
    return path == "/" or {"", ".", ".."}.isdisjoint(path.split("/")[1:])


def _origin_form(target: bytes) -> bytes:
    """Return path and query of a target with scheme and host, which every server must accept (RFC 9112, 3.2.2)."""
    parsed = httptools.parse_url(target)
    path: bytes = parsed.path or b"/"
    return path if parsed.query is None else b"%s?%s" % (path, parsed.query)
