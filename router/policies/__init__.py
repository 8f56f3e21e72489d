"""Policies: which instance a request goes to. One file a policy, one small protocol."""

from __future__ import annotations

from collections.abc import Callable

from router.policies.base import Candidate, Decision, Outcome, Policy, PolicyOptions, RequestFeatures
from router.policies.cache_aware import CacheAware, RemoteCacheAware
from router.policies.consistent_hash import ConsistentHash
from router.policies.fd_metrics_score import FdMetricsScore, FdRemoteMetricsScore
from router.policies.features import request_features
from router.policies.pool_aware import PoolAware
from router.policies.power_of_two import PowerOfTwo
from router.policies.process_tokens import ProcessTokens
from router.policies.random import Random
from router.policies.request_num import RequestNum
from router.policies.round_robin import RoundRobin

__all__ = [
    "POLICIES",
    "Candidate",
    "Decision",
    "Outcome",
    "Policy",
    "PolicyOptions",
    "RequestFeatures",
    "request_features",
]

POLICIES: dict[str, Callable[..., Policy]] = {
    "random": Random,
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "request_num": RequestNum,
    "process_tokens": ProcessTokens,
    "fd_metrics_score": FdMetricsScore,
    "fd_remote_metrics_score": FdRemoteMetricsScore,
    "consistent_hash": ConsistentHash,
    "cache_aware": CacheAware,
    "remote_cache_aware": RemoteCacheAware,
    "pool_aware": PoolAware,
}
"""Every policy by the name that flags and YAML use; each is made of ``PolicyOptions`` and a clock, or of neither."""
