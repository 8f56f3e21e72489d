"""Policy, and the data that it sees and returns: plain, so that live router, test and simulator run the same object."""

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
    """The properties of a request that a policy may go by; its prefix is hashed only for a policy that asks."""

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
            prompt_tokens: tokens of its prompt, estimated.
            prefix: gives the chained hashes of the prompt's whole chunks, first to last.
            tokens_per_chunk: how many tokens one of those chunks stands for, estimated.
            key: the session or user it belongs to; ``""`` where it names none.
            model: the name of the model that it asks for, as the client sent it; ``""`` where it names none.
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
        """The chained hashes of the prompt's whole chunks: equal first hashes mean an equal beginning."""
        return self._hash_prefix()


@dataclass(slots=True)
class InstanceLoad:
    """The requests that the router has running on one instance. Policies choose among these, and only read them."""

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
    """The chosen instance's key, and the figures that made it the choice."""

    key: str
    reasons: Mapping[str, float | str]
    work: float
    """The cost of its prefill, in tokens' worth of computing: the prompt's tokens, less what is cached."""
    cached_tokens: int = 0
    """How many of the prompt's tokens the policy expects not to be computed."""


class Outcome(NamedTuple):
    """The result of a request that a policy placed."""

    key: str
    """The instance."""
    queued: float
    """Its ``InstanceLoad.queued`` when the request was sent there, without the request's own work."""
    ttft: float | None
    """Seconds from sending to the first token; None where no single moment shows it."""
    prompt_tokens: int | None
    """As the engine counted; None where it did not say."""
    cached_tokens: int | None
    """Prompt tokens that the engine did not compute; None where it did not say."""
    own_cached_tokens: int | None = None
    """Of these, those from the instance's own cache and not from the pool; None where it did not say."""


class PolicyOptions(NamedTuple):
    """The settings of policies; most names and defaults are those of FastDeploy's Go router."""

    eviction_duration_mins: float = 30.0
    balance_abs_threshold: float = 1.0
    balance_rel_threshold: float = 0.2
    hit_ratio_weight: float = 1.0
    load_balance_weight: float = 0.05
    waiting_weight: float = 10.0
    prefix_index_entries: int = DEFAULT_MAX_ENTRIES


class Policy(Protocol):
    """Chooses one of the candidates; it may keep state of its own, and is called from one thread."""

    token_seconds: float
    """What a token of work takes an instance, as it has learned; 0 where it has not."""

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """One of ``candidates``, of which there is at least one."""

    def observe_outcome(self, request: RequestFeatures, decision: Decision, outcome: Outcome) -> None:
        """Learn from a request that was placed by ``decision`` and has been answered."""

    def make_sibling(self) -> Policy:
        """A policy of the same kind for requests of another model: it knows the same caches, and learns for itself."""

    def forget_instance(self, key: str) -> None:
        """Drop all that is known of this instance's cache: it has restarted or is gone."""


DEFAULTS = PolicyOptions()

requests_of = attrgetter("requests")
"""``InstanceLoad.requests``, for ``map``."""
tokens_of = attrgetter("tokens")
"""``InstanceLoad.tokens``, for ``map``."""


_AnyPolicy = TypeVar("_AnyPolicy", bound="PolicyBase")


class PolicyBase:
    """A policy that learns nothing and remembers no instance."""

    token_seconds = 0.0
    """See ``Policy.token_seconds``."""

    def __init__(self, options: PolicyOptions = DEFAULTS, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: gives the time in seconds; a simulator's is its own.
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
    """Takes candidates in turn, so that equals share the work."""

    __slots__ = ("taken",)

    def __init__(self) -> None:
        self.taken = 0

    def take_next(self, candidates: Sequence[InstanceLoad]) -> InstanceLoad:
        """The candidate whose turn it is."""
        chosen = candidates[self.taken % len(candidates)]
        self.taken += 1
        return chosen

    def take_least(self, candidates: Sequence[InstanceLoad], scores: Sequence[Any]) -> InstanceLoad:
        """The candidate with the least of ``scores``, which stand in the candidates' order; equals take turns."""
        count = len(candidates)
        start = self.taken % count
        self.taken += 1
        # No function of Python's is called for each candidate: a request waits for this.
        return candidates[min([*range(start, count), *range(start)], key=scores.__getitem__)]
