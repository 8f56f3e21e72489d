"""The data plane: serves each forwarded request from its arrival to the end of its response.

The steps for one request are: check and admit the client; parse the body once; select instances; send an attempt; relay
its response, or send another attempt if it fails before the first bytes. If a decode instance preempts the request, or
the instance of a stream dies, another attempt continues the response.

``ServingRequest`` takes these steps when events arrive, from the client or from the exchanges. A task runs only while
the request must wait: in the queue, while a large body is scanned, before another attempt, or for a resumption.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping, Sequence
from functools import partial

from router.access import FORWARDED, find_route
from router.fleet import Instance, Role
from router.http import (
    UNCHECKED_BYTES,
    ApiError,
    BadBody,
    ClientRequest,
    Headers,
    LargeBody,
    NoRoom,
    Refused,
    RequestEnded,
    TokenCount,
    UpstreamError,
    echo_request_id,
    estimate_tokens,
    to_dialect,
)
from router.serving.aborts import AbortScope
from router.serving.attempt import REDIRECTIONS, Attempt, LegFailed, Trouble
from router.serving.dialects import NotReady
from router.serving.reading.api import GENERATING, EngineIds
from router.serving.reading.parsed_request import (
    ParsedRequest,
    RequestHead,
    guess_ids,
    is_large,
    read_head,
    scan_large_body,
)
from router.serving.relay import ClientResponse
from router.serving.retry_loop import ABORTED, RetryLoop
from router.serving.services import Services
from router.serving.timeline import RequestTimeline
from router.telemetry import RequestRecord, RunningRequest

__all__ = ["Proxy", "ServingRequest"]

_log = logging.getLogger("router.serving.request")

# If a check for timeouts runs later than planned by more than this, it is postponed.
LATE_SECONDS = 0.25
# Limit of the bytes of one client's bodies that have not arrived completely, or wait for the response to an earlier
# request of their connection, in one process. It applies if requests are limited; a single body may be larger.
MAX_HELD_BYTES = 256 * 1024 * 1024


class Proxy:
    """Serves the requests for forwarded paths, and has a list of the requests that are being served."""

    def __init__(self, services: Services) -> None:
        self.max_body_bytes = services.settings.max_body_bytes
        self.is_leaving = False
        """Whether clients should close their connections, because this process will stop."""
        self.known_targets: Mapping[bytes, str] = {path.encode(): path for path in FORWARDED}
        """The path of each request target that needs no further check: the forwarded paths without placeholders."""
        self._timeout = services.settings.request_timeout_secs
        # If an instance fails its probes, its streams that have sent no data for this time are ended.
        self._silence = services.settings.health_check_interval_secs
        self._stall = services.settings.stream_stall_secs
        self._services = services
        self._live: set[ServingRequest] = set()
        self._held: Counter[str] = Counter()  # bytes of the bodies in ``MAX_HELD_BYTES``, by client

    @property
    def num_requests(self) -> int:
        """Number of requests that are being served or are queued."""
        return len(self._live)

    def takes(self, path: str) -> bool:
        """Return whether requests for this path are forwarded to an instance."""
        route = find_route(path)
        return route is not None and route.is_forwarded

    def find_refusal(self, headers: Headers) -> Refused | None:
        """Return why the router refuses a request, judged by its headers before its body arrives; else None."""
        try:
            self._services.auth.identify_client(headers)
        except Refused as refused:
            return refused
        return None

    def hold_bytes(self, request: ClientRequest, num_bytes: int) -> Refused | None:
        """Count bytes of a body that arrives in several pieces. Return why the request is refused; else None."""
        try:
            client = self._services.auth.identify_client(request.headers)
        except Refused as refused:
            return refused
        if client and self._services.admission.is_limited:
            client, own = request.held or (client, 0)
            held = self._held[client] + num_bytes
            if held > MAX_HELD_BYTES and held > own + num_bytes:
                message = f"the requests that this API key is sending have bodies of more than {MAX_HELD_BYTES} bytes"
                return Refused(ApiError(429, message, "queue_full"), 1)
            self._held[client], request.held = held, (client, own + num_bytes)
        return None

    def release_bytes(self, request: ClientRequest) -> None:
        """Stop counting the bytes of a request's body."""
        if request.held is not None:
            client, own = request.held
            request.held = None
            self._held[client] -= own
            if not self._held[client]:
                del self._held[client]

    def serve(self, request: ClientRequest) -> None:
        """Serve one request."""
        ServingRequest(request, self._services, self._live).start()

    def on_refused(self, method: str, path: str, error: ApiError, request_id: str = "") -> None:
        """Record a request that was refused with ``error`` before it was read to its end."""
        record = RequestRecord(method, path, time.time(), request_id=request_id, status=error.status, error=error.code)
        self._services.audit.add_record(record)

    def list_progress(self, since: float) -> list[RunningRequest]:
        """Return the running requests that arrived, or were sent to an instance, after ``since``.

        Args:
            since: a value of ``time.perf_counter``.
        """
        return [
            serving.describe_progress()
            for serving in self._live
            if serving.started >= since or (serving.attempt is not None and serving.attempt.sent_at >= since)
        ]

    def stop(self) -> None:
        """End every running request with an error, because the router is stopping."""
        self._end_older(ApiError(503, "the router is stopping", "router_stopping"), time.perf_counter())

    async def watch_the_clock(self) -> None:
        """End requests that exceed their time limit, and streams that stall, until this task is cancelled."""
        late = ApiError(504, f"the request had no response within {self._timeout:g} s", "request_timeout")
        was_late = False
        while True:
            seconds = min(1.0, self._timeout / 4, (self._stall or self._timeout) / 4)
            due_at = time.monotonic() + seconds
            await asyncio.sleep(seconds)
            was_late = not was_late and time.monotonic() - due_at > LATE_SECONDS
            if was_late:
                continue  # this process did not run, so data may have arrived that it has not read yet
            self._end_older(late, time.perf_counter() - self._timeout)
            if self._stall:
                self._end_stalled_streams(time.perf_counter() - self._stall)

    def on_instance_failure(self, instance: Instance) -> None:
        """Fail the attempts that wait for ``instance``, which does not respond to probes. Other attempts may follow."""
        for serving in list(self._live):
            if serving.attempt is not None:
                serving.attempt.on_instance_failure(instance, self._silence)

    def abort_requests(self, scope: AbortScope) -> tuple[set[str], list[str]]:
        """Prevent further attempts of the requests that the abort selects.

        Returns:
            Those ids of the abort that select a request in this process, and all ids of these requests at engines.
        """
        found: set[str] = set()
        engine_ids: list[str] = []
        for serving in list(self._live):
            meant, known = serving.abort(scope)
            found.update(meant)
            engine_ids += known
        return found, engine_ids

    def _end_stalled_streams(self, since: float) -> None:
        """Fail the streams that have sent no data since ``since``, and abort them at their instances."""
        for serving in list(self._live):
            attempt = serving.attempt
            if attempt is not None and attempt.is_stalled(since):
                attempt.on_stall(self._stall)

    def _end_older(self, error: ApiError, started_before: float) -> None:
        for serving in [serving for serving in self._live if serving.started <= started_before]:
            serving.end_early(error)


