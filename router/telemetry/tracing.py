"""Spans for OpenTelemetry: for each request, each of its attempts, and each leg (part of an attempt at one instance).

While a request is served, the router only creates ids for the header ``traceparent``, so that the spans of an instance
become children of the span of its leg. The router creates its spans later from the records of ended requests, a few at
a time. The thread of OpenTelemetry's SDK sends them. If the receiver ends or hangs, only spans are lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcommon.spans import CONTEXT_HEADERS, SpanSender, measure_epoch, open_sender
from router.telemetry.records import AttemptRecord, LegRecord, RequestRecord, RequestTrace

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

    from router.http import ClientRequest
    from router.policies import Decision

__all__ = ["Tracer", "open_tracer"]

_log = logging.getLogger("router.telemetry.tracing")

# Number of requests whose spans are created in one step, which takes less than a millisecond.
RECORDS_AT_ONCE = 8
# Maximum time between the end of a request and the end of its prefill leg (see serving/attempt.py).
LATE_LEG_SECONDS = 6.0

SERVICE_NAME = "kvrouter"
# Attributes of a span, by their names in the access log. "session.id" is a name of OpenTelemetry's conventions.
_ID_ATTRIBUTES = {
    "session_id": "session.id",
    "parent_session_id": "router.parent_session_id",
    "req_id": "router.req_id",
    "x_bd_logid": "router.x_bd_logid",
}
_ID_CHARACTERS = 128


def open_tracer(receiver: str) -> Tracer | None:
    """Start tracing. If OpenTelemetry's packages are missing, log a message and return None.

    Args:
        receiver: URL of the receiver of spans.
    """
    return open_sender(Tracer, receiver, _log)


class Tracer(SpanSender):
    """Begins traces, and creates the spans of ended requests. All methods must be called in the event loop's thread."""

    def __init__(self, receiver: str) -> None:
        super().__init__(receiver, SERVICE_NAME, "router", _log)
        self._pending: deque[RequestRecord] = deque()  # their spans are created in the next turns of the event loop
        self._late: list[RequestRecord] = []  # ended requests with a prefill leg that has not ended
        self._epoch = 0.0  # the time at which ``time.perf_counter`` was 0, in seconds since 1970

    def begin_trace(self, request: ClientRequest) -> RequestTrace | None:
        """Continue the trace of the client's request, or begin a new one.

        Remove the request's header ``traceparent``, because each leg gets its own. If the client's header says that the
        request is not traced, return None. Then the instances get the client's header.
        """
        api = self._api
        parent, trace_id, result = self._sample(request.headers, f"{request.method} {request.path}")
        has_parent = parent.is_valid
        is_sampled = result.decision.name == "RECORD_AND_SAMPLE"
        if has_parent and not is_sampled and not parent.trace_flags.sampled:
            return None
        # The header tracestate has no meaning without a valid traceparent.
        dropped = CONTEXT_HEADERS[:1] if has_parent else CONTEXT_HEADERS
        if any(name in CONTEXT_HEADERS for name, _ in request.headers):
            request.headers = [header for header in request.headers if header[0] not in dropped]
        flags = api.TraceFlags(api.TraceFlags.SAMPLED if is_sampled else api.TraceFlags.DEFAULT)
        context = api.SpanContext(trace_id, RequestTrace.make_span_id(), False, flags, parent.trace_state)
        return RequestTrace(context, parent if has_parent else None, result.attributes or {})

    def on_batch(self, batch: Sequence[RequestRecord]) -> None:
        """Receive a batch of ended requests, and schedule the creation of their spans."""
        is_idle = not self._pending
        self._pending.extend(record for record in batch if record.trace is not None and record.trace.is_sampled)
        if is_idle and self._pending:
            asyncio.get_running_loop().call_soon(self._make_some)

    def close(self) -> None:
        """Create the remaining spans, and wait a short time until they are sent."""
        for record in (*self._pending, *self._late):
            self._make_spans(record)
        super().close()

    def _make_some(self) -> None:
        for _ in range(min(RECORDS_AT_ONCE, len(self._pending))):
            record = self._pending.popleft()
            if all(exchange.ended_at for attempt in record.attempts for _, _, exchange, _ in attempt.legs):
                self._make_spans(record)
            else:
                self._late.append(record)
                asyncio.get_running_loop().call_later(LATE_LEG_SECONDS, self._make_late, record)
        if self._pending:
            asyncio.get_running_loop().call_soon(self._make_some)

    def _make_late(self, record: RequestRecord) -> None:
        self._late.remove(record)
        self._make_spans(record)

    def _make_spans(self, record: RequestRecord) -> None:
        trace = record.trace
        assert trace is not None
        self._epoch = measure_epoch(time.perf_counter)
        end = record.started + record.total_ms / 1e3
        events = [("first byte", record.started + record.first_byte_ms / 1e3)] if record.first_byte_ms else []
        usage = self._name_usage(
            record.prompt_tokens, record.completion_tokens, record.cached_tokens, _OPERATIONS.get(record.path, "")
        )
        self._add(
            f"{record.method} {record.path}",
            trace.context,
            trace.parent,
            (record.started, end),
            {**_describe_request(record, trace), **usage},
            kind=self._api.SpanKind.SERVER,
            trouble=_find_trouble(record),
            events=events,
        )
        for number, attempt in enumerate(record.attempts, 1):
            self._make_attempt_spans(record, trace, number, attempt)

    def _make_attempt_spans(
        self, record: RequestRecord, trace: RequestTrace, number: int, attempt: AttemptRecord
    ) -> None:
        context = self._derive_context(trace, trace.make_span_id())
        is_good = attempt.ended == "answered"
        attributes = {"router.request_id": record.request_id, "router.attempt": number, "router.ended": attempt.ended}
        times = (attempt.began_at, attempt.ended_at)
        trouble = "" if is_good else attempt.ended
        self._add("attempt", context, trace.context, times, attributes, trouble=trouble)
        for place, (instance, role, exchange, span_id) in enumerate(attempt.legs):
            if not exchange.sent_at and instance not in attempt.ended:
                continue  # the request of this leg was not sent
            decision = attempt.decisions[place] if place < len(attempt.decisions) else None
            self._add(
                f"{role.value} leg",
                self._derive_context(trace, span_id),
                context,
                (exchange.sent_at or attempt.began_at, exchange.ended_at or attempt.ended_at),
                _describe_leg(instance, role.value, exchange.status, decision),
                kind=self._api.SpanKind.CLIENT,
                trouble=_find_leg_trouble(attempt, attempt.legs[place]),
                events=[("first byte", exchange.first_byte_at)] if exchange.first_byte_at else [],
            )

    def _derive_context(self, trace: RequestTrace, span_id: int) -> SpanContext:
        own = trace.context
        derived: SpanContext = self._api.SpanContext(own.trace_id, span_id, False, own.trace_flags, own.trace_state)
        return derived

    def _add(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        times: tuple[float, float],
        attributes: Mapping[str, Any],
        *,
        events: Sequence[tuple[str, float]] = (),
        **more: Any,
    ) -> None:
        """Add a span like ``_add_span``, but with times of ``time.perf_counter``.

        Args:
            times: start and end of the span.
            events: name and time of each event in the span.
        """
        epoch = self._epoch
        at = epoch + times[0], epoch + times[1]
        moments = [(what, epoch + moment) for what, moment in events]
        self._add_span(name, context, parent, at, attributes, events=moments, **more)


