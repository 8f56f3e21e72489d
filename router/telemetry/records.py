"""Records of requests: the source of the access log, metrics, explanations and spans."""

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
    """One request in its trace: the ids that are sent to others, and data in addition to its record. Read-only."""

    __slots__ = ("attributes", "context", "is_sampled", "model", "parent")

    def __init__(self, context: SpanContext, parent: SpanContext | None, attributes: Mapping[str, Any]) -> None:
        """
        Args:
            context: context of the request's own span.
            parent: context of the client's span.
            attributes: attributes that the sampler adds.
        """
        self.context = context
        self.parent = parent
        self.attributes = attributes
        self.is_sampled = context.trace_flags.sampled
        """Whether spans are created for it."""
        self.model: object = ""

    @property
    def trace_id(self) -> str:
        """The trace's id in the format of headers and logs."""
        return f"{self.context.trace_id:032x}"

    @staticmethod
    def make_span_id() -> int:
        """Return a new span's id, which is not 0."""
        return random.getrandbits(64) or 1

    def make_head_line(self, span_id: int) -> bytes:
        """Return the header that sends an instance the id of its leg's span."""
        context = self.context
        return b"traceparent: 00-%032x-%016x-%02x\r\n" % (context.trace_id, span_id, context.trace_flags)


LegRecord: TypeAlias = "tuple[str, Role, ExchangeRecord, int]"
"""One leg of an attempt: its instance with its role, its exchange, and the id of its span (0: none).

Prefill's leg may end later than the request. (A plain tuple, because two of them are created for each request.)
"""


class AttemptRecord(NamedTuple):
    """One attempt: the decisions that placed it (prefill's first, in a pair), its result, and its times."""

    decisions: Sequence[Decision]
    ended: str
    """``answered``, or its failure in one sentence."""
    began_at: float = 0.0
    ended_at: float = 0.0
    """Start time, from ``time.perf_counter``."""
    legs: Sequence[LegRecord] = ()
    """Legs, prefill's first in a pair; empty if it failed before a request was sent."""
    trouble: str = ""
    """What kind of failure it was, without text of the instance or the client; ``""`` if it answered or preempted."""


@dataclass(slots=True)
class RequestRecord:
    """Data of one request. The code that serves it fills this in; after it is added, it does not change any more."""

    method: str
    path: str
    """Path without the query, which may be confidential."""
    started_unix: float
    """Seconds since 1970 when its head had been read."""
    request_id: str = ""
    started: float = 0.0
    """The same moment as ``started_unix``, from ``time.perf_counter``."""
    client: str = ""
    """Name of the API key's client; ``""`` if no keys are configured."""
    trace_id: str = ""
    """Trace id of the W3C trace context in the request."""
    client_ids: Mapping[str, str] = field(default_factory=dict)
    """The ids by which its client finds it in logs, by their names there."""
    status: int = 499
    """Status that the client got; 499 if the client left before it had the whole response."""
    error: str = ""
    """The code of the error that ended it; ``""`` if none did."""
    model: object = ""
    """The ``model`` in the request, as the client sent it; ``""`` if it names none."""
    mixed: str = ""
    prefill: str = ""
    decode: str = ""
    """``host:port`` of the instances of the last attempt, by role."""
    streamed: bool = False
    """Whether the answer was an event stream, so that its first byte indicates the first token."""
    first_byte_ms: float = 0.0
    """Seconds from arrival to the first byte of the answer's body from the instance; 0 if there was none."""
    total_ms: float = 0.0
    queued_ms: float = 0.0
    """Seconds in the queue until it was admitted or refused."""
    bytes_sent: int = 0
    chunks: int = 0
    """Number of pieces in which the answer's body arrived from the instance."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Cached tokens from the usage, if the engine that computed the prompt reported them."""
    own_cached_tokens: int | None = None
    """Cached tokens from the engine's own cache (the rest came from the pool). Reported by our engine only."""
    decode_cached_tokens: int | None = None
    """Cached tokens reported by a pair's decode instance; for it, everything that prefill computed counts as cached."""
    predicted_cached_tokens: int | None = None
    """Cached tokens that the policy expected; None if it does not use prefixes."""
    attempts: list[AttemptRecord] = field(default_factory=list)
    trace: RequestTrace | None = None
    """The request's trace, if it is traced."""


class RunningRequest(NamedTuple):
    """A request that has not ended."""

    request_id: str
    method: str
    path: str
    client: str
    model: object
    started_unix: float
    """Seconds since 1970 when its head had been read."""
    started: float
    """The same moment, from ``time.perf_counter``."""
    attempt: int
    """Number of its attempt; 0 before the first."""
    sent_at: float
    """When that attempt was sent, from ``time.perf_counter``; 0 before."""
    instances: Sequence[str]
    """Keys of that attempt's instances, prefill's first in a pair."""
