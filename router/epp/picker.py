"""Picker: the gRPC server to which gateways report their requests. It runs next to a router's HTTP server."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc

from kvcommon.http_limits import READ_SECONDS
from router.access import Access, find_route
from router.app import RouterApp
from router.epp.messages import pass_on
from router.epp.protos import (
    NOT_SERVING,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from router.epp.request import GatewayRequest
from router.http import ApiError, Refused, is_normal_path
from router.settings import SettingsError

__all__ = ["Picker"]

_log = logging.getLogger("router.epp")

_EXT_PROC, _HEALTH = "envoy.service.ext_proc.v3.ExternalProcessor", "grpc.health.v1.Health"
_LIVENESS, _WHOLE_SERVER = "liveness", ""
_READINESS = ("readiness", _EXT_PROC)
# Maximum size of a message in addition to the body of the request.
_MESSAGE_BYTES = 1024 * 1024
# Time without messages after which the picker sends a ping to a gateway with running requests, and time limit of the
# reply. If a gateway's host has died, its requests end then.
PING_SECONDS = 30.0
# If more messages than this wait to be sent to the gateway, the response is paused.
MAX_UNSENT = 32
_JSON = [(b"content-type", b"application/json")]


class Picker:
    """Serves requests that gateways report, with the same parts of the router that serve requests over HTTP."""

    def __init__(self, router: RouterApp) -> None:
        """Create the server. An event loop must be running.

        Raises:
            SettingsError: the port cannot be used.
        """
        settings = router.settings
        self._router = router
        options = [
            ("grpc.max_receive_message_length", settings.max_body_bytes + _MESSAGE_BYTES),
            # Envoy's connection_keepalive sends pings while there is no traffic. gRPC would close the connection then.
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_time_ms", int(1000 * PING_SECONDS)),
            ("grpc.http2.ping_timeout_ms", int(1000 * PING_SECONDS)),
            ("grpc.so_reuseport", int(settings.num_workers > 1 or bool(settings.shared_state))),
        ]
        self._server = grpc.aio.server(options=options)
        read, write = ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        serve = grpc.stream_stream_rpc_method_handler(self._serve, read, write)
        read, write = HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
        check = grpc.unary_unary_rpc_method_handler(self._check_health, read, write)
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(_EXT_PROC, {"Process": serve}),
                grpc.method_handlers_generic_handler(_HEALTH, {"Check": check}),
            )
        )
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"{host}:{settings.epp_port}"
        try:
            if settings.ssl_certfile:
                key = Path(settings.ssl_keyfile or settings.ssl_certfile).read_bytes()
                credentials = grpc.ssl_server_credentials([(key, Path(settings.ssl_certfile).read_bytes())])
                self.port = self._server.add_secure_port(address, credentials)
            else:
                self.port = self._server.add_insecure_port(address)
        except RuntimeError as exc:
            raise SettingsError(f"cannot listen for gateways at {address}: choose another --epp-port ({exc})") from None

    async def start(self) -> None:
        """Start the gRPC server."""
        await self._server.start()
        _log.info("the endpoint picker listens at port %d", self.port)

    async def stop(self, grace: float) -> None:
        """Accept no new requests, and wait up to ``grace`` seconds for running requests."""
        await self._server.stop(grace)

    async def _serve(self, _: AsyncIterator[Any], context: Any) -> None:
        await _Stream(self._router, context).run()

    async def _check_health(self, request: Any, context: Any) -> Any:
        router, is_ready = self._router, True
        if request.service in _READINESS:
            is_ready = not router.find_unreadiness()
        elif (
            request.service == _WHOLE_SERVER
        ):  # also ready without instances, because the picker's errors give the reason
            is_ready = not router.proxy.is_leaving
        elif request.service != _LIVENESS:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r}")
        return HealthCheckResponse(status=SERVING if is_ready else NOT_SERVING)


class _Stream:
    """One stream of a gateway, which carries one request. A ``GatewayRequest`` uses it instead of a connection."""

    def __init__(self, router: RouterApp, context: Any) -> None:
        self._router = router
        self._context = context
        self._outbox: deque[Any] = deque()
        self._writing = asyncio.Lock()
        self._failure: tuple[grpc.StatusCode, str] | None = None  # status with which the stream has to end
        self._takes_message = False
        self._request: GatewayRequest | None = None
        self._running: asyncio.Task[Any] | None = None
        self._is_idle = False  # whether the stream is ended because the gateway does not end it
        # Attributes of a ``RouterProtocol``, which ``ClientRequest`` uses.
        self.loop = asyncio.get_running_loop()
        self.tasks: set[asyncio.Task[None]] = set()
        self.known_head: object = None
        self.flow = SimpleNamespace(write_paused=False)
        self._timeout = router.settings.request_timeout_secs
        # Times at which the stream began, and at which a message was last received or sent.
        self._began_at = self._active_at = self.loop.time()
        self._watch = self.loop.call_later(min(READ_SECONDS, self._timeout), self._check_activity)

    async def run(self) -> None:
        """Serve the request until the gateway ends the stream."""
        self._running = asyncio.current_task()
        is_first = True
        try:
            while (message := await self._context.read()) is not grpc.aio.EOF:
                self._takes_message, self._active_at = True, self.loop.time()
                try:
                    self._take_message(message, is_first)
                except ValueError as exc:
                    self._failure = grpc.StatusCode.INVALID_ARGUMENT, str(exc)
                self._takes_message = is_first = False
                await self._flush()
        except asyncio.CancelledError:
            if not self._is_idle:
                raise
        finally:
            self._watch.cancel()
            # Breaks reference cycles, which only the garbage collector could free.
            request, self._request, self._running = self._request, None, None
            if request is not None:
                request.on_client_gone()
        await self._flush()  # gRPC cannot end a stream while a message is being written

    def _take_message(self, message: Any, is_first: bool) -> None:
        if self._request is not None:
            self._request.on_message(message)
        elif is_first and message.HasField("request_headers"):
            self._request = GatewayRequest(self, message, self._router, self.write, self._serve_request)
        elif is_first and not message.HasField("response_headers"):
            raise ValueError("the first message of a stream must be request_headers or response_headers")
        else:  # the gateway has responded itself, before it asked for an instance
            for each in pass_on(message):
                self.write(each)

    def _check_activity(self) -> None:
        """Refuse a request whose rest does not arrive, and end a stream that the gateway does not end."""
        request, now = self._request, self.loop.time()
        unheard, late = self._active_at + READ_SECONDS - now, self._began_at + self._timeout - now
        if request is not None and request.is_arriving:
            # A gateway that buffers the body sends nothing until the body is complete.
            left = late if request.is_buffered else min(unheard, late)
            if left <= 0:
                seconds = READ_SECONDS if left == unheard else self._timeout
                message = f"the rest of the request did not arrive within {seconds:g} s"
                request.refuse(Refused(ApiError(408, message, "request_incomplete")))
        elif self._writing.locked() or not (request is None or request.response_complete or request.disconnected):
            left = 0.0  # the request is being served, with the time limits of ``Proxy``, or the gateway reads slowly
        else:
            left = unheard
            if left <= 0 and self._running is not None:
                self._is_idle = True
                self._running.cancel()
                return
        self._watch = self.loop.call_later(min(left, READ_SECONDS) if left > 0 else READ_SECONDS, self._check_activity)

    def hang_up(self, request: GatewayRequest) -> None:
        """End the stream with an error, because the response cannot be completed."""
        if not request.disconnected:
            self._failure = grpc.StatusCode.ABORTED, "the response to the client cannot be completed"
            self._flush_soon()

    def on_response_complete(self) -> None:
        """Do nothing, because the gateway ends the stream."""

    def write(self, message: Any) -> None:
        """Send a message to the gateway, as soon as all earlier messages were sent."""
        self._outbox.append(message)
        self.flow.write_paused = len(self._outbox) > MAX_UNSENT
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._takes_message and not self._writing.locked():
            task = self.loop.create_task(self._flush())
            self.tasks.add(task)
            task.add_done_callback(self._on_flushed)

    def _on_flushed(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("the gateway ended a stream while the picker wrote to it: %s", error)  # ``run`` notices it, too

    async def _flush(self) -> None:
        async with self._writing:
            while self._outbox:
                await self._context.write(self._outbox.popleft())
                self._active_at = self.loop.time()
                if self.flow.write_paused and not self._outbox:
                    self.flow.write_paused = False
                    if self._request is not None and self._request.on_ready is not None:
                        self._request.on_ready()
            failure, self._failure = self._failure, None
            if failure is not None:
                await self._context.abort(*failure)

    def _serve_request(self, request: GatewayRequest) -> None:
        """Serve a complete request: by an instance, or by the router itself if its path needs no instance."""
        router = self._router
        if router.proxy.takes(request.path) and is_normal_path(request.path):
            router.proxy.serve(request)
            return
        route = find_route(request.path)
        if route is not None and route.access in (Access.CLIENT, Access.CLIENT_OR_ADMIN):
            request.run(self._run_control(request))
            return
        error = ApiError(404, f"the router has no path {request.path!r} for the clients of a gateway", "unknown_path")
        request.send_response(404, _JSON, error.body(request.path))

    async def _run_control(self, request: GatewayRequest) -> None:
        """Pass a request to the router's control plane, and send the response."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": request.path,
            "raw_path": request.target.partition(b"?")[0],
            "query_string": request.target.partition(b"?")[2],
            "headers": request.headers,
            "client": None,
        }
        status, headers, pieces = 500, [], []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": request.body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], message["headers"]
            else:
                pieces.append(message.get("body", b""))

        try:
            await self._router(scope, receive, send)
        except Exception:
            _log.exception("%s %s failed", request.method, request.path)
        request.send_response(status, headers, b"".join(pieces))
