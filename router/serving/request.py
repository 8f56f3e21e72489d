"""One client's request on its way: its client, its attempts, and how it goes on after a failure or a preemption."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from router.access import Auth, CacheSalts, Limits
from router.fleet import HealthMonitor, Instance, PairInfo, Role
from router.http import (
    HOP_BY_HOP,
    MAX_ID_CHARACTERS,
    NOT_PASSED_BACK,
    UNCHECKED_BYTES,
    ApiError,
    BadBody,
    ClientRequest,
    ConnectionPool,
    Headers,
    InferenceBody,
    LargeBody,
    NoRoom,
    PreparedHead,
    Refused,
    UpstreamError,
    Usage,
    echo_request_id,
    encode_member,
    encode_request_id,
    end_to_end,
    estimate_tokens,
    find_request_id,
    parse_inference,
    prepare_head,
    read_usage,
    splice_parts,
)
from router.policies import Decision, Outcome, RequestFeatures, request_features
from router.serving.aborts import Aborter, names_any
from router.serving.attempt import REDIRECTIONS, Attempt, EngineIds, Leg, LegFailed
from router.serving.keep_alive import KeepAlive
from router.serving.response import CLIENT_LEFT, ClientResponse, RequestEnded
from router.serving.resume import ResponseMerger, StreamMerger
from router.serving.retry import Retries
from router.serving.selection import NoInstance, Selection, Selector
from router.serving.trace import log_attempt_end, log_choice, log_request_end
from router.settings import RouterSettings
from router.telemetry import AttemptRecord, Audit, RequestRecord, RouterMetrics

__all__ = ["Services", "ServingRequest"]

_log = logging.getLogger("router.serving.request")

# A failed attempt excludes the instance that failed; or, the first time, takes its connection for stale.
MAX_ATTEMPTS = 6
DETOKENIZE_SECONDS = 5.0

# Engines name a request's sequences <prefix><request_id>_<number>.
_ID_PREFIXES = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}

_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
# The router reads the responses to completions; and each attempt at one has an id of its own, which is in its body.
_NOT_FORWARDED_WITH_COMPLETIONS = _NOT_FORWARDED | {b"accept-encoding", b"x-request-id"}
_JSON = [(b"content-type", b"application/json")]
_ABORTED = ApiError(409, "the request was aborted", "aborted")
_NO_FEATURES = RequestFeatures(0)
_INSTANCE_HEADERS = {role: f"x-router-{role.value}".encode() for role in Role}


class Services(NamedTuple):
    """The parts of the router that serve a request: one of each, shared by all requests."""

    settings: RouterSettings
    auth: Auth
    admission: Limits
    selector: Selector
    pair_info: PairInfo
    upstream: ConnectionPool
    health: HealthMonitor
    aborter: Aborter
    metrics: RouterMetrics
    audit: Audit
    is_debugging: bool
    """Whether the log shows each request's way; looked up once, at start."""


