"""PoolAware: the policy that minimises the time of a request and the delay of later requests, given all caches."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from math import fsum
from operator import attrgetter

import xxhash

from router.policies.base import DEFAULTS, Decision, InstanceLoad, Outcome, PolicyOptions, RequestFeatures
from router.policies.prefill_cost import PrefillCost
from router.policies.prefix_index import PrefixMatch
from router.policies.prefix_policy import PrefixPolicy
from router.policies.resume_points import POOL

__all__ = ["PoolAware"]

# Increase of alpha for each waiting request, and the maximum of alpha. Measured with kvrouter simulate, from 8 to 64
# instances and from low load to overload: the mean time to first token is at most 4 % above the one with the best fixed
# alpha, which is 2 at low load and 32 at overload.
_ALPHA_PER_WAITING = 2.0
_MAX_ALPHA = 32.0
# Candidates are chosen in turn if their costs differ by less than this fraction of a request's mean work. So routers
# with the same data choose the same instance less often. In the simulator, the mean time to first token is 0.5 % lower
# for four routers that exchange data after 50 ms; for one router there is no significant difference.
_NEARLY_EQUAL = 0.1
# Number of requests over which means are taken, approximately.
_MEMORY = 100

_get_queued = attrgetter("queued")

_NO_MATCH = PrefixMatch(0, {}, [])


class PoolAware(PrefixPolicy):
    """Chooses the instance with the least cost = queued tokens + alpha x (uncached tokens + fetch cost x pool tokens).

    Queued tokens are the work that waits at the instance. Uncached tokens of the prompt are neither in the instance's
    own cache nor in the pool. Pool tokens are only in the pool.

    **Alpha** is the cost of computing one token, in units of queued tokens. Computing a token delays its own request,
    and all requests that arrive before the queue is empty. Alpha is 1 if no request waits, and each queued token delays
    the request by the time to compute one token. It grows with the number of waiting requests. It also grows if the
    instance prefills several requests in parallel: each queued token then delays the request by less. Without waiting
    requests, the request's own time decides. At overload, alpha is high, and the least total work decides, which
    shortens the queues.

    **Fetch cost** is the cost of a token from the pool, where computing the token costs 1. If the pool often lacks
    chunks that it should have (because it evicts them, or there is no pool), the fetch cost rises up to 1. Then only
    the instances' own caches count.

    If several candidates have nearly the same cost, all requests of a session, and of its child sessions (sub-agents),
    use the same candidate. Requests without a session use these candidates in turn.

    The policy learns how long an instance keeps a chunk that no request uses. It compares the prefix that it expected
    in the cache with the cached tokens that the instance reports. It also learns for which prefixes an instance reuses
    fewer chunks than it has computed (``ResumePoints``).
    """

    def __init__(self, options: PolicyOptions = DEFAULTS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(options, clock)
        self._max_kept_seconds = 60 * options.eviction_duration_mins
        self._cost = PrefillCost()
        self._kept_seconds = self._max_kept_seconds  # how long an instance caches a chunk after its last use
        self._mean_queue = 0.0
        self._mean_work = 0.0
        # In tokens. They are equal, as if the pool had lacked none; and small, so that a missing pool is soon noticed.
        self._pool_expected = self._pool_found = 10_000.0
        self.alpha = 1.0
        """Cost of computing one token, in queued tokens; see the class."""
        self.fetch_cost = 1.0
        """Mean cost of a token that the pool should have, where computing the token costs 1.

        A token that the pool does not have must be computed, so it costs 1.
        """
        self._update_costs()

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """Choose the candidate with the least cost for this request, given all caches and queues."""
        chunks, prompt, per_chunk = request.chunks, request.prompt_tokens, request.tokens_per_chunk
        match = self._index.look_up(chunks, self._kept_seconds) if chunks else _NO_MATCH
        alpha, fetch_cost, own, pool = self.alpha, self.fetch_cost, match.own, match.pool
        if pool and not self._resume_points.is_empty:
            find = self._resume_points.find
            own = {key: find(key, chunks[end - 1], end) for key, end in own.items()}
            pool = find(POOL, chunks[pool - 1], pool)
        saving = alpha * fetch_cost * per_chunk  # for each chunk in the own cache, which is not fetched from the pool
        if request.home:
            start = xxhash.xxh3_64_intdigest(request.home.encode(errors="surrogatepass")) % len(candidates)
        else:
            start = self._turns.taken % len(candidates)
            self._turns.taken += 1
        queues = [*map(_get_queued, candidates)]
        # Without the handicap, no candidate costs less than this.
        lower_bound = min(queues) - saving * max(own.values(), default=0)
        chosen, least, handicap = candidates[start], float("inf"), 0.0
        handicap_step = _NEARLY_EQUAL * self._mean_work / len(candidates)
        for candidate in [*candidates[start:], *candidates[:start]]:
            if least <= lower_bound + handicap:
                break  # the handicap grows, so that the other candidates cannot cost less
            cost = candidate.queued + handicap - saving * own.get(candidate.key, 0)
            handicap += handicap_step
            if cost < least:
                chosen, least = candidate, cost
        if chunks:
            self._add_chain(chunks, chosen.key)

        own_chunks = match.own.get(chosen.key, 0)
        own_tokens = min(own_chunks * per_chunk, prompt)
        known: Mapping[str, float | str] = {}
        if self.caches:
            known, own_tokens = self._ask_cache(request, chosen.key, own_chunks, own_tokens)
        if own.get(chosen.key, 0) < own_chunks and known.get("own_known") != "exact":
            own_tokens = min(own_tokens, own[chosen.key] * per_chunk)
            known = {name: reason for name, reason in known.items() if name != "own_engine_tokens"}
        cached_tokens = max(min(pool * per_chunk, prompt), own_tokens)
        pool_tokens = cached_tokens - own_tokens
        work = prompt - cached_tokens + fetch_cost * pool_tokens
        self._mean_queue += (fsum(queues) / len(queues) - self._mean_queue) / _MEMORY
        self._mean_work += (work - self._mean_work) / _MEMORY
        self._update_alpha()
        reasons: dict[str, float | str] = {
            "policy": "pool_aware",
            "cost": chosen.queued + alpha * work,
            "queued": chosen.queued,
            "own_tokens": own_tokens,
            "own_unused_secs": match.ages[bisect_left(match.ages, (own_chunks, 0.0))][1] if match.ages else 0.0,
            "pool_tokens": pool_tokens,
            "alpha": alpha,
            "fetch_cost": fetch_cost,
            **known,
        }
        return Decision(chosen.key, reasons, work, cached_tokens, (own_chunks, match.pool))

    def observe_outcome(self, request: RequestFeatures, decision: Decision, outcome: Outcome) -> None:
        """Learn the costs of tokens, and how long instances keep chunks, from the result of a request."""
        super().observe_outcome(request, decision, outcome)
        if not outcome.prompt_tokens or outcome.cached_tokens is None:
            return
        # The engine counts tokens, the router estimates them. From here on, all values are in the router's tokens.
        scale = request.prompt_tokens / outcome.prompt_tokens
        cached = outcome.cached_tokens * scale
        own_expected, pool_expected = float(decision.reasons["own_tokens"]), float(decision.reasons["pool_tokens"])
        reported = outcome.own_cached_tokens
        own = min(own_expected, cached) if reported is None else reported * scale
        if request.reads_cache:
            if decision.computed_before[1]:
                # Media, and text that is not English, have more tokens than estimated: a full hit would look partial.
                most = max(cached, float(outcome.cached_tokens))
                most_own = most if reported is None else max(own, float(reported))
                self._observe_resume_points(request, decision, most, most_own, outcome.seconds)
            if own_expected:
                # One chunk may be missing: an engine caches whole blocks, which differ from the router's chunks.
                kept = own + request.tokens_per_chunk >= own_expected
                self._learn_kept_seconds(float(decision.reasons["own_unused_secs"]), kept)
            if pool_expected:
                self._pool_expected += pool_expected - self._pool_expected / _MEMORY
                self._pool_found += min(pool_expected, max(0.0, cached - own_expected)) - self._pool_found / _MEMORY
        if outcome.ttft is not None:
            self._cost.observe_first_token(outcome.queued, request.prompt_tokens - cached, cached - own, outcome.ttft)
        self._update_costs()

    def _observe_resume_points(
        self, request: RequestFeatures, decision: Decision, cached: float, own: float, seconds: float
    ) -> None:
        """Record how much of a prefix that earlier requests have computed was cached for this request.

        A model with sliding windows or recurrent layers may reuse only a part of it, which ``ResumePoints`` predicts.

        Args:
            request: the request.
            decision: the policy's decision for it.
            cached: number of cached tokens in total.
            own: number of tokens that the instance's own cache had.
            seconds: time since the request was sent.
        """
        most = request.prompt_tokens // request.tokens_per_chunk  # media have chunks, and no estimated tokens
        own_end, pool_end = (min(end, most) for end in decision.computed_before)
        sent_at = self._clock() - seconds
        if own_end and decision.reasons.get("own_known") != "exact":
            resumed = round(own / request.tokens_per_chunk)
            self._resume_points.observe(decision.key, request.chunks[own_end - 1], own_end, resumed, sent_at)
        resumed = round(cached / request.tokens_per_chunk)
        if pool_end:
            self._resume_points.observe(POOL, request.chunks[pool_end - 1], pool_end, resumed, sent_at)

    def _update_costs(self) -> None:
        """Compute all costs, after ``_pool_found`` or the learned prefill costs have changed."""
        self.token_seconds = self._cost.token_seconds * self._cost.queue_cost
        self._update_alpha()
        found = self._pool_found / self._pool_expected
        self.fetch_cost = found * self._cost.fetch_cost + (1 - found)

    def _update_alpha(self) -> None:
        """Compute ``alpha``, after the mean queue, the mean work or the learned prefill costs have changed."""
        waiting = self._mean_queue / self._mean_work if self._mean_work else 0.0
        self.alpha = min(_MAX_ALPHA, (1 + _ALPHA_PER_WAITING * waiting) / self._cost.queue_cost)

    def _learn_kept_seconds(self, unused_seconds: float, kept: bool) -> None:
        # The value converges to the age at which half of the unused chunks are still cached.
        if not kept:
            self._kept_seconds = max(1.0, 0.9 * self._kept_seconds)
        elif unused_seconds > self._kept_seconds / 2:
            self._kept_seconds = min(self._max_kept_seconds, 1.1 * self._kept_seconds)
