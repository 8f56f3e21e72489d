"""The data plane: every request under /v1, from the client's bytes to the answer's.

One request's way: who asks is checked and let in; the body, read once, is parsed once; instances are selected; the
attempt is sent; its first bytes decide whether it stands or another attempt is made; then bytes are relayed as they
come. Where decode puts a request down half-way, another attempt goes on with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

import orjson

from router.access import Admission, Auth
from router.fleet import HealthMonitor, Instance, Registration, disaggregate_info
from router.http.api_error import ApiError, Refused
from router.http.body import encode_member
from router.http.errors import ConnectFailed, NoRoom, UpstreamError
from router.http.message import Headers
from router.http.pool import Upstream
from router.http.server import ClientRequest, path_of
from router.http.usage import read_usage
from router.policies import Outcome
from router.serving.aborts import Aborter
from router.serving.attempt import Attempt, Leg, LegFailed
from router.serving.request import Journey, Over
from router.serving.resume import AnswerStitcher
from router.serving.selection import NoInstance, Selection, Selector
from router.settings import RouterSettings
from router.telemetry import Audit, RequestRecord, RouterMetrics

__all__ = ["Proxy"]

_log = logging.getLogger("router.serving.proxy")

# A failed attempt excludes the instance that failed; or, the first time, takes its connection for stale.
ATTEMPTS = 6
# Pairs of instances whose ``disaggregate_info`` is kept encoded.
MOST_PAIRS = 10_000
DETOKENIZE_SECONDS = 5.0

# These concern all instances at once, and are the control plane's.
_NOT_TAKEN = frozenset({"/v1/models", "/v1/abort_requests"})


class Proxy:
    """Serves requests under /v1 from the registered instances."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        auth: Auth,
        admission: Admission,
        selector: Selector,
        upstream: Upstream,
        health: HealthMonitor,
        aborter: Aborter,
        metrics: RouterMetrics,
        audit: Audit,
    ) -> None:
        self.max_body_bytes = settings.max_body_bytes
        self._timeout = settings.request_timeout_secs
        self._preempt_retries = settings.preempt_retry_count
        self._exclude_preempting = settings.preempt_retry_exclude_decode
        # A stream of an instance that fails its probes is given up when it has been silent for this long.
        self._silence = settings.health_check_interval_secs
        self._auth = auth
        self._admission = admission
        self._selector = selector
        self._upstream = upstream
        self._health = health
        self._aborter = aborter
        self._metrics = metrics
        self._audit = audit
        self._journeys: set[Journey] = set()
        self._pairs: dict[tuple[str, str], tuple[Registration, Registration, bytes]] = {}

    def takes(self, path: bytes) -> bool:
        """Whether this path (with its query) is served by an instance, rather than by the router or by all of them."""
        asked = path_of(path)
        return asked.startswith("/v1/") and asked not in _NOT_TAKEN

    def refusal(self, headers: Headers) -> Refused | None:
        """Why whoever sent these headers may not send a body; None if it may."""
        try:
            self._auth.identify_client(headers)
        except Refused as refused:
            return refused
        return None

    async def serve(self, request: ClientRequest) -> None:
        """Answer one request."""
        journey = Journey(request)
        self._journeys.add(journey)
        try:
            await self._admit(journey)
            journey.read_request()
            await self._answer(journey)
        except Refused as refused:
            journey.turn_away(refused)
        except Over as over:
            journey.end_with(over.error)
        except NoRoom as exc:
            _log.error("%s", exc)
            journey.end_with(ApiError(503, str(exc), "router_overloaded"))
        except asyncio.CancelledError:
            # While it waits in line, by ``fail``; otherwise uvicorn cancels what a client that does not read has held
            # up beyond the grace of a shutdown.
            journey.end_with(journey.over.error if journey.over else None)
        except Exception:
            _log.exception("%s %s failed", request.method, request.path)
            journey.end_with(ApiError(500, "the router failed to handle the request", "router_error"))
        finally:
            journey.over = None  # its traceback leads to the journey: only the collector could free both
            self._journeys.discard(journey)
            if journey.client is not None:
                self._admission.leave(journey.client)
            self._record(journey)

    def refused(self, method: str, path: str, error: ApiError) -> None:
        """Note a request that was answered with ``error`` without being read."""
        record = RequestRecord(method, path, time.time(), status=error.status, error=error.code)
        self._audit.add_record(record)

    def stop(self) -> None:
        """End every request in progress with a clear error: the router is stopping."""
        self._end_all(ApiError(503, "the router is stopping", "router_stopping"), time.perf_counter())

    async def watch_the_clock(self) -> None:
        """End requests that have run for longer than the time-out, until cancelled."""
        late = ApiError(504, f"the request was not answered within {self._timeout:g} s", "request_timeout")
        while True:
            await asyncio.sleep(min(1.0, self._timeout / 4))
            self._end_all(late, time.perf_counter() - self._timeout)

    def instance_failed(self, instance: Instance) -> None:
        """Give up what waits for an instance that no longer answers probes, and try it elsewhere where that may be."""
        for journey in list(self._journeys):
            if journey.attempt is not None:
                journey.attempt.instance_failed(instance, self._silence)

    def abort(self, asked: Collection[str] | None) -> list[str]:
        """Try the requests that clients know by these ids, or all, no more; answer what engines call them now."""
        return [known for journey in self._journeys for known in journey.abort(asked)]

    def _end_all(self, error: ApiError, started_before: float) -> None:
        for journey in [journey for journey in self._journeys if journey.started <= started_before]:
            journey.fail(Over(error))

    async def _admit(self, journey: Journey) -> None:
        """Check who asks, and wait until it is its turn.

        Raises:
            Refused: it may not ask, or not so much at once.
        """
        client = self._auth.identify_client(journey.request_headers)
        if not self._admission.try_enter(client):
            journey.queueing = asyncio.current_task()
            journey.watch_client()
            await self._admission.enter(client)
            journey.queueing = None
        journey.client = journey.record.client = client

    async def _answer(self, journey: Journey) -> None:
        try:
            while not await journey.relay(await self._begin(journey)):
                await self._resume(journey)
                if journey.stitcher is not None and journey.stitcher.complete:
                    journey.finish_locally()
                    break
        except LegFailed as failure:
            journey.refuse(failure)
        else:
            journey.attempt_ended("answered")

    async def _begin(self, journey: Journey) -> bytes:
        """Make attempts until one has the first bytes of an answer.

        Raises:
            LegFailed: no attempt had; this is the last one's failure.
            NoRoom: the router cannot send it, to whichever instance.
            Over: no instance could take the request, or the journey was ended.
        """
        try:
            selection = self._select(journey)
        except NoInstance as none:
            raise Over(none.error) from None
        attempts = 0
        while True:
            if journey.over is not None:
                raise journey.over
            if journey.aborted:
                raise Over(ApiError(409, "the request was aborted", "aborted"))
            journey.selection = selection
            attempt = self._attempt(journey, selection)
            attempts += 1
            try:
                return await attempt.begin()
            except LegFailed as failure:
                attempt.give_up(culprit=failure.instance)
                journey.attempt_ended(str(failure))
                self._note_failure(failure)
                if not failure.another_may_serve or attempts == ATTEMPTS:
                    raise
                self._metrics.count_retry(failure.instance.key)
                await journey.back_off(failure)
                try:
                    selection = self._select(journey)
                except NoInstance:
                    raise failure from None

    async def _resume(self, journey: Journey) -> None:
        """Prepare the next leg of a request that its decode instance put down.

        Raises:
            Over: it cannot be continued.
        """
        stitcher, selection = journey.stitcher, journey.selection
        assert stitcher is not None
        assert selection is not None
        decode = selection.answering
        journey.attempt_ended("preempted")
        journey.preemptions += 1
        self._metrics.count_preemption(decode.key)
        if self._exclude_preempting:
            journey.avoided.add(decode.key)
        if isinstance(stitcher, AnswerStitcher):
            while (ids := stitcher.wants_detokenized) is not None:
                stitcher.detokenized(await self._detokenize(decode, ids))
        if stitcher.complete:
            return
        if journey.preemptions > self._preempt_retries:
            message = f"decode instances preempted the request {journey.preemptions} times; the last was {decode.key}"
            raise Over(ApiError(503, message, "preempted"))
        if stitcher.resumption() is None:
            message = f"decode instance {decode.key} preempted the request, whose answer cannot be continued elsewhere"
            raise Over(ApiError(503, message, "preempted"))
        if not isinstance(stitcher, AnswerStitcher):
            stitcher.next_leg()

    async def _detokenize(self, instance: Instance, ids: list[int]) -> str | None:
        """The text of ``ids``, asked of an instance; None where it cannot tell."""
        body = orjson.dumps({"tokens": ids})
        headers = [(b"content-type", b"application/json")]
        try:
            answer = await self._upstream.fetch(
                instance.address, "POST", "/detokenize", headers=headers, body=body, timeout=DETOKENIZE_SECONDS
            )
            text = orjson.loads(answer.body)["prompt"] if answer.status == 200 else None
        except (UpstreamError, ValueError, KeyError, TypeError):
            return None
        return text if isinstance(text, str) else None

    def _select(self, journey: Journey) -> Selection:
        choose = self._selector.choose if journey.body else self._selector.choose_any
        if not journey.avoided:
            return choose(journey.features, journey.excluded)
        try:
            return choose(journey.features, journey.excluded | journey.avoided)
        except NoInstance:
            return choose(journey.features, journey.excluded)

    def _attempt(self, journey: Journey, selection: Selection) -> Attempt:
        """Prepare the exchanges with the selected instances; nothing is sent yet."""
        answering, prefill = selection.answering, selection.prefill
        info = b""
        if prefill is not None:
            info = self._pair_info(prefill, answering)
            journey.expect_preemption()
        data, engine_ids = journey.next_attempt(info)
        decisions = selection.decisions
        journey.attempt = Attempt(
            self._leg(journey, answering, data, decisions[-1].work),
            self._leg(journey, prefill, data, decisions[0].work) if prefill else None,
            engine_ids,
            hold_bytes=journey.hold_bytes,
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

    def _leg(self, journey: Journey, instance: Instance, data: bytes, work: float) -> Leg:
        fresh = instance.key in journey.gone_stale
        exchange = self._upstream.send_prepared(instance.address, journey.head, data, fresh=fresh)
        return Leg(instance, exchange, journey.features.prompt_tokens, work)

    def _note_failure(self, failure: LegFailed) -> None:
        """Count what the instance, and not the request or its partner, is to blame for."""
        broken = failure.answer is None or failure.answer.status >= 500
        if broken and not failure.stale and not failure.in_hand_over:
            failure.instance.record_failure(time.monotonic(), str(failure))

    def _note_trouble(self, instance: Instance, error: Exception) -> None:
        if isinstance(error, ConnectFailed):
            instance.mark_unhealthy(str(error))
        else:
            self._health.probe_soon(instance)

    def _record(self, journey: Journey) -> None:
        record = journey.record
        record.total_ms = (time.perf_counter() - journey.started) * 1e3
        if journey.selection is not None and journey.body is not None:
            self._record_serving(journey, journey.selection)
        self._audit.add_record(record)

    def _record_serving(self, journey: Journey, selection: Selection) -> None:
        """Note who served a completion, and let the policies learn from how it went."""
        record, attempt = journey.record, journey.attempt
        assert attempt is not None
        usage = journey.usage()
        record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        record.cached_tokens = usage.cached_tokens
        prefill, answering = selection.prefill, selection.answering
        first = selection.decisions[0]
        if prefill is None:
            leg, record.mixed = attempt.answering, answering.key
        else:
            assert attempt.prefill is not None
            leg, record.prefill, record.decode = attempt.prefill, prefill.key, answering.key
            if usage.cached_tokens is None:
                usage = read_usage(leg.exchange.drained) or usage
                record.cached_tokens = usage.cached_tokens
        record.predicted_cached_tokens = first.cached_tokens
        if record.error or record.status >= 400:
            return
        ttft = attempt.prefilled_at - attempt.sent_at if attempt.prefilled_at else None
        outcome = Outcome(
            first.key, leg.queued, ttft, usage.prompt_tokens, usage.cached_tokens, usage.own_cached_tokens
        )
        self._selector.policies[leg.instance.role].observe_outcome(journey.features, first, outcome)
