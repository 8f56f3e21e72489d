"""The attempts for one request, one after another: which instances are used, and how failures affect the next
attempt.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from router.http import ApiError, TimedOut, UpstreamError
from router.serving.asking import LegMaker, ask_for_usage, ask_instances, list_members
from router.serving.attempt import Attempt, StreamStalled
from router.serving.dialects import NotReady
from router.serving.response import HELD_BYTES, MERGED_BYTES, RequestEnded
from router.serving.resume import ResponseMerger, Resuming, StreamMerger, find_obstacle, make_merger
from router.serving.retry import LegFailed, Reached, Retries, Sent, Trouble, classify
from router.serving.selection import NoInstance

if TYPE_CHECKING:
    from router.http import ClientRequest
    from router.serving.reading.parsed_request import ParsedRequest
    from router.serving.response import ClientResponse
    from router.serving.selection import Selection
    from router.serving.services import Services
    from router.serving.story import Story

__all__ = ["ABORTED", "Attempts"]

ABORTED = ApiError(409, "the request was aborted", "aborted")


class Attempts:
    """All attempts made for one request. Callers only read its public attributes, except ``ended`` and
    ``is_aborted``.
    """

    __slots__ = (
        *("_is_prepared", "_request", "_response", "_retries", "_services", "_story"),
        *("current", "ended", "end_reason", "is_aborted", "number", "resuming"),
    )

    def __init__(self, request: ClientRequest, services: Services, story: Story, response: ClientResponse) -> None:
        self._request = request
        self._services = services
        self._story = story
        self._response = response
        self._retries: Retries | None = None  # set after the first failed attempt
        self._is_prepared = False  # ``prepare`` has selected instances, and maybe created an attempt
        self.current: Attempt | None = None
        """The present attempt, or the last one."""
        self.number = 0
        """Number of attempts made."""
        self.resuming: Resuming | None = None
        """State of the resumption, once an instance has interrupted the request."""
        self.ended: RequestEnded | None = None
        """Error that ends the request instead of the next attempt."""
        self.end_reason = ""
        """Why no other attempt follows the last failed one."""
        self.is_aborted = False
        """Whether a client has made its engines stop it: if the present attempt fails, it is the last."""

    def prepare(self, parsed: ParsedRequest) -> Attempt:
        """Return the first attempt, with which ``begin_response`` continues; nothing is sent yet.

        Raises:
            Exception: the same as ``begin_response``, which will raise it again.
        """
        attempt = self._make_attempt(parsed, self._select_instances(parsed))
        self._is_prepared = True
        return attempt

    def settle(self) -> None:
        """Note that the prepared attempt has its answer; otherwise ``begin_response`` would make another attempt."""
        self._is_prepared = False

    async def begin_response(self, parsed: ParsedRequest) -> bytes:
        """Make attempts until one returns the first bytes of a response.

        Raises:
            LegFailed: all attempts failed; this is the last failure.
            NoRoom: the router cannot send it, to any instance.
            RequestEnded: no instance could take the request, or the request was ended.
        """
        try:
            selection = self._story.selection if self._is_prepared else None
            selection = selection or self._select_instances(parsed)
        except NoInstance as none:
            raise RequestEnded(self._explain_none(none)) from None
        while True:
            try:
                attempt = self.current if self._is_prepared else None
                self._is_prepared = False
                while attempt is None:
                    if self.ended is not None:
                        raise self.ended
                    if self.is_aborted:
                        raise RequestEnded(ABORTED)
                    try:
                        attempt = self._make_attempt(parsed, selection)
                    except NotReady as unready:  # again, if a failure of another request discarded the facts meanwhile
                        await self._learn_of_prefill(unready, selection)
                return await attempt.begin()
            except LegFailed as failure:
                await self._note_failure(failure, selection)
                if self.end_reason:
                    raise
                self._services.metrics.count_retry(failure.instance.key)
                await self._note_retry().exclude_and_back_off(failure, selection)
                try:
                    selection = self._select_instances(parsed)
                except NoInstance:
                    raise failure from None

    async def go_on_after_preemption(self) -> None:
        """Prepare the next segment of a request that its decode instance preempted.

        Raises:
            RequestEnded: it cannot be continued.
        """
        merger, selection, services = self._response.merger, self._story.selection, self._services
        assert merger is not None
        assert selection is not None
        decode = selection.answering
        self._story.end_attempt(self.current, "preempted")
        services.metrics.count_preemption(decode.key)
        if services.settings.preempt_retry_exclude_decode:
            self._note_retry().avoid(decode.key)
        self.resuming = self.resuming or Resuming(services.settings)
        error = await self.resuming.prepare_after_preemption(merger, decode, services.upstream)
        assert self.current is not None
        self._response.end_segment(self.current)
        if error is not None:
            raise RequestEnded(error)

    async def go_on_after_break(self, parsed: ParsedRequest, attempt: Attempt, exc: UpstreamError) -> None:
        """Prepare the next segment of a stream after its instance died, ended the stream early, or hung.

        Raises:
            RequestEnded: it cannot be continued.
        """
        response, services, instance = self._response, self._services, attempt.answering.instance
        is_stall = isinstance(exc, StreamStalled)
        if is_stall:
            attempt.give_up()
            error = ApiError(504, str(exc), "stream_stalled")
        else:
            attempt.break_off(exc)
            role = instance.role.value
            error = ApiError(502, f"{role} instance failed in the middle of its answer: {exc}", f"{role}_failed")
        self._story.end_attempt(attempt, f"broke off: {exc}")
        merger = response.merger if isinstance(response.merger, StreamMerger) else None
        if not response.is_event_stream or parsed.body is None or not services.settings.stream_resume_count:
            raise RequestEnded(error) from exc
        reached = Reached.RELAYED if response.bytes_sent else Reached.HEAD
        trouble = Trouble.STALL if is_stall else Trouble.DEATH
        retries = self._note_retry()
        end_reason = retries.find_end(reached, trouble, deaths=not is_stall)
        self.resuming = self.resuming or Resuming(services.settings)
        is_chat = parsed.api.is_chat
        failed = self.resuming.prepare_after_break(merger, parsed.body, instance, error, is_chat=is_chat)
        if failed is None and merger is None and response.bytes_sent:
            engine = instance.registration.engine
            why = find_obstacle(parsed.body, engine, is_chat) if parsed.api.is_continuable else "its API has no way to"
            failed = self.resuming.explain(why or "its tokens' ids are not known")
        if failed is None and end_reason and not (merger is not None and merger.complete):
            failed = self.resuming.explain(end_reason)
        if failed is not None:
            raise RequestEnded(failed) from exc
        response.end_segment(attempt)
        services.metrics.count_resumption(instance.key)
        retries.begin_again(instance.key, is_hung=isinstance(exc, TimedOut))
        await self._settle_end(parsed, self.resuming, merger)

    async def _settle_end(self, parsed: ParsedRequest, resuming: Resuming, merger: StreamMerger | None) -> None:
        """Make a stream continue from the end of a character.

        Raises:
            RequestEnded: that position cannot be determined.
        """
        if merger is None or not merger.doubtful_ids:
            return
        try:
            asked = self._select_instances(parsed).answering
        except NoInstance as none:
            raise RequestEnded(self._explain_none(none)) from None
        if why := await resuming.settle_end(merger, asked, self._services.upstream):
            raise RequestEnded(resuming.explain(why))

    def _explain_none(self, none: NoInstance) -> ApiError:
        """Return why no instance can be used and, for an interrupted stream, why it was interrupted."""
        if self.resuming is not None and self.resuming.is_broken:
            return self.resuming.explain("no other instance can take it")
        return none.error

    def _select_instances(self, parsed: ParsedRequest) -> Selection:
        """Return the instances for the next attempt; raise ``NoInstance`` if there are none."""
        keeper = self._services.kept_responses.find_keeper(parsed.kept_id) if parsed.kept_id else None
        if keeper is not None:
            if self._retries is not None and self._retries.excludes(keeper):
                message = f"{keeper} keeps the response, and has failed"
                raise NoInstance(ApiError(502, message, "keeper_failed", "previous_response_id"))
            return self._services.selector.choose_keeper(parsed.features, keeper)
        selector, is_completion = self._services.selector, parsed.body is not None
        if self._retries is not None:
            return self._retries.select(selector, parsed.features, is_completion)
        return selector.choose(parsed.features) if is_completion else selector.choose_any(parsed.features)

    def _note_retry(self) -> Retries:
        """Return the record of the earlier attempts, which decides on the next instances."""
        if self._retries is None:
            self._retries = Retries(self._classify())
        return self._retries

    def _classify(self) -> Sent:
        return classify(self._request.method, self._request.path)

    async def _learn_of_prefill(self, unready: NotReady, selection: Selection) -> None:
        """Query prefill for the facts that its pair needs.

        Raises:
            LegFailed: it does not report them.
        """
        assert selection.prefill is not None
        self._story.selection = selection
        try:
            await unready.learn(self._services.upstream)
        except UpstreamError as exc:
            prefill, reached, trouble = selection.prefill, Reached.UNSENT, Trouble.UNREACHABLE
            raise LegFailed(prefill, str(exc), reached=reached, trouble=trouble) from exc

    def _make_attempt(self, parsed: ParsedRequest, selection: Selection) -> Attempt:
        """Prepare the exchanges with the selected instances; nothing is sent yet.

        Raises:
            NotReady: a fact about the pair has to be learned first.
            RequestEnded: they cannot serve it.
        """
        services, response = self._services, self._response
        # An engine may still know the id of the previous attempt.
        request_id = self._story.request_id + self._story.tag
        if self.number:
            request_id += f"-retry{self.number}"
        asking = ask_instances(services.pairs, selection, parsed, request_id)
        self.number += 1
        pair = asking.pair
        self._story.selection, self._story.pair = asking.selection, pair
        if services.is_debugging:
            self._story.log_choice(parsed.features.prompt_tokens)
        engine = asking.selection.answering.registration.engine
        if response.merger is None and parsed.body is not None and parsed.api.is_continuable:
            response.merger = make_merger(
                parsed.body,
                engine,
                is_chat=parsed.api.is_chat,
                may_be_preempted=pair is not None and pair.merges_segments,
                may_be_resumed=services.settings.stream_resume_count > 0,
            )
        own_id = request_id if self._story.tag else ""
        members = list_members(parsed, engine, response.merger, self.resuming, own_id)
        if response.token_count is not None:
            asked, response.has_null_usages = ask_for_usage(parsed, engine)
            members |= asked
            response.hides_usage = bool(asked)
        if self._retries is not None:
            is_fresh = self._retries.wants_fresh
        else:  # a request without retries must not use a connection that was just closed
            is_fresh = parsed.body is None and self._classify() is Sent.ONCE
        maker = LegMaker(services.upstream, parsed, asking, members, is_fresh, self._story.trace)
        answering, prefill = maker.make_legs()
        held = MERGED_BYTES if isinstance(response.merger, ResponseMerger) else HELD_BYTES
        self.current = Attempt(
            answering,
            prefill,
            asking.engine_ids,
            ask_decode=partial(maker.ask_decode, answering) if pair is not None and pair.is_prefill_first else None,
            may_err_late=pair is not None and pair.may_err_late,
            hold_bytes=0 if parsed.body is None else held,
            aborter=services.aborter,
            on_trouble=services.health.on_trouble,
        )
        return self.current

    async def _note_failure(self, failure: LegFailed, selection: Selection) -> None:
        """Note a failed attempt: end its other leg, and count the failure for the instance unless the request or the
        partner is the cause.

        Raises:
            RequestEnded: it failed because its client aborted it.
        """
        deaths = int(failure.trouble is Trouble.DEATH)
        if self.current is not None:
            if deaths and failure.instance is self.current.answering.instance:
                await self.current.await_prefill_end()
            deaths = max(deaths, self.current.deaths)
            self.current.give_up(culprit=failure.instance)
        if selection.prefill is not None:
            self._services.pairs.forget_prefill(selection.prefill)
        self._story.end_attempt(self.current, str(failure))
        if self.is_aborted:
            raise RequestEnded(ABORTED) from failure
        is_broken = failure.response is None or failure.response.status >= 500
        if is_broken and not failure.is_stale and failure.trouble is not Trouble.HAND_OVER:
            failure.instance.record_failure(time.monotonic(), str(failure))
        if failure.response is not None and failure.trouble is Trouble.DEATH:
            self._services.health.probe_soon(failure.instance)
        self.end_reason = self._note_retry().find_end(failure.reached, failure.trouble, deaths)
