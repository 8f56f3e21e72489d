"""FastDeploy's score: running requests, and waiting ones that count more; the lowest wins."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Decision, InstanceLoad, PolicyBase, RequestFeatures, requests_of

__all__ = ["FdMetricsScore", "FdRemoteMetricsScore"]


class FdMetricsScore(PolicyBase):
    """The lowest score by the router's own count, which knows of running requests and not of those that wait there."""

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """See ``Policy.choose_instance``."""
        chosen = self._turns.take_least(candidates, list(map(requests_of, candidates)))
        return Decision(chosen.key, {"policy": "fd_metrics_score", "score": chosen.requests}, request.prompt_tokens)


class FdRemoteMetricsScore(PolicyBase):
    """The lowest score by the instances' own account, which counts all routers' requests.

    That account is some seconds old. The requests that this router has sent since are added, or all until
    the next account would go to the instance with the lowest score in this one.
    """

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """See ``Policy.choose_instance``."""
        weight = self._options.waiting_weight

        scores: list[float] = []
        for candidate in candidates:
            running, waiting = candidate.running, candidate.waiting
            if running is None or waiting is None:
                scores.append(candidate.requests)
            else:
                scores.append(running + waiting * weight + max(0, candidate.requests - running - waiting))
        chosen = self._turns.take_least(candidates, scores)
        reasons: dict[str, float | str] = {"policy": "fd_remote_metrics_score", "score": min(scores)}
        return Decision(chosen.key, reasons, request.prompt_tokens)
