"""Spans for OpenTelemetry: one for each request, under the client's span, and one for each phase of the request.

The spans are created when the request has ended, from times that sequences and generations always record. If the
receiver of spans is down or hangs, only spans are lost.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.scheduling.pool_use import Reason
from engine.scheduling.request import Sequence
from kvcommon.spans import SpanSender, measure_epoch, open_sender

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

__all__ = ["Phase", "RequestTrace", "Tracer", "list_phases", "open_tracer"]

log = logging.getLogger(__name__)

SERVICE_NAME = "kvengine"
# A shorter wait gets no span.
_MIN_WAIT_SECONDS = 0.001
_GOOD_ENDS = ("stop", "length")
_NOTHING: Mapping[str, Any] = {}


class Phase(NamedTuple):
    """A phase of a request, such as prefill. Start and end are times of ``time.monotonic``."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, Any] = _NOTHING
    trouble: str = ""
    """Why the phase failed; "" if it did not."""


def list_phases(sequence: Sequence, now: float, trouble: str = "") -> Iterator[Phase]:
    """Yield the phases of a sequence, except its saves. A preempted sequence has the times of its first admission.

    Args:
        sequence: the sequence with the recorded times.
        now: the current time of ``time.monotonic``: the end of the last phase if the sequence has not ended.
        trouble: why the request failed; the last phase gets this reason. "" if it did not fail.
    """
    phases = list(_list_phases(sequence, now))
    if phases and trouble:
        phases[-1] = phases[-1]._replace(trouble=phases[-1].trouble or trouble)
    yield from phases


def _list_phases(sequence: Sequence, now: float) -> Iterator[Phase]:
    if not sequence.submitted_at:
        return
    look_up, load, use = sequence.look_up, sequence.load, sequence.pool_use
    ended_at, started_at, first_token_at = sequence.ended_at or now, sequence.started_at, sequence.first_token_at
    yield Phase("queue", sequence.submitted_at, look_up[0] if look_up else started_at or ended_at)
    if look_up:
        failure = use.text if use.reason is Reason.FAILED else ""
        yield Phase("look-up", *look_up, {"engine.pool": use.text}, "" if load else failure)
        if load:
            yield Phase("load", *load, {"engine.pool_cached_tokens": sequence.pool_cached_tokens}, failure)
        waited_from = (load or look_up)[1]
        if (started_at or ended_at) - waited_from > _MIN_WAIT_SECONDS:
            yield Phase("queue", waited_from, started_at or ended_at)
    if not started_at:
        return
    if first_token_at is None or first_token_at > started_at:
        cached = sequence.own_cached_tokens + sequence.pool_cached_tokens
        tokens = {"engine.computed_tokens": sequence.num_prompt_tokens - cached}
        yield Phase("prefill", started_at, first_token_at or ended_at, tokens)
    if first_token_at is not None and (sequence.num_output_tokens > 1 or sequence.finish_reason not in _GOOD_ENDS):
        tokens = {"engine.decoded_tokens": sequence.num_output_tokens - 1}
        yield Phase("decode", max(first_token_at, started_at), ended_at, tokens)


def open_tracer(receiver: str) -> Tracer | None:
    """Start tracing.

    Args:
        receiver: the URL of the receiver, for the log.

    Returns:
        The tracer, or None if the packages of OpenTelemetry are missing, which is logged.
    """
    return open_sender(Tracer, receiver, log)


class _Arrival(NamedTuple):
    """The arrival of a request: its trace, and its time."""

    trace_id: int
    parent: SpanContext | None
    """The client's span, or None if the client sent none."""
    at: float
    """When the request arrived, as a time of ``time.monotonic``."""
    epoch: float
    """The time when ``time.monotonic`` was 0, in seconds since 1970. All spans of the request use the same value."""


