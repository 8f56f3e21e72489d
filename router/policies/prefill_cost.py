"""PrefillCost: learns the cost of waiting, computing and fetching tokens from measured times to first token."""

from __future__ import annotations

from collections import deque

import numpy as np

__all__ = ["PrefillCost"]

_WINDOW = 512
_FIT_EVERY = 128
# Weight of the assumed costs: they count as much as this many measured requests.
_PRIOR = 16.0
_TINY = 1e-6
_LEAST_SECONDS = 1e-3
_ASSUMED = np.array([1.0, 1.0, 0.25, 0.0])


class PrefillCost:
    """Models the time to first token as queued tokens x a + computed tokens x b + fetched tokens x c + d.

    The method is a weighted least-squares fit of the relative error over the last measured requests. A request that
    took more than twice the expected time (a stalled connection, a pause of the engine) gets a smaller weight. So a few
    outliers have little effect. A cost that the requests do not determine keeps its assumed value: a queued token takes
    as long as a computed token, and a fetched token a quarter.
    """

    def __init__(self) -> None:
        self.fetch_cost = 0.25
        """Time to fetch a token, as a fraction of the time to compute it; from 0.02 to 1."""
        self.queue_cost = 1.0
        """Time for which a queued token delays a request, divided by the time to compute a token; from 0.5 to 2."""
        self.token_seconds = 0.0
        """Seconds to compute a token; 0 until it is learned."""
        self._outcomes: deque[tuple[float, float, float, float]] = deque(maxlen=_WINDOW)
        self._until_fit = _FIT_EVERY

    def observe_first_token(self, queued: float, computed: float, fetched: float, seconds: float) -> None:
        """Learn from one request: its time to first token, and the numbers of queued, computed and fetched tokens."""
        if queued + computed + fetched < 1:
            return
        self._outcomes.append((queued, computed, fetched, max(seconds, _LEAST_SECONDS)))
        self._until_fit -= 1
        if self._until_fit == 0:
            self._until_fit = _FIT_EVERY
            self._refit_costs()

    def _refit_costs(self) -> None:
        outcomes = np.array(self._outcomes)
        figures, seconds = np.column_stack([outcomes[:, :3], np.ones(len(outcomes))]), outcomes[:, 3]
        scale = float(np.median(seconds / (figures @ _ASSUMED)))  # seconds per token
        assumed = _ASSUMED * scale
        # The prior adds equations: each variable alone, with its typical size, costs as much as assumed. A variable
        # that was always 0 gets a tiny size, because otherwise the equations have no solution.
        typical = np.mean((figures / (figures @ assumed)[:, None]) ** 2, axis=0)
        prior = np.diag(_PRIOR * np.maximum(typical, [_TINY / scale**2] * 3 + [0]))
        found = assumed
        for _ in range(4):
            expected = np.maximum(figures @ found, 0.1 * (figures @ assumed))
            rows, targets = figures / expected[:, None], seconds / expected
            weights = 1 / np.maximum(1.0, np.abs(targets - rows @ found))
            normal = rows.T @ (rows * weights[:, None]) + prior
            found = np.linalg.solve(normal, rows.T @ (targets * weights) + prior @ assumed)
        computing = max(float(found[1]), 0.1 * scale)
        self.token_seconds = computing
        self.fetch_cost = min(1.0, max(0.02, float(found[2]) / computing))
        self.queue_cost = min(2.0, max(0.5, float(found[0]) / computing))
