"""GatewayRequest: a request that a gateway reports, served by the same code as a request over HTTP.

The proxy serves it like a client's request: selects an instance, counts the load and learns from the response. Only
one exchange is different: the leg of the first attempt that generates the response. The gateway sends the request of
this leg, and reports the instance's response. The picker carries out all other exchanges: the prefill leg of a pair
and, if the first attempt fails, the legs of later attempts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from router.app import RouterApp
from router.epp.messages import (
    CONTINUE,
    change_head,
    change_headers,
    end_with_trailers,
    make_immediate,
    pass_on,
    read_headers,
    read_served,
    read_subset,
    send_to,
    split_body,
)
from router.epp.protos import BUFFERED, FULL_DUPLEX_STREAMED
from router.fleet import Instance, Role
from router.http import (
    HOP_BY_HOP,
    NOT_PASSED_BACK,
    Address,
    ApiError,
    ClientRequest,
    ConnectionPool,
    Exchange,
    Headers,
    PreparedHead,
    Receiver,
    Refused,
    echo_request_id,
    end_to_end,
    path_of,
)

__all__ = ["GatewayExchange", "GatewayRequest"]

# Headers of a request that the gateway sets itself.
_OF_GATEWAY = HOP_BY_HOP | {b"host", b"expect", b"content-length"}
# Statuses of a gateway that cannot reach the instance. After one of them the instance is probed.
_MAYBE_DEAD = frozenset({502, 503, 504})
_JSON = [(b"content-type", b"application/json")]
_WRONG_MODES = (
    "the gateway's ext_proc filter must have request_body_mode FULL_DUPLEX_STREAMED or BUFFERED, and "
    "response_body_mode FULL_DUPLEX_STREAMED"
)


class GatewayExchange(Exchange):
    """A request to an instance, and its response. The gateway sends the request and reports the response."""

    __slots__ = ("_request_of_gateway", "body", "head")

    def __init__(
        self, request: GatewayRequest, pool: ConnectionPool, address: Address, head: PreparedHead, body: bytes
    ) -> None:
        super().__init__(pool, address, (), head.bodiless, False)
        self.head, self.body = head, body
        self._request_of_gateway = request

    def send(self, receiver: Receiver) -> None:
        """Make the gateway send the request."""
        if not self.is_closed:
            self.receiver, self.record.sent_at = receiver, time.perf_counter()
            self._request_of_gateway.forward(self)


class GatewayRequest(ClientRequest):
    """A client's request that a gateway reports, and its response. ``on_message`` gets the gateway's messages."""

    __slots__ = (
        *("_awaits_head", "_exchange", "_has_no_body", "_has_trailers", "_held", "_on_complete", "_response_head"),
        *("_router", "_subset", "_write_message", "is_buffered", "on_served"),
    )

    def __init__(
        self,
        stream: Any,
        message: Any,
        router: RouterApp,
        write: Callable[[Any], None],
        on_complete: Callable[[GatewayRequest], None],
    ) -> None:
        """
        Args:
            stream: the gateway's stream, which replaces a client's connection.
            message: the first message of the stream, with the request's head.
            router: the router of this process, whose parts serve the request.
            write: sends a message to the gateway.
            on_complete: called when the whole request has arrived.
        """
        pseudo, headers, self._has_no_body = read_headers(message.request_headers)
        target = pseudo.get(b":path", b"/")
        method = pseudo.get(b":method", b"GET").decode("latin-1")
        own = [header for header in headers if header[0] != b"content-length"]
        super().__init__(stream, method, target, path_of(target), own, "1.1", True)
        self._router = router
        self.gateway = self
        self._subset = read_subset(message)  # the endpoints from which the picker may choose; None for any
        self._write_message = write
        self._on_complete = on_complete
        self.on_served: Callable[[Instance], None] | None = None
        """Called with the instance to which the gateway has sent the request, if it is not the chosen one."""
        self._exchange: GatewayExchange | None = None  # the exchange that the gateway performs; None until it begins
        self._response_head: Headers = []  # the headers of the response that the gateway has reported
        self._awaits_head = False  # whether the gateway waits for a reply to the head of the response
        self._has_trailers = False  # whether trailers follow: after the request, later after the response
        # A response that is sent to the gateway in one piece, because the gateway does not wait for an instance's.
        self._held: tuple[int, Headers, list[bytes]] | None = None
        modes = message.protocol_config if message.HasField("protocol_config") else None
        self.is_buffered = modes is not None and modes.request_body_mode == BUFFERED
        """Whether the gateway collects the body, and then sends it in one message."""
        if modes is not None and (
            modes.response_body_mode != FULL_DUPLEX_STREAMED
            or modes.request_body_mode not in (FULL_DUPLEX_STREAMED, BUFFERED)
        ):
            self.refuse(Refused(ApiError(500, _WRONG_MODES, "wrong_processing_mode")))
        elif self._has_no_body:
            self._complete_request()
        elif self.is_buffered:
            write(CONTINUE)

    @property
    def is_arriving(self) -> bool:
        """Return whether a part of the request has not arrived yet."""
        return self.more_body and not (self.response_complete or self.disconnected)

    def refuse(self, refused: Refused) -> None:
        """Send an error before the request has arrived completely, and discard the part that has arrived."""
        self.body, self.arriving = b"", None
        self._router.proxy.release_bytes(self)
        error, echo = refused.error, echo_request_id(self.headers)
        self._router.proxy.on_refused(self.method, self.path, error, echo[0][1].decode() if echo else "")
        self.send_response(error.status, [*_JSON, *refused.headers, *echo], error.body(self.path))

    def on_message(self, message: Any) -> None:
        """Handle the next message of the gateway.

        Raises:
            ValueError: the message is not valid.
        """
        kind = message.WhichOneof("request")
        if self.disconnected or (kind == "response_headers" and self._exchange is None and not self.response_complete):
            self._leave_to_gateway(message)
        elif kind == "request_body":
            # A buffered body is complete, even if end_of_stream is not set because trailers follow.
            self._take_body(message.request_body.body, message.request_body.end_of_stream or self.is_buffered)
        elif kind == "request_trailers":
            self._take_trailers()
        elif kind == "response_headers":
            self._take_response_head(message)
        elif kind == "response_body":
            self._read(message.response_body.body, message.response_body.end_of_stream)
        elif kind == "response_trailers":
            self._has_trailers = True
            self._read(b"", True)

    def on_client_gone(self) -> None:
        """Handle the end of the gateway's stream: end the request if its response is not complete."""
        self._router.proxy.release_bytes(self)
        super().on_client_gone()
        # This breaks reference cycles, which only the garbage collector could free.
        self.gateway = self._exchange = self.on_served = None

    def prepare_exchange(
        self, address: Address, head: PreparedHead, body: bytes | tuple[bytes, ...], fresh: bool = False
    ) -> Exchange:
        """Return an exchange for a leg that generates the response. The gateway carries out the first such exchange."""
        if self._exchange is not None:
            return self._router.upstream.prepare_exchange(address, head, body, fresh)
        whole = b"".join(body) if isinstance(body, tuple) else body
        return GatewayExchange(self, self._router.upstream, address, head, whole)

    def list_excluded(self) -> frozenset[str]:
        """Return the keys of the instances to which the gateway cannot send this request."""
        subset = self._subset
        if subset is None:
            return frozenset()
        may_respond = (instance for instance in self._router.registry if instance.role is not Role.PREFILL)
        return frozenset(each.key for each in may_respond if not {each.key, each.address.host} & subset)

    def forward(self, exchange: GatewayExchange) -> None:
        """Send the gateway the address of the instance, and the changed head and body of the request."""
        self._exchange = exchange
        arrived = end_to_end(self.headers, _OF_GATEWAY)
        sent = _parse_lines(exchange.head.start.partition(b"\r\n")[2])
        body = None if exchange.body == self.body else exchange.body
        if body is not None:
            sent.append((b"content-length", b"%d" % len(body)))
        changes, endpoint = change_headers(arrived, sent), str(exchange.address)
        if self.is_buffered and not self._has_no_body:
            self._write_message(send_to(endpoint, changes, body, after_body=True))
            return
        self._write_message(send_to(endpoint, changes, None, after_body=False))
        if not self._has_no_body:
            for piece in split_body(exchange.body, is_request=True, is_end=not self._has_trailers):
                self._write_message(piece)
            if self._has_trailers:
                self._write_message(end_with_trailers(is_request=True))
        self._has_trailers = False

    def send_response(self, status: int, headers: Headers, body: bytes, lines: bytes = b"") -> None:
        """Send the gateway a complete response. ``ClientRequest.send_response`` describes the arguments."""
        length = [] if self.method == "HEAD" else [(b"content-length", b"%d" % len(body))]
        if length:
            headers = [header for header in headers if header[0] != b"content-length"]
        self.start_response(status, headers + length, lines)
        self.finish_response(body)

    def start_response(self, status: int, headers: Headers, lines: bytes = b"") -> None:
        """Send the gateway the head of a response. ``ClientRequest.start_response`` describes the arguments."""
        self.response_started = True
        headers = headers + _parse_lines(lines)
        if self._awaits_head and (not self._has_no_body or self.method == "HEAD"):
            self._awaits_head = False
            self._write_message(change_head(end_to_end(self._response_head), status, headers))
        else:
            self._held = status, headers, []

    def write_piece(self, data: bytes) -> None:
        """Send ``data`` to the gateway as a piece of the response's body, but not the last piece."""
        self._send_body(data, is_end=False)

    def finish_response(self, data: bytes) -> None:
        """Send ``data`` to the gateway as the last piece of the response's body, and complete the response."""
        if self.disconnected:  # the gateway has sent a response of its own
            self._complete_response()
            return
        self._send_body(data, is_end=True)
        if self._held is not None:
            status, headers, pieces = self._held
            self._write_message(make_immediate(status, headers, b"".join(pieces)))
        elif self._has_trailers:
            self._write_message(end_with_trailers(is_request=False))
        self._complete_response()

    def _send_body(self, data: bytes, *, is_end: bool) -> None:
        if self._held is not None:
            self._held[2].append(data)
        elif not self._has_no_body:
            for piece in split_body(data, is_request=False, is_end=is_end and not self._has_trailers):
                self._write_message(piece)

    def _take_trailers(self) -> None:
        if self.is_buffered and not self.more_body:  # the body before the trailers was already processed
            self._write_message(end_with_trailers(is_request=True))
        else:
            self._has_trailers = True
            self._take_body(b"", True)

    def _take_body(self, data: bytes, is_end: bool) -> None:
        if self.response_complete or not self.more_body:
            return
        limit = self._router.settings.max_body_bytes
        if len(self.body) + len(data) > limit:
            message = f"the body is larger than the {limit} bytes that this router accepts"
            self.refuse(Refused(ApiError(413, message, "body_too_large")))
        elif is_end and not self.body:
            self.body = data
            self._complete_request()
        elif refused := self._router.proxy.hold_bytes(self, len(data)):  # otherwise a client could fill the memory
            self.refuse(refused)
        else:
            if self.arriving is None:
                self.arriving = bytearray()
                self.body = cast(bytes, self.arriving)  # not copied to bytes, because a copy would block the router
            self.arriving += data
            if is_end:
                self._complete_request()

    def _leave_to_gateway(self, message: Any) -> None:
        """Let the gateway send its own response to a request that has no instance yet, and discard this request."""
        self.body, self.arriving = b"", None
        self.on_client_gone()
        for each in pass_on(message):
            self._write_message(each)

    def _complete_request(self) -> None:
        self.more_body, self.arriving = False, None
        self._router.proxy.release_bytes(self)
        self._on_complete(self)

    def _take_response_head(self, message: Any) -> None:
        pseudo, self._response_head, self._has_no_body = read_headers(message.response_headers)
        if self.response_complete:
            return
        exchange = self._exchange
        self._awaits_head = self._held is None
        if exchange is None or exchange.is_closed:
            return
        status = int(pseudo.get(b":status", b""))
        chosen = str(exchange.address)
        instance = self._router.registry.get(read_served(message) or chosen)
        if instance is not None and instance.key != chosen and self.on_served is not None:
            self.on_served(instance)
        if instance is not None and status in _MAYBE_DEAD:
            self._router.health.probe_soon(instance)
        exchange.on_head(status, end_to_end(self._response_head, NOT_PASSED_BACK))
        exchange.on_read(b"", self._has_no_body)

    def _read(self, data: bytes, is_end: bool) -> None:
        """Pass bytes of the instance's response to the exchange, unless the exchange has ended."""
        if self._exchange is not None and not (self._exchange.is_closed or self._exchange.complete):
            self._exchange.on_read(data, is_end)


def _parse_lines(lines: bytes) -> Headers:
    """Return the headers in lines that end with CRLF."""
    headers: Headers = []
    for line in lines.split(b"\r\n"):
        name, colon, value = line.partition(b": ")
        if colon:
            headers.append((name.lower(), value))
    return headers
