"""The policy that minimises a request's total cost, its own time and the delay of later requests, given all caches."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from router.policies.base import DEFAULTS, Decision, InstanceLoad, Outcome, PolicyOptions, RequestFeatures
from router.policies.prefill_cost import PrefillCost
from router.policies.prefix_index import PrefixMatch
from router.policies.prefix_policy import PrefixPolicy

__all__ = ["PoolAware"]

# Increase of alpha for each waiting request, and the maximum of alpha. Found with kvrouter simulate: from 8 to 64
# instances and from low load to overload, the mean time to first token is within 4 % of that of the best fixed alpha,
# which is 2 at low load and 32 at overload.
_ALPHA_PER_WAITING = 2.0
_MAX_ALPHA = 32.0
# Candidates whose costs differ by less than this fraction of a request's mean work take turns. So routers with the same
# knowledge choose the same instance less often: for four routers that exchange data after 50 ms, the simulator finds a
# mean time to first token that is 0.5 % lower, and for one router no significant difference.
_NEARLY_EQUAL = 0.1
# Means are taken over about this many requests.
_MEMORY = 100

_NO_MATCH = PrefixMatch(0, {}, [])


class PoolAware(PrefixPolicy):
    """Minimises cost = queue ahead + alpha x (tokens in neither place + fetch cost x tokens only in the pool).

    A token of work delays its own request, and all requests that arrive while the queue lasts. **Alpha** is the cost of
    a token of work to all of these together. It is 1 without waiting requests, and grows with their number. Its unit is
    queued tokens, so it is higher if a queued token takes less time than a computed one (an instance may prefill
    several requests in parallel). Without waiting requests, the request's own time decides. At overload, alpha is high,
    and the least total work decides, which shortens the queues.

    **Fetch cost** is the cost of a token from the pool, relative to computing it. If the pool often lacks chunks that
    it should have (it evicts, or there is no pool), this cost rises up to 1: then only the instances' own caches count.

    If an instance reports that it no longer had chunks that it should have cached, the policy learns how long instances
    cache unused chunks.
    """

    def __init__(self, options: PolicyOptions = DEFAULTS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(options, clock)
        self._longest_kept = 60 * options.eviction_duration_mins
        self._cost = PrefillCost()
        self._kept_seconds = self._longest_kept  # how long an instance caches a chunk after its last use
        self._mean_queue = 0.0
        self._mean_work = 0.0
        self._pool_expected = self._pool_found = 100_000.0  # tokens; a pool is trusted until it lacks some
        self.alpha = 1.0
        """Cost of a token of work, in queued tokens."""
        self.fetch_cost = 1.0
        """Cost of a token that the pool should have, relative to computing it: if the pool has it, and if not."""
        self._update_costs()

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """See ``Policy.choose_instance``."""
        chunks, prompt, per_chunk = request.chunks, request.prompt_tokens, request.tokens_per_chunk
        held = self._index.look_up(chunks, self._kept_seconds) if chunks else _NO_MATCH
        alpha, fetch_cost, own = self.alpha, self.fetch_cost, held.own
        saving = alpha * fetch_cost * per_chunk  # per chunk that does not have to be fetched
        start = self._turns.taken % len(candidates)
        self._turns.taken += 1
        chosen, least, queue, handicap = candidates[start], float("inf"), 0.0, 0.0
        handicap_step = _NEARLY_EQUAL * self._mean_work / len(candidates)
        for candidate in [*candidates[start:], *candidates[:start]]:
            queued = candidate.queued
            queue += queued
            cost = queued + handicap - saving * own.get(candidate.key, 0)
            handicap += handicap_step
            if cost < least:
                chosen, least = candidate, cost
        if chunks:
            self._add_chain(chunks, chosen.key)

        own_chunks = own.get(chosen.key, 0)
        cached_tokens = min(held.pool * per_chunk, prompt)
        own_tokens = min(own_chunks * per_chunk, prompt)
        pool_tokens = cached_tokens - own_tokens
        work = prompt - cached_tokens + fetch_cost * pool_tokens
        self._mean_queue += (queue / len(candidates) - self._mean_queue) / _MEMORY
        self._mean_work += (work - self._mean_work) / _MEMORY
        self._update_alpha()
        reasons: dict[str, float | str] = {
            "policy": "pool_aware",
            "cost": chosen.queued + alpha * work,
            "queued": chosen.queued,
            "own_tokens": own_tokens,
            "own_unused_secs": held.ages[bisect_left(held.ages, (own_chunks, 0.0))][1] if held.ages else 0.0,
            "pool_tokens": pool_tokens,
            "alpha": alpha,
            "fetch_cost": fetch_cost,
        }
        return Decision(chosen.key, reasons, work, cached_tokens)

    def observe_outcome(self, request: RequestFeatures, decision: Decision, outcome: Outcome) -> None:
        """See ``Policy.observe_outcome``."""
        if not outcome.prompt_tokens or outcome.cached_tokens is None:
            return
        # The engine counts tokens, the router estimates them. From here on, all values are in the router's tokens.
        scale = request.prompt_tokens / outcome.prompt_tokens
        cached = outcome.cached_tokens * scale
        own_expected, pool_expected = float(decision.reasons["own_tokens"]), float(decision.reasons["pool_tokens"])
        told = outcome.own_cached_tokens
        own = min(own_expected, cached) if told is None else told * scale
        if own_expected:
            # An engine caches whole blocks, which differ from the router's chunks, so a difference of one chunk is
            # allowed.
            kept = own + request.tokens_per_chunk >= own_expected
            self._learn_kept_seconds(float(decision.reasons["own_unused_secs"]), kept)
        if pool_expected:
            self._pool_expected += pool_expected - self._pool_expected / _MEMORY
            self._pool_found += min(pool_expected, max(0.0, cached - own_expected)) - self._pool_found / _MEMORY
        if outcome.ttft is not None:
            self._cost.observe_first_token(outcome.queued, request.prompt_tokens - cached, cached - own, outcome.ttft)
        self._update_costs()

    def _update_costs(self) -> None:
        """Compute all costs after the pool's record or the fit have changed."""
        self.token_seconds = self._cost.token_seconds * self._cost.queue_cost
        self._update_alpha()
        found = self._pool_found / self._pool_expected
        self.fetch_cost = found * self._cost.fetch_cost + (1 - found)

    def _update_alpha(self) -> None:
        """Compute ``alpha`` after the means or the fit have changed."""
        waiting = self._mean_queue / self._mean_work if self._mean_work else 0.0
        self.alpha = min(_MAX_ALPHA, (1 + _ALPHA_PER_WAITING * waiting) / self._cost.queue_cost)

    def _learn_kept_seconds(self, unused_seconds: float, kept: bool) -> None:
        # It converges to the age at which unused chunks are still cached in half of the cases.
        if not kept:
            self._kept_seconds = max(1.0, 0.9 * self._kept_seconds)
        elif unused_seconds > self._kept_seconds / 2:
            self._kept_seconds = min(self._longest_kept, 1.1 * self._kept_seconds)
