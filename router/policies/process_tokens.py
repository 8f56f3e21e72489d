"""The instance with the fewest prompt tokens to process: suits prefill, whose time grows with tokens."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Decision, InstanceLoad, PolicyBase, RequestFeatures, tokens_of

__all__ = ["ProcessTokens"]


class ProcessTokens(PolicyBase):
    """The instance with the fewest prompt tokens to process."""

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """See ``Policy.choose_instance``."""
        chosen = self._turns.take_least(candidates, list(map(tokens_of, candidates)))
        return Decision(chosen.key, {"policy": "process_tokens", "tokens": chosen.tokens}, request.prompt_tokens)
