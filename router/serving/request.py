"""The handling of one client's request: admitted, read, answered by its attempts, ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from functools import partial

from router.access import find_route
from router.fleet import Role
from router.http import (
    NOT_PASSED_BACK,
    UNCHECKED_BYTES,
    ApiError,
    BadBody,
    ClientRequest,
    LargeBody,
    NoRoom,
    Refused,
    TokenCount,
    UpstreamError,
    echo_request_id,
    end_to_end,
    estimate_tokens,
    to_dialect,
)
from router.serving.aborts import AbortScope
from router.serving.attempt import REDIRECTIONS, Attempt
from router.serving.attempts import ABORTED, Attempts
from router.serving.dialects import NotReady
from router.serving.keep_alive import KeepAlive
from router.serving.reading.api import GENERATING, EngineIds
from router.serving.reading.head import RequestHead, read_head
from router.serving.reading.large import is_large, look_through
from router.serving.reading.parsed_request import ParsedRequest, guess_ids
from router.serving.response import ClientResponse, RequestEnded
from router.serving.retry import LegFailed
from router.serving.selection import NoInstance
from router.serving.services import Services
from router.serving.story import Story

__all__ = ["ServingRequest"]

_log = logging.getLogger("router.serving.request")


class ServingRequest:
    """A request from its arrival to the end of its response. ``fail`` ends it early, from outside."""

    __slots__ = (
        "_attempts",
        "_charged",
        "_failure",
        "_is_preempted",
        "_keep_alive",
        "_live",
        "_parsed",
        "_queueing",
        "_request",
        "_response",
        "_services",
        "_story",
        "_waiting_ids",
        "started",
    )

    def __init__(self, request: ClientRequest, services: Services, live: set[ServingRequest]) -> None:
        """
        Args:
            live: the set of requests that are being served.
        """
        self._live = live
        self._story = story = Story(services)
        self.started = story.started
        """Time of arrival, from ``time.perf_counter``."""
        self._request = request
        self._response = response = ClientResponse(request)
        self._attempts = Attempts(request, services, story, response)
        self._services = services
        self._parsed: ParsedRequest | None = None  # set when it is parsed
        self._queueing: asyncio.Task[object] | None = None  # the task that waits in the queue, during the wait
        self._waiting_ids: EngineIds | None = None  # while it is queued unparsed
        self._charged: int | None = None  # tokens charged to the client at the beginning, if there are limits
        self._keep_alive: KeepAlive | None = None
        # State that ``start`` passes to ``serve_to_end``, in addition to an attempt: a preempted answer; an exception.
        self._is_preempted = False
        self._failure: Exception | None = None

    @property
    def attempt(self) -> Attempt | None:
        """The present attempt, or the last one."""
        return self._attempts.current

    def start(self) -> None:
        """Answer the request; raise nothing.

        If it is not a stream, the first attempt is sent immediately, and a complete answer is relayed immediately,
        without a task. Otherwise a task runs ``serve_to_end``.
        """
        services, request = self._services, self._request
        self._live.add(self)
        if services.tracer is not None:
            self._story.join_trace(services.tracer, request)
        if not services.admission.is_limited and len(request.body) <= UNCHECKED_BYTES:
            try:
                client = services.auth.identify_client(request.headers)
                self._story.tag = services.auth.tags.get(client, "")
                services.admission.try_enter(client)
                self._story.client = client
                self._parsed = parsed = self._read_request(client, self._read_head())
                if not parsed.wants_stream and self._attempts.prepare(parsed).send(self._on_answer):
                    return
            except (Refused, RequestEnded, NoInstance, NotReady):
                pass  # ``serve_to_end`` gets the same error, and handles it
            except Exception as exc:
                self._failure = exc
        request.run(self.serve_to_end())

    def _on_answer(self) -> None:
        """Handle that the attempt sent by ``start`` has an answer, or its beginning, or has failed."""
        attempt, parsed = self._attempts.current, self._parsed
        assert attempt is not None
        assert parsed is not None
        is_done = False
        try:
            whole = attempt.take_whole()
            if whole is not None and self._response.holds_whole(attempt):
                self._attempts.settle()
                if parsed.api.keeps_answers:
                    self._services.kept_responses.note_answer(whole, attempt.answering.instance.key, self._story.tag)
                is_done = self._response.relay_whole(attempt, whole, self._story.own_head())
                self._is_preempted = not is_done
        except Exception as exc:
            self._failure = exc
        if is_done:
            self._story.end_attempt(attempt, "answered")
            self._finish()
        else:
            self._request.run(self.serve_to_end())

    async def serve_to_end(self) -> None:
        """Answer the request, or continue to; raise nothing."""
        response, services = self._response, self._services
        try:
            if self._failure is not None:
                raise self._failure
            if self._story.client is None:
                client = services.auth.identify_client(self._request.headers)
                self._story.tag = services.auth.tags.get(client, "")
                if services.admission.is_limited:
                    await self._pass_limits(client)
                else:
                    services.admission.try_enter(client)
                    self._story.client = client
            if self._parsed is None:
                self._parsed = await self._read_any(self._story.client or "")
            await self._answer_client(self._parsed)
        except Refused as refused:
            response.send_rejection(refused, echo_request_id(self._request.headers))
        except RequestEnded as ended:
            self._end_with(ended.error)
        except BadBody as exc:
            self._end_with(ApiError(400, str(exc), "invalid_body", exc.param))
        except NoRoom as exc:
            _log.error("%s", exc)
            self._end_with(ApiError(503, str(exc), "router_overloaded"))
        except asyncio.CancelledError:
            # Cancelled by ``fail`` while it is queued. Otherwise uvicorn cancels it, if a client that does not read has
            # delayed it beyond the grace time of a shutdown.
            self._end_with(self._attempts.ended.error if self._attempts.ended else None)
        except Exception:
            _log.exception("%s %s failed", self._request.method, self._request.path)
            self._end_with(ApiError(500, "the router failed to handle the request", "router_error"))
        finally:
            self._finish()

    def _finish(self) -> None:
        """Release everything that the ended request holds, even if parts of this fail."""
        self._live.discard(self)
        self._attempts.ended = self._failure = None  # their tracebacks form reference cycles with this request
        if self._keep_alive is not None:
            self._keep_alive.stop()
        try:
            if self._charged is not None:
                self._leave_charged(self._charged)
            elif self._story.client is not None:
                self._services.admission.leave(self._story.client)
            self._story.write_record(self._request, self._response, self._parsed, self._attempts.current)
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
            self._services.admission.leave(self._story.client or "", uncharged)

    def end_early(self, ended: RequestEnded) -> None:
        """End the request: the task that works on it gets ``ended``."""
        attempts = self._attempts
        if attempts.ended is None:
            attempts.ended = ended
            if attempts.current is not None:
                attempts.current.fail(ended)
            if self._queueing is not None:
                self._queueing.cancel()
            self._request.unblock_sending()

    def abort(self, scope: AbortScope) -> tuple[Collection[str], Sequence[str]]:
        """If the abort means this request, prevent further attempts.

        Returns:
            Those of the given ids that mean it, and its engines' ids.
        """
        story = self._story
        if self._request.path not in GENERATING or not scope.reaches(story.tag):
            return (), ()
        meant: Collection[str] = ()
        if scope.asked is not None:
            parsed = self._parsed
            ids = self._waiting_ids if parsed is None else parsed.name_at_engines(story.request_id)
            meant = scope.find_meant(ids, story.tag) if ids is not None else ()
            if ids is None or not meant:
                return (), ()
            story.request_id = ids.request_id
        attempt = self._attempts.current
        if attempt is None or not attempt.sent_at or attempt.engine_ids is None:  # closing connections is enough
            self.end_early(RequestEnded(ABORTED))
            return meant, ()
        self._attempts.is_aborted = True
        return meant, attempt.engine_ids.list_ids()

    async def _pass_limits(self, client: str) -> None:
        """Wait for the admission of the request if there are limits.

        Raises:
            Refused: there are too many requests, or the client has used up its tokens.
            RequestEnded: the client left, or the request cannot be served.
        """
        services = self._services
        tokens = estimate_tokens(self._request.body)
        priority = services.auth.find_priority(client, self._request.headers)
        if services.auth.token_rates.get(client, services.settings.max_tokens_per_sec_per_key):
            self._response.token_count = TokenCount()
        if not services.admission.try_enter(client, tokens):
            if self._request.disconnected:
                raise RequestEnded(None)
            self._request.on_leave = self._on_client_left
            # Comments can be sent only to a stream's client; and an abort does not search large bodies for ids.
            if services.settings.sse_keepalive_secs or len(self._request.body) > UNCHECKED_BYTES:
                self._parsed = await self._read_any(client)
                self._check_ended()
            elif self._request.path in GENERATING:
                self._waiting_ids = guess_ids(self._request)
            self._queueing = asyncio.current_task()
            since = time.perf_counter()
            try:
                await services.admission.enter(client, priority, tokens, len(self._request.body))
            finally:
                self._story.queued_seconds = time.perf_counter() - since
            self._queueing = None
        self._story.client, self._charged = client, tokens

    def _on_client_left(self) -> None:
        self.end_early(RequestEnded(None))

    def _check_ended(self) -> None:
        if self._attempts.ended is not None:
            raise self._attempts.ended

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
        story, kept_responses = self._story, self._services.kept_responses
        story.request_id, story.client_ids = parsed.request_id, parsed.client_ids
        if parsed.api.keeps_answers and parsed.body is not None and parsed.body.members.get("background"):
            settings = self._services.settings
            is_counted = settings.max_concurrent_requests or settings.max_concurrent_requests_per_key
            if is_counted or self._response.token_count is not None:
                message = "background must be false where requests or tokens are limited: nobody would count its answer"
                raise RequestEnded(ApiError(400, message, "background_refused", "background"))
        if story.tag:
            if parsed.kept_id and not kept_responses.is_open_to(parsed.kept_id, story.tag):
                message = f"this router knows of no response {parsed.kept_id[:100]!r} of this client"
                raise RequestEnded(ApiError(404, message, "response_not_found"))
            # The id of a stored response must not change: its client uses it in later requests.
            self._response.tag = b"" if parsed.kept_id or parsed.api.keeps_answers else story.tag.encode()
        seconds = self._services.settings.sse_keepalive_secs
        if seconds and parsed.wants_stream:
            self._keep_alive = KeepAlive(self._response, seconds, self._story.own_head())
        return parsed

    def _read_head(self) -> RequestHead:
        """Parse the headers that the router uses, and monitor the client from now on.

        Raises:
            RequestEnded: a header is invalid, or the client has left.
        """
        request = self._request
        if request.disconnected:
            raise RequestEnded(None)
        request.on_leave = self._on_client_left
        try:
            head = read_head(request, self._story.tag)
        except BadBody as exc:
            raise RequestEnded(ApiError(400, str(exc), "invalid_header", exc.param)) from None
        story = self._story
        story.sent_id = story.request_id = head.sent_id
        story.client_ids = head.client_ids
        story.trace_id = head.trace_id or story.trace_id
        return head

    async def _read_any(self, client: str) -> ParsedRequest:
        """Parse a request, and let other requests run meanwhile if its body is large.

        Raises:
            RequestEnded: it cannot be served, or the client left.
        """
        head = self._read_head()
        if not is_large(self._request):
            return self._read_request(client, head)
        parsed = self._read_request(client, head, await look_through(self._request, self._check_ended))
        await asyncio.sleep(0)  # parsing took long, and hashing the prompt and the next steps do, too
        _ = parsed.features.chunks
        await asyncio.sleep(0)
        return parsed

    async def _answer_client(self, parsed: ParsedRequest) -> None:
        """Make attempts, and continue after preemptions, until the client has the whole response.

        Raises:
            RequestEnded: the response cannot be completed.
            NoRoom: the router cannot send the request, to any instance.
        """
        response = self._response
        try:
            while not await self._relay_segment(parsed):
                if response.merger is not None and response.merger.complete:
                    response.finish_from_segments(self._story.own_head())
                    break
        except LegFailed as failure:
            self._send_failure(failure)
        else:
            self._story.end_attempt(self._attempts.current, "answered")

    async def _relay_segment(self, parsed: ParsedRequest) -> bool:
        """Make attempts until one answers, and relay the answer; return False if another segment follows.

        Raises:
            LegFailed: all attempts failed; this is the last failure.
            NoRoom: the router cannot send the request, to any instance.
            RequestEnded: the response cannot be completed.
        """
        response = self._response
        if not self._is_preempted:
            first = await self._attempts.begin_response(parsed)
            attempt = self._attempts.current
            assert attempt is not None
            if parsed.api.keeps_answers:
                self._services.kept_responses.note_answer(first, attempt.answering.instance.key, self._story.tag)
            if self._keep_alive is not None:
                self._keep_alive.stop()
            if attempt.is_event_stream or not response.holds_whole(attempt):
                return await self._relay_pieces(parsed, attempt, first)
            if response.relay_whole(attempt, first, self._story.own_head()):
                return True
        self._is_preempted = False
        await self._attempts.go_on_after_preemption()
        return False

    async def _relay_pieces(self, parsed: ParsedRequest, attempt: Attempt, first: bytes) -> bool:
        """Relay the response while it arrives; return False if another segment follows.

        Raises:
            RequestEnded: the answering leg failed or preempted the request, which cannot continue; or it was ended.
        """
        try:
            if await self._response.relay_pieces(attempt, first, self._story.own_head()):
                return True
        except UpstreamError as exc:
            await self._attempts.go_on_after_break(parsed, attempt, exc)
        else:
            await self._attempts.go_on_after_preemption()
        return False

    def _send_failure(self, failure: LegFailed) -> None:
        """Send the failure of the last attempt: the instance's own response, unless prefill failed."""
        response, role = failure.response, failure.instance.role
        resuming = self._attempts.resuming
        if resuming is not None and resuming.is_broken:
            raise RequestEnded(resuming.explain(str(failure)))
        if response is not None and response.status in REDIRECTIONS:
            raise RequestEnded(ApiError(502, str(failure), "instance_redirects"))
        is_own = response is not None and (response.status < 500 or role is not Role.PREFILL)
        if response is not None and is_own and not self._request.response_started:
            headers = end_to_end(response.headers, NOT_PASSED_BACK)
            self._response.send(response.status, headers, response.body, self._story.own_head())
        elif response is not None and is_own and not self._response.first_byte_at:
            self._response.end_with_refusal(response.status, response.body)
        else:
            why = self._attempts.end_reason or f"no other {role.value} instance could take the request"
            message = f"{role.value} instance failed: {failure}; {why}"
            raise RequestEnded(ApiError(502, message, f"{role.value}_failed"))

    def _end_with(self, error: ApiError | None) -> None:
        """End the request for the client, at any stage of its response; and end the present attempt, if any."""
        attempts = self._attempts
        if attempts.current is not None:
            attempts.current.give_up()
            attempts.current.forget_errors()
        if attempts.number > self._story.num_ended:
            self._story.end_attempt(attempts.current, error.message if error else "the client left")
        if error is not None and not self._request.response_started:
            settings = self._services.settings
            error = to_dialect(settings.dialect, error, self._story.request_id, splitwise=settings.splitwise)
        self._response.end_with(error, self._story.own_head())
