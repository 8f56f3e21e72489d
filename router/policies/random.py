"""Any instance, each as likely as the others."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.base import Candidate, Decision, PolicyBase, RequestFeatures

__all__ = ["Random"]


class Random(PolicyBase):
    """Any instance, each as likely as the others."""

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """See ``Policy.choose``."""
        chosen = random.choice(candidates)
        return Decision(chosen.key, {"policy": "random", "candidates": len(candidates)}, request.prompt_tokens)
