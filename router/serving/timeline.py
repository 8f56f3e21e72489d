"""RequestTimeline: the events of one request, for the headers of its response, its record and the log.

It stores the client, the selected instances with the reasons, the end of each attempt, and finally the engine's token
counts. The log contains the timeline only at level ``debug``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from router.http import read_usage
from router.telemetry import AttemptRecord, LegRecord, RequestRecord, RequestTrace, RunningRequest

if TYPE_CHECKING:
    from router.fleet import Instance
    from router.http import ClientRequest, Usage
    from router.policies import Decision, RequestFeatures
    from router.serving.attempt import Attempt
    from router.serving.dialects import Pair
    from router.serving.reading.parsed_request import ParsedRequest
    from router.serving.relay import ClientResponse
    from router.serving.selection import Selection
    from router.serving.services import Services
    from router.telemetry import Tracer

__all__ = ["RequestTimeline"]

_log = logging.getLogger("router.serving.timeline")

_NO_IDS: Mapping[str, str] = {}


class RequestTimeline:
    """The timeline of one request, from its arrival on."""

    __slots__ = (
        *("_last", "_records", "_services"),
        *("client", "client_ids", "pair", "queued_seconds", "request_id", "selection", "sent_id", "started"),
        *("started_unix", "tag", "trace", "trace_id"),
    )

    def __init__(self, services: Services) -> None:
        self.started = time.perf_counter()
        """Time at which the request arrived, a value of ``time.perf_counter``."""
        self.started_unix = time.time()
        """Time at which the request arrived, in seconds since 1970."""
        self.client: str | None = None
        """Name of the client; None before the request is admitted."""
        self.tag = ""
        """Suffix of the request's id at engines, which identifies the client; ``""`` without API keys."""
        self.queued_seconds = 0.0
        """Seconds for which the request was queued."""
        self.request_id = ""
        self.sent_id = ""
        """The id that the client sent in a header; ``""`` if it sent none."""
        self.client_ids = _NO_IDS
        """Ids from the client's headers and body, by their names in the access log, such as ``session_id``."""
        self.trace_id = ""
        self.trace: RequestTrace | None = None
        """The trace of the request; None if it is not traced."""
        self.selection: Selection | None = None
        """The instances of the last attempt."""
        self.pair: Pair | None = None
        """The pair of the last attempt; None if an instance served it alone."""
        self._services = services
        self._records: list[AttemptRecord] = []
        self._last: Attempt | None = None  # the last attempt that has a record

    @property
    def num_ended(self) -> int:
        """Number of ended attempts."""
        return len(self._records)

    def join_trace(self, tracer: Tracer, request: ClientRequest) -> None:
        """Trace the request, unless the client's trace context disables tracing."""
        self.trace = tracer.begin_trace(request)
        if self.trace is not None:
            self.trace_id = self.trace.trace_id

    def log_choice(self, prompt_tokens: int) -> None:
        """Log which instances were selected for the attempt that begins, and why."""
        if self.selection is not None:
            _log_choice(self.request_id, len(self._records) + 1, self.selection, prompt_tokens)

    def end_attempt(self, attempt: Attempt | None, how: str, trouble: str = "") -> None:
        """Store the record of the attempt that has just ended.

        Args:
            attempt: the attempt; None if the request failed before its first attempt.
            how: ``answered``, ``preempted``, or in one sentence why the attempt failed.
            trouble: type of the failure; ``""`` if the attempt did not fail.
        """
        decisions = self.selection.decisions if self.selection else ()
        ended_at = time.perf_counter()
        if attempt is None or attempt is self._last:  # the attempt failed before a request was sent to an instance
            began_at = self._records[-1].ended_at if self._records else self.started
            legs: tuple[LegRecord, ...] = ()
        else:
            self._last, began_at = attempt, attempt.sent_at
            leg, prefill = attempt.answering, attempt.prefill
            legs = ((leg.instance.key, leg.instance.role, leg.exchange.record, leg.span_id),)
            if prefill is not None:
                first = (prefill.instance.key, prefill.instance.role, prefill.exchange.record, prefill.span_id)
                legs = (first, *legs)
        self._records.append(AttemptRecord(decisions, how, began_at, ended_at, legs, trouble))
        if self._services.is_debugging:
            _log_attempt_end(self.request_id, len(self._records), attempt, how)

    def router_headers(self) -> bytes:
        """Return the header lines of the response that name the instances and the policy.

        ``/admin/explain`` has the complete timeline.
        """
        lines = b""
        if self.request_id:
            # A client's own id may contain any printable character.
            own_id = self.request_id.encode("ascii", "backslashreplace")
            client_id = (self.sent_id or self.request_id).encode()
            lines = b"x-router-request-id: %s\r\nx-request-id: %s\r\n" % (own_id, client_id)
        selection = self.selection
        if selection is not None:
            decision = selection.decisions[0]
            prefill = selection.prefill.head_line if selection.prefill is not None else b""
            reason = f"x-router-decision: {decision.reasons.get('policy', '')}; cached={decision.cached_tokens}\r\n"
            lines += prefill + selection.answering.head_line + reason.encode()
        return lines

    def describe_progress(
        self, request: ClientRequest, parsed: ParsedRequest | None, attempt: Attempt | None, number: int
    ) -> RunningRequest:
        """Return what is known about a running request: its times, instances and attempts so far.

        Args:
            request: the client's request.
            parsed: the parsed request; None before it is parsed.
            attempt: the last attempt; None if there was none.
            number: index of the last attempt, from 1 on; 0 if there was none.
        """
        legs = () if attempt is None else (attempt.prefill, attempt.answering)
        return RunningRequest(
            self.request_id,
            request.method,
            request.path,
            self.client or "",
            parsed.features.model if parsed is not None else "",
            self.started_unix,
            self.started,
            number,
            0.0 if attempt is None else attempt.sent_at,
            [leg.instance.key for leg in legs if leg is not None],
        )

    def write_record(
        self, request: ClientRequest, response: ClientResponse, parsed: ParsedRequest | None, attempt: Attempt | None
    ) -> None:
        """Write the record of the ended request, and report its result to the policies.

        Args:
            request: the client's request.
            response: the response to the client.
            parsed: the parsed request; None if it was not parsed.
            attempt: the last attempt; None if there was none.
        """
        record = RequestRecord(
            request.method,
            request.path,
            self.started_unix,
            request_id=self.request_id,
            started=self.started,
            client=self.client or "",
            trace_id=self.trace_id,
            client_ids=self.client_ids,
            status=response.status,
            error=response.error_code,
            model=parsed.features.model if parsed is not None else "",
            streamed=response.is_event_stream,
            first_byte_ms=(response.first_byte_at - self.started) * 1e3 if response.first_byte_at else 0.0,
            total_ms=(time.perf_counter() - self.started) * 1e3,
            queued_ms=self.queued_seconds * 1e3,
            bytes_sent=response.bytes_sent,
            chunks=response.chunks,
            attempts=self._records,
        )
        if self.trace is not None:
            record.trace = self.trace
            self.trace.model = record.model
        selection = self.selection
        if selection is not None and attempt is not None and parsed is not None and parsed.body is not None:
            self._note_outcome(record, response, parsed, selection, attempt)
        self._services.audit.add_record(record)
        if self._services.is_debugging:
            _log_request_end(record)

    def _note_outcome(
        self,
        record: RequestRecord,
        response: ClientResponse,
        parsed: ParsedRequest,
        selection: Selection,
        attempt: Attempt,
    ) -> None:
        """Add the instances and token counts to the record. After a success, pass the measurements to the policy."""
        usage = own_usage = response.read_usage()
        record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        if selection.prefill is None:
            leg, record.mixed = attempt.answering, selection.answering.key
        else:
            assert attempt.prefill is not None
            leg, record.prefill, record.decode = attempt.prefill, selection.prefill.key, selection.answering.key
            record.decode_cached_tokens = own_usage.cached_tokens
            usage = read_usage(attempt.prefill_answer) or own_usage
            pair = self.pair
            if pair is not None and not record.error and (pair.is_prefill_first or usage is not own_usage):
                why = pair.find_lost_hand_over(attempt.prefill_answer, usage, own_usage)
                if why:
                    self._report_computed_twice(selection.prefill, selection.answering, why)
        record.cached_tokens, record.own_cached_tokens = usage.cached_tokens, usage.own_cached_tokens
        if response.is_resumed:  # the counts are those of the last segment, whose prompt includes earlier tokens
            if selection.prefill is not None:
                record.cached_tokens, record.decode_cached_tokens = response.read_cached_tokens(), None
                record.own_cached_tokens = None
            else:
                usage = usage._replace(cached_tokens=None, own_cached_tokens=None)
        record.predicted_cached_tokens = _predict_cached_tokens(selection.decisions[0], parsed.features, usage)
        if not record.error and record.status < 400:
            ttft = attempt.prefilled_at - attempt.sent_at if attempt.prefilled_at else None
            self._services.selector.learn(
                selection,
                parsed.features,
                usage,
                queued_before=leg.queued_before,
                ttft=ttft,
                seconds=time.perf_counter() - attempt.sent_at,
            )

    def _report_computed_twice(self, prefill: Instance, decode: Instance, why: str) -> None:
        count = self._services.metrics.count_computed_twice(decode.key)
        if count == 1 or count % 1000 == 0:
            _log.warning(
                "decode %s computes prompts again, although prefill %s computed them (%d so far): %s; see "
                "PromptsComputedTwice in docs/runbook.md",
                *(decode.key, prefill.key, count, why),
            )


