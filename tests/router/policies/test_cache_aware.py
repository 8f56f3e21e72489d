"""cache_aware: it prefers caches, unless loads differ too much."""

from __future__ import annotations

from router.policies import InstanceLoad, RequestFeatures
from router.policies.cache_aware import CacheAware, RemoteCacheAware


def instances(count: int) -> list[InstanceLoad]:
    return [InstanceLoad(f"10.0.0.{i}:8000") for i in range(count)]


def prompt(*chunks: int, tokens: int = 0) -> RequestFeatures:
    return RequestFeatures(tokens or 100 * len(chunks), lambda: chunks, tokens_per_chunk=100)


def test_cache_aware_chooses_the_instance_with_the_prefix() -> None:
    policy, candidates = CacheAware(), instances(4)
    first = policy.choose_instance(prompt(1, 2, 3), candidates)
    second = policy.choose_instance(prompt(1, 2, 3, 4), candidates)
    assert second.key == first.key
    assert (second.cached_tokens, second.work) == (300, 100)


def test_cache_aware_chooses_by_tokens_if_loads_differ_too_much() -> None:
    policy, candidates = CacheAware(), instances(2)
    first = policy.choose_instance(prompt(1, 2, 3), candidates).key
    for candidate in candidates:
        candidate.requests, candidate.tokens = (10, 5000) if candidate.key == first else (1, 100)
    assert policy.choose_instance(prompt(1, 2, 3), candidates).key != first


def test_cache_aware_forgets_a_restarted_instance() -> None:
    policy, candidates = CacheAware(), instances(2)
    first = policy.choose_instance(prompt(1, 2), candidates).key
    policy.forget_instance(first)
    assert policy.choose_instance(prompt(1, 2), candidates).cached_tokens == 0


def test_remote_cache_aware_uses_the_reported_load_if_it_is_higher() -> None:
    policy = RemoteCacheAware()
    idle, busy = InstanceLoad("idle", requests=3), InstanceLoad("busy", requests=1, tokens=10, running=5, waiting=4)
    decision = policy.choose_instance(prompt(1), [busy, idle])
    assert (decision.key, decision.reasons) == ("idle", {"policy": "remote_cache_aware", "load_difference": 6})


def test_equals_take_turns() -> None:
    policy = CacheAware()
    chosen = [policy.choose_instance(RequestFeatures(10), instances(3)).key for _ in range(6)]
    assert chosen == [candidate.key for candidate in instances(3)] * 2


def test_an_instance_without_a_reported_load_has_the_load_that_the_router_counts() -> None:
    loads = [InstanceLoad("a:1", requests=0), InstanceLoad("b:1", requests=0, running=0, waiting=1)]
    assert RemoteCacheAware()._measure_loads(loads) == [0, 1]
    assert RemoteCacheAware()._measure_loads([InstanceLoad("a:1", requests=1, running=0, waiting=0)]) == [1]
