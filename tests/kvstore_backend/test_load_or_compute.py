"""Blocks are computed while loading is slower, and a load is tried again from time to time."""

from __future__ import annotations

import pytest

from kvstore_backend.load_or_compute import LoadOrCompute

BLOCK = 16
COMPUTE_SECONDS = 0.1
"""Time to compute the tokens of a block."""


def estimate(*seconds_per_block: float) -> LoadOrCompute:
    """Create an estimator that knows the time to compute, and loads of ten blocks."""
    estimator = LoadOrCompute(BLOCK)
    estimator.record_step(10 * BLOCK, 10 * COMPUTE_SECONDS)
    for seconds in seconds_per_block:
        estimator.record_load(10, 10 * seconds)
    return estimator


@pytest.mark.parametrize("times", [0.1, 0.9, 1.1, 10])
def test_blocks_are_computed_if_loading_takes_longer(times: float) -> None:
    assert estimate(*[times * COMPUTE_SECONDS] * 4).decide(10, 0) == ("load" if times < 1 else "compute")


def test_blocks_are_loaded_until_enough_is_measured() -> None:
    assert estimate(*[10 * COMPUTE_SECONDS] * 3).decide(10, 0) == "load"
    without_steps = LoadOrCompute(BLOCK)
    for _ in range(4):
        without_steps.record_load(10, 1000)
    assert without_steps.decide(10, 0) == "load"


def test_slow_loads_do_not_count_if_another_load_was_fast() -> None:
    assert estimate(0.5 * COMPUTE_SECONDS, *[100 * COMPUTE_SECONDS] * 3).decide(10, 0) == "load"


def test_a_load_may_take_longer_if_more_requests_run() -> None:
    estimator = estimate(*[3.5 * COMPUTE_SECONDS] * 4)
    decisions = [estimator.decide(10, num_running) for num_running in range(5)]
    assert decisions == ["compute"] * 3 + ["load"] * 2


def test_a_very_short_load_is_never_skipped() -> None:
    estimator = LoadOrCompute(BLOCK)
    estimator.record_step(1000, 1e-6)
    for _ in range(4):
        estimator.record_load(10, 0.04)
    assert estimator.decide(10, 0) == "load"
    assert estimator.decide(20, 0) == "compute"


def test_every_sixteenth_decision_tries_a_load_again() -> None:
    estimator = estimate(*[10 * COMPUTE_SECONDS] * 4)
    decisions = [estimator.decide(10, 0) for _ in range(48)]
    assert decisions == (["compute"] * 15 + ["load"]) * 3


def test_blocks_are_loaded_again_after_one_fast_load() -> None:
    estimator = estimate(*[10 * COMPUTE_SECONDS] * 4)
    estimator.record_load(10, COMPUTE_SECONDS)
    assert estimator.decide(10, 0) == "load"


def test_the_time_to_compute_is_estimated_from_recent_steps() -> None:
    estimator = estimate(*[10 * COMPUTE_SECONDS] * 4)
    for _ in range(20):
        estimator.record_step(2048, 2048 * 20 * COMPUTE_SECONDS / BLOCK)
    assert estimator.decide(10, 0) == "load"


def test_the_text_has_both_estimates() -> None:
    assert repr(estimate(0.002)) == "a block takes 2.00 ms to load, 100.00 ms to compute"
    assert repr(LoadOrCompute(BLOCK)) == "a block takes ? ms to load, ? ms to compute"
