"""HTTP for all paths of an instance: HEAD, request ids, limits, and errors in OpenAI's or Anthropic's format."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import httptools
import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engine.protocol import ApiError, anthropic_error_body
from kvcommon import request_ids
from kvcommon.http_limits import HEAD_BYTES, READ_SECONDS, HeadRefusal, refuse_long_head, refuse_unreadable
from kvcommon.request_ids import encode_request_id

__all__ = [
    "CLIENT_LEFT",
    "HttpMiddleware",
    "InstanceProtocol",
    "add_error_handlers",
    "encode_request_id",
    "find_request_id",
    "read_body",
]

CLIENT_LEFT = 499
"""Status of the response if the client has disconnected; it is only for logs."""

# The router has the same limit, so an instance refuses nothing that the router accepts.
MAX_BODY_BYTES = 64 * 1024 * 1024

_INCOMPLETE = "the rest of the request did not arrive within %g s"
_ANTHROPIC_PATH = "/v1/messages"


class InstanceProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which answers bytes that are not HTTP, or a head that is too long, with an error object.

    The error object has OpenAI's format. The protocol declines offers of other protocols, such as HTTP/2, and closes
    connections on which no request arrives.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._undigested = 0  # number of bytes since the parser last completed a head, a piece of a body, or a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Handle a new connection, and start the time limit for the head of its first request."""
        super().connection_made(transport)
        self._limit_silence()

    def data_received(self, data: bytes) -> None:
        """Process bytes from the client. Refuse them if they are not HTTP, or if a head or trailers are too long."""
        self._unset_keepalive_if_required()
        self._undigested += len(data)
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._decline_upgrade(data[upgrade.args[0] :])
            except httptools.HttpParserError:
                self._refuse_connection(refuse_unreadable(len(self.url), "this instance"))
                return
            else:
                break
        cycle: Any = self.cycle  # may be None, which uvicorn's type does not say
        if self._undigested > HEAD_BYTES:
            self._refuse_connection(refuse_long_head(len(self.url), "this instance"))
        elif cycle is None or self._is_in_head or cycle.response_complete:
            self._limit_silence()  # the bytes may also be empty lines, or the rest of a body

    @property
    def _is_in_head(self) -> bool:
        """Return whether the head of a request has begun, and is not complete."""
        cycle: Any = self.cycle
        # uvicorn creates a scope at the beginning of a request, and a cycle with this scope at the end of the head.
        return self.scope is not (None if cycle is None else cycle.scope)

    def on_headers_complete(self) -> None:
        """Begin a request. If its head offers another protocol, ``data_received`` parses it again without the offer."""
        self._undigested = 0
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Store a piece of a body."""
        self._undigested = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the body of a request."""
        self._undigested = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _decline_upgrade(self, rest: bytes) -> bytes:
        """Return the head of a request that offers another protocol, without that offer, and the bytes after the head.

        For example, Java's client offers HTTP/2. The parser reads no body after such a head.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse_connection((405, "this instance does not support CONNECT", "method_not_allowed"))
            return b""
        start = b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())
        headers = [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join([start, *headers, b"", rest])

    def _limit_silence(self) -> None:
        """Start the time limit for the next bytes of a head. uvicorn ends it when bytes arrive."""
        self.timeout_keep_alive_task = self.loop.call_later(READ_SECONDS, self._end_silence)

    def _end_silence(self) -> None:
        """Close a connection on which the rest of a head did not arrive, unless a response is in progress."""
        cycle: Any = self.cycle
        if self.transport.is_closing() or (cycle is not None and not cycle.response_complete):
            return
        if self._is_in_head:
            self._refuse_connection((408, _INCOMPLETE % READ_SECONDS, "request_incomplete"))
        else:
            self.transport.close()

    def _refuse_connection(self, refusal: HeadRefusal) -> None:
        status, message, code = refusal
        cycle: Any = self.cycle
        # If an earlier response is in progress, the client would read this one as a part of it.
        is_free = cycle is None or cycle.response_complete or not (cycle.response_started or self.pipeline)
        if is_free and not self.transport.is_closing():
            head = "HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            body = orjson.dumps(ApiError(status, message, code=code).body)
            self.transport.write((head % (status, HTTPStatus(status).phrase, len(body))).encode() + body)
        self.transport.close()


class HttpMiddleware:
    """Answers HEAD as GET (uvicorn leaves out the body), and adds the client's ``X-Request-Id`` to each response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application, HEAD as GET, and add ``X-Request-Id`` to the response."""
        if scope["type"] == "http":
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}
            if echo := _echo_request_id(scope["headers"]):
                send = _add_header(send, echo)
        await self._app(scope, receive, send)


