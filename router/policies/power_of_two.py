"""The less busy of two instances taken at random: nearly as even as the least busy of all, and never a stampede."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.base import Candidate, Decision, PolicyBase, RequestFeatures

__all__ = ["PowerOfTwo"]


class PowerOfTwo(PolicyBase):
    """The one with fewer requests running, of two instances taken at random."""

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """See ``Policy.choose``."""
        pair = random.sample(candidates, min(2, len(candidates)))
        chosen = min(pair, key=lambda candidate: candidate.requests)
        reasons: dict[str, float | str] = {
            "policy": "power_of_two",
            "requests": chosen.requests,
            "other_requests": max(candidate.requests for candidate in pair),
        }
        return Decision(chosen.key, reasons, request.prompt_tokens)
