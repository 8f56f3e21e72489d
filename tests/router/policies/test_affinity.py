"""consistent_hash and cache_aware: who is sent where, again and again."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies import POLICIES, InstanceLoad, PolicyOptions, RequestFeatures

KEYS = [f"session {i}" for i in range(300)]


def instances(count: int) -> list[InstanceLoad]:
    return [InstanceLoad(f"10.0.0.{i}:8000") for i in range(count)]


def places(candidates: list[InstanceLoad]) -> dict[str, str]:
    policy = POLICIES["consistent_hash"]()
    return {key: policy.choose_instance(RequestFeatures(100, key=key), candidates).key for key in KEYS}


def prompt(*chunks: int, tokens: int = 0) -> RequestFeatures:
    return RequestFeatures(tokens or 100 * len(chunks), lambda: chunks, tokens_per_chunk=100)


@given(count=st.integers(2, 8), gone=st.integers(0, 7))
def test_an_instance_that_leaves_moves_only_its_own_sessions(count: int, gone: int) -> None:
    candidates = instances(count)
    left = candidates.pop(gone % count)
    before, after = places([*candidates, left]), places(candidates)
    assert {key for key in KEYS if before[key] != after[key]} == {key for key in KEYS if before[key] == left.key}


def test_sessions_are_spread() -> None:
    spread = Counter(places(instances(6)).values())
    assert len(spread) == 6
    assert max(spread.values()) < 2 * 300 / 6


def test_one_hot_session_does_not_overload_its_instance() -> None:
    policy, candidates = POLICIES["consistent_hash"](), instances(4)
    for _ in range(100):
        chosen = policy.choose_instance(RequestFeatures(100, key="hot"), candidates).key
        next(c for c in candidates if c.key == chosen).requests += 1
    assert max(c.requests for c in candidates) <= 1.25 * 100 / 4 + 1


def test_without_a_key_equal_beginnings_go_together() -> None:
    policy, candidates = POLICIES["consistent_hash"](), instances(8)
    turns = [policy.choose_instance(prompt(1, 2, 3, 4, *range(10, 10 + n)), candidates).key for n in range(20)]
    assert len(set(turns)) == 1


def test_cache_aware_goes_where_the_prefix_is() -> None:
    policy, candidates = POLICIES["cache_aware"](), instances(4)
    first = policy.choose_instance(prompt(1, 2, 3), candidates)
    second = policy.choose_instance(prompt(1, 2, 3, 4), candidates)
    assert second.key == first.key
    assert (second.cached_tokens, second.work) == (300, 100)


def test_cache_aware_goes_by_tokens_when_loads_differ_too_much() -> None:
    policy, candidates = POLICIES["cache_aware"](), instances(2)
    first = policy.choose_instance(prompt(1, 2, 3), candidates).key
    for candidate in candidates:
        candidate.requests, candidate.tokens = (10, 5000) if candidate.key == first else (1, 100)
    assert policy.choose_instance(prompt(1, 2, 3), candidates).key != first


def test_cache_aware_forgets_a_restarted_instance() -> None:
    policy, candidates = POLICIES["cache_aware"](), instances(2)
    first = policy.choose_instance(prompt(1, 2), candidates).key
    policy.forget_instance(first)
    assert policy.choose_instance(prompt(1, 2), candidates).cached_tokens == 0


@pytest.mark.parametrize("name", ["cache_aware", "pool_aware"])
def test_what_was_learned_of_caches_outlives_the_router(name: str) -> None:
    policy, restarted = POLICIES[name](), POLICIES[name]()
    first = policy.choose_instance(prompt(1, 2, 3), instances(8)).key
    restarted.load_dump(policy.prepare_dump()())  # type: ignore[attr-defined]
    decision = restarted.choose_instance(prompt(1, 2, 3), instances(8))
    assert (decision.key, decision.cached_tokens) == (first, 300)


def test_the_remote_score_counts_waiting_requests_by_their_weight() -> None:
    policy = POLICIES["fd_remote_metrics_score"](PolicyOptions(waiting_weight=10))
    busy, waited = InstanceLoad("busy", running=9, waiting=0), InstanceLoad("waited", running=0, waiting=1)
    assert policy.choose_instance(prompt(1), [busy, waited]).reasons == {
        "policy": "fd_remote_metrics_score",
        "score": 9,
    }


def test_the_remote_score_adds_what_was_sent_since_the_instance_was_asked() -> None:
    policy = POLICIES["fd_remote_metrics_score"]()
    stale, other = InstanceLoad("stale", requests=8, running=0, waiting=0), InstanceLoad("other", running=5, waiting=0)
    assert policy.choose_instance(prompt(1), [stale, other]).key == "other"


def test_the_remote_score_of_an_unknown_instance_is_what_the_router_sent() -> None:
    policy = POLICIES["fd_remote_metrics_score"]()
    unknown, known = InstanceLoad("unknown", requests=3), InstanceLoad("known", running=4, waiting=0)
    assert policy.choose_instance(prompt(1), [unknown, known]).key == "unknown"


def test_power_of_two_avoids_the_busier_of_two() -> None:
    policy = POLICIES["power_of_two"]()
    candidates = [InstanceLoad("idle"), InstanceLoad("busy", requests=5)]
    assert {policy.choose_instance(prompt(1), candidates).key for _ in range(50)} == {"idle"}
