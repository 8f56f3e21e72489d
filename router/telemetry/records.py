"""Records of requests: what the access log, metrics, explanations and spans are made from."""

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

__all__ = ["AttemptRecord", "LegRecord", "RequestRecord", "RequestTrace"]


class RequestTrace:
    """One request in its trace: the ids that others are told, and facts beside its record. Attributes are read."""

    __slots__ = ("attributes", "context", "is_sampled", "model", "parent")

    def __init__(self, context: SpanContext, parent: SpanContext | None, attributes: Mapping[str, Any]) -> None:
        """
        Args:
            context: of the request's own span.
            parent: the client's.
            attributes: those that the sampler adds.
        """
        self.context = context
        self.parent = parent
        self.attributes = attributes
        self.is_sampled = context.trace_flags.sampled
        """Whether spans are made of it."""
        self.model: object = ""

    @property
    def trace_id(self) -> str:
        """The trace's id as headers and logs have it."""
        return f"{self.context.trace_id:032x}"

    @staticmethod
    def make_span_id() -> int:
        """A new span's id, which is not 0."""
        return random.getrandbits(64) or 1

    def make_head_line(self, span_id: int) -> bytes:
        """The header by which an instance hears of its leg's span."""
        context = self.context
        return b"traceparent: 00-%032x-%016x-%02x\r\n" % (context.trace_id, span_id, context.trace_flags)


LegRecord: TypeAlias = "tuple[str, Role, ExchangeRecord, int]"
"""One leg of an attempt: its instance and the role of that, its exchange, and the id of its span (0: it has none).

Prefill's may end later than the request. (A plain tuple, as two of them are made for each request.)
"""


class AttemptRecord(NamedTuple):
    """One attempt: the decisions that placed it (prefill's first, in a pair), how it ended, and its times."""

    decisions: Sequence[Decision]
    ended: str
    """``answered``, or its failure in one sentence."""
    began_at: float = 0.0
    ended_at: float = 0.0
    """On ``time.perf_counter``."""
    legs: Sequence[LegRecord] = ()
    """Prefill's first, in a pair; none where it failed before an instance was asked."""


@dataclass(slots=True)
class RequestRecord:
    """The story of one request. The code that serves it fills this in, and changes it no more once it is added."""

    method: str
    path: str
    """Without the query, which may be confidential."""
    started_unix: float
    """Seconds since 1970 when its head had been read."""
    request_id: str = ""
    started: float = 0.0
    """The moment of ``started_unix`` on ``time.perf_counter``."""
    client: str = ""
    """The holder of the API key; ``""`` where there are no keys."""
    trace_id: str = ""
    """Of the W3C trace context it came with."""
    client_ids: Mapping[str, str] = field(default_factory=dict)
    """The ids by which its client looks for it in logs, by their names there."""
    status: int = 499
    """As the client got it; 499 if the client left before it had all of the response."""
    error: str = ""
    """The code of the error that ended it; ``""`` if none did."""
    mixed: str = ""
    prefill: str = ""
    decode: str = ""
    """``host:port`` of the instances of the last attempt, by role."""
    streamed: bool = False
    """Whether the answer was an event stream, so that its first byte shows the first token."""
    first_byte_ms: float = 0.0
    """From its arrival to the first byte of the answer's body from the instance; 0 if there was none."""
    total_ms: float = 0.0
    queued_ms: float = 0.0
    """How long it waited in line until it was let in, or refused."""
    bytes_sent: int = 0
    chunks: int = 0
    """Pieces in which the answer's body came from the instance."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Of usage, where the engine that computed the prompt said so."""
    own_cached_tokens: int | None = None
    """Of the cached ones, those that the engine had itself; the pool had the others. Ours says so."""
    decode_cached_tokens: int | None = None
    """As a pair's decode instance said, to which all is cached that prefill has computed."""
    predicted_cached_tokens: int | None = None
    """As the policy expected; None where it does not look at prefixes."""
    attempts: list[AttemptRecord] = field(default_factory=list)
    trace: RequestTrace | None = None
    """Where the request is traced."""
