"""Policies: which instance a request goes to. Plain data in, a decision out.

base.py               Policy, and the plain data that it gets and returns; a prompt as a chain of chunk hashes
prefix_index.py       PrefixIndex: which instance has computed which prefix
prefix_policy.py      PrefixPolicy: the base of policies with such an index
prefill_cost.py       PrefillCost: learns the cost of waiting, computing and fetching
simple.py             policies that consider only loads: random, round_robin, request_num, ...
consistent_hash.py    the same instance for the same session
cache_aware.py        weighs caches against load, as FastDeploy's Go router does
pool_aware.py         the least cost, given the caches, the pool and the queues
"""

from __future__ import annotations

from collections.abc import Callable

from router.policies.base import (
    Decision,
    InstanceLoad,
    Outcome,
    Policy,
    PolicyOptions,
    RequestFeatures,
    find_session,
    request_features,
)
from router.policies.cache_aware import CacheAware, RemoteCacheAware
from router.policies.consistent_hash import ConsistentHash
from router.policies.pool_aware import PoolAware
from router.policies.prefix_index import DEFAULT_MAX_ENTRIES
from router.policies.prefix_policy import PrefixPolicy
from router.policies.simple import (
    FdMetricsScore,
    FdRemoteMetricsScore,
    PowerOfTwo,
    ProcessTokens,
    Random,
    RequestNum,
    RoundRobin,
)

__all__ = [
    "DEFAULT_MAX_ENTRIES",
    "POLICIES",
    "Decision",
    "InstanceLoad",
    "Outcome",
    "Policy",
    "PolicyOptions",
    "PrefixPolicy",
    "RequestFeatures",
    "find_session",
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
"""Every policy by its name in flags and YAML. Constructors take ``PolicyOptions`` and a clock, or nothing."""
