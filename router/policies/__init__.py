"""Policies: which instance a request goes to. One file a policy, one small protocol.

base.py              the protocol of policies: plain data in, a decision with its reasons out
random.py            any instance
round_robin.py       one instance after another
power_of_two.py      the less busy of two taken at random
request_num.py       the fewest running requests
process_tokens.py    the fewest prompt tokens to process
fd_metrics_score.py  FastDeploy's score of running and waiting requests
consistent_hash.py   the same instance for the same session
cache_aware.py       FastDeploy's weighing of cache against load
pool_aware.py        the least estimated cost, given the cached prefixes
prefix_policy.py     the part that policies with a prefix index have in common
prefix_index.py      which instance has computed which prefix
prefill_cost.py      the cost of waiting, computing and fetching, learned from first tokens
features.py          a prompt as a chain of chunk hashes
"""

from __future__ import annotations

from collections.abc import Callable

from router.policies.base import Candidate, Decision, Outcome, Policy, PolicyOptions, RequestFeatures
from router.policies.cache_aware import CacheAware, RemoteCacheAware
from router.policies.consistent_hash import ConsistentHash
from router.policies.fd_metrics_score import FdMetricsScore, FdRemoteMetricsScore
from router.policies.pool_aware import PoolAware
from router.policies.power_of_two import PowerOfTwo
from router.policies.process_tokens import ProcessTokens
from router.policies.random import Random
from router.policies.request_num import RequestNum
from router.policies.round_robin import RoundRobin

__all__ = ["POLICIES", "Candidate", "Decision", "Outcome", "Policy", "PolicyOptions", "RequestFeatures"]

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