def _add_header(send: Send, header: tuple[bytes, bytes]) -> Send:
    """Return a function like ``send`` that adds ``header`` to a response, unless the response has it."""

    async def send_with_header(message: Message) -> None:
        if message["type"] == "http.response.start" and all(name != header[0] for name, _ in message["headers"]):
            message["headers"] = [*message["headers"], header]
        await send(message)

    return send_with_header


async def read_body(request: Request) -> bytes:
    """Read the whole body of a request.

    Raises:
        ApiError: 413, the body is too large; 408, the rest of the body did not arrive in time; 415, the body is
            compressed.
        ClientDisconnect: the client has disconnected.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        message = f"the body has the content encoding {encoding}; this instance accepts only bodies without one"
        raise ApiError(415, message, param="Content-Encoding")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    pieces = request.stream()
    while True:
        try:
            body += await asyncio.wait_for(anext(pieces), READ_SECONDS)
        except StopAsyncIteration:
            return bytes(body)
        except (asyncio.TimeoutError, TimeoutError):
            raise ApiError(408, _INCOMPLETE % READ_SECONDS, code="request_incomplete") from None
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()


def _too_large() -> ApiError:
    return ApiError(
        413, f"the body is larger than the {MAX_BODY_BYTES} bytes that this instance accepts", code="body_too_large"
    )


def find_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the id in the header ``X-Request-Id``; "" if there is none.

    Raises:
        ApiError: 400; the id is not valid.
    """
    try:
        return request_ids.find_request_id(headers, "this instance")
    except ValueError as exc:
        raise ApiError(400, str(exc), param="X-Request-Id") from None


def _echo_request_id(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, bytes] | None:
    """Return the header ``X-Request-Id`` with the client's id, or None if the client sent no valid id."""
    try:
        sent = find_request_id(headers)
    except ApiError:
        return None
    return encode_request_id(sent) if sent else None


def add_error_handlers(app: FastAPI) -> None:
    """Add handlers that answer each error with an error object in the format of the request's API."""

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        # The connection is closed, because the rest of the body would be read as another request.
        headers = {"Connection": "close"} if error.status == 408 else None
        return JSONResponse(_shape_error(request, error), error.status, headers=headers)

    @app.exception_handler(ClientDisconnect)
    async def on_client_disconnect(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_LEFT)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        path, code = request.url.path, None
        message = f"{request.method} {path}: {error.detail}"
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message, code = f"{path} accepts {allowed}, not {request.method}", "method_not_allowed"
        elif error.status_code == 404:
            known = [route.path for route in app.routes if hasattr(route, "path")]
            nearest = difflib.get_close_matches(path, known, 1, 0.8)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            message, code = f"this instance has no path {path!r}{hint}", "unknown_path"
        told = ApiError(error.status_code, message, code=code)
        return JSONResponse(_shape_error(request, told), told.status, headers=error.headers)

    @app.exception_handler(Exception)
    async def on_unexpected_error(request: Request, error: Exception) -> Response:
        message = f"this instance failed ({type(error).__name__}); its log says why"
        response = JSONResponse(_shape_error(request, ApiError(500, message)), 500)
        if echo := _echo_request_id(request.headers.raw):  # this response does not pass the middleware
            response.raw_headers.append(echo)
        return response


def _shape_error(request: Request, error: ApiError) -> dict[str, Any]:
    """Return the body of an error response in the format of the request's API."""
    path = request.url.path
    is_anthropic = path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")
    return anthropic_error_body(error.status, str(error)) if is_anthropic else error.body
