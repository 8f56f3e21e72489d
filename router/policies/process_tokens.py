"""The instance with the fewest prompt tokens to process: suits prefill, whose time grows with tokens."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate, Decision, PolicyBase, RequestFeatures

__all__ = ["ProcessTokens"]


class ProcessTokens(PolicyBase):
    """The instance with the fewest prompt tokens to process."""

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """See ``Policy.choose``."""
        chosen = self._turns.least(candidates, lambda candidate: candidate.tokens)
        return Decision(chosen.key, {"policy": "process_tokens", "tokens": chosen.tokens}, request.prompt_tokens)
