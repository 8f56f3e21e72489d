"""Policies that compare the instances' caches and loads, as FastDeploy's Go router does."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Decision, InstanceLoad, RequestFeatures, requests_of, tokens_of
from router.policies.prefix_policy import PrefixPolicy

__all__ = ["CacheAware", "RemoteCacheAware"]


class CacheAware(PrefixPolicy):
    """Chooses the minimum of (1 - hit ratio) x hit-ratio-weight + (load / highest load) x load-balance-weight.

    Load is the number of running requests. If the loads differ by more than both thresholds, the policy ignores caches
    and chooses the instance with the fewest prompt tokens.
    """

    name = "cache_aware"

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """Choose the candidate with the lowest score; if the loads differ too much, the one with the fewest tokens."""
        chunks, options = request.chunks, self._options
        loads = self._measure_loads(candidates)
        highest, difference = max(loads), max(loads) - min(loads)
        chunks_at = self._index.look_up(chunks).own if chunks else {}
        if difference > options.balance_abs_threshold and difference > options.balance_rel_threshold * highest:
            chosen = self._turns.take_least(candidates, list(map(tokens_of, candidates)))
            own = chunks_at.get(chosen.key, 0)
            reasons: dict[str, float | str] = {"policy": self.name, "load_difference": difference}
        else:
            hit_weight = options.hit_ratio_weight / (len(chunks) or 1)
            load_weight = options.load_balance_weight / (highest or 1)
            scores = []
            for candidate, load in zip(candidates, loads, strict=True):
                cost = load_weight * load - hit_weight * chunks_at.get(candidate.key, 0)
                scores.append((options.hit_ratio_weight + cost, candidate.tokens))
            chosen = self._turns.take_least(candidates, scores)
            own = chunks_at.get(chosen.key, 0)
            reasons = {"policy": self.name, "score": min(scores)[0], "hit_ratio": own / (len(chunks) or 1)}
        if chunks:
            self._add_chain(chunks, chosen.key)
        cached = min(own * request.tokens_per_chunk, request.prompt_tokens)
        return Decision(chosen.key, reasons, request.prompt_tokens - cached, cached)

    def _measure_loads(self, candidates: Sequence[InstanceLoad]) -> list[int]:
        """Return the load of each candidate, in the same order."""
        return list(map(requests_of, candidates))


class RemoteCacheAware(CacheAware):
    """Chooses like ``CacheAware``, with the loads that the instances report, which include all routers' requests.

    If an instance reports no load, or fewer requests than this router has sent it, this router's own count is used.
    """

    name = "remote_cache_aware"

    def _measure_loads(self, candidates: Sequence[InstanceLoad]) -> list[int]:
        loads = []
        for candidate in candidates:
            loads.append(max(candidate.requests, (candidate.running or 0) + (candidate.waiting or 0)))
        return loads
