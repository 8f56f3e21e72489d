"""PrefillCost: the costs of waiting, computing and fetching, from noisy times to first token."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.policies.prefill_cost import PrefillCost

SECONDS_PER_TOKEN = 1e-4


def learn(fetch: float, queue: float, noise: random.Random, stalls: float = 0.0, base: float = 0.05) -> PrefillCost:
    """Return the costs learned from 1024 outcomes with these true costs. A part of ``stalls`` is a minute late."""
    cost = PrefillCost()
    for _ in range(1024):
        queued, computed, fetched = noise.expovariate(1e-4), noise.expovariate(1e-4), noise.expovariate(1e-4)
        seconds = base + SECONDS_PER_TOKEN * (queue * queued + computed + fetch * fetched)
        late = 60.0 if noise.random() < stalls else 0.0
        cost.observe_first_token(queued, computed, fetched, seconds * noise.lognormvariate(0, 0.2) + late)
    return cost


def test_the_initial_cost_of_a_fetched_token_is_a_quarter() -> None:
    assert (PrefillCost().fetch_cost, PrefillCost().queue_cost) == (0.25, 1.0)


@pytest.mark.parametrize(("fetch", "queue"), [(0.05, 1.0), (0.25, 0.5), (0.8, 1.0)])
def test_the_true_costs_are_learned(fetch: float, queue: float) -> None:
    cost = learn(fetch, queue, random.Random(1))
    assert cost.fetch_cost == pytest.approx(fetch, abs=0.08)
    assert cost.queue_cost == pytest.approx(queue, abs=0.12)


def test_a_few_stalls_of_a_minute_have_a_small_effect() -> None:
    cost = learn(0.25, 1.0, random.Random(2), stalls=0.03)
    assert cost.fetch_cost == pytest.approx(0.25, abs=0.1)


def test_costs_that_outcomes_do_not_show_remain_at_their_initial_values() -> None:
    cost = PrefillCost()
    for _ in range(512):
        cost.observe_first_token(0.0, 1000.0, 0.0, 0.1)
    assert cost.fetch_cost == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(("tokens", "seconds"), [(0.5, 0.0), (1.0, 0.1)])
def test_a_time_to_first_token_counts_from_one_token_of_work_on(tokens: float, seconds: float) -> None:
    cost = PrefillCost()
    for _ in range(128):
        cost.observe_first_token(0.0, tokens, 0.0, 0.1)
    assert cost.token_seconds == pytest.approx(seconds, rel=0.01)


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.floats(0, 1e9)] * 4), min_size=1, max_size=8))
def test_costs_stay_within_bounds_for_any_outcomes(outcomes: list[tuple[float, float, float, float]]) -> None:
    cost = PrefillCost()
    for _ in range(600 // len(outcomes)):
        for queued, computed, fetched, seconds in outcomes:
            cost.observe_first_token(queued, computed, fetched, seconds)
    assert 0.02 <= cost.fetch_cost <= 1.0
    assert 0.5 <= cost.queue_cost <= 2.0