class RequestTrace:
    """Creates the spans of one sequence in the trace of its request."""

    def __init__(self, tracer: Tracer, arrival: _Arrival) -> None:
        self._tracer = tracer
        self._arrival = arrival
        self._context = tracer.make_context(arrival)

    def end(
        self,
        sequence: Sequence,
        role: str,
        num_output_tokens: int,
        reason: str,
        phases: Iterable[Phase],
        trouble: str,
    ) -> None:
        """Create the spans of a request that has ended. Saves get their span later, because they may still run.

        Args:
            sequence: the sequence of the request.
            role: the role of the instance.
            num_output_tokens: number of tokens of the answer.
            reason: the finish reason of the answer.
            phases: phases that are not recorded in the sequence.
            trouble: why the request failed; "" if it did not.
        """
        now = time.monotonic()
        attributes = {
            "engine.request_id": sequence.request.request_id,
            "engine.role": role,
            "engine.finish_reason": reason,
            **self._tracer.name_usage(sequence, num_output_tokens),
            "engine.own_cached_tokens": sequence.own_cached_tokens,
            "engine.pool_cached_tokens": sequence.pool_cached_tokens,
            "engine.preemptions": sequence.num_preemptions,
        }
        whole = Phase(f"{role} instance", self._arrival.at, now, attributes, trouble)
        self._tracer.add_span(whole, self._arrival.epoch, self._context, self._arrival.parent, is_server=True)
        for phase in (*list_phases(sequence, now, trouble), *phases):
            self._add_phase(phase)

    def end_saves(self, sequence: Sequence) -> None:
        """Create the span of the sequence's saves to the pool. Call this when all of them have ended."""
        saves = sequence.saves
        if saves.ended_at:
            lacking = saves.num_begun - saves.num_done
            trouble = f"{lacking} of {saves.num_begun} blocks were not saved" if lacking else ""
            blocks = {"engine.pool.saved_blocks": saves.num_done}
            self._add_phase(Phase("save", saves.began_at, saves.ended_at, blocks, trouble))

    def _add_phase(self, phase: Phase) -> None:
        context = self._tracer.make_context(self._arrival)
        self._tracer.add_span(phase, self._arrival.epoch, context, self._context, is_server=False)


class Tracer(SpanSender):
    """Creates the spans of requests."""

    def __init__(self, receiver: str) -> None:
        super().__init__(receiver, SERVICE_NAME, "engine", log)
        # The arrival of the request that the current task of the event loop answers.
        self._arrival: ContextVar[_Arrival | None] = ContextVar("arrival", default=None)

    def enter_request(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Record the arrival of a request in the current task, with the trace in its headers.

        ``begin_request`` uses this record for the sequences that the task creates.
        """
        parent, trace_id, result = self._sample(headers, "request")
        is_sampled = result.decision.name == "RECORD_AND_SAMPLE"
        at = time.monotonic()
        arrival = _Arrival(trace_id, parent if parent.is_valid else None, at, measure_epoch(time.monotonic))
        self._arrival.set(arrival if is_sampled else None)

    def begin_request(self) -> RequestTrace | None:
        """Return the trace of a new sequence of the current task's request, or None if the request is not traced."""
        arrival = self._arrival.get()
        return None if arrival is None else RequestTrace(self, arrival)

    def make_context(self, arrival: _Arrival) -> SpanContext:
        """Return the context of a new span in the trace of a request."""
        state = arrival.parent.trace_state if arrival.parent is not None else None
        flags = self._api.TraceFlags(self._api.TraceFlags.SAMPLED)
        context: SpanContext = self._api.SpanContext(arrival.trace_id, random.getrandbits(64) or 1, False, flags, state)
        return context

    def name_usage(self, sequence: Sequence, num_output_tokens: int) -> dict[str, Any]:
        """Return the token counts of a sequence as attributes, with the names of OpenTelemetry's conventions."""
        cached = sequence.own_cached_tokens + sequence.pool_cached_tokens
        return self._name_usage(sequence.num_prompt_tokens, num_output_tokens, cached, "text_completion")

    def add_span(
        self, phase: Phase, epoch: float, context: SpanContext, parent: SpanContext | None, *, is_server: bool
    ) -> None:
        """Add the span of a phase.

        Args:
            phase: name, start, end and attributes of the span.
            epoch: the time when ``time.monotonic`` was 0, in seconds since 1970.
            context: trace id and span id of the new span.
            parent: trace id and span id of the parent span, or None if there is none.
            is_server: whether the span is of the kind "server", for the whole request.
        """
        times = epoch + phase.start, epoch + phase.end
        kind = self._api.SpanKind.SERVER if is_server else None
        self._add_span(phase.name, context, parent, times, phase.attributes, kind=kind, trouble=phase.trouble)
