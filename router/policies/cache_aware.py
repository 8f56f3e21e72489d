"""FastDeploy's Go router's weighing of each instance's cache against its load."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate, Decision, RequestFeatures
from router.policies.prefix_policy import PrefixPolicy

__all__ = ["CacheAware", "RemoteCacheAware"]


class CacheAware(PrefixPolicy):
    """The lowest (1 - hit ratio) x hit-ratio-weight + (load / highest load) x load-balance-weight.

    Load is the number of requests running. Where it differs by more than both thresholds, caches are not looked
    at, and the instance with the fewest prompt tokens is taken.
    """

    name = "cache_aware"

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """See ``Policy.choose``."""
        chunks = request.chunks
        loads = [self._load(candidate) for candidate in candidates]
        highest, difference = max(loads), max(loads) - min(loads)
        options = self._options
        if difference > options.balance_abs_threshold and difference > options.balance_rel_threshold * highest:
            chosen = self._turns.least(candidates, lambda candidate: candidate.tokens)
            reasons: dict[str, float | str] = {"policy": self.name, "load_difference": difference}
            own = self._index.look_up(chunks).own.get(chosen.key, 0)
        else:
            held = self._index.look_up(chunks).own
            hit_weight = options.hit_ratio_weight / (len(chunks) or 1)
            load_weight = options.load_balance_weight / (highest or 1)

            def score(candidate: Candidate) -> tuple[float, int]:
                cost = load_weight * self._load(candidate) - hit_weight * held.get(candidate.key, 0)
                return options.hit_ratio_weight + cost, candidate.tokens

            chosen = self._turns.least(candidates, score)
            own = held.get(chosen.key, 0)
            reasons = {"policy": self.name, "score": score(chosen)[0], "hit_ratio": own / (len(chunks) or 1)}
        self._index.add(chunks, chosen.key)
        cached = min(own * request.tokens_per_chunk, request.prompt_tokens)
        return Decision(chosen.key, reasons, request.prompt_tokens - cached, cached)

    def _load(self, candidate: Candidate) -> int:
        return candidate.requests


class RemoteCacheAware(CacheAware):
    """The same, with load by the instances' own account where that is known; it counts all routers' requests."""

    name = "remote_cache_aware"

    def _load(self, candidate: Candidate) -> int:
        return max(candidate.requests, (candidate.running or 0) + (candidate.waiting or 0))
