"""One client's request on its way: its client, its attempts, and how it goes on after a failure or a preemption."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from router.access import Auth, Limits
from router.fleet import EngineKind, HealthMonitor, KeptResponses, Role
from router.http import (
    NOT_PASSED_BACK,
    UNCHECKED_BYTES,
    ApiError,
    BadBody,
    ClientRequest,
    ConnectionPool,
    LargeBody,
    NoRoom,
    Refused,
    TimedOut,
    UpstreamError,
    echo_request_id,
    encode_member,
    end_to_end,
    estimate_tokens,
    find_request_id,
)
from router.serving.aborts import Aborter
from router.serving.api import GENERATING
from router.serving.asking import LegMaker, ask_instances
from router.serving.attempt import REDIRECTIONS, Attempt, LegFailed, StreamStalled
from router.serving.dialects import NotReady, Pairs
from router.serving.keep_alive import KeepAlive
from router.serving.parsed_request import ParsedRequest, guess_ids
from router.serving.response import ClientResponse, RequestEnded
from router.serving.resume import (
    CannotContinue,
    ResponseMerger,
    Resuming,
    StreamMerger,
    continue_stream,
    find_obstacle,
    tells_ids,
)
from router.serving.retry import Retries
from router.serving.selection import NoInstance, Selection, Selector
from router.serving.story import Story
from router.settings import RouterSettings
from router.telemetry import Audit, RouterMetrics, Tracer

__all__ = ["Services", "ServingRequest"]

_log = logging.getLogger("router.serving.request")

# A failed attempt excludes the instance that failed; or, the first time, takes its connection for stale.
MAX_ATTEMPTS = 6

_ABORTED = ApiError(409, "the request was aborted", "aborted")


class Services(NamedTuple):
    """The parts of the router that serve a request: one of each, shared by all requests."""

    settings: RouterSettings
    auth: Auth
    admission: Limits
    selector: Selector
    pairs: Pairs
    kept_responses: KeptResponses
    upstream: ConnectionPool
    health: HealthMonitor
    aborter: Aborter
    metrics: RouterMetrics
    audit: Audit
    tracer: Tracer | None
    """Where requests are traced."""
    is_debugging: bool
    """Whether the log shows each request's way; looked up once, at start."""