class ServingRequest:
    """A request from its arrival to the end of its response. ``fail`` ends it early, from outside."""

    __slots__ = (
        "_cache_salt",
        "_charged",
        "_ended",
        "_features",
        "_head",
        "_is_aborted",
        "_is_read",
        "_keep_alive",
        "_num_attempts",
        "_preemptions",
        "_queueing",
        "_records",
        "_request",
        "_response",
        "_retries",
        "_selection",
        "_sent_id",
        "_services",
        "_started_unix",
        "_trace_id",
        "attempt",
        "body",
        "client",
        "request_id",
        "started",
    )

    _head: PreparedHead

    def __init__(self, request: ClientRequest, services: Services) -> None:
        self.started = time.perf_counter()
        """When it arrived, on ``time.perf_counter``."""
        self.client: str | None = None
        """Who asks, once admitted."""
        self.body: InferenceBody | None = None
        """Of a completion."""
        self.request_id = ""
        self.attempt: Attempt | None = None
        """The one that runs, or ran last."""
        self._started_unix = time.time()
        self._request = request
        self._response = ClientResponse(request)
        self._services = services
        self._trace_id = self._sent_id = ""
        self._features = _NO_FEATURES
        self._selection: Selection | None = None
        self._retries = Retries()
        self._num_attempts = self._preemptions = 0
        self._records: list[AttemptRecord] = []
        self._queueing: asyncio.Task[object] | None = None  # the task that waits in the line, while it does
        self._ended: RequestEnded | None = None
        # A client has told its engines to stop it: an attempt that fails now is the last.
        self._is_aborted = False
        self._is_read = False
        self._cache_salt = b""  # the member that keeps the client's cache apart, where there is one
        self._charged: int | None = None  # tokens that the client was charged for at the beginning, if there are limits
        self._keep_alive: KeepAlive | None = None

    async def serve(self) -> None:
        """Answer the request; nothing is raised."""
        response, services = self._response, self._services
        try:
            client = services.auth.identify_client(self._request.headers)
            if services.admission.is_limited:
                await self._pass_limits(client)
            else:
                services.admission.try_enter(client)
            self.client = client
            if not self._is_read:
                await self._read_request(client)
            await self._answer_client()
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
            self._ended = None  # its traceback leads to this request: only the collector could free both
            if self._keep_alive is not None:
                self._keep_alive.stop()
            if self.client is not None:
                uncharged = 0 if self._charged is None else self._count_uncharged_tokens(self._charged)
                services.admission.leave(self.client, uncharged)
            self._write_record()

    def fail(self, ended: RequestEnded) -> None:
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
        if self.attempt is None:
            return self._abort_unsent(asked), ()
        if self.body is None:
            return (), ()
        meant: Collection[str] = ()
        if asked is not None:
            meant = self._find_meant(asked, self.body.choices)
            if not meant:
                return (), ()
        self._is_aborted = True
        return meant, self.attempt.engine_ids.list_ids() if self.attempt.engine_ids else ()

    def _abort_unsent(self, asked: Collection[str] | None) -> Collection[str]:
        """``abort`` while it waits in line: its body may not have been read yet."""
        if self._request.path not in _ID_PREFIXES:
            return ()
        meant: Collection[str] = ()
        if asked is not None:
            body = self.body
            with contextlib.suppress(BadBody):
                if body is None and len(self._request.body) <= UNCHECKED_BYTES and names_any(self._request.body, asked):
                    body = parse_inference(self._request.body)
                sent_id = find_request_id(self._request.headers)
                self.request_id = self.request_id or (body and body.request_id) or sent_id
            meant = self._find_meant(asked, body.choices if body else 1) if self.request_id else ()
            if not meant:
                return ()
        self.fail(RequestEnded(_ABORTED))
        return meant

    def _find_meant(self, asked: Collection[str], choices: int) -> Collection[str]:
        """Those of the ids asked that mean this request."""
        sent = EngineIds(_ID_PREFIXES[self._request.path], self.request_id, choices)
        return {self.request_id, sent.whole, *sent.list_ids()}.intersection(asked)

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
            self._watch_client()
            # Only a stream's client can be told that it waits; and an abort does not look for ids in large bodies.
            if services.settings.sse_keepalive_secs or len(self._request.body) > UNCHECKED_BYTES:
                await self._read_request(client)
                if self._ended is not None:
                    raise self._ended
            self._queueing = asyncio.current_task()
            await services.admission.enter(client, priority, tokens)
            self._queueing = None
        self._charged = tokens

    def _count_uncharged_tokens(self, charged: int) -> int:
        """How many tokens more the request has used than the client was charged for; negative for fewer."""
        response = self._response
        has_failed = response.status >= 400 or (response.error_code and not response.first_byte_at)
        if has_failed and response.status != CLIENT_LEFT:
            return -charged
        usage = response.read_usage()
        # Where the engine does not say how many tokens it made, each piece it sent stands for one.
        completion = usage.completion_tokens or (response.chunks if response.is_event_stream else 0)
        prompt = self._features.prompt_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        return prompt + completion - charged

    def _watch_client(self) -> None:
        """End the request when the client leaves.

        Raises:
            RequestEnded: it has left.
        """
        if self._request.disconnected:
            raise RequestEnded(None)
        self._request.on_leave = self._on_client_left

    def _on_client_left(self) -> None:
        self.fail(RequestEnded(None))

    async def _read_request(self, client: str) -> None:
        """Parse the body if the request is a completion, and prepare the head that instances get.

        Raises:
            RequestEnded: it cannot be served, or the client left.
        """
        request = self._request
        self._watch_client()
        for name, value in request.headers:
            if name == b"traceparent":
                self._trace_id = value[3:35].decode("latin-1")
        try:
            self._sent_id = self.request_id = find_request_id(request.headers)
        except BadBody as exc:
            raise RequestEnded(ApiError(400, str(exc), "invalid_header", exc.param)) from None
        if request.path not in _ID_PREFIXES:
            self.request_id = self._sent_id or _make_request_id()
            self._features = RequestFeatures(estimate_tokens(request.body))
            headers = end_to_end(request.headers, _NOT_FORWARDED)
        elif request.method != "POST":
            message = f"{request.path} takes POST, not {request.method}"
            raise RequestEnded(ApiError(405, message, "method_not_allowed"))
        else:
            is_large = len(request.body) > UNCHECKED_BYTES
            try:
                large = await self._look_through() if is_large else None
                self.body = body = parse_inference(request.body, large)
            except BadBody as exc:
                raise RequestEnded(ApiError(400, str(exc), "invalid_body", exc.param)) from None
            if len(body.request_id or "") > MAX_ID_CHARACTERS:
                message = f"request_id is longer than the {MAX_ID_CHARACTERS} characters this router takes"
                raise RequestEnded(ApiError(400, message, "invalid_body", "request_id"))
            members: Mapping[str, Any] = body.members
            if self._services.auth.cache_salts is not None:
                members = self._salt_cache(self._services.auth.cache_salts, client, members)
            self._features = request_features(members, body.prompt_tokens, request.headers)
            self.request_id = body.request_id or self._sent_id or _make_request_id()
            seconds = self._services.settings.sse_keepalive_secs
            if seconds and members.get("stream"):
                self._keep_alive = KeepAlive(self._response, seconds, self._own_headers())
            headers = end_to_end(request.headers, _NOT_FORWARDED_WITH_COMPLETIONS)
            if is_large:  # parsing has taken its time, and so do hashing the prompt and what follows
                await asyncio.sleep(0)
                _ = self._features.chunks
                await asyncio.sleep(0)
        self._head = prepare_head(request.method, request.target, headers)
        self._is_read = True

    async def _look_through(self) -> LargeBody:
        """Look through a large body, and let other requests go on meanwhile.

        Raises:
            BadBody: it would take too long to parse.
            RequestEnded: the request was ended meanwhile.
        """
        large = LargeBody(self._request.body)
        for _ in large.check_values():
            await asyncio.sleep(0)
            if self._ended is not None:
                raise self._ended
        return large

    def _salt_cache(self, salts: CacheSalts, client: str, members: Mapping[str, Any]) -> Mapping[str, Any]:
        """Give the request a salt of its client's; return the body's members with it.

        Raises:
            RequestEnded: the salt that the client sent is none.
        """
        own = members.get("cache_salt")
        if not isinstance(own, str | None):
            message = "cache_salt must be text"
            raise RequestEnded(ApiError(400, message, "invalid_body", "cache_salt"))
        salt = salts.derive(client, own or "")
        self._cache_salt = encode_member("cache_salt", salt)
        return {**members, "cache_salt": salt}

    async def _answer_client(self) -> None:
        """Make attempts, and go on after preemptions, until the client has the whole response.

        Raises:
            RequestEnded: it cannot have it.
            NoRoom: the router cannot send the request, to any instance.
        """
        response = self._response
        try:
            while True:
                first = await self._begin_attempt()
                attempt = self.attempt
                assert attempt is not None
                if self._keep_alive is not None:
                    self._keep_alive.stop()
                if not attempt.is_event_stream and response.holds_whole(attempt):
                    is_done = response.relay_whole(attempt, first, self._own_headers())
                else:
                    is_done = await self._relay_pieces(attempt, first)
                if is_done:
                    break
                await self._prepare_next_segment()
                if response.merger is not None and response.merger.complete:
                    response.finish_from_segments(self._own_headers())
                    break
        except LegFailed as failure:
            self._send_failure(failure)
        else:
            self._end_attempt("answered")

    async def _relay_pieces(self, attempt: Attempt, first: bytes) -> bool:
        """Relay the response as it comes; False if the decode instance preempted the request half-way.

        Raises:
            RequestEnded: the answering leg failed, or the request was ended.
        """
        try:
            return await self._response.relay_pieces(attempt, first, self._own_headers())
        except UpstreamError as exc:
            attempt.break_off(exc)
            self._end_attempt(f"broke off: {exc}")
            role = attempt.answering.instance.role.value
            message = f"{role} instance failed in the middle of its answer: {exc}"
            raise RequestEnded(ApiError(502, message, f"{role}_failed")) from exc

    async def _begin_attempt(self) -> bytes:
        """Make attempts until one has the first bytes of a response.

        Raises:
            LegFailed: no attempt had; this is the last one's failure.
            NoRoom: the router cannot send it, to any instance.
            RequestEnded: no instance could take the request, or the request was ended.
        """
        try:
            selection = self._select_instances()
        except NoInstance as none:
            raise RequestEnded(none.error) from None
        attempts = 0
        while True:
            if self._ended is not None:
                raise self._ended
            if self._is_aborted:
                raise RequestEnded(_ABORTED)
            attempt = self._make_attempt(selection)
            attempts += 1
            try:
                return await attempt.begin()
            except LegFailed as failure:
                attempt.give_up(culprit=failure.instance)
                self._end_attempt(str(failure))
                self._blame_instance(failure)
                if not failure.another_may_serve or attempts == MAX_ATTEMPTS:
                    raise
                self._services.metrics.count_retry(failure.instance.key)
                await self._retries.record_failure_and_back_off(failure, selection)
                try:
                    selection = self._select_instances()
                except NoInstance:
                    raise failure from None

    async def _prepare_next_segment(self) -> None:
        """Prepare the next segment of a request that its decode instance preempted.

        Raises:
            RequestEnded: it cannot be continued.
        """
        merger, selection, settings = self._response.merger, self._selection, self._services.settings
        assert merger is not None
        assert selection is not None
        decode = selection.answering
        self._end_attempt("preempted")
        self._preemptions += 1
        self._services.metrics.count_preemption(decode.key)
        if settings.preempt_retry_exclude_decode:
            self._retries.avoid(decode.key)
        if isinstance(merger, ResponseMerger):
            while (ids := merger.ids_to_detokenize) is not None:
                merger.take_text(await self._detokenize(decode, ids))
        if merger.complete:
            return
        if self._preemptions > settings.preempt_retry_count:
            message = f"decode instances preempted the request {self._preemptions} times; the last was {decode.key}"
            raise RequestEnded(ApiError(503, message, "preempted"))
        if merger.resumption() is None:
            message = f"decode instance {decode.key} preempted the request, whose answer cannot be continued elsewhere"
            raise RequestEnded(ApiError(503, message, "preempted"))
        if isinstance(merger, StreamMerger):
            merger.begin_segment()

    async def _detokenize(self, instance: Instance, ids: list[int]) -> str | None:
        """The text of ``ids``, asked of an instance; None where it cannot tell."""
        try:
            response = await self._services.upstream.fetch(
                instance.address,
                "POST",
                "/detokenize",
                headers=_JSON,
                body=orjson.dumps({"tokens": ids}),
                timeout=DETOKENIZE_SECONDS,
            )
            text = orjson.loads(response.body)["prompt"] if response.status == 200 else None
        except (UpstreamError, ValueError, KeyError, TypeError):
            return None
        return text if isinstance(text, str) else None

    def _select_instances(self) -> Selection:
        return self._retries.select(self._services.selector, self._features, self.body is not None)

    def _make_attempt(self, selection: Selection) -> Attempt:
        """Prepare the exchanges with the selected instances; nothing is sent yet."""
        services, answering, prefill = self._services, selection.answering, selection.prefill
        pair_info = b""
        if prefill is not None:
            pair_info = services.pair_info.encode_pair(prefill, answering)
            if self.body is not None:
                self._response.expect_segments(self.body)
        data, engine_ids = self._next_body(pair_info)
        self._selection = selection
        if services.is_debugging:
            log_choice(self.request_id, self._num_attempts, selection, self._features.prompt_tokens)
        self.attempt = Attempt(
            self._make_leg(answering, data, selection.decisions[-1].work),
            self._make_leg(prefill, data, selection.decisions[0].work) if prefill else None,
            engine_ids,
            hold_bytes=self._response.hold_bytes(self.body),
            aborter=services.aborter,
            on_trouble=services.health.on_trouble,
        )
        return self.attempt

    def _make_leg(self, instance: Instance, data: bytes | tuple[bytes, ...], work: float) -> Leg:
        fresh = instance.key in self._retries.stale
        exchange = self._services.upstream.prepare_exchange(instance.address, self._head, data, fresh)
        return Leg(instance, exchange, self._features.prompt_tokens, work)

    def _next_body(self, pair_info: bytes) -> tuple[bytes | tuple[bytes, ...], EngineIds | None]:
        """The body to send to instances, and the ids that their engines will give the request's sequences.

        Each attempt has a request id of its own, because an engine may still know the one before. A request that
        is no completion is sent as it is.

        Args:
            pair_info: the encoded member ``disaggregate_info``; empty for an instance alone.
        """
        body, merger, number = self.body, self._response.merger, self._num_attempts
        self._num_attempts += 1
        if body is None:
            return self._request.body, None
        request_id = f"{self.request_id}-retry{number}" if number else self.request_id
        added = {"request_id": encode_member("request_id", request_id)}
        if self._cache_salt:
            added["cache_salt"] = self._cache_salt
        if pair_info:
            added["disaggregate_info"] = pair_info
        if isinstance(merger, StreamMerger) and not body.members.get("return_token_ids"):
            added["return_token_ids"] = b'"return_token_ids":true'
        if self._preemptions and merger is not None:
            resumption = merger.resumption() or {}
            added |= {name: encode_member(name, value) for name, value in resumption.items()}
        return splice_parts(body, added), EngineIds(_ID_PREFIXES[self._request.path], request_id, body.choices)

    def _blame_instance(self, failure: LegFailed) -> None:
        """Count a failure for which the instance, and not the request or its partner, is to blame."""
        is_broken = failure.response is None or failure.response.status >= 500
        if is_broken and not failure.stale and not failure.in_hand_over:
            failure.instance.record_failure(time.monotonic(), str(failure))

    def _end_attempt(self, how: str) -> None:
        """Keep the reasons of the attempt that has just ended, and how it ended."""
        decisions = self._selection.decisions if self._selection else ()
        self._records.append(AttemptRecord(decisions, how))
        if self._services.is_debugging:
            log_attempt_end(self.request_id, len(self._records), self.attempt, how)

    def _send_failure(self, failure: LegFailed) -> None:
        """Answer with the failure of the last attempt: the instance's own response, unless prefill broke down."""
        response, role = failure.response, failure.instance.role
        if response is not None and response.status in REDIRECTIONS:
            raise RequestEnded(ApiError(502, str(failure), "instance_redirects"))
        is_own = response is not None and (response.status < 500 or role is not Role.PREFILL)
        if response is not None and is_own and not self._request.response_started:
            headers = end_to_end(response.headers, NOT_PASSED_BACK)
            self._response.send(response.status, headers, response.body, self._own_headers())
        elif response is not None and is_own and not self._response.first_byte_at:
            self._response.end_with_refusal(response.status, response.body)
        else:
            message = f"{role.value} instance failed: {failure}; no other {role.value} instance could take the request"
            raise RequestEnded(ApiError(502, message, f"{role.value}_failed"))

    def _end_with(self, error: ApiError | None) -> None:
        """End the request for the client, however much it has got; and the attempt, if one still runs."""
        if self.attempt is not None:
            self.attempt.give_up()
        if self._num_attempts > len(self._records):
            self._end_attempt(error.message if error else "the client left")
        self._response.end_with(error, self._own_headers())

    def _own_headers(self) -> Headers:
        """Who served the request, and why; the whole story is at /admin/explain."""
        headers = []
        if self.request_id:
            # A client's own id may hold any printable character.
            headers.append((b"x-router-request-id", self.request_id.encode("ascii", "backslashreplace")))
            headers.append(encode_request_id(self._sent_id or self.request_id))
        selection = self._selection
        if selection is not None:
            decision = selection.decisions[0]
            for instance in (selection.prefill, selection.answering):
                if instance is not None:
                    headers.append((_INSTANCE_HEADERS[instance.role], instance.key.encode()))
            reason = f"{decision.reasons.get('policy', '')}; cached={decision.cached_tokens}"
            headers.append((b"x-router-decision", reason.encode()))
        return headers

    def _write_record(self) -> None:
        """Keep the story of the request, and let the policies learn from it."""
        request, response = self._request, self._response
        record = RequestRecord(
            request.method,
            request.path,
            self._started_unix,
            request_id=self.request_id,
            client=self.client or "",
            trace_id=self._trace_id,
            status=response.status,
            error=response.error_code,
            streamed=response.is_event_stream,
            first_byte_ms=(response.first_byte_at - self.started) * 1e3 if response.first_byte_at else 0.0,
            total_ms=(time.perf_counter() - self.started) * 1e3,
            bytes_sent=response.bytes_sent,
            chunks=response.chunks,
            attempts=self._records,
        )
        if self._selection is not None and self.attempt is not None and self.body is not None:
            self._record_serving(record, self._selection, self.attempt)
        self._services.audit.add_record(record)
        if self._services.is_debugging:
            log_request_end(record)

    def _record_serving(self, record: RequestRecord, selection: Selection, attempt: Attempt) -> None:
        """Note who served a completion, and the engine's figures of it."""
        usage = self._response.read_usage()
        record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        prefill, answering, first = selection.prefill, selection.answering, selection.decisions[0]
        if prefill is None:
            leg, record.mixed = attempt.answering, answering.key
        else:
            assert attempt.prefill is not None
            leg, record.prefill, record.decode = attempt.prefill, prefill.key, answering.key
            if usage.cached_tokens is None:
                usage = read_usage(leg.exchange.kept_body) or usage
        record.cached_tokens = usage.cached_tokens
        record.predicted_cached_tokens = first.cached_tokens
        if not record.error and record.status < 400:
            self._teach_policy(attempt, leg, first, usage)

    def _teach_policy(self, attempt: Attempt, leg: Leg, decision: Decision, usage: Usage) -> None:
        """Let the policy that chose the leg's instance learn from how it went."""
        ttft = attempt.prefilled_at - attempt.sent_at if attempt.prefilled_at else None
        outcome = Outcome(
            decision.key, leg.queued_before, ttft, usage.prompt_tokens, usage.cached_tokens, usage.own_cached_tokens
        )
        self._services.selector.policies[leg.instance.role].observe_outcome(self._features, decision, outcome)


def _make_request_id() -> str:
    """A random UUID of version 4; not from ``uuid``, which asks the kernel for each."""
    text = f"{random.getrandbits(128):032x}"
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-a{text[17:20]}-{text[20:]}"
