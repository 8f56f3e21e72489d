"""RetryLoop: sends the attempts of one request, one after another, until one succeeds or no more may follow.

Only the table ``RULES`` decides whether a request is sent again. The columns of a row are: the kind of the request
(``Sent``), how far it had got (``Reached``), and the cause of the failure (``Trouble``). The first matching row gives
the number of attempts that may fail in this way. Two rules explain the numbers:

- A request is not sent again after two instances have died while they processed it. Prefill and decode count
  separately, before and during the response. The reason is that the request may have caused the deaths.
- A request that may change the state of an instance is sent only once (RFC 9110, 9.2.2).
"""

from __future__ import annotations

import enum
import itertools
import random
import time
from asyncio import sleep
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from router.fleet import EngineKind, Instance
from router.http import ApiError, ClientRequest, RequestEnded, TimedOut, UpstreamError
from router.policies import RequestFeatures
from router.serving.attempt import Attempt, AttemptOwner, LegFailed, Reached, StreamStalled, Trouble
from router.serving.dialects import NotReady
from router.serving.plan import LegMaker, list_members, make_merger, plan_requests, request_usage
from router.serving.reading.api import GENERATING
from router.serving.reading.parsed_request import ParsedRequest
from router.serving.relay import HELD_BYTES, MERGED_BYTES, ClientResponse
from router.serving.resume import ResponseMerger, Resumption, StreamMerger, find_obstacle
from router.serving.selection import NoInstance, Selection, Selector
from router.serving.services import Services
from router.serving.timeline import RequestTimeline

__all__ = ["ABORTED", "MAX_ATTEMPTS", "MAX_DEATHS", "RULES", "RetryLoop", "Sent", "classify", "find_limit"]

MAX_ATTEMPTS = 6
MAX_DEATHS = 2

# Pause before the third attempt; doubled before each further one. There is no pause before the second attempt.
BACK_OFF_SECONDS = 0.05

# After a lost connection, the request may use the instance again after this time: it has restarted if it is healthy.
RETURN_SECONDS = 2.0