# The values of gen_ai.operation.name.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}


def _describe_request(record: RequestRecord, trace: RequestTrace) -> dict[str, Any]:
    return {
        **trace.attributes,
        "http.request.method": record.method,
        "url.path": record.path,
        "http.response.status_code": record.status,
        "error.type": record.error,
        "gen_ai.request.model": trace.model if isinstance(trace.model, str) else None,
        "router.request_id": record.request_id,
        "router.client": record.client,
        "router.attempts": len(record.attempts),
        "router.cached_tokens": record.cached_tokens,
        "router.predicted_cached_tokens": record.predicted_cached_tokens,
        **{_ID_ATTRIBUTES[name]: value[:_ID_CHARACTERS] for name, value in record.client_ids.items()},
    }


def _find_trouble(record: RequestRecord) -> str:
    """Return why the request failed, in one sentence; "" if it succeeded, or if the client made a mistake."""
    if not record.error and record.status < 500:
        return ""
    last = record.attempts[-1].ended if record.attempts else ""
    if last and last != "answered":
        return last
    return record.error if record.status >= 500 or record.status == 200 else ""


def _describe_leg(instance: str, role: str, status: int, decision: Decision | None) -> dict[str, Any]:
    host, _, port = instance.rpartition(":")
    attributes: dict[str, Any] = {
        "server.address": host.strip("[]"),
        "server.port": int(port) if port.isdecimal() else None,
        "http.response.status_code": status or None,
        "router.instance": instance,
        "router.role": role,
    }
    if decision is not None:
        attributes["router.policy"] = decision.reasons.get("policy")
        attributes["router.reasons"] = ", ".join(
            f"{name}={reason if isinstance(reason, str) else f'{reason:g}'}"
            for name, reason in decision.reasons.items()
            if name != "policy"
        )
        attributes["router.predicted_cached_tokens"] = decision.cached_tokens
    return attributes


def _find_leg_trouble(attempt: AttemptRecord, leg: LegRecord) -> str:
    """Return why a leg failed, in one sentence; "" if it did not fail."""
    instance, _, exchange, _ = leg
    if exchange.status >= 400:
        return f"{instance} answered with {exchange.status}"
    if exchange.is_complete or attempt.ended == "answered":
        return ""
    return attempt.ended if instance in attempt.ended else f"given up: {attempt.ended}"
