"""The data plane: every forwarded request, from the client's bytes to the response's.

The steps for one request: its client is checked and admitted; the body is read and parsed once; instances are selected;
an attempt is sent; its first bytes decide whether it is relayed or another attempt is made; then bytes are relayed as
they arrive. If decode preempts a request in the middle, another attempt continues it. ``ServingRequest`` does this
within the events that it gets, from its client and from the exchanges. A task runs only while the request must wait:
for its turn, for a large body, before another attempt, for a resumption.
"""

from __future__ import annotations

import asyncio
import logging
import time
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
from router.serving.attempt import REDIRECTIONS, Attempt, LegFailed
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

# If a check for time-outs itself runs later than this, it is postponed to the next one.
LATE_SECONDS = 0.25


class Proxy:
    """Serves requests for forwarded paths from the instances: has the services for it, and the running requests."""

    def __init__(self, services: Services) -> None:
        self.max_body_bytes = services.settings.max_body_bytes
        self.is_leaving = False
        """Whether clients should close their connections, because this process stops soon."""
        self.known_targets: Mapping[bytes, str] = {path.encode(): path for path in FORWARDED}
        """Checked targets of its requests, and their paths."""
        self._timeout = services.settings.request_timeout_secs
        # If an instance fails its probes, its streams are ended after this time of silence.
        self._silence = services.settings.health_check_interval_secs
        self._stall = services.settings.stream_stall_secs
        self._services = services
        self._live: set[ServingRequest] = set()

    def __repr__(self) -> str:
        return f"<Proxy {len(self._live)} requests>"

    @property
    def num_requests(self) -> int:
        """Number of requests that are being served or queued."""
        return len(self._live)

    def takes(self, path: str) -> bool:
        """Return whether this path is served by an instance, rather than by the router or by all instances."""
        route = find_route(path)
        return route is not None and route.is_forwarded

    def find_refusal(self, headers: Headers) -> Refused | None:
        """Return why the sender of these headers may not send a body; None if it may."""
        try:
            self._services.auth.identify_client(headers)
        except Refused as refused:
            return refused
        return None

    def serve(self, request: ClientRequest) -> None:
        """Answer one request."""
        ServingRequest(request, self._services, self._live).start()

    def on_refused(self, method: str, path: str, error: ApiError, request_id: str = "") -> None:
        """Note a request that was answered with ``error`` without being read."""
        record = RequestRecord(method, path, time.time(), request_id=request_id, status=error.status, error=error.code)
        self._services.audit.add_record(record)

    def list_progress(self, since: float) -> list[RunningRequest]:
        """Return the requests in progress that began, or were sent to an instance, since this time of
        ``time.perf_counter``.
        """
        return [
            serving.describe_progress()
            for serving in self._live
            if serving.started >= since or (serving.attempt is not None and serving.attempt.sent_at >= since)
        ]

    def stop(self) -> None:
        """End every request in progress with a clear error: the router is stopping."""
        self._end_older(ApiError(503, "the router is stopping", "router_stopping"), time.perf_counter())

    async def watch_the_clock(self) -> None:
        """End requests that exceed the time-out, and instances' streams that stall, until cancelled."""
        late = ApiError(504, f"the request was not answered within {self._timeout:g} s", "request_timeout")
        was_late = False
        while True:
            seconds = min(1.0, self._timeout / 4, (self._stall or self._timeout) / 4)
            due_at = time.monotonic() + seconds
            await asyncio.sleep(seconds)
            was_late = not was_late and time.monotonic() - due_at > LATE_SECONDS
            if was_late:
                continue  # this process did not run: first it has to read the data that arrived meanwhile
            self._end_older(late, time.perf_counter() - self._timeout)
            if self._stall:
                self._end_stalled_streams(time.perf_counter() - self._stall)

    def on_instance_failure(self, instance: Instance) -> None:
        """End attempts that wait for an instance that answers no probes, and retry elsewhere if allowed."""
        for serving in list(self._live):
            if serving.attempt is not None:
                serving.attempt.on_instance_failure(instance, self._silence)

    def abort_requests(self, scope: AbortScope) -> tuple[set[str], list[str]]:
        """Prevent further attempts of the requests that the abort means.

        Returns:
            Those of the given ids that mean a request here, and all ids by which engines know these requests now.
        """
        found: set[str] = set()
        engine_ids: list[str] = []
        for serving in list(self._live):
            meant, known = serving.abort(scope)
            found.update(meant)
            engine_ids += known
        return found, engine_ids

    def _end_stalled_streams(self, since: float) -> None:
        """End the streams without data from their instances since this time; the instances get an abort."""
        for serving in list(self._live):
            attempt = serving.attempt
            if attempt is not None and attempt.is_stalled(since):
                attempt.on_stall(self._stall)

    def _end_older(self, error: ApiError, started_before: float) -> None:
        for serving in [serving for serving in self._live if serving.started <= started_before]:
            serving.end_early(error)


