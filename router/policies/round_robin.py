"""One instance after another."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Decision, InstanceLoad, PolicyBase, RequestFeatures

__all__ = ["RoundRobin"]


class RoundRobin(PolicyBase):
    """One instance after another."""

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """See ``Policy.choose_instance``."""
        turn = self._turns.taken
        chosen = self._turns.take_next(candidates)
        return Decision(chosen.key, {"policy": "round_robin", "turn": turn}, request.prompt_tokens)
