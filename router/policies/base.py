"""Policy, and its input and output: plain data, so that router, tests and simulator use the same policies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar

from router.policies.prefix_index import DEFAULT_MAX_ENTRIES

__all__ = [
    "DEFAULTS",
    "Decision",
    "InstanceLoad",
    "Outcome",
    "Policy",
    "PolicyBase",
    "PolicyOptions",
    "RequestFeatures",
    "Turns",
]


class RequestFeatures:
    """Properties of a request that a policy may use. Its prefix is hashed only if a policy reads it."""

    def __init__(
        self,
        prompt_tokens: int,
        prefix: Callable[[], Sequence[int]] | None = None,
        *,
        tokens_per_chunk: int = 0,
        key: str = "",
        model: object = "",
    ) -> None:
        """
        Args:
            prompt_tokens: estimated number of prompt tokens.
            prefix: returns the chained hashes of the prompt's whole chunks, first to last.
            tokens_per_chunk: estimated number of tokens per chunk.
            key: session or user of the request; ``""`` if it names none.
            model: name of the model in the request, as the client sent it; ``""`` if it names none.
        """
        self.prompt_tokens = prompt_tokens
        self.tokens_per_chunk = tokens_per_chunk
        self.key = key
        self.model = model
        if prefix is None:
            self.chunks = ()
        else:
            self._hash_prefix = prefix

    @cached_property
    def chunks(self) -> Sequence[int]:
        """Chained hashes of the prompt's whole chunks: equal first hashes mean an equal beginning."""
        return self._hash_prefix()


@dataclass(slots=True)
class InstanceLoad:
    """The requests that the router has running on one instance. Policies choose among these, read-only."""

    key: str
    """``host:port``."""
    requests: int = 0
    """Number of requests sent to it and not completely answered."""
    tokens: int = 0
    """Prompt tokens of those requests."""
    queued: float = 0.0
    """Work of those requests that have no first token yet: the sum of their decisions' ``work``."""
    running: int | None = None
    """Number of running requests that the instance reports, from all routers; None if unknown."""
    waiting: int | None = None
    """Number of waiting requests that the instance reports; None if unknown."""

    def add_request(self, tokens: int, work: float) -> None:
        """Count a request that is sent to it, with this number of prompt tokens and a prefill that costs ``work``."""
        self.requests += 1
        self.tokens += tokens
        self.queued += work

    def remove_prefill(self, tokens: int, work: float) -> None:
        """Note that the prefill of a request is complete."""
        self.tokens -= tokens
        self.queued -= work

    def remove_request(self, tokens: int, work: float) -> None:
        """Note that a request has ended. ``tokens`` and ``work`` are those of its prefill, if that was not complete."""
        self.requests -= 1
        self.tokens -= tokens
        self.queued -= work


class Decision(NamedTuple):
    """The chosen instance's key, and the values that decided the choice."""

    key: str
    reasons: Mapping[str, float | str]
    work: float
    """Cost of its prefill in computed tokens: the tokens of the prompt without the cached ones."""
    cached_tokens: int = 0
    """Number of the prompt's tokens that the policy expects not to be computed."""


class Outcome(NamedTuple):
    """The result of a request that a policy placed."""

    key: str
    """Key of the instance."""
    queued: float
    """Its ``InstanceLoad.queued`` when the request was sent there, without the request's own work."""
    ttft: float | None
    """Seconds from sending to the first token; None if no single moment shows it."""
    prompt_tokens: int | None
    """Number of prompt tokens as the engine counted them; None if it did not report it."""
    cached_tokens: int | None
    """Number of prompt tokens that the engine did not compute; None if it did not report it."""
    own_cached_tokens: int | None = None
    """Number of those from the instance's own cache, not from the pool; None if the engine did not report it."""


class PolicyOptions(NamedTuple):
    """Settings of policies. Most names and defaults are those of FastDeploy's Go router."""

    eviction_duration_mins: float = 30.0
    balance_abs_threshold: float = 1.0
    balance_rel_threshold: float = 0.2
    hit_ratio_weight: float = 1.0
    load_balance_weight: float = 0.05
    waiting_weight: float = 10.0
    prefix_index_entries: int = DEFAULT_MAX_ENTRIES


class Policy(Protocol):
    """Chooses one of the candidates. It may have its own state, and is called from one thread."""

    token_seconds: float
    """Learned time that a token of work takes an instance, in seconds; 0 if not learned yet."""

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """Return the choice among ``candidates``, which is not empty."""

    def observe_outcome(self, request: RequestFeatures, decision: Decision, outcome: Outcome) -> None:
        """Learn from a request that was placed by ``decision`` and has been answered."""

    def make_sibling(self) -> Policy:
        """Return a policy of the same kind for requests of another model. It shares the known caches, but learns
        separately.
        """

    def forget_instance(self, key: str) -> None:
        """Discard all knowledge about this instance's cache: it has restarted or is gone."""


DEFAULTS = PolicyOptions()

requests_of = attrgetter("requests")
"""Get ``InstanceLoad.requests``, for ``map``."""
tokens_of = attrgetter("tokens")
"""Get ``InstanceLoad.tokens``, for ``map``."""


_AnyPolicy = TypeVar("_AnyPolicy", bound="PolicyBase")


class PolicyBase:
    """A policy that learns nothing and stores nothing about instances."""

    token_seconds = 0.0
    """See ``Policy.token_seconds``."""

    def __init__(self, options: PolicyOptions = DEFAULTS, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: returns the time in seconds; a simulator has its own clock.
        """
        self._options = options
        self._clock = clock
        self._turns = Turns()

    def observe_outcome(self, request: RequestFeatures, decision: Decision, outcome: Outcome) -> None:
        """See ``Policy.observe_outcome``."""

    def make_sibling(self: _AnyPolicy) -> _AnyPolicy:
        """See ``Policy.make_sibling``."""
        return type(self)(self._options, self._clock)

    def forget_instance(self, key: str) -> None:
        """See ``Policy.forget_instance``."""


class Turns:
    """Selects candidates in turn, so that equal ones share the work."""

    __slots__ = ("taken",)

    def __init__(self) -> None:
        self.taken = 0

    def take_next(self, candidates: Sequence[InstanceLoad]) -> InstanceLoad:
        """Return the next candidate in turn."""
        chosen = candidates[self.taken % len(candidates)]
        self.taken += 1
        return chosen

    def take_least(self, candidates: Sequence[InstanceLoad], scores: Sequence[Any]) -> InstanceLoad:
        """Return the candidate with the lowest of ``scores``, which have the candidates' order. Equal ones take
        turns.
        """
        count = len(candidates)
        start = self.taken % count
        self.taken += 1
        # No Python function is called per candidate, because a request waits for this.
        return candidates[min([*range(start, count), *range(start)], key=scores.__getitem__)]
