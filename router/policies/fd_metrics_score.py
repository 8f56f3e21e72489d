"""FastDeploy's score: running requests, and waiting ones that count more; the lowest wins."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate, Decision, PolicyBase, RequestFeatures

__all__ = ["FdMetricsScore", "FdRemoteMetricsScore"]


class FdMetricsScore(PolicyBase):
    """The lowest score by the router's own count, which knows of running requests and not who waits there."""

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """See ``Policy.choose``."""
        chosen = self._turns.least(candidates, lambda candidate: candidate.requests)
        return Decision(chosen.key, {"policy": "fd_metrics_score", "score": chosen.requests}, request.prompt_tokens)


class FdRemoteMetricsScore(PolicyBase):
    """The lowest score by the instances' own account, which counts all routers' requests.

    That account is some seconds old. What this router has sent since is added, or all requests until the next
    account would go to whoever had the lowest score in this one.
    """

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """See ``Policy.choose``."""
        weight = self._options.waiting_weight

        def score(candidate: Candidate) -> float:
            running, waiting = candidate.running, candidate.waiting
            if running is None or waiting is None:
                return candidate.requests
            return running + waiting * weight + max(0, candidate.requests - running - waiting)

        chosen = self._turns.least(candidates, score)
        reasons: dict[str, float | str] = {"policy": "fd_remote_metrics_score", "score": score(chosen)}
        return Decision(chosen.key, reasons, request.prompt_tokens)
