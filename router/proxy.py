"""The data plane: every request under /v1, from the client's bytes to the answer's.

One request's way: its body has been read once and is parsed once; instances are selected; the attempt is sent; its
first bytes decide whether it stands or another attempt is made; then bytes are relayed as they come.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time

from router.aborts import Aborter
from router.body import BadBody, InferenceBody, encode_member, estimate_tokens, parse_inference, splice
from router.errors import ApiError
from router.health import HealthMonitor
from router.instances import Instance, Registration, Role
from router.metrics import RouterMetrics
from router.policies import RequestFeatures
from router.selection import NoInstance, Selection, Selector
from router.server import ClientRequest
from router.settings import RouterSettings
from router.splitwise import Attempt, HandOverFailed, Leg, LegFailed, disaggregate_info
from router.upstream import ConnectFailed, Headers, PreparedHead, Upstream, UpstreamError, prepare_head

__all__ = ["Proxy"]

_log = logging.getLogger("router.proxy")
_access_log = logging.getLogger("router.access")

# A failed attempt excludes the instance that failed; or, the first time, takes its connection for stale.
ATTEMPTS = 6
# Before the second attempt after a failure that another instance may share, and doubled before each further one.
BACK_OFF_SECONDS = 0.05
CLIENT_LEFT = 499
# Pairs of instances whose ``disaggregate_info`` is kept encoded.
MOST_PAIRS = 10_000
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
_JSON = [(b"content-type", b"application/json")]


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
    ) -> None:
        self.max_body_bytes = 1 << 30
        self._timeout = settings.request_timeout_secs
        self._selector = selector
        self._upstream = upstream
        self._health = health
        self._aborter = aborter
        self._metrics = metrics
        self._journeys: set[_Journey] = set()
        self._pairs: dict[tuple[str, str], tuple[Registration, Registration, bytes]] = {}

    def takes(self, path: bytes) -> bool:
        """Whether this path is served by an instance, rather than by the router or by all instances at once."""
        return path.startswith(b"/v1/") and not path.startswith((b"/v1/models", b"/v1/abort_requests"))

    async def serve(self, request: ClientRequest) -> None:
        """Answer one request."""
        journey = _Journey(request)
        self._journeys.add(journey)
        try:
            journey.read_request()
            await self._answer(journey)
        except _Over as over:
            journey.end_with(over.error)
        except asyncio.CancelledError:
            # uvicorn cancels what a client that does not read has held up beyond the grace of a shutdown.
            journey.end_with(None)
        except Exception:
            _log.exception("%s %s failed", journey.method, journey.path)
            journey.end_with(ApiError(500, "the router failed to handle the request", "router_error"))
        finally:
            self._journeys.discard(journey)
            self._record(journey)

    def stop(self) -> None:
        """End every request in progress with a clear error: the router is stopping."""
        self._end_all(ApiError(503, "the router is stopping", "router_stopping"), time.perf_counter())

    async def watch_the_clock(self) -> None:
        """End requests that have run for longer than the time-out, until cancelled."""
        late = ApiError(504, f"the request was not answered within {self._timeout:g} s", "request_timeout")
        while True:
            await asyncio.sleep(min(1.0, self._timeout / 4))
            self._end_all(late, time.perf_counter() - self._timeout)

    def _end_all(self, error: ApiError, started_before: float) -> None:
        for journey in [journey for journey in self._journeys if journey.started <= started_before]:
            journey.fail(_Over(error))

    async def _answer(self, journey: _Journey) -> None:
        try:
            first = await self._begin(journey)
        except LegFailed as failure:
            journey.refuse(failure)
        else:
            await journey.relay(first)

    async def _begin(self, journey: _Journey) -> bytes:
        """Make attempts until one has the first bytes of an answer.

        Raises:
            LegFailed: no attempt had; this is the last one's failure.
            _Over: no instance could take the request, or the journey was ended.
        """
        failure: LegFailed | None = None
        while journey.attempts < ATTEMPTS:
            if journey.over is not None:
                raise journey.over
            try:
                selection = self._select(journey)
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
                await journey.back_off(failure, selection)
        assert failure is not None
        raise failure

    def _select(self, journey: _Journey) -> Selection:
        choose = self._selector.choose if journey.body else self._selector.choose_any
        if not journey.avoided:
            return choose(journey.features, journey.excluded)
        try:
            return choose(journey.features, journey.excluded | journey.avoided)
        except NoInstance:
            return choose(journey.features, journey.excluded)

    def _attempt(self, journey: _Journey, selection: Selection) -> Attempt:
        """Prepare the exchanges with the selected instances; nothing is sent yet."""
        answering, prefill = selection.answering, selection.prefill
        data, engine_ids = journey.next_attempt(self._pair_info(prefill, answering) if prefill else b"")
        decisions = selection.decisions
        journey.selection = selection
        journey.attempt = Attempt(
            self._leg(journey, answering, data, decisions[-1].work),
            self._leg(journey, prefill, data, decisions[0].work) if prefill else None,
            engine_ids,
            aborter=self._aborter,
            on_trouble=self._note_trouble,
        )
        return journey.attempt

    def _pair_info(self, prefill: Instance, decode: Instance) -> bytes:
        """The member ``disaggregate_info``, encoded once for each pair."""
        pair = (prefill.registration, decode.registration)
        known = self._pairs.get((prefill.key, decode.key))
        if known is not None and known[0] is pair[0] and known[1] is pair[1]:
            return known[2]
        info = encode_member("disaggregate_info", disaggregate_info(*pair))
        if len(self._pairs) >= MOST_PAIRS:
            self._pairs.clear()
        self._pairs[prefill.key, decode.key] = (*pair, info)
        return info

    def _leg(self, journey: _Journey, instance: Instance, data: bytes, work: float) -> Leg:
        fresh = instance.key in journey.gone_stale
        exchange = self._upstream.send_prepared(instance.address, journey.head, data, fresh=fresh)
        return Leg(instance, exchange, journey.features.prompt_tokens, work)

    def _note_trouble(self, instance: Instance, error: Exception) -> None:
        if isinstance(error, ConnectFailed):
            instance.mark_unhealthy(str(error))
        else:
            self._health.suspect(instance)

    def _record(self, journey: _Journey) -> None:
        seconds = time.perf_counter() - journey.started
        self._metrics.answered(journey.method, journey.path, journey.status, seconds)
        mixed, prefill, decode = journey.served_by()
        if journey.path in _ID_PREFIXES:
            self._metrics.served(mixed, prefill, decode, journey.status)
        if _access_log.isEnabledFor(logging.INFO):
            first_ms = (journey.first_byte - journey.started) * 1e3 if journey.first_byte else 0.0
            _access_log.info(
                "method=%s path=%s status=%d error=%s request_id=%s mixed=%s prefill=%s decode=%s attempts=%d"
                " first_byte_ms=%.1f total_ms=%.1f",
                *(journey.method, journey.path, journey.status, journey.error or "-", journey.request_id or "-"),
                *(mixed or "-", prefill or "-", decode or "-", journey.attempts, first_ms, seconds * 1e3),
            )


class _Journey:
    """One client's request on its way. What ends it early comes through ``fail``."""

    __slots__ = (
        "_is_event_stream",
        "_request",
        "attempt",
        "attempts",
        "avoided",
        "body",
        "error",
        "excluded",
        "features",
        "first_byte",
        "gone_stale",
        "head",
        "method",
        "over",
        "path",
        "request_id",
        "selection",
        "started",
        "status",
    )

    head: PreparedHead

    def __init__(self, request: ClientRequest) -> None:
        self.started = time.perf_counter()
        self._request = request
        self.method = request.method
        self.path = request.path
        self.body: InferenceBody | None = None
        self.features = _NO_FEATURES
        self.request_id = ""
        self.excluded: set[str] = set()
        self.avoided: set[str] = set()
        self.gone_stale: set[str] = set()
        self.attempt: Attempt | None = None
        self.attempts = 0
        self.selection: Selection | None = None
        self.over: _Over | None = None
        self.status = CLIENT_LEFT
        self.first_byte = 0.0
        self.error = ""
        self._is_event_stream = False

    def fail(self, over: _Over) -> None:
        """End the journey: whoever works on it gets ``over``."""
        if self.over is None:
            self.over = over
            if self.attempt is not None:
                self.attempt.fail(over)

    def client_left(self) -> None:
        """End the journey: nobody waits for the answer."""
        self.fail(_Over(None))

    def read_request(self) -> None:
        """Parse the body if the request is a completion.

        Raises:
            _Over: it cannot be served, or the client left.
        """
        request = self._request
        if request.disconnected:
            raise _Over(None)
        request.on_leave = self.client_left
        prefix = _ID_PREFIXES.get(self.path)
        if prefix is None:
            self.features = RequestFeatures(estimate_tokens(request.body))
        elif self.method != "POST":
            raise _Over(ApiError(405, f"{self.path} takes POST, not {self.method}", "method_not_allowed"))
        else:
            try:
                self.body = parse_inference(request.body)
            except BadBody as exc:
                raise _Over(ApiError(400, str(exc), "invalid_body", exc.param)) from None
            self.features = RequestFeatures(self.body.prompt_tokens)
            self.request_id = self.body.request_id or _new_request_id()
        self.head = prepare_head(self.method, request.target, _end_to_end(request.headers, _NOT_FORWARDED))

    def next_attempt(self, info: bytes) -> tuple[bytes, list[str]]:
        """The body to send to instances, and the ids that their engines will give the request's sequences.

        Args:
            info: the encoded member ``disaggregate_info``; empty for an instance alone.

        Each attempt has a request id of its own, because an engine may still know the one before. A request that
        is no completion is sent as it is.
        """
        number = self.attempts
        self.attempts += 1
        if self.body is None:
            return self._request.body, []
        request_id = f"{self.request_id}-retry{number}" if number else self.request_id
        added = {"request_id": encode_member("request_id", request_id)}
        if info:
            added["disaggregate_info"] = info
        prefix = _ID_PREFIXES[self.path]
        full_id = request_id if request_id.startswith(prefix) else prefix + request_id
        return splice(self.body, added), [f"{full_id}_{i}" for i in range(self.body.choices)]

    async def back_off(self, failure: LegFailed, selection: Selection) -> None:
        """Note which instances the next attempt should not use, and give the others a moment."""
        key = failure.instance.key
        if failure.stale and key not in self.gone_stale:
            self.gone_stale.add(key)
            return
        if isinstance(failure, HandOverFailed) and selection.prefill is not None:
            self.avoided |= {selection.prefill.key, selection.answering.key}
        else:
            self.excluded.add(key)
        failures = len(self.excluded) + len(self.avoided) // 2
        if failures > 1:
            await asyncio.sleep(BACK_OFF_SECONDS * 2 ** (failures - 2) * random.uniform(0.5, 1.0))

    async def relay(self, first: bytes) -> None:
        """Send the answer's bytes to the client as they come; a slow client slows the instance down.

        Of an event stream, only whole events are sent, so that it can always be ended with an error event.
        """
        attempt, request = self.attempt, self._request
        assert attempt is not None
        exchange = attempt.answering.exchange
        self.status, self.first_byte = exchange.status, time.perf_counter()
        headers = _end_to_end(exchange.headers, _HOP_BY_HOP)
        if exchange.ended and not attempt.is_event_stream:
            request.respond(exchange.status, headers, first)
            attempt.finish()
            return
        self._is_event_stream = attempt.is_event_stream
        request.start(exchange.status, headers)
        data, held = first, b""
        try:
            while not exchange.ended:
                if self._is_event_stream:
                    data, held = _whole_events(held + data if held else data)
                if data:
                    await request.send(data)
                data = await attempt.more()
        except UpstreamError as exc:
            attempt.give_up(culprit=attempt.answering.instance)
            role = attempt.answering.instance.role.value
            error = ApiError(502, f"{role} instance failed in the middle of its answer: {exc}", f"{role}_failed")
            raise _Over(error) from exc
        request.finish(held + data if held else data)
        attempt.finish()

    def refuse(self, failure: LegFailed) -> None:
        """Answer with the failure of the last attempt: the instance's own answer, unless prefill broke down."""
        answer, role = failure.answer, failure.instance.role
        if answer is not None and (answer.status < 500 or role is not Role.PREFILL):
            self.respond(answer.status, _end_to_end(answer.headers, _HOP_BY_HOP), answer.body)
        else:
            message = f"{role.value} instance failed: {failure}; no other {role.value} instance could take the request"
            raise _Over(ApiError(502, message, f"{role.value}_failed"))

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""
        self.status, self.first_byte = status, time.perf_counter()
        self._request.respond(status, headers, body)

    def end_with(self, error: ApiError | None) -> None:
        """End the journey for the client, whatever it has got so far; and the attempt, if one still runs."""
        if self.attempt is not None:
            self.attempt.give_up()
        self.error = error.code if error else "client_left"
        request = self._request
        if request.response_complete:
            return
        if error is None:
            request.cut()
        elif not request.response_started:
            self.respond(error.status, _JSON, error.body())
        elif self._is_event_stream:
            request.finish(error.sse())
        else:
            request.cut()  # the answer stays short of its announced length

    def served_by(self) -> tuple[str, str, str]:
        """The mixed, the prefill and the decode instance of the last attempt; ``""`` where there was none."""
        keys = {}
        if self.selection is not None:
            for instance in (self.selection.answering, self.selection.prefill):
                if instance is not None:
                    keys[instance.role] = instance.key
        return keys.get(Role.MIXED, ""), keys.get(Role.PREFILL, ""), keys.get(Role.DECODE, "")


_NO_FEATURES = RequestFeatures(0)


def _new_request_id() -> str:
    """A random UUID of version 4; not from ``uuid``, which asks the kernel for each."""
    text = f"{random.getrandbits(128):032x}"
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-a{text[17:20]}-{text[20:]}"


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