class ServingRequest:
    """A request from its arrival to the end of its response. ``fail`` ends it early, from outside."""

    __slots__ = (
        "_charged",
        "_ended",
        "_failure",
        "_is_aborted",
        "_is_preempted",
        "_is_prepared",
        "_keep_alive",
        "_live",
        "_num_attempts",
        "_parsed",
        "_queueing",
        "_request",
        "_response",
        "_resuming",
        "_retries",
        "_services",
        "_story",
        "attempt",
        "started",
    )

    def __init__(self, request: ClientRequest, services: Services, live: set[ServingRequest]) -> None:
        """
        Args:
            live: has the requests that are served.
        """
        self._live = live
        self._story = story = Story(services)
        self.started = story.started
        """When it arrived, on ``time.perf_counter``."""
        self.attempt: Attempt | None = None
        """The one that runs, or ran last."""
        self._request = request
        self._response = ClientResponse(request)
        self._services = services
        self._parsed: ParsedRequest | None = None  # once it was read
        self._retries = Retries()
        self._num_attempts = 0
        self._resuming: Resuming | None = None  # once an instance has put it down
        self._queueing: asyncio.Task[object] | None = None  # the task that waits in the line, while it does
        self._ended: RequestEnded | None = None
        # A client has told its engines to stop it: an attempt that fails now is the last.
        self._is_aborted = False
        self._charged: int | None = None  # tokens that the client was charged for at the beginning, if there are limits
        self._keep_alive: KeepAlive | None = None
        # What ``start`` leaves to ``serve``: an attempt, perhaps sent; an answer that was preempted; an exception.
        self._is_prepared = self._is_preempted = False
        self._failure: Exception | None = None

    def start(self) -> None:
        """Answer the request; nothing is raised.

        Where no stream is asked for, the first attempt is sent at once, and an answer that comes whole is relayed as it
        comes: neither needs a task. All else is for one that runs ``serve``.
        """
        services, request = self._services, self._request
        self._live.add(self)
        if services.tracer is not None:
            self._story.join_trace(services.tracer, request)
        if not services.admission.is_limited and len(request.body) <= UNCHECKED_BYTES:
            try:
                client = services.auth.identify_client(request.headers)
                services.admission.try_enter(client)
                self._story.client = client
                self._parsed = parsed = self._read_request(client)
                if not parsed.wants_stream:
                    attempt = self._make_attempt(parsed, self._select_instances(parsed))
                    self._is_prepared = True
                    if attempt.send(self._on_answer):
                        return
            except Exception:
                pass  # ``serve`` comes to the same, and handles it
        request.run(self.serve_to_end())

    def _on_answer(self) -> None:
        """The attempt that ``start`` has sent has an answer, or at least the beginning of one, or has failed."""
        attempt, parsed = self.attempt, self._parsed
        assert attempt is not None
        assert parsed is not None
        is_done = False
        try:
            whole = attempt.take_whole()
            if whole is not None and self._response.holds_whole(attempt):
                self._is_prepared = False
                if parsed.api.keeps_answers:
                    self._services.kept_responses.note_answer(whole, attempt.answering.instance.key)
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
        """Answer the request, or go on with it; nothing is raised."""
        response, services = self._response, self._services
        try:
            if self._failure is not None:
                raise self._failure
            if self._story.client is None:
                client = services.auth.identify_client(self._request.headers)
                if services.admission.is_limited:
                    await self._pass_limits(client)
                else:
                    services.admission.try_enter(client)
                self._story.client = client
            if self._parsed is None:
                client = self._story.client
                self._parsed = await self._read_large(client) if self._is_large else self._read_request(client)
            await self._answer_client(self._parsed)
        except Refused as refused:
            response.send_rejection(refused, echo_request_id(self._request.headers))
        except RequestEnded as ended:
            self._end_with(ended.error)
        except NoRoom as exc:
            _log.error("%s", exc)
            self._end_with(ApiError(503, str(exc), "router_overloaded"))
        except asyncio.CancelledError:
            # While it waits in line, by ``fail``; otherwise uvicorn cancels it, where a client that does not read has
            # held it up beyond the grace of a shutdown.
            self._end_with(self._ended.error if self._ended else None)
        except Exception:
            _log.exception("%s %s failed", self._request.method, self._request.path)
            self._end_with(ApiError(500, "the router failed to handle the request", "router_error"))
        finally:
            self._finish()

    def _finish(self) -> None:
        """The request has ended."""
        self._live.discard(self)
        self._ended = self._failure = None  # their tracebacks lead to this request: only the collector could free both
        if self._keep_alive is not None:
            self._keep_alive.stop()
        if self._story.client is not None:
            uncharged = 0
            if self._charged is not None:
                prompt_tokens = self._parsed.features.prompt_tokens if self._parsed is not None else 0
                uncharged = self._response.count_used_tokens(prompt_tokens) - self._charged
            self._services.admission.leave(self._story.client, uncharged)
        self._story.write_record(self._request, self._response, self._parsed, self.attempt)

    def end_early(self, ended: RequestEnded) -> None:
        """End the request: the task that works on it gets ``ended``."""
        if self._ended is None:
            self._ended = ended
            if self.attempt is not None:
                self.attempt.fail(ended)
            if self._queueing is not None:
                self._queueing.cancel()
            self._request.unblock_sending()

    def abort(self, asked: Collection[str] | None) -> tuple[Collection[str], Sequence[str]]:
        """If one of these ids, or all (None), means this request, try it no more.

        Returns:
            The ids of those asked that mean it, and its engines' ids.
        """
        if self._request.path not in GENERATING:
            return (), ()
        meant: Collection[str] = ()
        if asked is not None:
            parsed = self._parsed
            ids = guess_ids(self._request, asked) if parsed is None else parsed.name_at_engines(self._story.request_id)
            meant = ids.find_meant(asked) if ids.request_id else ()
            if not meant:
                return (), ()
            self._story.request_id = ids.request_id
        attempt = self.attempt
        if attempt is None or not attempt.sent_at or attempt.engine_ids is None:  # none runs, or by closing connections
            self.end_early(RequestEnded(_ABORTED))
            return meant, ()
        self._is_aborted = True
        return meant, attempt.engine_ids.list_ids()

    async def _pass_limits(self, client: str) -> None:
        """Have the request let in where there are limits.

        Raises:
            Refused: there are too many requests, or the client has used its tokens.
            RequestEnded: the client left, or the request cannot be served.
        """
        services = self._services
        tokens = estimate_tokens(self._request.body)
        priority = services.auth.find_priority(client, self._request.headers)
        if not services.admission.try_enter(client, tokens):
            if self._request.disconnected:
                raise RequestEnded(None)
            self._request.on_leave = self._on_client_left
            # Only a stream's client can be told that it waits; and an abort does not look for ids in large bodies.
            if services.settings.sse_keepalive_secs or len(self._request.body) > UNCHECKED_BYTES:
                self._parsed = await self._read_large(client) if self._is_large else self._read_request(client)
                if self._ended is not None:
                    raise self._ended
            self._queueing = asyncio.current_task()
            since = time.perf_counter()
            try:
                await services.admission.enter(client, priority, tokens)
            finally:
                self._story.queued_seconds = time.perf_counter() - since
            self._queueing = None
        self._charged = tokens

    def _on_client_left(self) -> None:
        self.end_early(RequestEnded(None))

    @property
    def _is_large(self) -> bool:
        """Whether its body takes so long to parse that it is looked through first."""
        return len(self._request.body) > UNCHECKED_BYTES and self._request.path in GENERATING

    def _read_request(self, client: str, large: LargeBody | None = None) -> ParsedRequest:
        """Read the request, as far as the router needs to.

        Args:
            large: of a large body that was looked through; then the head has been read, too.

        Raises:
            RequestEnded: it cannot be served, or the client left.
        """
        request = self._request
        if large is None:
            self._read_head()
        salts = self._services.auth.cache_salts
        derive_salt = partial(salts.derive, client) if salts else None
        parsed = ParsedRequest(request, self._story.sent_id, large, derive_salt, self._services.selector.aliases)
        self._story.request_id = parsed.request_id
        seconds = self._services.settings.sse_keepalive_secs
        if seconds and parsed.wants_stream:
            self._keep_alive = KeepAlive(self._response, seconds, self._story.own_head())
        return parsed

    def _read_head(self) -> None:
        """Read the headers that matter to the router, and watch the client from now on.

        Raises:
            RequestEnded: a header is wrong, or the client has left.
        """
        request = self._request
        if request.disconnected:
            raise RequestEnded(None)
        request.on_leave = self._on_client_left
        for name, value in request.headers:
            if name == b"traceparent":
                self._story.trace_id = value[3:35].decode("latin-1")
        try:
            self._story.sent_id = self._story.request_id = find_request_id(request.headers)
        except BadBody as exc:
            raise RequestEnded(ApiError(400, str(exc), "invalid_header", exc.param)) from None

    async def _read_large(self, client: str) -> ParsedRequest:
        """Read a request with a large body, and let other requests go on meanwhile; as ``_read_request``."""
        self._read_head()
        parsed = self._read_request(client, await self._look_through())
        await asyncio.sleep(0)  # parsing has taken its time, and so do hashing the prompt and what follows
        _ = parsed.features.chunks
        await asyncio.sleep(0)
        return parsed

    async def _look_through(self) -> LargeBody:
        """Look through a large body, and let other requests go on meanwhile.

        Raises:
            RequestEnded: it would take too long to parse, or the request was ended meanwhile.
        """
        large = LargeBody(self._request.body)
        try:
            for _ in large.check_values():
                await asyncio.sleep(0)
                if self._ended is not None:
                    raise self._ended
        except BadBody as exc:
            raise RequestEnded(ApiError(400, str(exc), "invalid_body", exc.param)) from None
        return large

    async def _answer_client(self, parsed: ParsedRequest) -> None:
        """Make attempts, and go on after preemptions, until the client has the whole response.

        Raises:
            RequestEnded: it cannot have it.
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
            self._story.end_attempt(self.attempt, "answered")

    async def _relay_segment(self, parsed: ParsedRequest) -> bool:
        """Make attempts until one answers, and relay the answer; False if another segment is to follow.

        Raises:
            LegFailed: no attempt had an answer; this is the last one's failure.
            NoRoom: the router cannot send the request, to any instance.
            RequestEnded: the client cannot have the whole answer.
        """
        response = self._response
        if not self._is_preempted:
            first = await self._begin_attempt(parsed)
            attempt = self.attempt
            assert attempt is not None
            if parsed.api.keeps_answers:
                self._services.kept_responses.note_answer(first, attempt.answering.instance.key)
            if self._keep_alive is not None:
                self._keep_alive.stop()
            if attempt.is_event_stream or not response.holds_whole(attempt):
                return await self._relay_pieces(parsed, attempt, first)
            if response.relay_whole(attempt, first, self._story.own_head()):
                return True
        self._is_preempted = False
        await self._go_on_after_preemption()
        return False

    async def _relay_pieces(self, parsed: ParsedRequest, attempt: Attempt, first: bytes) -> bool:
        """Relay the response as it comes; False if another segment is to follow.

        Raises:
            RequestEnded: the answering leg failed or preempted the request, which cannot go on; or it was ended.
        """
        try:
            if await self._response.relay_pieces(attempt, first, self._story.own_head()):
                return True
        except UpstreamError as exc:
            self._go_on_after_break(parsed, attempt, exc)
        else:
            await self._go_on_after_preemption()
        return False

    async def _begin_attempt(self, parsed: ParsedRequest) -> bytes:
        """Make attempts until one has the first bytes of a response.

        Raises:
            LegFailed: no attempt had; this is the last one's failure.
            NoRoom: the router cannot send it, to any instance.
            RequestEnded: no instance could take the request, or the request was ended.
        """
        try:
            selection = self._story.selection if self._is_prepared else None
            selection = selection or self._select_instances(parsed)
        except NoInstance as none:
            resuming = self._resuming
            if resuming is not None and resuming.is_broken:
                raise RequestEnded(resuming.explain("no other instance can take it")) from None
            raise RequestEnded(none.error) from None
        attempts = 0
        while True:
            attempts += 1
            try:
                if self._is_prepared and self.attempt is not None:
                    self._is_prepared = False
                    return await self.attempt.begin()
                while True:
                    if self._ended is not None:
                        raise self._ended
                    if self._is_aborted:
                        raise RequestEnded(_ABORTED)
                    try:
                        attempt = self._make_attempt(parsed, selection)
                        break
                    except NotReady as unready:  # again, if another request's failure had it forgotten meanwhile
                        await self._learn_of_prefill(unready, selection)
                return await attempt.begin()
            except LegFailed as failure:
                if self.attempt is not None:
                    self.attempt.give_up(culprit=failure.instance)
                if selection.prefill is not None:
                    self._services.pairs.forget_prefill(selection.prefill)
                self._story.end_attempt(self.attempt, str(failure))
                if self._is_aborted:
                    raise RequestEnded(_ABORTED) from failure
                self._blame_instance(failure)
                if not failure.another_may_serve or attempts == MAX_ATTEMPTS:
                    raise
                self._services.metrics.count_retry(failure.instance.key)
                await self._retries.record_failure_and_back_off(failure, selection)
                try:
                    selection = self._select_instances(parsed)
                except NoInstance:
                    raise failure from None

    def _select_instances(self, parsed: ParsedRequest) -> Selection:
        """Those for the next attempt; raises ``NoInstance`` if there are none."""
        keeper = self._services.kept_responses.find_keeper(parsed.kept_id) if parsed.kept_id else None
        if keeper is not None:
            return self._services.selector.choose_keeper(parsed.features, keeper)
        return self._retries.select(self._services.selector, parsed.features, parsed.body is not None)

    async def _learn_of_prefill(self, unready: NotReady, selection: Selection) -> None:
        """Ask prefill for the facts that its pair needs.

        Raises:
            LegFailed: it does not tell.
        """
        assert selection.prefill is not None
        self._story.selection = selection
        try:
            await unready.learn(self._services.upstream)
        except UpstreamError as exc:
            raise LegFailed(selection.prefill, str(exc)) from exc

    async def _go_on_after_preemption(self) -> None:
        """Prepare the next segment of a request that its decode instance preempted.

        Raises:
            RequestEnded: it cannot be continued.
        """
        merger, selection, services = self._response.merger, self._story.selection, self._services
        assert merger is not None
        assert selection is not None
        decode = selection.answering
        self._story.end_attempt(self.attempt, "preempted")
        services.metrics.count_preemption(decode.key)
        if services.settings.preempt_retry_exclude_decode:
            self._retries.avoid(decode.key)
        self._resuming = self._resuming or Resuming(services.settings)
        error = await self._resuming.prepare_after_preemption(merger, decode, services.upstream)
        assert self.attempt is not None
        self._response.end_segment(self.attempt)
        if error is not None:
            raise RequestEnded(error)

    def _go_on_after_break(self, parsed: ParsedRequest, attempt: Attempt, exc: UpstreamError) -> None:
        """Prepare the next segment of a stream whose instance died, broke off or hung.

        Raises:
            RequestEnded: it cannot be continued.
        """
        response, services, instance = self._response, self._services, attempt.answering.instance
        if isinstance(exc, StreamStalled):
            attempt.give_up()
            error = ApiError(504, str(exc), "stream_stalled")
        else:
            attempt.break_off(exc)
            role = instance.role.value
            error = ApiError(502, f"{role} instance failed in the middle of its answer: {exc}", f"{role}_failed")
        self._story.end_attempt(self.attempt, f"broke off: {exc}")
        merger = response.merger if isinstance(response.merger, StreamMerger) else None
        if not response.is_event_stream or parsed.body is None or not services.settings.stream_resume_count:
            raise RequestEnded(error) from exc
        self._resuming = self._resuming or Resuming(services.settings)
        is_chat = parsed.api.is_chat
        failed = self._resuming.prepare_after_break(merger, parsed.body, instance, error, is_chat=is_chat)
        if failed is None and merger is None and response.bytes_sent:
            engine = instance.registration.engine
            why = find_obstacle(parsed.body, engine, is_chat) if parsed.api.is_continuable else "its API has no way to"
            failed = self._resuming.explain(why or "its tokens' ids are not known")
        if failed is not None:
            raise RequestEnded(failed) from exc
        response.end_segment(attempt)
        services.metrics.count_resumption(instance.key)
        self._retries.begin_again(instance.key, is_hung=isinstance(exc, TimedOut))

    def _make_attempt(self, parsed: ParsedRequest, selection: Selection) -> Attempt:
        """Prepare the exchanges with the selected instances; nothing is sent yet.

        Raises:
            RequestEnded: they cannot serve it.
        """
        services, number = self._services, self._num_attempts
        # An engine may still know the id of the attempt before.
        request_id = f"{self._story.request_id}-retry{number}" if number else self._story.request_id
        asking = ask_instances(services.pairs, selection, parsed, request_id)
        self._num_attempts += 1
        pair = asking.pair
        self._story.selection, self._story.pair = asking.selection, pair
        if services.is_debugging:
            self._story.log_choice(parsed.features.prompt_tokens)
        engine = asking.selection.answering.registration.engine
        if parsed.body is not None and parsed.api.is_continuable:
            if pair is not None and pair.merges_segments:
                self._response.expect_segments(parsed.body)
            elif (
                parsed.wants_stream
                and services.settings.stream_resume_count
                and not find_obstacle(parsed.body, engine, parsed.api.is_chat)
            ):
                self._response.expect_segments(parsed.body, engine is not EngineKind.FASTDEPLOY)
        members, stale = self._list_members(parsed, engine), self._retries.stale
        maker = LegMaker(services.upstream, parsed, asking, members, stale, self._story.trace)
        answering, prefill = maker.make_legs()
        self.attempt = Attempt(
            answering,
            prefill,
            asking.engine_ids,
            ask_decode=partial(maker.ask_decode, answering) if pair is not None and pair.is_prefill_first else None,
            may_err_late=pair is not None and pair.may_err_late,
            hold_bytes=self._response.hold_bytes(parsed.body),
            aborter=services.aborter,
            on_trouble=services.health.on_trouble,
        )
        return self.attempt

    def _list_members(self, parsed: ParsedRequest, engine: EngineKind) -> dict[str, bytes]:
        """The members that this attempt's bodies get in any dialect.

        Raises:
            RequestEnded: this engine cannot go on with the answer.
        """
        body, merger = parsed.body, self._response.merger
        members: dict[str, bytes] = {}
        if parsed.cache_salt:
            members["cache_salt"] = parsed.cache_salt
        if parsed.model:
            members["model"] = parsed.model
        if merger is None:
            return members
        assert body is not None
        is_wanted = isinstance(merger, StreamMerger) and not body.members.get("return_token_ids")
        if is_wanted and (engine is EngineKind.FASTDEPLOY or tells_ids(engine, parsed.api.is_chat)):
            members["return_token_ids"] = b'"return_token_ids":true'
        if self._resuming is not None:
            members |= {name: encode_member(name, value) for name, value in self._continue(parsed, engine).items()}
        return members

    def _continue(self, parsed: ParsedRequest, engine: EngineKind) -> Mapping[str, Any]:
        """The members that the next segment's request has beside the client's own.

        Raises:
            RequestEnded: this engine cannot go on with the answer.
        """
        merger, resuming = self._response.merger, self._resuming
        if isinstance(merger, ResponseMerger):
            return merger.resumption()
        assert isinstance(merger, StreamMerger)
        try:
            return continue_stream(merger, engine, parsed.api.is_chat)
        except CannotContinue as exc:
            assert resuming is not None
            raise RequestEnded(resuming.explain(str(exc))) from None

    def _blame_instance(self, failure: LegFailed) -> None:
        """Count a failure for which the instance, and not the request or its partner, is to blame."""
        is_broken = failure.response is None or failure.response.status >= 500
        if is_broken and not failure.stale and not failure.in_hand_over:
            failure.instance.record_failure(time.monotonic(), str(failure))

    def _send_failure(self, failure: LegFailed) -> None:
        """Answer with the failure of the last attempt: the instance's own response, unless prefill broke down."""
        response, role = failure.response, failure.instance.role
        if self._resuming is not None and self._resuming.is_broken:
            raise RequestEnded(self._resuming.explain(str(failure)))
        if response is not None and response.status in REDIRECTIONS:
            raise RequestEnded(ApiError(502, str(failure), "instance_redirects"))
        is_own = response is not None and (response.status < 500 or role is not Role.PREFILL)
        if response is not None and is_own and not self._request.response_started:
            headers = end_to_end(response.headers, NOT_PASSED_BACK)
            self._response.send(response.status, headers, response.body, self._story.own_head())
        elif response is not None and is_own and not self._response.first_byte_at:
            self._response.end_with_refusal(response.status, response.body)
        else:
            message = f"{role.value} instance failed: {failure}; no other {role.value} instance could take the request"
            raise RequestEnded(ApiError(502, message, f"{role.value}_failed"))

    def _end_with(self, error: ApiError | None) -> None:
        """End the request for the client, however much it has got; and the attempt, if one still runs."""
        if self.attempt is not None:
            self.attempt.give_up()
        if self._num_attempts > self._story.num_ended:
            self._story.end_attempt(self.attempt, error.message if error else "the client left")
        self._response.end_with(error, self._story.own_head())