_NONE: frozenset[str] = frozenset()
# RFC 9110, 9.2.2.
_IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
# Paths at which an engine's response depends only on the request, and nothing is stored.
_COMPUTING_PATHS = frozenset(
    {
        *("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/v1/classify", "/tokenize", "/detokenize"),
        *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/v1/messages/count_tokens"),
        *("/v1/moderations", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/reward"),
    }
)

ABORTED = ApiError(409, "the request was aborted", "aborted")


class Sent(enum.Enum):
    """Kind of a request. It decides whether a request that was sent to an instance may be sent again."""

    GENERATION = "generation"
    """A request for which tokens are generated: chat, completions, responses, messages."""
    REPEATABLE = "repeatable"
    """A request that generates nothing, and that may be sent twice without an additional effect."""
    ONCE = "once"
    """Any other request. It may change the state of an instance, so it is sent only once."""


_ANY_SENT, _ANY_REACH, _ANY_TROUBLE = frozenset(Sent), frozenset(Reached), frozenset(Trouble)

RULES: Sequence[tuple[frozenset[Sent], frozenset[Reached], frozenset[Trouble], int]] = (
    # Columns: kind of the request, how far it had got, cause of the failure, number of attempts that may fail like this
    (_ANY_SENT, _ANY_REACH, frozenset({Trouble.REJECTION}), 1),
    (_ANY_SENT, frozenset({Reached.UNSENT}), _ANY_TROUBLE, MAX_ATTEMPTS),
    (frozenset({Sent.ONCE}), _ANY_REACH, _ANY_TROUBLE, 1),
    (frozenset({Sent.REPEATABLE}), frozenset({Reached.RELAYED}), _ANY_TROUBLE, 1),
    # Deaths are counted in total, before and during the response; other failures since the last byte the client got.
    (_ANY_SENT, _ANY_REACH, frozenset({Trouble.DEATH}), MAX_DEATHS),
    # Stalled streams are resumed up to --stream-resume-count times.
    (_ANY_SENT, _ANY_REACH, _ANY_TROUBLE, MAX_ATTEMPTS),
)


def classify(method: str, path: str) -> Sent:
    """Return the kind of a client's request, by its method and path."""
    if path in GENERATING:
        return Sent.GENERATION
    if method in _IDEMPOTENT_METHODS or path in _COMPUTING_PATHS:
        return Sent.REPEATABLE
    return Sent.ONCE


def _list_limits() -> Iterator[tuple[tuple[Sent, Reached, Trouble], int]]:
    for cell in itertools.product(Sent, Reached, Trouble):
        row = next(row for row in RULES if all(value in allowed for value, allowed in zip(cell, row[:3], strict=True)))
        yield cell, row[3]


_LIMITS: Mapping[tuple[Sent, Reached, Trouble], int] = dict(_list_limits())


def find_limit(sent: Sent, reached: Reached, trouble: Trouble) -> int:
    """Return how many attempts of a request may fail with ``trouble`` at ``reached``; 1: no attempt may follow."""
    return _LIMITS[sent, reached, trouble]


class RetryLoop:
    """Sends the attempts of one request. Other code may set ``is_aborted``, but no other public attribute."""

    __slots__ = (
        *("_request", "_response", "_retries", "_selection", "_services", "_timeline"),
        *("current", "end_reason", "is_aborted", "number", "resumption"),
    )

    def __init__(
        self, request: ClientRequest, services: Services, timeline: RequestTimeline, response: ClientResponse
    ) -> None:
        self._request = request
        self._services = services
        self._timeline = timeline
        self._response = response
        self._retries: Retries | None = None  # set after the first failed attempt
        self._selection: Selection | None = None  # the instances of the present attempt
        self.current: Attempt | None = None
        """The attempt that runs, or the last attempt if none runs; None before the first attempt."""
        self.number = 0
        """Number of attempts that have begun."""
        self.resumption: Resumption | None = None
        """State of the resumption; None if no instance has interrupted the request."""
        self.end_reason = ""
        """Why no attempt follows the last failed attempt; ``""`` if another attempt follows."""
        self.is_aborted = False
        """Whether a client has aborted the request at its engines. Then no attempt follows the present one."""

    def send(self, parsed: ParsedRequest, owner: AttemptOwner) -> None:
        """Select instances, and send an attempt: the first attempt, or the attempt for the next segment.

        Raises:
            NotReady: the router must first query the id of prefill's engine. ``send_after`` does that.
            RequestEnded: no instance can serve the request.
        """
        try:
            self._selection = self._select_instances(parsed)
        except NoInstance as none:
            raise RequestEnded(self._explain_none(none)) from None
        self._make_attempt(parsed, self._selection).send(owner)

    async def send_after(
        self, cause: LegFailed | NotReady, parsed: ParsedRequest, owner: AttemptOwner
    ) -> LegFailed | None:
        """Send the next attempt, after the last attempt has failed or a pair was not ready.

        Args:
            cause: the failure of the last attempt; or ``NotReady``, with the query that must be sent first.
            parsed: the client's request.
            owner: gets the events of the attempt.

        Returns:
            The failure that ends the request; None if an attempt was sent.

        Raises:
            RequestEnded: the request was aborted, or the instances cannot serve it.
        """
        while True:
            selection = self._selection
            assert selection is not None
            failure = await self._learn(cause, selection) if isinstance(cause, NotReady) else cause
            if failure is not None:
                await self._note_failure(failure, selection)
                if self.end_reason:
                    return failure
                self._services.metrics.count_retry(failure.instance.key)
                await self._note_retry().exclude_and_back_off(failure, selection)
                try:
                    self._selection = selection = self._select_instances(parsed)
                except NoInstance:
                    return failure
            try:
                self._make_attempt(parsed, selection).send(owner)
            except NotReady as unready:  # also if another request has failed and discarded what was known about prefill
                cause = unready.with_traceback(None)
            else:
                return None

    async def resume_after_preemption(self, parsed: ParsedRequest) -> None:
        """Prepare the next segment of a request that its decode instance has preempted.

        Raises:
            RequestEnded: no instance can continue the response.
        """
        merger, selection, services = self._response.merger, self._timeline.selection, self._services
        assert merger is not None
        assert selection is not None
        decode = selection.answering
        self._timeline.end_attempt(self.current, "preempted")
        services.metrics.count_preemption(decode.key)
        if services.settings.preempt_retry_exclude_decode:
            self._note_retry().avoid(decode.key)
        self.resumption = self.resumption or Resumption(services.settings)
        error = await self.resumption.prepare_after_preemption(merger, decode, services.upstream)
        assert self.current is not None
        self._response.end_segment(self.current)
        if error is not None:
            raise RequestEnded(error)
        if isinstance(merger, StreamMerger):
            await self._remove_unfinished_character(parsed, self.resumption, merger)

    async def resume_after_failure(self, parsed: ParsedRequest, attempt: Attempt, exc: UpstreamError) -> None:
        """Prepare the next segment of a stream whose instance has died, ended the stream early, or hangs.

        Raises:
            RequestEnded: no instance can continue the response.
        """
        response, services, instance = self._response, self._services, attempt.answering.instance
        is_stall = isinstance(exc, StreamStalled)
        if is_stall:
            attempt.give_up()
            error = ApiError(504, str(exc), "stream_stalled")
        else:
            attempt.break_off(exc)
            role = instance.role.value
            error = ApiError(502, f"{role} instance failed in the middle of its response: {exc}", f"{role}_failed")
        trouble = Trouble.STALL if is_stall else Trouble.DEATH
        self._timeline.end_attempt(attempt, f"broke off: {exc}", trouble.value)
        merger = response.merger if isinstance(response.merger, StreamMerger) else None
        if not response.is_event_stream or parsed.body is None or not services.settings.stream_resume_count:
            raise RequestEnded(error) from exc
        reached = Reached.RELAYED if response.bytes_sent else Reached.HEAD
        retries = self._note_retry()
        end_reason = retries.find_end(reached, trouble, int(not is_stall), instance.key)
        self.resumption = self.resumption or Resumption(services.settings)
        is_chat = parsed.api.is_chat
        failed = self.resumption.prepare_after_failure(merger, parsed.body, instance, error, is_chat=is_chat)
        if failed is None and merger is None and response.bytes_sent:
            engine = instance.registration.engine
            why = (
                find_obstacle(parsed.body, engine, is_chat)
                if parsed.api.is_continuable
                else "the API of the request cannot continue a response"
            )
            failed = self.resumption.explain(why or "the token ids of the stream are not known")
        if failed is None and end_reason and not (merger is not None and merger.complete):
            failed = self.resumption.explain(end_reason)
        if failed is not None:
            raise RequestEnded(failed) from exc
        response.end_segment(attempt)
        services.metrics.count_resumption(instance.key)
        retries.begin_again(instance.key, is_hung=isinstance(exc, TimedOut))
        await self._remove_unfinished_character(parsed, self.resumption, merger)

    async def _remove_unfinished_character(
        self, parsed: ParsedRequest, resumption: Resumption, merger: StreamMerger | None
    ) -> None:
        """Remove the tokens of an incomplete character at the end of a stream, which another instance will continue.

        Raises:
            RequestEnded: it is not known whether the stream ends with an incomplete character.
        """
        if merger is None or not merger.doubtful_ids:
            return
        try:
            asked = self._select_instances(parsed).answering
        except NoInstance as none:
            raise RequestEnded(self._explain_none(none)) from None
        if why := await resumption.remove_unfinished_character(merger, asked, self._services.upstream):
            raise RequestEnded(resumption.explain(why))

    def _note_served(self, instance: Instance) -> None:
        """Record that the gateway has sent the present attempt to ``instance``, not to the chosen instance."""
        attempt, selection = self.current, self._timeline.selection
        assert attempt is not None
        assert selection is not None
        attempt.answering.move(instance)
        decision = selection.decisions[-1]._replace(key=instance.key, cached_tokens=0)
        decisions = (*selection.decisions[:-1], decision)
        self._timeline.selection = selection._replace(answering=instance, decisions=decisions)

    def _explain_none(self, none: NoInstance) -> ApiError:
        """Return why no instance can be used. For an interrupted stream, return why it was interrupted."""
        if self.resumption is not None and self.resumption.is_broken:
            return self.resumption.explain("no other instance can take the request")
        return none.error

    def _select_instances(self, parsed: ParsedRequest) -> Selection:
        """Select the instances for the next attempt; raise ``NoInstance`` if there are none."""
        gateway = self._request.gateway
        excluded = _NONE if gateway is None else gateway.list_excluded()
        stored_at = self._services.stored_responses.find_instance(parsed.stored_id) if parsed.stored_id else None
        if stored_at is not None:
            if stored_at in excluded:
                message = f"{stored_at} stores the response, but the gateway does not use this instance"
                raise NoInstance(ApiError(503, message, "no_instance", "previous_response_id"))
            if self._retries is not None and self._retries.excludes(stored_at):
                message = f"{stored_at}, which stores the response, has failed"
                raise NoInstance(ApiError(502, message, "keeper_failed", "previous_response_id"))
            return self._services.selector.choose_named(parsed.features, stored_at)
        selector, is_completion = self._services.selector, parsed.body is not None
        if self._retries is not None:
            return self._retries.select(selector, parsed.features, is_completion, excluded)
        choose = selector.choose if is_completion else selector.choose_any
        return choose(parsed.features, excluded)

    def _note_retry(self) -> Retries:
        """Return the record of the failed attempts, which is created at the first call."""
        if self._retries is None:
            self._retries = Retries(self._classify())
        return self._retries

    def _classify(self) -> Sent:
        return classify(self._request.method, self._request.path)

    async def _learn(self, unready: NotReady, selection: Selection) -> LegFailed | None:
        """Query the id of prefill's engine, which the pair needs. Return the failure if this fails; else None."""
        assert selection.prefill is not None
        self._timeline.selection = selection
        try:
            await unready.learn(self._services.upstream)
        except UpstreamError as exc:
            failure = LegFailed(selection.prefill, str(exc), reached=Reached.UNSENT, trouble=Trouble.UNREACHABLE)
            failure.__cause__ = exc.with_traceback(None)
            return failure
        return None

    def _make_attempt(self, parsed: ParsedRequest, selection: Selection) -> Attempt:
        """Create the attempt at the selected instances. Nothing is sent yet.

        Raises:
            NotReady: the router must first query the id of prefill's engine.
            RequestEnded: the instances cannot serve the request, or it was aborted.
        """
        if self.is_aborted:
            raise RequestEnded(ABORTED)
        services, response = self._services, self._response
        # Each attempt has its own id, because an engine may still know that of the previous attempt.
        request_id = self._timeline.request_id + self._timeline.tag
        if self.number:
            request_id += f"-retry{self.number}"
        plan = plan_requests(services.pairs, selection, parsed, request_id)
        self.number += 1
        pair = plan.pair
        self._timeline.selection, self._timeline.pair = plan.selection, pair
        if services.is_debugging:
            self._timeline.log_choice(parsed.features.prompt_tokens)
        engine = plan.selection.answering.registration.engine
        if response.merger is None:
            response.merger = make_merger(parsed, plan, may_be_resumed=services.settings.stream_resume_count > 0)
        if isinstance(response.merger, StreamMerger):  # another attempt may use another engine
            response.merger.nulls_ids = engine is EngineKind.VLLM
        # No header contains an id that is not ASCII; see ``request_id_header``.
        own_id = request_id if self._timeline.tag or not request_id.isascii() else ""
        members = list_members(parsed, engine, response.merger, self.resumption, own_id)
        if response.token_count is not None:
            usage, response.has_null_usages = request_usage(parsed, engine)
            members |= usage
            response.hides_usage = bool(usage)
        if self._retries is not None:
            is_fresh = self._retries.wants_fresh
        else:  # a request that is not sent again must not use an idle connection, which may just have been closed
            is_fresh = parsed.body is None and self._classify() is Sent.ONCE
        gateway = self._request.gateway
        if gateway is not None:
            gateway.on_served = self._note_served
        sender = gateway or services.upstream
        maker = LegMaker(services.upstream, parsed, plan, members, is_fresh, self._timeline.trace, sender)
        answering, prefill = maker.make_legs()
        is_in_order = pair is not None and pair.is_prefill_first
        set_decode_request = partial(maker.set_decode_request, answering) if is_in_order else None
        held = MERGED_BYTES if isinstance(response.merger, ResponseMerger) else HELD_BYTES
        self.current = Attempt(
            answering,
            prefill,
            plan.engine_ids,
            set_decode_request=set_decode_request,
            may_err_late=pair is not None and pair.may_err_late,
            hold_bytes=0 if parsed.body is None else held,
            aborter=services.aborter,
            on_trouble=services.health.on_trouble,
        )
        return self.current

    async def _note_failure(self, failure: LegFailed, selection: Selection) -> None:
        """Record a failed attempt, and end its other leg. Count it for the instance if the instance is the cause.

        Raises:
            RequestEnded: the attempt failed because a client has aborted the request.
        """
        deaths, is_stale = int(failure.trouble is Trouble.DEATH), failure.is_stale
        if self.current is not None:
            is_answering = failure.instance is self.current.answering.instance
            if is_answering and failure.trouble in (Trouble.DEATH, Trouble.UNREACHABLE):
                await self.current.await_prefill_end()
            # Each death counts once, also if the next attempt fails before it has an ``Attempt``.
            deaths, self.current.deaths = max(deaths, self.current.deaths), 0
            # Another instance that works at the request may die a moment later, which nobody would count.
            is_stale &= not self.current.give_up(culprit=failure.instance)
        if selection.prefill is not None:
            self._services.pairs.forget_prefill(selection.prefill)
        self._timeline.end_attempt(self.current, str(failure), failure.trouble.value)
        if self.is_aborted:
            raise RequestEnded(ABORTED)
        is_broken = failure.response is None or failure.response.status >= 500
        if is_broken and not failure.is_stale and failure.trouble not in (Trouble.HAND_OVER, Trouble.REJECTION):
            failure.instance.record_failure(time.monotonic(), str(failure))
        if failure.response is not None and failure.trouble is Trouble.DEATH:
            self._services.health.probe_soon(failure.instance)
        self.end_reason = self._note_retry().find_end(
            failure.reached, failure.trouble, deaths, failure.instance.key, is_stale=is_stale
        )


class Retries:
    """The failed attempts of one request, and the instances at which they failed."""

    __slots__ = (
        "_avoided",
        "_deaths",
        "_excluded",
        "_failed",
        "_hung",
        "_pauses",
        "_returns",
        "_sent",
        "_stale_at",
        "wants_fresh",
    )

    def __init__(self, sent: Sent) -> None:
        self.wants_fresh = False
        """Whether each leg gets a new connection, because an attempt has failed.

        If a leg used an idle connection that its instance closes at this moment, the instance would count as dead.
        """
        self._sent = sent
        self._deaths = 0  # number of instances that have died, or may have, while they served the request
        self._failed = 0  # number of failed attempts since the last byte that the client got
        self._excluded = _NONE  # instances that are not used again
        self._avoided = _NONE  # instances that are used again only if there is no other
        self._hung = _NONE
        self._returns: dict[str, float] | None = None  # for some excluded instances, when they may be used again
        self._pauses = 0
        self._stale_at = ""  # the instance that closed an idle connection in the attempt before

    def select(
        self, selector: Selector, features: RequestFeatures, is_completion: bool, excluded: frozenset[str] = _NONE
    ) -> Selection:
        """Select the instance or the pair for the next attempt. Instances in ``excluded`` are not used.

        Raises:
            NoInstance: no instance is left.
        """
        choose = selector.choose if is_completion else selector.choose_any
        if self._returns:
            now = time.monotonic()
            self._excluded -= {key for key, at in self._returns.items() if now >= at}
        if self._avoided:
            try:
                return choose(features, self._excluded | self._avoided | excluded)
            except NoInstance:
                pass  # the avoided instances are used below
        return choose(features, self._excluded | excluded)

    def excludes(self, key: str) -> bool:
        """Return whether the request must not be sent to the instance ``key`` again."""
        return key in self._excluded

    def avoid(self, key: str) -> None:
        """Use the instance ``key`` again only if there is no other instance."""
        self._avoided |= {key}

    def find_end(self, reached: Reached, trouble: Trouble, deaths: int, key: str, *, is_stale: bool = False) -> str:
        """Record a failed attempt. Return why the request is not sent again; ``""`` if it is sent again.

        Args:
            reached: how far the request had got.
            trouble: the cause of the failure.
            deaths: number of instances that have died, or may have died, in this attempt.
            key: the instance that has failed.
            is_stale: whether this instance had probably closed the connection before the request was sent, and no other
                instance was processing the request.
        """
        if trouble is Trouble.DEATH and not is_stale and self._stale_at == key:
            # The instance has broken an idle connection and then a new one. This is one death and one attempt.
            deaths -= 1
            self._failed -= 1
        self._stale_at = key if is_stale else ""
        self._deaths += deaths
        self._failed += 1
        limit = find_limit(self._sent, reached, trouble)
        if limit == 1:
            return (
                "a request of this kind is not sent again"
                if trouble is not Trouble.REJECTION
                else "the instance refused the request"
            )
        # An instance that has died had got the request, although the failure may be that of the other one of a pair.
        reached = Reached.SENT if reached is Reached.UNSENT else reached
        if deaths and self._deaths >= find_limit(self._sent, reached, Trouble.DEATH):
            return f"instances failed {self._deaths} times while they served this request, so it is not sent again"
        return f"the request was sent {self._failed} times" if self._failed >= limit else ""

    def begin_again(self, key: str, *, is_hung: bool) -> None:
        """Reset the counts after a failure in the middle of a response, so that the next segment can be sent.

        Instances that failed earlier may be used again, and ``key`` only if there is no other instance.

        Args:
            key: the instance that has failed.
            is_hung: whether this instance must not be used again, because it may hang again.
        """
        if is_hung:
            self._hung |= {key}
        self._excluded, self._returns = self._hung, None
        self._avoided = frozenset({key})
        self._failed = self._pauses = 0
        self.wants_fresh = True

    async def exclude_and_back_off(self, failure: LegFailed, selection: Selection) -> None:
        """Record which instances the next attempt must not use or should avoid, and wait before the next attempt."""
        key, self.wants_fresh = failure.instance.key, True
        if failure.is_stale:
            return
        if failure.trouble is Trouble.HAND_OVER and selection.prefill is not None:
            self._avoided |= {selection.prefill.key, selection.answering.key}
        else:
            self._excluded |= {key}
            cause = failure.__cause__
            if isinstance(cause, UpstreamError) and not isinstance(cause, TimedOut) and key not in self._hung:
                self._returns = {**(self._returns or {}), key: time.monotonic() + RETURN_SECONDS}
        self._pauses += 1
        if self._pauses > 1:
            await sleep(BACK_OFF_SECONDS * 2 ** (self._pauses - 2) * random.uniform(0.5, 1.0))
