"""The instance with the fewest requests running: suits decode, whose step time grows with the batch."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Decision, InstanceLoad, PolicyBase, RequestFeatures, requests_of

__all__ = ["RequestNum"]


class RequestNum(PolicyBase):
    """The instance with the fewest requests running."""

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """See ``Policy.choose_instance``."""
        chosen = self._turns.take_least(candidates, list(map(requests_of, candidates)))
        return Decision(chosen.key, {"policy": "request_num", "requests": chosen.requests}, request.prompt_tokens)