class ServingRequest:
    """A request from its arrival to the end of its response. ``end_early`` ends it from outside.

    It is the owner of its attempts and, once a response has begun, the receiver of the answering leg. The methods that
    are called for an event raise nothing.
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
            live: the set of requests that are being served.
        """
        self._live = live
        self._timeline = timeline = RequestTimeline(services)
        self.started = timeline.started
        """Time of arrival, from ``time.perf_counter``."""
        self._request = request
        self._response = response = ClientResponse(request)
        self._retry_loop = RetryLoop(request, services, timeline, response)
        self._services = services
        self._parsed: ParsedRequest | None = None  # set when it is parsed
        self._task: asyncio.Task[None] | None = None  # while the request waits
        self._waiting_ids: EngineIds | None = None  # while it is queued unparsed
        self._charged: int | None = None  # tokens charged to the client at the beginning, if there are limits
        self._is_ending = False  # ``end_early`` was called
        self._end_error: ApiError | None = None  # with this error

    @property
    def attempt(self) -> Attempt | None:
        """The present attempt, or the last one."""
        return self._retry_loop.current

    def start(self) -> None:
        """Begin to serve the request: send its first attempt, unless it has to wait."""
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
                    self._response.token_count = TokenCount()
                if not services.admission.try_enter(client, tokens):
                    self._wait(self._queue(client, priority, tokens))
                    return
                self._charged = tokens
            self._timeline.client = client
            self._read_and_send(client)
        except Exception as exc:
            self._end_after(exc)

    def on_begun(self, attempt: Attempt, first: bytes, is_end: bool) -> None:
        """Relay the beginning of an attempt's response; see ``AttemptOwner``."""
        response, parsed = self._response, self._parsed
        assert parsed is not None
        response.stop_comments()
        try:
            if parsed.api.stores_answers:
                key = attempt.answering.instance.key
                self._services.kept_responses.note_answer(first, key, self._timeline.tag)
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
            attempt.answering.exchange.receiver = None  # it may report more before the task runs that ends this attempt
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
        """Return what is known of it before its end."""
        retry_loop = self._retry_loop
        return self._timeline.describe_progress(self._request, self._parsed, retry_loop.current, retry_loop.number)

    def end_early(self, error: ApiError | None) -> None:
        """End the request, with ``error`` for its client."""
        if self._is_ending:
            return
        self._is_ending, self._end_error = True, error
        if self._task is not None:
            self._task.cancel()  # it ends the request
        else:
            self._end_after(RequestEnded(error))

    def abort(self, scope: AbortScope) -> tuple[Collection[str], Sequence[str]]:
        """If the abort means this request, prevent further attempts.

        Returns:
            Those of the given ids that mean it, and its engines' ids.
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
        if attempt is None or not attempt.sent_at or attempt.engine_ids is None:  # closing connections is enough
            self.end_early(ABORTED)
            return meant, ()
        self._retry_loop.is_aborted = True
        return meant, attempt.engine_ids.list_ids()

    def _wait(self, step: Coroutine[None, None, None]) -> None:
        """Run a step that has to wait, in a task."""
        self._request.run(self._run(step))

    async def _run(self, step: Coroutine[None, None, None]) -> None:
        if self._is_ending:  # since the task was created
            step.close()
            return
        self._task = task = asyncio.current_task()
        try:
            await step
        except asyncio.CancelledError:
            # Cancelled by ``end_early``; or by uvicorn, if the request runs beyond the grace time of a shutdown.
            self._end_after(RequestEnded(self._end_error))
        except Exception as exc:
            self._end_after(exc)
        finally:
            if self._task is task:
                self._task = None

    def _send(self, parsed: ParsedRequest) -> None:
        """Send an attempt: the first one, or the one for the next segment."""
        try:
            self._retry_loop.send(parsed, self)
        except NotReady as unready:
            self._wait(self._send_after(unready.with_traceback(None)))

    async def _send_after(self, cause: LegFailed | NotReady) -> None:
        """Send another attempt, or end the request with the failure of the last one."""
        assert self._parsed is not None
        failure = await self._retry_loop.send_after(cause, self._parsed, self)
        if failure is not None:
            self._end_after(failure)

    async def _queue(self, client: str, priority: int, tokens: int) -> None:
        """Wait for the admission of the request, then send it.

        Raises:
            Refused: there are too many requests, or the client has used up its tokens.
            RequestEnded: the client left, or the request cannot be served.
        """
        services, request = self._services, self._request
        if request.disconnected:
            raise RequestEnded(None)
        request.on_leave = partial(self.end_early, None)
        # Comments can be sent only to a stream's client; and an abort does not search large bodies for ids.
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
            self._send(self._parsed)

    def _read_and_send(self, client: str) -> None:
        """Parse the request and send its first attempt, both in a task if the body is large."""
        if is_large(self._request):
            self._wait(self._read_large_and_send(client))
        else:
            self._parsed = parsed = self._read_request(client, self._read_head())
            self._send(parsed)

    async def _read_large_and_send(self, client: str) -> None:
        self._parsed = parsed = await self._read_large(client)
        self._send(parsed)

    def _go_on(self, attempt: Attempt, is_relayed: bool, is_end: bool) -> None:
        """Take the next step after a part of a response was relayed.

        Args:
            is_relayed: False if the instance preempted the request.
        """
        if not is_relayed:
            self._wait(self._resume(None))
        elif is_end:
            self._timeline.end_attempt(attempt, "answered")
            self._finish()

    async def _resume(self, error: UpstreamError | None) -> None:
        """Continue a response elsewhere.

        Args:
            error: why the answering leg failed; None if its instance preempted the request.
        """
        retry_loop, parsed, attempt = self._retry_loop, self._parsed, self._retry_loop.current
        assert parsed is not None
        assert attempt is not None
        if error is None:
            await retry_loop.resume_after_preemption()
        else:
            await retry_loop.resume_after_failure(parsed, attempt, error)
        if self._response.merger is not None and self._response.merger.complete:
            self._response.finish_from_segments(self._timeline.router_headers())
            self._timeline.end_attempt(attempt, "answered")
            self._finish()
        else:
            self._send(parsed)

    def _end_after(self, exc: Exception) -> None:
        """End the request with the answer to an exception."""
        try:
            if isinstance(exc, LegFailed):
                self._send_failure(exc)
            elif isinstance(exc, Refused):
                self._response.send_rejection(exc, echo_request_id(self._request.headers))
            else:
                self._end_with(self._find_error(exc))
        except Exception:
            _log.exception("%s %s was not answered", self._request.method, self._request.path)
        finally:
            self._finish()

    def _find_error(self, exc: Exception) -> ApiError | None:
        """Return the error for the client; None if it has left. Log what is no fault of the client or the instances."""
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
        """Release everything that the ended request holds, even if parts of this fail."""
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
            _log.exception("%s %s has ended without a record", self._request.method, self._request.path)
        if not self._request.response_complete:  # the code that ended it has failed itself
            self._request.cut_response()

    def _leave_charged(self, charged: int) -> None:
        """Release the client's admission, and charge it for the tokens it has used."""
        uncharged = 0
        try:
            prompt_tokens = self._parsed.features.prompt_tokens if self._parsed is not None else 0
            uncharged = self._response.count_used_tokens(prompt_tokens) - charged
        finally:
            self._services.admission.leave(self._timeline.client or "", uncharged)

    def _read_request(self, client: str, head: RequestHead, large: LargeBody | None = None) -> ParsedRequest:
        """Parse the request, as far as the router needs it.

        Args:
            large: the scanned body, if it is large.

        Raises:
            RequestEnded: it cannot be served.
        """
        request = self._request
        if request.path not in GENERATING:
            route = find_route(request.path)
            if route is not None and not route.takes(request.method):
                message = f"{request.path} takes {', '.join(route.methods)}, not {request.method}"
                raise RequestEnded(ApiError(405, message, "method_not_allowed"))
        salts = self._services.auth.cache_salts
        derive_salt = partial(salts.derive, client) if salts else None
        parsed = ParsedRequest(request, head, large, derive_salt, self._services.selector.aliases)
        timeline, kept_responses = self._timeline, self._services.kept_responses
        timeline.request_id, timeline.client_ids = parsed.request_id, parsed.client_ids
        if parsed.api.stores_answers and parsed.body is not None and parsed.body.members.get("background"):
            settings = self._services.settings
            is_counted = settings.max_concurrent_requests or settings.max_concurrent_requests_per_key
            if is_counted or self._response.token_count is not None:
                message = "background must be false where requests or tokens are limited: nobody would count its answer"
                raise RequestEnded(ApiError(400, message, "background_refused", "background"))
        if timeline.tag:
            if parsed.stored_id and not kept_responses.is_open_to(parsed.stored_id, timeline.tag):
                message = f"this router knows of no response {parsed.stored_id[:100]!r} of this client"
                raise RequestEnded(ApiError(404, message, "response_not_found"))
            # The id of a stored response must not change: its client uses it in later requests.
            self._response.tag = b"" if parsed.stored_id or parsed.api.stores_answers else timeline.tag.encode()
        seconds = self._services.settings.sse_keepalive_secs
        if seconds and parsed.wants_stream:
            self._response.start_comments(seconds, timeline.router_headers())
        return parsed

    def _read_head(self) -> RequestHead:
        """Parse the headers that the router uses, and monitor the client from now on.

        Raises:
            RequestEnded: a header is invalid, or the client has left.
        """
        request = self._request
        if request.disconnected:
            raise RequestEnded(None)
        request.on_leave = partial(self.end_early, None)
        try:
            head = read_head(request, self._timeline.tag)
        except BadBody as exc:
            raise RequestEnded(ApiError(400, str(exc), "invalid_header", exc.param)) from None
        timeline = self._timeline
        timeline.sent_id = timeline.request_id = head.sent_id
        timeline.client_ids = head.client_ids
        timeline.trace_id = head.trace_id or timeline.trace_id
        return head

    async def _read_large(self, client: str) -> ParsedRequest:
        """Parse a request with a large body, and let other requests run meanwhile.

        Raises:
            RequestEnded: it cannot be served, or the client left.
        """
        head = self._read_head()
        parsed = self._read_request(client, head, await scan_large_body(self._request))
        await asyncio.sleep(0)  # parsing took long, and hashing the prompt and the next steps do, too
        _ = parsed.features.chunks
        await asyncio.sleep(0)
        return parsed

    def _send_failure(self, failure: LegFailed) -> None:
        """Send the failure of the last attempt: the instance's own response, unless prefill failed."""
        response, role = failure.response, failure.instance.role
        resumption = self._retry_loop.resumption
        is_own = response is not None and (response.status < 500 or role is not Role.PREFILL)
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
        """End the request for the client, at any stage of its response; and end the present attempt, if any."""
        retry_loop, timeline = self._retry_loop, self._timeline
        if retry_loop.current is not None:
            retry_loop.current.give_up()
        if retry_loop.number > timeline.num_ended:
            how, trouble = (error.message, error.code) if error else ("the client left", "client_left")
            timeline.end_attempt(retry_loop.current, how, trouble)
        if error is not None and not self._request.response_started:
            settings = self._services.settings
            error = to_dialect(settings.dialect, error, timeline.request_id, splitwise=settings.splitwise)
        self._response.end_with(error, timeline.router_headers())