class ServingRequest:
    """A request, from its arrival to the end of its response. Other code can end it with ``end_early``.

    This object is the owner of the attempts and, when a response has begun, the receiver of the answering leg. The
    methods ``on_...`` raise no exceptions.
    """

    __slots__ = (
        "_charged",
        "_end_error",
        "_is_ending",
        "_live",
        "_parsed",
        "_request",
        "_response",
        "_retry_loop",
        "_services",
        "_task",
        "_timeline",
        "_waiting_ids",
        "started",
    )

    def __init__(self, request: ClientRequest, services: Services, live: set[ServingRequest]) -> None:
        """
        Args:
            request: the client's request.
            services: the parts of the router that serve it.
            live: the set of requests that are being served, to which this request adds itself.
        """
        self._live = live
        self._timeline = timeline = RequestTimeline(services)
        self.started = timeline.started
        """Time at which the request arrived, a value of ``time.perf_counter``."""
        self._request = request
        self._response = response = ClientResponse(request)
        self._retry_loop = RetryLoop(request, services, timeline, response)
        self._services = services
        self._parsed: ParsedRequest | None = None  # the parsed request; None before it is parsed
        self._task: asyncio.Task[None] | None = None  # the running task; None while no task runs
        self._waiting_ids: EngineIds | None = None  # ids for an abort, while the request is queued and not parsed
        self._charged: int | None = None  # number of tokens charged to the client at admission; None without limits
        self._is_ending = False  # whether ``end_early`` was called
        self._end_error: ApiError | None = None  # the error that ``end_early`` was called with

    @property
    def attempt(self) -> Attempt | None:
        """The attempt that runs, or the last attempt if none runs; None before the first attempt."""
        return self._retry_loop.current

    def start(self) -> None:
        """Begin to serve the request: send its first attempt, unless the request must wait."""
        services, request = self._services, self._request
        self._live.add(self)
        try:
            if services.tracer is not None:
                self._timeline.join_trace(services.tracer, request)
            client = services.auth.identify_client(request.headers)
            self._timeline.tag = services.auth.tags.get(client, "")
            if not services.admission.is_limited:
                services.admission.try_enter(client)
            else:
                tokens = estimate_tokens(request.body)
                priority = services.auth.find_priority(client, request.headers)
                if services.auth.token_rates.get(client, services.settings.max_tokens_per_sec_per_key):
                    api = GENERATING.get(request.path)
                    self._response.token_count = TokenCount(has_ids=api is not None and api.is_continuable)
                if not services.admission.try_enter(client, tokens):
                    self._wait(self._queue(client, priority, tokens))
                    return
                self._charged = tokens
            self._timeline.client = client
            self._read_and_send(client)
        except Exception as exc:
            self._end_after(exc)

    def on_begun(self, attempt: Attempt, first: bytes, is_end: bool) -> None:
        """Relay the first bytes of an attempt's response; see ``AttemptOwner``."""
        response, parsed = self._response, self._parsed
        assert parsed is not None
        response.stop_comments()
        try:
            if parsed.api.stores_answers:
                key = attempt.answering.instance.key
                self._services.stored_responses.record_response(first, key, self._timeline.tag)
            headers = self._timeline.router_headers()
            if not attempt.is_event_stream and response.holds_whole(attempt, is_end):
                self._go_on(attempt, response.relay_whole(attempt, first, headers), is_end)
                return
            response.begin_pieces(attempt, headers)
        except Exception as exc:
            self._end_after(exc)
            return
        self.on_data(first, is_end)

    def on_not_begun(self, error: Exception) -> None:
        """Handle the failure of an attempt before its response has begun; see ``AttemptOwner``."""
        if isinstance(error, LegFailed):
            self._wait(self._send_after(error))
        else:
            self._end_after(error)

    def on_data(self, data: bytes, is_end: bool) -> None:
        """Relay the next bytes of the response; see ``Receiver``."""
        attempt = self._retry_loop.current
        assert attempt is not None
        try:
            self._go_on(attempt, self._response.relay_piece(attempt, data, is_end), is_end)
        except UpstreamError as exc:
            attempt.answering.exchange.receiver = None  # no further reports, because a task will end this attempt later
            self.on_failed(exc)
        except Exception as exc:
            self._end_after(exc)

    def on_failed(self, error: Exception) -> None:
        """Handle the failure of the answering leg in the middle of the response; see ``Receiver``."""
        if isinstance(error, UpstreamError):
            self._wait(self._resume(error.with_traceback(None)))
        else:
            self._end_after(error)

    def describe_progress(self) -> RunningRequest:
        """Return the data of the running request."""
        retry_loop = self._retry_loop
        return self._timeline.describe_progress(self._request, self._parsed, retry_loop.current, retry_loop.number)

    def end_early(self, error: ApiError | None) -> None:
        """End the request now. The client gets ``error``; None if the client has disconnected."""
        if self._is_ending:
            return
        self._is_ending, self._end_error = True, error
        if self._task is not None:
            self._task.cancel()  # the cancelled task ends the request
        else:
            self._end_after(RequestEnded(error))

    def abort(self, scope: AbortScope) -> tuple[Collection[str], Sequence[str]]:
        """Prevent further attempts of this request if the abort selects it.

        Returns:
            Those ids of the abort that select this request, and the request's ids at its engines.
        """
        timeline = self._timeline
        if self._request.path not in GENERATING or not scope.reaches(timeline.tag):
            return (), ()
        meant: Collection[str] = ()
        if scope.asked is not None:
            parsed = self._parsed
            ids = self._waiting_ids if parsed is None else parsed.name_at_engines(timeline.request_id)
            meant = scope.matching_ids(ids, timeline.tag) if ids is not None else ()
            if ids is None or not meant:
                return (), ()
            timeline.request_id = ids.request_id
        attempt = self._retry_loop.current
        if attempt is None or not attempt.sent_at or attempt.engine_ids is None:  # no abort at an engine is needed
            self.end_early(ABORTED)
            return meant, ()
        self._retry_loop.is_aborted = True
        return meant, attempt.engine_ids.list_ids()

    def _wait(self, step: Coroutine[None, None, None]) -> None:
        """Run a step that must wait, in an asyncio task."""
        self._request.run(self._run(step))

    async def _run(self, step: Coroutine[None, None, None]) -> None:
        if self._is_ending:  # the request has ended since the task was created
            step.close()
            return
        self._task = task = asyncio.current_task()
        try:
            await step
        except asyncio.CancelledError:
            # ``end_early`` has cancelled the task; or uvicorn has, because the grace time of a shutdown has ended.
            self._end_after(RequestEnded(self._end_error))
        except Exception as exc:
            self._end_after(exc)
        finally:
            if self._task is task:
                self._task = None

    def _send(self, parsed: ParsedRequest) -> None:
        """Send an attempt: the first attempt, or the attempt for the next segment."""
        try:
            self._retry_loop.send(parsed, self)
        except NotReady as unready:
            self._wait(self._send_after(unready.with_traceback(None)))

    async def _send_after(self, cause: LegFailed | NotReady) -> None:
        """Send another attempt after ``cause``. If none may follow, end the request with the failure."""
        assert self._parsed is not None
        failure = await self._retry_loop.send_after(cause, self._parsed, self)
        if failure is not None:
            self._end_after(failure)

    async def _queue(self, client: str, priority: int, tokens: int) -> None:
        """Wait until the request is admitted, then send it.

        Raises:
            Refused: there are too many requests, or the client has used all its tokens.
            RequestEnded: the client has disconnected, or the request cannot be served.
        """
        services, request = self._services, self._request
        if request.disconnected:
            raise RequestEnded(None)
        request.on_leave = partial(self.end_early, None)
        # A request is parsed before it waits if its body is large, or if comments may have to be sent to its client.
        if is_large(request):
            self._parsed = await self._read_large(client)
        elif services.settings.sse_keepalive_secs or len(request.body) > UNCHECKED_BYTES:
            self._parsed = self._read_request(client, self._read_head())
        elif request.path in GENERATING:
            self._waiting_ids = guess_ids(request)
        since = time.perf_counter()
        try:
            await services.admission.enter(client, priority, tokens, len(request.body))
        finally:
            self._timeline.queued_seconds = time.perf_counter() - since
        self._timeline.client, self._charged = client, tokens
        if self._parsed is None:
            self._read_and_send(client)
        else:
            self._send_first(self._parsed)

    def _read_and_send(self, client: str) -> None:
        """Parse the request and send its first attempt. If the body is large, do both in a task."""
        if is_large(self._request):
            self._wait(self._read_large_and_send(client))
        else:
            self._parsed = parsed = self._read_request(client, self._read_head())
            self._send_first(parsed)

    async def _read_large_and_send(self, client: str) -> None:
        self._parsed = parsed = await self._read_large(client)
        self._send_first(parsed)

    def _send_first(self, parsed: ParsedRequest, *, is_asked: bool = False) -> None:
        """Send the first attempt.

        Args:
            parsed: the request.
            is_asked: whether the other processes were asked for the stored response that the request needs.
        """
        if stored_id := parsed.stored_id:
            stored = self._services.stored_responses
            if not is_asked and stored.find_instance(stored_id) is None:
                self._wait(self._ask_and_send(parsed))
                return
            if not stored.is_open_to(stored_id, self._timeline.tag):
                message = f"this client has no stored response {stored_id[:100]!r} at this router"
                raise RequestEnded(ApiError(404, message, "response_not_found"))
        self._send(parsed)

    async def _ask_and_send(self, parsed: ParsedRequest) -> None:
        await self._services.stored_responses.ask_others(parsed.stored_id)
        self._send_first(parsed, is_asked=True)

    def _go_on(self, attempt: Attempt, is_relayed: bool, is_end: bool) -> None:
        """End or resume the response if its attempt has ended. Call this after each relayed piece.

        Args:
            attempt: the attempt.
            is_relayed: False if another segment must follow, after a preemption.
            is_end: whether the response is complete.
        """
        if not is_relayed:
            self._wait(self._resume(None))
        elif is_end:
            self._timeline.end_attempt(attempt, "answered")
            self._finish()

    async def _resume(self, error: UpstreamError | None) -> None:
        """Continue a response with another attempt.

        Args:
            error: why the answering leg failed; None if its instance preempted the request.
        """
        retry_loop, parsed, attempt = self._retry_loop, self._parsed, self._retry_loop.current
        assert parsed is not None
        assert attempt is not None
        if error is None:
            await retry_loop.resume_after_preemption(parsed)
        else:
            await retry_loop.resume_after_failure(parsed, attempt, error)
        if self._response.merger is not None and self._response.merger.complete:
            self._response.finish_from_segments(self._timeline.router_headers())
            self._timeline.end_attempt(attempt, "answered")
            self._finish()
        else:
            self._send(parsed)

    def _end_after(self, exc: Exception) -> None:
        """End the request with the error response for ``exc``."""
        try:
            if isinstance(exc, LegFailed):
                self._send_failure(exc)
            elif isinstance(exc, Refused):
                self._response.send_rejection(exc, echo_request_id(self._request.headers))
            else:
                self._end_with(self._find_error(exc))
        except Exception:
            _log.exception(
                "%s %s: the error response could not be sent to the client", self._request.method, self._request.path
            )
        finally:
            self._finish()

    def _find_error(self, exc: Exception) -> ApiError | None:
        """Return the error for the client; None if the client has disconnected.

        If the router is the cause, log ``exc``.
        """
        if isinstance(exc, RequestEnded):
            return exc.error
        if isinstance(exc, BadBody):
            return ApiError(400, str(exc), "invalid_body", exc.param)
        if isinstance(exc, NoRoom):
            _log.error("%s", exc)
            return ApiError(503, str(exc), "router_overloaded")
        _log.error("%s %s failed", self._request.method, self._request.path, exc_info=exc)
        return ApiError(500, "the router failed to handle the request", "router_error")

    def _finish(self) -> None:
        """Release everything that the request uses. If one step fails, the other steps are still done."""
        if self not in self._live:
            return
        self._live.discard(self)
        self._response.stop_comments()
        try:
            if self._charged is not None:
                self._leave_charged(self._charged)
            elif self._timeline.client is not None:
                self._services.admission.leave(self._timeline.client)
            self._timeline.write_record(self._request, self._response, self._parsed, self._retry_loop.current)
        except Exception:
            _log.exception(
                "%s %s ended, but the access log and the metrics may lack this request",
                *(self._request.method, self._request.path),
            )
        if not self._request.response_complete:  # the code that should end the response has failed
            self._request.cut_response()

    def _leave_charged(self, charged: int) -> None:
        """Report the end of the request to ``admission``, with the used tokens, less those charged before."""
        uncharged = 0
        try:
            prompt_tokens = self._parsed.features.prompt_tokens if self._parsed is not None else 0
            uncharged = self._response.count_used_tokens(prompt_tokens) - charged
        finally:
            self._services.admission.leave(self._timeline.client or "", uncharged)

    def _read_request(self, client: str, head: RequestHead, large: LargeBody | None = None) -> ParsedRequest:
        """Parse the request, as far as the router needs it.

        Args:
            client: name of the client.
            head: the parsed head.
            large: the scanned body, if it is large.

        Raises:
            RequestEnded: the request cannot be served.
        """
        request = self._request
        if request.path not in GENERATING:
            route = find_route(request.path)
            if route is not None and not route.takes(request.method):
                message = f"{request.path} accepts {', '.join(route.methods)}, not {request.method}"
                raise RequestEnded(ApiError(405, message, "method_not_allowed"))
        salts = self._services.auth.cache_salts
        derive_salt = partial(salts.derive, client) if salts else None
        parsed = ParsedRequest(request, head, large, derive_salt, self._services.selector.aliases)
        timeline = self._timeline
        timeline.request_id, timeline.client_ids = parsed.request_id, parsed.client_ids
        if parsed.api.stores_answers and parsed.body is not None and parsed.body.members.get("background"):
            settings = self._services.settings
            is_counted = settings.max_concurrent_requests or settings.max_concurrent_requests_per_key
            if is_counted or self._response.token_count is not None:
                message = (
                    "background must be false because this router limits requests or tokens, and cannot "
                    "count background responses"
                )
                raise RequestEnded(ApiError(400, message, "background_refused", "background"))
        if timeline.tag:
            # The id of a stored response is not changed, because the client uses it in later requests.
            self._response.tag = b"" if parsed.stored_id or parsed.api.stores_answers else timeline.tag.encode()
        seconds = self._services.settings.sse_keepalive_secs
        if seconds and parsed.wants_stream and request.gateway is None:  # a gateway accepts no comments
            self._response.start_comments(seconds, timeline.router_headers())
        return parsed

    def _read_head(self) -> RequestHead:
        """Parse the headers that the router uses. From now on, a disconnect of the client ends the request."""
        request = self._request
        if request.disconnected:
            raise RequestEnded(None)
        request.on_leave = partial(self.end_early, None)
        try:
            head = read_head(request, self._services.sessions, self._timeline.tag)
        except BadBody as exc:
            raise RequestEnded(ApiError(400, str(exc), "invalid_header", exc.param)) from None
        timeline = self._timeline
        timeline.sent_id = timeline.request_id = head.sent_id
        timeline.client_ids = head.client_ids
        timeline.trace_id = head.trace_id or timeline.trace_id
        return head

    async def _read_large(self, client: str) -> ParsedRequest:
        """Parse a request with a large body. Other requests run between the steps."""
        head = self._read_head()
        parsed = self._read_request(client, head, await scan_large_body(self._request))
        await asyncio.sleep(0)  # parsing took long, and hashing the prompt will take long, too
        _ = parsed.features.chunks
        await asyncio.sleep(0)
        return parsed

    def _send_failure(self, failure: LegFailed) -> None:
        """Send the failure of the last attempt: the instance's own response, or an error of the router."""
        response, role = failure.response, failure.instance.role
        resumption = self._retry_loop.resumption
        is_rejection = failure.trouble is Trouble.REJECTION
        is_own = response is not None and (response.status < 500 or is_rejection or role is not Role.PREFILL)
        if resumption is not None and resumption.is_broken:
            self._end_with(resumption.explain(str(failure)))
        elif response is not None and response.status in REDIRECTIONS:
            self._end_with(ApiError(502, str(failure), "instance_redirects"))
        elif response is not None and is_own and not self._request.response_started:
            self._response.send(response.status, response.headers, response.body, self._timeline.router_headers())
        elif response is not None and is_own and not self._response.first_byte_at:
            self._response.end_with_refusal(response.status, response.body)
        else:
            why = self._retry_loop.end_reason or f"no other {role.value} instance could take the request"
            message = f"{role.value} instance failed: {failure}; {why}"
            self._end_with(ApiError(502, message, f"{role.value}_failed"))

    def _end_with(self, error: ApiError | None) -> None:
        """End the request with ``error``, at any stage of its response. End its running attempt, too."""
        retry_loop, timeline = self._retry_loop, self._timeline
        if retry_loop.current is not None:
            retry_loop.current.give_up()
        if retry_loop.number > timeline.num_ended:
            how, trouble = (error.message, error.code) if error else ("the client left", "client_left")
            timeline.end_attempt(retry_loop.current, how, trouble)
        if error is not None and not self._request.response_started:
            settings = self._services.settings
            error = to_dialect(settings.dialect, error, timeline.request_id, splitwise=settings.splitwise)
        headers = timeline.router_headers()
        if error is not None and error.status == 405 and (route := find_route(self._request.path)) is not None:
            headers += b"allow: %s\r\n" % ", ".join(route.methods).encode()  # RFC 9110, 15.5.6
        self._response.end_with(error, headers)
