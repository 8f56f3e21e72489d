"""Policies: which instance a request goes to. One file a policy, one small protocol."""

from __future__ import annotations

from collections.abc import Callable

from router.policies.base import Candidate, Decision, Outcome, Policy, PolicyOptions, RequestFeatures
from router.policies.process_tokens import ProcessTokens
from router.policies.random import Random
from router.policies.request_num import RequestNum
from router.policies.round_robin import RoundRobin

__all__ = ["POLICIES", "Candidate", "Decision", "Outcome", "Policy", "PolicyOptions", "RequestFeatures"]

POLICIES: dict[str, Callable[[], Policy]] = {
    "random": Random,
    "round_robin": RoundRobin,
    "request_num": RequestNum,
    "process_tokens": ProcessTokens,
}
"""Every policy by the name that flags and YAML use."""
