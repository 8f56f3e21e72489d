"""What a policy sees and says: plain data, so that the live router, a test and a simulator run the same object."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from router.policies.prefix_index import DEFAULT_MAX_ENTRIES

__all__ = [
    "DEFAULTS",
    "Candidate",
    "Decision",
    "Outcome",
    "Policy",
    "PolicyBase",
    "PolicyOptions",
    "RequestFeatures",
    "Turns",
]


class RequestFeatures:
    """What a policy may know of a request; its prefix is hashed only for a policy that asks."""

    __slots__ = ("_chunks", "_prefix", "key", "prompt_tokens", "tokens_per_chunk")

    def __init__(
        self,
        prompt_tokens: int,
        prefix: Callable[[], Sequence[int]] | None = None,
        *,
        tokens_per_chunk: int = 0,
        key: str = "",
    ) -> None:
        """
        Args:
            prompt_tokens: tokens of its prompt, estimated.
            prefix: gives the chained hashes of the prompt's whole chunks, first to last.
            tokens_per_chunk: how many tokens one of those chunks stands for, estimated.
            key: the session or user it belongs to; ``""`` where it names none.
        """
        self.prompt_tokens = prompt_tokens
        self.tokens_per_chunk = tokens_per_chunk
        self.key = key
        self._prefix = prefix
        self._chunks: Sequence[int] | None = None

    @property
    def chunks(self) -> Sequence[int]:
        """The chained hashes of the prompt's whole chunks: equal first hashes mean an equal beginning."""
        if self._chunks is None:
            self._chunks = self._prefix() if self._prefix is not None else ()
        return self._chunks


@dataclass(slots=True)
class Candidate:
    """An instance that may be chosen, and what the router has running on it. Policies only read it."""

    key: str
    """``host:port``."""
    requests: int = 0
    """Requests sent to it and not yet answered to the end."""
    tokens: int = 0
    """Prompt tokens of those requests."""
    queued: float = 0.0
    """Work of those requests that have no first token yet: the sum of their decisions' ``work``."""
    running: int | None = None
    """Requests running there by its own account, from all routers; None where that is not known."""
    waiting: int | None = None
    """Requests waiting there by its own account; None where that is not known."""

    def add_request(self, tokens: int, work: float) -> None:
        """A request with so many prompt tokens is sent to it, whose prefill costs ``work``."""
        self.requests += 1
        self.tokens += tokens
        self.queued += work

    def remove_prefill(self, tokens: int, work: float) -> None:
        """The prefill of a request is done."""
        self.tokens -= tokens
        self.queued -= work

    def remove_request(self, tokens: int, work: float) -> None:
        """A request has ended; ``tokens`` and ``work`` are of its prefill, if that was not done."""
        self.requests -= 1
        self.tokens -= tokens
        self.queued -= work


class Decision(NamedTuple):
    """The chosen candidate's key, and the figures that made it the choice."""

    key: str
    reasons: Mapping[str, float | str]
    work: float
    """What its prefill will cost, in tokens' worth of computing: the prompt's tokens, less what is cached."""
    cached_tokens: int = 0
    """How many of the prompt's tokens the policy expects not to be computed."""


class Outcome(NamedTuple):
    """What became of a request that a policy placed."""

    key: str
    """The instance."""
    queued: float
    """Its ``Candidate.queued`` when the request was sent there, without the request's own work."""
    ttft: float | None
    """Seconds from sending to the first token; None where no single moment shows it."""
    prompt_tokens: int | None
    """As the engine counted; None where it did not say."""
    cached_tokens: int | None
    """Prompt tokens that the engine did not compute; None where it did not say."""
    own_cached_tokens: int | None = None
    """Of these, those from the instance's own cache and not from the pool; None where it did not say."""


class PolicyOptions(NamedTuple):
    """What can be set about policies; most names and defaults are those of FastDeploy's Go router."""

    eviction_duration_mins: float = 30.0
    balance_abs_threshold: float = 1.0
    balance_rel_threshold: float = 0.2
    hit_ratio_weight: float = 1.0
    load_balance_weight: float = 0.05
    waiting_weight: float = 10.0
    prefix_index_entries: int = DEFAULT_MAX_ENTRIES


class Policy(Protocol):
    """Chooses one of the candidates; it may keep state of its own, and is called from one thread."""

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """One of ``candidates``, of which there is at least one."""

    def observe(self, request: RequestFeatures, decision: Decision, outcome: Outcome) -> None:
        """Learn from a request that was placed by ``decision`` and has been answered."""

    def forget(self, key: str) -> None:
        """The instance of this key has restarted or is gone: what was known of its cache is void."""


DEFAULTS = PolicyOptions()


class PolicyBase:
    """A policy that learns nothing and remembers no instance."""

    def __init__(self, options: PolicyOptions = DEFAULTS, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: gives the time in seconds; a simulator's is its own.
        """
        self._options = options
        self._clock = clock
        self._turns = Turns()

    def observe(self, request: RequestFeatures, decision: Decision, outcome: Outcome) -> None:
        """See ``Policy.observe``."""

    def forget(self, key: str) -> None:
        """See ``Policy.forget``."""


@dataclass(slots=True)
class Turns:
    """Takes candidates in turn, so that equals share the work."""

    taken: int = field(default=0)

    def next(self, candidates: Sequence[Candidate]) -> Candidate:
        """The candidate whose turn it is."""
        chosen = candidates[self.taken % len(candidates)]
        self.taken += 1
        return chosen

    def least(self, candidates: Sequence[Candidate], load: Callable[[Candidate], Any]) -> Candidate:
        """The candidate with the least ``load``, which is anything that compares; equals take turns."""
        start = self.taken % len(candidates)
        self.taken += 1
        return min([*candidates[start:], *candidates[:start]], key=load)
