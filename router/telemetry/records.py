"""Records of requests. Access log, metrics, explanations and spans are made from them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

    from router.fleet import Role
    from router.http import ExchangeRecord
    from router.policies import Decision

__all__ = ["AttemptRecord", "LegRecord", "RequestRecord", "RequestTrace", "RunningRequest"]


class RequestTrace:
    """The trace of one request: the ids that are sent to instances, and data for spans that the record lacks."""

    __slots__ = ("attributes", "context", "is_sampled", "model", "parent")

    def __init__(self, context: SpanContext, parent: SpanContext | None, attributes: Mapping[str, Any]) -> None:
        """
        Args:
            context: context of the request's span.
            parent: context of the client's span; None if the client sent none.
            attributes: attributes that the sampler adds to the request's span.
        """
        self.context = context
        self.parent = parent
        self.attributes = attributes
        self.is_sampled = context.trace_flags.sampled
        """Whether spans are created for this request."""
        self.model: object = ""
        """The ``model`` in the request, as the client sent it."""

    @property
    def trace_id(self) -> str:
        """The id of the trace, in the format of headers and logs."""
        return f"{self.context.trace_id:032x}"

    @staticmethod
    def make_span_id() -> int:
        """Return the id of a new span, a random number that is not 0."""
        return random.getrandbits(64) or 1

    def make_head_line(self, span_id: int) -> bytes:
        """Return the header ``traceparent``, which sends the id of a leg's span to the instance of this leg."""
        context = self.context
        return b"traceparent: 00-%032x-%016x-%02x\r\n" % (context.trace_id, span_id, context.trace_flags)


LegRecord: TypeAlias = "tuple[str, Role, ExchangeRecord, int]"
"""One leg of an attempt, the part at one instance: key and role of the instance, exchange, id of the span or 0.

The leg of a prefill instance may end later than the request. A leg is a plain tuple, because that is fastest, and each
request to a pair creates two of them.
"""


class AttemptRecord(NamedTuple):
    """One attempt of a request: how its instances were chosen, its result and its times."""

    decisions: Sequence[Decision]
    """The decisions of the policies. In a pair, the decision about prefill is the first."""
    ended: str
    """``answered``, ``preempted``, or in one sentence why the attempt failed."""
    began_at: float = 0.0
    """Time at which the attempt began, a value of ``time.perf_counter``."""
    ended_at: float = 0.0
    """Time at which the attempt ended, a value of ``time.perf_counter``."""
    legs: Sequence[LegRecord] = ()
    """The legs. In a pair, prefill's leg is the first. Empty if the attempt failed before a request was sent."""
    trouble: str = ""
    """Type of the failure, without texts from the instance or the client; ``""`` if the attempt did not fail."""


@dataclass(slots=True)
class RequestRecord:
    """The data of one request. The code that serves the request fills it in, until ``Audit.add_record`` is called."""

    method: str
    path: str
    """Path without the query, because a query may be confidential."""
    started_unix: float
    """Time at which the head of the request had arrived, in seconds since 1970."""
    request_id: str = ""
    started: float = 0.0
    """The same time as ``started_unix``, as a value of ``time.perf_counter``."""
    client: str = ""
    """Name of the client, which belongs to the API key; ``""`` if no keys are configured."""
    trace_id: str = ""
    """Trace id from the W3C trace context in the request."""
    client_ids: Mapping[str, str] = field(default_factory=dict)
    """Ids from the client's headers, by their names in the access log, such as ``session_id``."""
    status: int = 499
    """Status that the client got; 499 if the client disconnected before the response was complete."""
    error: str = ""
    """Code of the error that ended the request; ``""`` if there was no error."""
    model: object = ""
    """The ``model`` in the request, as the client sent it; ``""`` if the request names none."""
    mixed: str = ""
    prefill: str = ""
    decode: str = ""
    """``mixed``, ``prefill`` and ``decode``: keys of the last attempt's instances, by role; ``""`` if there is none."""
    streamed: bool = False
    """Whether the response was an event stream. Then its first byte shows the time of the first token."""
    first_byte_ms: float = 0.0
    """Milliseconds from the request's arrival to the first byte of the response's body; 0 if there was none."""
    total_ms: float = 0.0
    queued_ms: float = 0.0
    """Milliseconds in the queue until the request was admitted or refused."""
    bytes_sent: int = 0
    chunks: int = 0
    """Number of pieces in which the response's body arrived from the instance."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Cached tokens from the usage, if the engine that computed the prompt reported them; else None."""
    own_cached_tokens: int | None = None
    """Cached tokens from the instance's own cache; the others came from the pool. Only our engine reports this."""
    decode_cached_tokens: int | None = None
    """Cached tokens that a pair's decode instance reported. They include all tokens that prefill has computed."""
    predicted_cached_tokens: int | None = None
    """Cached tokens that the policy expected; None if the policy does not use prefixes."""
    attempts: list[AttemptRecord] = field(default_factory=list)
    trace: RequestTrace | None = None
    """The trace of the request; None if it is not traced."""


class RunningRequest(NamedTuple):
    """The data of a request that has not ended."""

    request_id: str
    method: str
    path: str
    client: str
    model: object
    started_unix: float
    """Time at which the head of the request had arrived, in seconds since 1970."""
    started: float
    """The same time as ``started_unix``, as a value of ``time.perf_counter``."""
    attempt: int
    """Index of the present attempt, from 1 on; 0 before the first attempt."""
    sent_at: float
    """Time at which the present attempt was sent to its instances, a value of ``time.perf_counter``; 0 before."""
    instances: Sequence[str]
    """Keys of the present attempt's instances. In a pair, prefill's key is the first."""
