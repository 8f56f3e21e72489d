"""consistent_hash: all requests of a session go to the same instance."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.policies import InstanceLoad, RequestFeatures
from router.policies.consistent_hash import ConsistentHash

KEYS = [f"session {i}" for i in range(300)]


def instances(count: int) -> list[InstanceLoad]:
    return [InstanceLoad(f"10.0.0.{i}:8000") for i in range(count)]


def place_sessions(candidates: list[InstanceLoad]) -> dict[str, str]:
    policy = ConsistentHash()
    return {key: policy.choose_instance(RequestFeatures(100, key=key), candidates).key for key in KEYS}


def prompt(*chunks: int, tokens: int = 0) -> RequestFeatures:
    return RequestFeatures(tokens or 100 * len(chunks), lambda: chunks, tokens_per_chunk=100)


@given(count=st.integers(2, 8), gone=st.integers(0, 7))
def test_an_instance_that_leaves_moves_only_its_own_sessions(count: int, gone: int) -> None:
    candidates = instances(count)
    left = candidates.pop(gone % count)
    before, after = place_sessions([*candidates, left]), place_sessions(candidates)
    assert {key for key in KEYS if before[key] != after[key]} == {key for key in KEYS if before[key] == left.key}


def test_sessions_are_spread() -> None:
    spread = Counter(place_sessions(instances(6)).values())
    assert len(spread) == 6
    assert max(spread.values()) < 2 * 300 / 6


def test_a_session_with_many_requests_does_not_overload_its_instance() -> None:
    policy, candidates = ConsistentHash(), instances(4)
    for _ in range(100):
        chosen = policy.choose_instance(RequestFeatures(100, key="hot"), candidates).key
        next(c for c in candidates if c.key == chosen).requests += 1
    assert max(c.requests for c in candidates) <= 1.25 * 100 / 4 + 1


def test_prompts_without_a_key_and_with_the_same_start_go_to_one_instance() -> None:
    policy, candidates = ConsistentHash(), instances(8)
    turns = [policy.choose_instance(prompt(1, 2, 3, 4, *range(10, 10 + n)), candidates).key for n in range(20)]
    assert len(set(turns)) == 1
