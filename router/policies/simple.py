"""Policies that consider only the loads of instances, not prefixes or sessions."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.base import Decision, InstanceLoad, PolicyBase, RequestFeatures, requests_of, tokens_of

__all__ = [
    "FdMetricsScore",
    "FdRemoteMetricsScore",
    "PowerOfTwo",
    "ProcessTokens",
    "Random",
    "RequestNum",
    "RoundRobin",
]


class Random(PolicyBase):
    """Chooses an instance at random, each with the same probability."""

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """Choose one of ``candidates`` at random."""
        chosen = random.choice(candidates)
        return Decision(chosen.key, {"policy": "random", "candidates": len(candidates)}, request.prompt_tokens)


class RoundRobin(PolicyBase):
    """Chooses the instances in turn."""

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """Choose the next of ``candidates`` in round-robin order."""
        turn = self._turns.taken
        chosen = self._turns.take_next(candidates)
        return Decision(chosen.key, {"policy": "round_robin", "turn": turn}, request.prompt_tokens)


class PowerOfTwo(PolicyBase):
    """Draws two instances at random, and chooses the one with fewer running requests."""

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """Draw two of ``candidates``, and choose the one with fewer running requests."""
        pair = random.sample(candidates, min(2, len(candidates)))
        chosen = min(pair, key=requests_of)
        reasons: dict[str, float | str] = {
            "policy": "power_of_two",
            "requests": chosen.requests,
            "other_requests": max(map(requests_of, pair)),
        }
        return Decision(chosen.key, reasons, request.prompt_tokens)


class RequestNum(PolicyBase):
    """Chooses the instance with the fewest running requests. Suits decode: its steps take longer with more requests."""

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """Choose the candidate with the fewest running requests."""
        chosen = self._turns.take_least(candidates, list(map(requests_of, candidates)))
        return Decision(chosen.key, {"policy": "request_num", "requests": chosen.requests}, request.prompt_tokens)


class ProcessTokens(PolicyBase):
    """Chooses the instance with the fewest prompt tokens to process. Suits prefill: its time grows with the tokens."""

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """Choose the candidate with the fewest prompt tokens to process."""
        chosen = self._turns.take_least(candidates, list(map(tokens_of, candidates)))
        return Decision(chosen.key, {"policy": "process_tokens", "tokens": chosen.tokens}, request.prompt_tokens)


class FdMetricsScore(PolicyBase):
    """Chooses the instance with the lowest score. The score is the number of requests that this router runs there."""

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """Choose the candidate with the fewest running requests."""
        chosen = self._turns.take_least(candidates, list(map(requests_of, candidates)))
        return Decision(chosen.key, {"policy": "fd_metrics_score", "score": chosen.requests}, request.prompt_tokens)


class FdRemoteMetricsScore(PolicyBase):
    """Chooses the instance with the lowest score = running requests + waiting requests x waiting-weight.

    The instances report these numbers in their metrics. They include the requests of all routers, but are some seconds
    old. So requests that this router has sent since then are added.
    """

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """Choose the candidate with the lowest score, computed from running and waiting requests."""
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