def _predict_cached_tokens(decision: Decision, features: RequestFeatures, usage: Usage) -> int:
    """Return the number of cached tokens that the policy expected; in the engine's count of tokens if possible."""
    if not usage.prompt_tokens or not features.prompt_tokens:
        return decision.cached_tokens
    scale = usage.prompt_tokens / features.prompt_tokens
    own, predicted = decision.reasons.get("own_engine_tokens"), decision.cached_tokens * scale
    if own is not None:
        predicted = float(own) + float(decision.reasons["pool_tokens"]) * scale
    return min(round(predicted), usage.prompt_tokens)


def _log_choice(request_id: str, number: int, selection: Selection, prompt_tokens: int) -> None:
    instances = [selection.answering] if selection.prefill is None else [selection.prefill, selection.answering]
    choices = "; ".join(
        f"{instance.role.value} {instance.key} because of {_format_reasons(decision)}"
        for instance, decision in zip(instances, selection.decisions, strict=False)
    )
    expected = selection.decisions[0].cached_tokens
    text = "request %s, attempt %d: %s; about %d prompt tokens, %d of them expected in a cache"
    _log.debug(text, request_id, number, choices, prompt_tokens, expected)


def _log_attempt_end(request_id: str, number: int, attempt: Attempt | None, how: str) -> None:
    """Log the result of an attempt, and how long it took."""
    milliseconds = (time.perf_counter() - attempt.sent_at) * 1e3 if attempt is not None and attempt.sent_at else 0.0
    _log.debug("request %s, attempt %d: %s after %.1f ms", request_id, number, how, milliseconds)


def _log_request_end(record: RequestRecord) -> None:
    """Log the result of a request: its status, its tokens as engines counted them, and its times."""
    ended = f"{record.method} {record.path} {record.status}{' ' + record.error if record.error else ''}"
    counts = (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
    tokens = ("unknown" if count is None else count for count in counts)
    text = "request %s%s: %s; prompt tokens: %s, cached: %s, generated: %s; first byte after %.1f ms, end after %.1f ms"
    ids = "".join(f", {name} {value!r}" for name, value in record.client_ids.items())
    _log.debug(text, record.request_id, ids, ended, *tokens, record.first_byte_ms, record.total_ms)


def _format_reasons(decision: Decision) -> str:
    reasons = [
        f"{name}={reason if isinstance(reason, str) else f'{reason:g}'}" for name, reason in decision.reasons.items()
    ]
    return ", ".join([*reasons, f"work={decision.work:g}"])
