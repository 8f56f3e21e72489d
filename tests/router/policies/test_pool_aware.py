"""pool_aware: its choice, and its learned parameters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies import POLICIES, Decision, InstanceLoad, Outcome, RequestFeatures
from router.policies.base import PolicyOptions
from router.policies.pool_aware import PoolAware


def prompt(*chunks: int, tokens: int = 0) -> RequestFeatures:
    return RequestFeatures(tokens or 1000 * len(chunks), lambda: chunks, tokens_per_chunk=1000)


def outcome(decision: Decision, cached: int | None, own: int | None = None, **more: float) -> Outcome:
    return Outcome(decision.key, more.get("queued", 0.0), more.get("ttft"), 4000, cached, own)


def test_the_next_turn_goes_to_the_instance_with_its_prefix() -> None:
    policy, candidates = PoolAware(), [InstanceLoad(key) for key in "abcd"]
    first = policy.choose_instance(prompt(1, 2, 3), candidates)
    second = policy.choose_instance(prompt(1, 2, 3, 4), candidates)
    assert second.key == first.key
    assert (second.work, second.cached_tokens) == (1000, 3000)


def test_another_instance_loads_from_the_pool_if_the_one_with_the_prefix_is_too_busy() -> None:
    policy, candidates = PoolAware(), [InstanceLoad("a"), InstanceLoad("b")]
    first = policy.choose_instance(prompt(1, 2, 3), candidates).key
    next(c for c in candidates if c.key == first).queued = 100_000
    second = policy.choose_instance(prompt(1, 2, 3, 4), candidates)
    assert second.key != first
    assert second.cached_tokens == 3000
    assert second.work == 1000 + 0.25 * 3000
    assert (second.reasons["own_tokens"], second.reasons["pool_tokens"]) == (0, 3000)


@given(queues=st.lists(st.floats(0, 1e6), min_size=1, max_size=8))
def test_the_shortest_queue_is_chosen_if_no_prefix_is_cached(queues: list[float]) -> None:
    decision = PoolAware().choose_instance(prompt(1, 2), [InstanceLoad(str(i), queued=q) for i, q in enumerate(queues)])
    assert decision.reasons["queued"] == min(queues)
    assert decision.work == 2000


def test_requests_with_a_common_prefix_are_spread_over_all_instances() -> None:
    policy, candidates = PoolAware(), [InstanceLoad(key) for key in "abcd"]
    by_key = {candidate.key: candidate for candidate in candidates}
    for request in range(100):
        decision = policy.choose_instance(prompt(1, *range(1000 * (request + 1), 1000 * (request + 1) + 5)), candidates)
        by_key[decision.key].queued += decision.work
    assert max(c.queued for c in candidates) < 1.2 * min(c.queued for c in candidates)


def test_candidates_with_nearly_equal_costs_take_turns() -> None:
    policy = PoolAware()
    for request in range(200):
        policy.choose_instance(prompt(1000 + request), [InstanceLoad("a")])  # each has 1000 tokens of work

    def choose_from(other_queue: float) -> list[str]:
        loads = [InstanceLoad("a", queued=500.0), InstanceLoad("b", queued=other_queue)]
        return [policy.choose_instance(RequestFeatures(1000), loads).key for _ in range(6)]

    assert choose_from(520.0) == ["a", "b"] * 3
    assert choose_from(600.0) == ["a"] * 6


def test_all_requests_of_a_session_use_the_same_one_of_equal_candidates() -> None:
    policy, candidates = PoolAware(), [InstanceLoad(key) for key in "abcdefgh"]

    def choose(home: str) -> str:
        return policy.choose_instance(RequestFeatures(100, home=home), candidates).key

    assert len({choose("one") for _ in range(8)}) == 1
    assert len({choose(str(number)) for number in range(50)}) == len(candidates)


def test_a_session_leaves_an_instance_with_a_queue() -> None:
    policy, candidates = PoolAware(), [InstanceLoad(key) for key in "abcd"]
    request = RequestFeatures(1000, home="one")
    home = policy.choose_instance(request, candidates).key
    next(each for each in candidates if each.key == home).queued = 5000
    assert policy.choose_instance(request, candidates).key != home


def test_a_prompt_has_at_most_as_many_cached_tokens_as_tokens() -> None:
    policy, candidates = PoolAware(), [InstanceLoad("a")]
    policy.choose_instance(prompt(1, 2, tokens=1500), candidates)
    again = policy.choose_instance(prompt(1, 2, tokens=1500), candidates)
    assert (again.cached_tokens, again.work) == (1500, 0)


def test_a_restarted_instance_is_no_longer_preferred_but_the_pool_counts() -> None:
    policy = PoolAware()
    first = policy.choose_instance(prompt(1, 2), [InstanceLoad("a"), InstanceLoad("b")])
    policy.forget_instance(first.key)
    again = policy.choose_instance(prompt(1, 2), [InstanceLoad(first.key)])
    assert (again.reasons["own_tokens"], again.cached_tokens, again.work) == (0, 2000, 500)


def test_longer_queues_increase_the_weight_of_work() -> None:
    policy = PoolAware()
    for request in range(300):
        policy.choose_instance(prompt(request, request + 1000), [InstanceLoad("a", queued=0.0)])
    calm = policy.alpha
    for request in range(300):
        policy.choose_instance(prompt(request + 2000, request + 3000), [InstanceLoad("a", queued=20_000.0)])
    assert calm == pytest.approx(1.0)
    assert 5 * calm < policy.alpha <= 32


def test_a_pool_without_hits_makes_only_own_caches_count() -> None:
    policy = PoolAware()
    for request in range(500):
        here, there = InstanceLoad("here"), InstanceLoad("there")
        policy.choose_instance(prompt(request, 10**6 + request), [here])
        decision = policy.choose_instance(prompt(request, 10**6 + request), [there])
        policy.observe_outcome(prompt(request, 10**6 + request), decision, outcome(decision, cached=0))
    assert policy.fetch_cost > 0.95


def test_a_pool_with_only_hits_costs_only_the_fetch() -> None:
    policy = PoolAware()
    for request in range(500):
        policy.choose_instance(prompt(request), [InstanceLoad("here")])
        decision = policy.choose_instance(prompt(request), [InstanceLoad("there")])
        policy.observe_outcome(prompt(request), decision, outcome(decision, cached=4000))
    assert policy.fetch_cost == pytest.approx(0.25)


@pytest.mark.parametrize(("truth", "expected"), [(0.05, 0.05), (0.7, 0.7)])
def test_the_fetch_cost_is_learned_from_times_to_first_token(truth: float, expected: float) -> None:
    policy = PoolAware()
    for request in range(600):
        tokens, fetched = 4000 + 1000 * (request % 3), 1000 * (request % 4)
        features = prompt(request, tokens=tokens)
        decision = Decision("a", {"own_tokens": 0.0, "pool_tokens": fetched, "own_unused_secs": 0.0}, 0.0, fetched)
        seconds = 0.02 + 1e-4 * (tokens - fetched + truth * fetched)
        policy.observe_outcome(features, decision, Outcome("a", 0.0, seconds, tokens, fetched, 0))
    assert policy.fetch_cost == pytest.approx(expected, abs=0.05)


def test_the_policy_learns_that_instances_evict_sooner() -> None:
    now = 0.0
    policy = PoolAware(clock=lambda: now)
    for request in range(200):
        features = prompt(*range(4 * request, 4 * request + 4))
        policy.choose_instance(features, [InstanceLoad("a")])
        now += 60.0
        decision = policy.choose_instance(features, [InstanceLoad("a")])
        policy.observe_outcome(features, decision, outcome(decision, cached=4000, own=0))
    assert decision.reasons["own_tokens"] == 0
    assert decision.reasons["pool_tokens"] == 4000


def test_fewer_cached_tokens_than_expected_show_an_eviction() -> None:
    policy, candidates = PoolAware(), [InstanceLoad("a")]
    policy.choose_instance(prompt(1, 2, 3, 4), candidates)
    decision = policy.choose_instance(prompt(1, 2, 3, 4), candidates)
    kept_seconds = policy._kept_seconds
    policy.observe_outcome(prompt(1, 2, 3, 4), decision, outcome(decision, cached=1000))
    assert policy._kept_seconds == pytest.approx(0.9 * kept_seconds)


def test_nothing_is_learned_from_an_engine_that_reports_no_cached_tokens() -> None:
    policy = PoolAware()
    decision = policy.choose_instance(prompt(1), [InstanceLoad("a")])
    for _ in range(300):
        policy.observe_outcome(prompt(1), decision, Outcome("a", 0.0, 9.0, None, None))
    assert (policy.fetch_cost, policy.alpha) == (0.25, 1.0)


def test_the_policy_has_its_name() -> None:
    assert POLICIES["pool_aware"] is PoolAware


def test_the_retention_time_of_chunks_is_learned_within_bounds() -> None:
    policy = PoolAware(PolicyOptions(eviction_duration_mins=2.0))
    assert policy._kept_seconds == 120.0
    policy._learn_kept_seconds(100.0, kept=True)
    assert policy._kept_seconds == 120.0
    policy._learn_kept_seconds(100.0, kept=False)
    assert policy._kept_seconds == pytest.approx(108.0)
    policy._learn_kept_seconds(50.0, kept=True)
    assert policy._kept_seconds == pytest.approx(108.0)
    policy._learn_kept_seconds(60.0, kept=True)
    assert policy._kept_seconds == pytest.approx(118.8)
    for _ in range(100):
        policy._learn_kept_seconds(1.0, kept=False)
    assert policy._kept_seconds == 1.0
