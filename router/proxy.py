"""The data plane: every request under /v1 as a raw ASGI application, from the client's bytes to the answer's.

One request's way: its body is read once and parsed once; instances are selected; the attempt is sent; its first
bytes decide whether it stands or another attempt is made; then bytes are relayed as they come.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from router.aborts import Aborter
from router.body import BadBody, InferenceBody, estimate_tokens, parse_inference, splice
from router.errors import ApiError
from router.health import HealthMonitor
from router.instances import Instance, Role
from router.metrics import RouterMetrics
from router.policies import RequestFeatures
from router.selection import NoInstance, Selection, Selector
from router.settings import RouterSettings
from router.splitwise import Attempt, Leg, LegFailed, disaggregate_info
from router.tasks import Tasks
from router.upstream import ConnectFailed, Headers, Upstream, UpstreamError

__all__ = ["Proxy"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_log = logging.getLogger("router.proxy")
_access_log = logging.getLogger("router.access")

# A failed attempt excludes the instance that failed; or, the first time, takes its connection for stale.
ATTEMPTS = 6
CLIENT_LEFT = 499
# An event longer than this is not waited for, but relayed in pieces.
EVENT_BYTES = 1024 * 1024

# Engines name a request's sequences <prefix><request_id>_<number>.
_ID_PREFIXES = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}

_HOP_BY_HOP = frozenset(
    name.encode()
    for name in (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    )
)
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}


class _Over(Exception):
    """The journey ends now: with an error for the client, or with nothing because the client left."""

    def __init__(self, error: ApiError | None) -> None:
        super().__init__(error.message if error else "the client left")
        self.error = error


class Proxy:
    """Serves requests under /v1 from the registered instances."""

    def __init__(
        self,
        settings: RouterSettings,
        selector: Selector,
        upstream: Upstream,
        health: HealthMonitor,
        aborter: Aborter,
        metrics: RouterMetrics,
        tasks: Tasks,
    ) -> None:
        self._timeout = settings.request_timeout_secs
        self._selector = selector
        self._upstream = upstream
        self._health = health
        self._aborter = aborter
        self._metrics = metrics
        self._tasks = tasks
        self._journeys: set[_Journey] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        journey = _Journey(scope, receive, send)
        self._journeys.add(journey)
        try:
            await self._serve(journey)
        except _Over as over:
            await journey.end_with(over.error)
        except asyncio.CancelledError:
            # uvicorn cancels what a client that does not read has held up beyond the grace of a shutdown.
            await journey.end_with(None)
        except Exception:
            _log.exception("%s %s failed", journey.method, journey.path)
            await journey.end_with(ApiError(500, "the router failed to handle the request", "router_error"))
        finally:
            self._journeys.discard(journey)
            self._record(journey)

    def stop(self) -> None:
        """End every request in progress with a clear error: the router is stopping."""
        for journey in list(self._journeys):
            journey.fail(_Over(ApiError(503, "the router is stopping", "router_stopping")))

    async def _serve(self, journey: _Journey) -> None:
        await journey.read_request()
        watcher = asyncio.ensure_future(journey.watch_client())
        late = ApiError(504, f"the request was not answered within {self._timeout:g} s", "request_timeout")
        timer = asyncio.get_running_loop().call_later(self._timeout, journey.fail, _Over(late))
        try:
            await self._answer(journey)
        finally:
            timer.cancel()
            watcher.cancel()

    async def _answer(self, journey: _Journey) -> None:
        try:
            first = await self._begin(journey)
        except LegFailed as failure:
            await journey.refuse(failure)
        else:
            await journey.relay(first)

    async def _begin(self, journey: _Journey) -> bytes:
        """Make attempts until one has the first bytes of an answer.

        Raises:
            LegFailed: no attempt had; this is the last one's failure.
            _Over: no instance could take the request, or the journey was ended.
        """
        choose = self._selector.choose if journey.body else self._selector.choose_any
        failure: LegFailed | None = None
        while journey.attempts < ATTEMPTS:
            if journey.over is not None:
                raise journey.over
            try:
                selection = choose(journey.features, journey.excluded)
            except NoInstance as exc:
                if failure is None:
                    raise _Over(exc.error) from None
                break
            attempt = self._attempt(journey, selection)
            try:
                return await attempt.begin()
            except LegFailed as exc:
                failure = exc
                attempt.give_up(culprit=exc.instance)
                if not exc.another_may_serve:
                    break
                self._metrics.retried(exc.instance.key)
                (journey.gone_stale if exc.stale else journey.excluded).add(exc.instance.key)
        assert failure is not None
        raise failure

    def _attempt(self, journey: _Journey, selection: Selection) -> Attempt:
        """Prepare the exchanges with the selected instances; nothing is sent yet."""
        answering, prefill = selection.answering, selection.prefill
        info = disaggregate_info(prefill.registration, answering.registration) if prefill else None
        data, engine_ids = journey.next_attempt(info)
        journey.served_by = {instance.role: instance.key for instance in (answering, prefill) if instance}
        journey.attempt = Attempt(
            self._leg(journey, answering, data),
            self._leg(journey, prefill, data) if prefill else None,
            engine_ids,
            aborter=self._aborter,
            tasks=self._tasks,
            on_trouble=self._note_trouble,
        )
        return journey.attempt

    def _leg(self, journey: _Journey, instance: Instance, data: bytes) -> Leg:
        exchange = self._upstream.exchange(
            instance.address,
            journey.method,
            journey.target,
            journey.forwarded_headers,
            data,
            fresh=instance.key in journey.gone_stale,
        )
        return Leg(instance, exchange, journey.features.prompt_tokens)

    def _note_trouble(self, instance: Instance, error: UpstreamError) -> None:
        if isinstance(error, ConnectFailed):
            instance.mark_unhealthy(str(error))
        else:
            self._health.suspect(instance)

    def _record(self, journey: _Journey) -> None:
        seconds = time.perf_counter() - journey.started
        self._metrics.answered(journey.method, journey.path, journey.status, seconds)
        mixed, prefill, decode = (journey.served_by.get(role, "") for role in Role)
        if journey.path in _ID_PREFIXES:
            self._metrics.served(mixed, prefill, decode, journey.status)
        if _access_log.isEnabledFor(logging.INFO):
            first_ms = (journey.first_byte - journey.started) * 1e3 if journey.first_byte else 0.0
            _access_log.info(
                "method=%s path=%s status=%d error=%s request_id=%s mixed=%s prefill=%s decode=%s attempts=%d"
                " first_byte_ms=%.1f total_ms=%.1f",
                *(journey.method, journey.raw_path, journey.status, journey.error or "-", journey.request_id or "-"),
                *(mixed or "-", prefill or "-", decode or "-", journey.attempts, first_ms, seconds * 1e3),
            )


class _Journey:
    """One client's request on its way. What ends it early comes through ``fail``."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started = time.perf_counter()
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        query: bytes = scope["query_string"]
        raw_path: bytes = scope["raw_path"]
        self.raw_path = raw_path.decode("latin-1")
        self.target = raw_path + b"?" + query if query else raw_path
        self.forwarded_headers = _end_to_end(scope["headers"], _NOT_FORWARDED)
        self.body: InferenceBody | None = None
        self.features = RequestFeatures(0)
        self.request_id = ""
        self.excluded: set[str] = set()
        self.gone_stale: set[str] = set()
        self.attempt: Attempt | None = None
        self.attempts = 0
        self.served_by: dict[Role, str] = {}
        self.over: _Over | None = None
        self.status = CLIENT_LEFT
        self.first_byte = 0.0
        self.error = ""
        self._data = b""
        self._receive = receive
        self._send = send
        self._is_event_stream = False

    def fail(self, over: _Over) -> None:
        """End the journey: whoever works on it gets ``over``."""
        if self.over is None:
            self.over = over
            if self.attempt is not None:
                self.attempt.fail(over)

    async def read_request(self) -> None:
        """Read the whole body, and parse it if the request is a completion.

        Raises:
            _Over: it cannot be served, or the client left.
        """
        prefix = _ID_PREFIXES.get(self.path)
        if prefix is not None and self.method != "POST":
            raise _Over(ApiError(405, f"{self.path} takes POST, not {self.method}", "method_not_allowed"))
        self._data = await self._read_body()
        if prefix is None:
            self.features = RequestFeatures(estimate_tokens(self._data))
            return
        try:
            self.body = parse_inference(self._data)
        except BadBody as exc:
            raise _Over(ApiError(400, str(exc), "invalid_body", exc.param)) from None
        self.features = RequestFeatures(self.body.prompt_tokens)
        self.request_id = self.body.request_id or str(uuid.uuid4())

    def next_attempt(self, info: dict[str, Any] | None) -> tuple[bytes, list[str]]:
        """The body to send to instances, and the ids that their engines will give the request's sequences.

        Each attempt has a request id of its own, because an engine may still know the one before. A request that
        is no completion is sent as it is.
        """
        number = self.attempts
        self.attempts += 1
        if self.body is None:
            return self._data, []
        request_id = f"{self.request_id}-retry{number}" if number else self.request_id
        added: dict[str, Any] = {"request_id": request_id}
        if info is not None:
            added["disaggregate_info"] = info
        prefix = _ID_PREFIXES[self.path]
        full_id = request_id if request_id.startswith(prefix) else prefix + request_id
        return splice(self.body, added), [f"{full_id}_{i}" for i in range(self.body.choices)]

    async def _read_body(self) -> bytes:
        parts = []
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _Over(None)
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def watch_client(self) -> None:
        """Wait until the client leaves (or has its answer), then end the journey."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.fail(_Over(None))

    async def relay(self, first: bytes) -> None:
        """Send the answer's bytes to the client as they come; a slow client slows the instance down.

        Of an event stream, only whole events are sent, so that it can always be ended with an error event.
        """
        attempt = self.attempt
        assert attempt is not None
        exchange = attempt.answering.exchange
        self._is_event_stream = attempt.is_event_stream
        await self._start(exchange.status, exchange.headers)
        data, held = first, b""
        try:
            while not exchange.ended:
                if self._is_event_stream:
                    data, held = _whole_events(held + data)
                if data:
                    await self._send({"type": "http.response.body", "body": data, "more_body": True})
                data = await attempt.more()
        except UpstreamError as exc:
            attempt.give_up(culprit=attempt.answering.instance)
            role = attempt.answering.instance.role.value
            error = ApiError(502, f"{role} instance failed in the middle of its answer: {exc}", f"{role}_failed")
            raise _Over(error) from exc
        await self._send({"type": "http.response.body", "body": held + data, "more_body": False})
        attempt.finish()

    async def refuse(self, failure: LegFailed) -> None:
        """Answer with the failure of the last attempt: the instance's own answer, unless prefill broke down."""
        answer, role = failure.answer, failure.instance.role
        if answer is not None and (answer.status < 500 or role is not Role.PREFILL):
            await self.respond(answer.status, answer.headers, answer.body)
        else:
            message = f"{role.value} instance failed: {failure}; no other {role.value} instance could take the request"
            raise _Over(ApiError(502, message, f"{role.value}_failed"))

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""
        kept = [header for header in headers if header[0] != b"content-length"]
        await self._start(status, [*kept, (b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def end_with(self, error: ApiError | None) -> None:
        """End the journey for the client, whatever it has got so far; and the attempt, if one still runs."""
        if self.attempt is not None:
            self.attempt.give_up()
        self.error = error.code if error else "client_left"
        if error is None:
            return
        if not self.first_byte:
            await self.respond(error.status, [(b"content-type", b"application/json")], error.body())
        elif self._is_event_stream:
            await self._send({"type": "http.response.body", "body": error.sse(), "more_body": False})
        # Otherwise the answer stays short of its announced length, and the client sees that it was cut.

    async def _start(self, status: int, headers: Headers) -> None:
        self.status = status
        self.first_byte = time.perf_counter()
        await self._send(
            {"type": "http.response.start", "status": status, "headers": _end_to_end(headers, _HOP_BY_HOP)}
        )


def _end_to_end(headers: Headers, dropped: frozenset[bytes]) -> Headers:
    """The headers that are for the other end, not for this hop."""
    named = [value for name, value in headers if name == b"connection"]
    if named:
        dropped = dropped | {name.strip().lower() for value in named for name in value.split(b",")}
    return [header for header in headers if header[0] not in dropped]


def _whole_events(data: bytes) -> tuple[bytes, bytes]:
    """Split server-sent events after the last whole one."""
    if data.endswith((b"\n\n", b"\r\n\r\n")):
        return data, b""
    end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in (b"\n\n", b"\r\n\r\n"))
    if end == 0 and len(data) > EVENT_BYTES:
        return data, b""
    return data[:end], data[end:]
