"""The instance with the fewest requests running: suits decode, whose step time grows with the batch."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate, Decision, PolicyBase, RequestFeatures

__all__ = ["RequestNum"]


class RequestNum(PolicyBase):
    """The instance with the fewest requests running."""

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """See ``Policy.choose``."""
        chosen = self._turns.least(candidates, lambda candidate: candidate.requests)
        return Decision(chosen.key, {"policy": "request_num", "requests": chosen.requests}, request.prompt_tokens)
