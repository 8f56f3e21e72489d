"""Any instance, each as likely as the others."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.base import Decision, InstanceLoad, PolicyBase, RequestFeatures

__all__ = ["Random"]


class Random(PolicyBase):
    """Any instance, each as likely as the others."""

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """See ``Policy.choose_instance``."""
        chosen = random.choice(candidates)
        return Decision(chosen.key, {"policy": "random", "candidates": len(candidates)}, request.prompt_tokens)
