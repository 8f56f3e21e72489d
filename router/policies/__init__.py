"""Policies: choose the instance for a request. A policy gets plain data and returns a decision.

base.py               Policy, its input and its output; computes the chunk hashes of a prompt
prefix_index.py       PrefixIndex: stores which instance has computed which prefix
resume_points.py      ResumePoints: learns how much of a known prefix an instance can use
prefix_policy.py      PrefixPolicy: the base of policies that have a PrefixIndex
block_names.py        computes names of blocks from their tokens, equal for all engines
block_tree.py         BlockTree: stores the cached blocks that one instance reports by KV events
cached_blocks.py      CachedBlocks: finds out which prompts have these blocks
prefill_cost.py       PrefillCost: learns the cost of waiting, computing and fetching
simple.py             policies that consider only loads: random, round_robin, request_num, ...
consistent_hash.py    chooses the same instance for the same session
cache_aware.py        compares caches and loads, as FastDeploy's Go router does
pool_aware.py         chooses the instance with the least cost, given the caches, the pool and the queues
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
    request_features,
)
from router.policies.block_names import TOKEN_BYTES, chain_names, iterate_names, pack_tokens, seed_of
from router.policies.cache_aware import CacheAware, RemoteCacheAware
from router.policies.cached_blocks import BlockHash, CachedBlocks, PlacedPrompt
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
    "TOKEN_BYTES",
    "BlockHash",
    "CachedBlocks",
    "Decision",
    "InstanceLoad",
    "Outcome",
    "PlacedPrompt",
    "Policy",
    "PolicyOptions",
    "PrefixPolicy",
    "RequestFeatures",
    "chain_names",
    "iterate_names",
    "pack_tokens",
    "request_features",
    "seed_of",
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
"""All policies by their names in flags and YAML. A constructor takes ``PolicyOptions`` and a clock, both optional."""
