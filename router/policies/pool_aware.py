"""The instance where a request costs least, its own time and everybody's, given what it and the pool have cached."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from router.policies.base import DEFAULTS, Candidate, Decision, PolicyBase, PolicyOptions, RequestFeatures
from router.prefix_index import PrefixIndex

__all__ = ["PoolAware"]

ALPHA = 8.0
FETCH = 0.25


class PoolAware(PolicyBase):
    def __init__(self, options: PolicyOptions = DEFAULTS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(options, clock)
        self._index = PrefixIndex(options.prefix_index_entries, 60 * options.eviction_duration_mins, clock)
        self.alpha = ALPHA
        self.fetch_cost = FETCH

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """See ``Policy.choose``."""
        chunks, prompt, per_chunk = request.chunks, request.prompt_tokens, request.tokens_per_chunk
        pool, own = self._index.look_up(chunks)
        alpha, fetch = self.alpha, self.fetch_cost
        pool_tokens = min(pool * per_chunk, prompt)
        elsewhere = prompt - pool_tokens * (1 - fetch)  # what it costs where nothing is held
        saving = alpha * fetch * per_chunk

        start = self._turns.taken % len(candidates)
        self._turns.taken += 1
        chosen, least = candidates[0], float("inf")
        for candidate in [*candidates[start:], *candidates[:start]]:
            cost = candidate.queued - saving * own.get(candidate.key, 0)
            if cost < least:
                chosen, least = candidate, cost
        self._index.add(chunks, chosen.key)
        own_tokens = min(own.get(chosen.key, 0) * per_chunk, prompt)
        work = elsewhere - own_tokens * fetch
        reasons: dict[str, float | str] = {
            "policy": "pool_aware",
            "cost": least + alpha * elsewhere,
            "queued": chosen.queued,
            "own_tokens": own_tokens,
            "pool_tokens": pool_tokens - own_tokens,
            "alpha": alpha,
            "fetch_cost": fetch,
        }
        return Decision(chosen.key, reasons, work, pool_tokens)

    def forget(self, key: str) -> None:
        """See ``Policy.forget``."""
        self._index.forget(key)
