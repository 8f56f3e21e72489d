"""The less busy of two instances taken at random: nearly as even as the least busy of all, and never a stampede."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.base import Decision, InstanceLoad, PolicyBase, RequestFeatures, requests_of

__all__ = ["PowerOfTwo"]


class PowerOfTwo(PolicyBase):
    """The one with fewer requests running, of two instances taken at random."""

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """See ``Policy.choose_instance``."""
        pair = random.sample(candidates, min(2, len(candidates)))
        chosen = min(pair, key=requests_of)
        reasons: dict[str, float | str] = {
            "policy": "power_of_two",
            "requests": chosen.requests,
            "other_requests": max(map(requests_of, pair)),
        }
        return Decision(chosen.key, reasons, request.prompt_tokens)
