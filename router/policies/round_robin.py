"""One instance after another."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate, Decision, PolicyBase, RequestFeatures

__all__ = ["RoundRobin"]


class RoundRobin(PolicyBase):
    """One instance after another."""

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """See ``Policy.choose``."""
        turn = self._turns.taken
        chosen = self._turns.next(candidates)
        return Decision(chosen.key, {"policy": "round_robin", "turn": turn}, request.prompt_tokens)
