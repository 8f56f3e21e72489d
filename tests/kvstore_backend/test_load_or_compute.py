"""A pool that is slower than computing is left alone, and tried again; anything else is loaded."""

from __future__ import annotations

import pytest

from kvstore_backend.load_or_compute import LoadOrCompute

BLOCK = 16
COMPUTE_SECONDS = 0.1
"""What computing a block's tokens takes."""


def estimate(*seconds_per_block: float) -> LoadOrCompute:
    """What knows how long computing takes, and of these loads of ten blocks."""
    known = LoadOrCompute(BLOCK)
    known.record_step(10 * BLOCK, 10 * COMPUTE_SECONDS)
    for seconds in seconds_per_block:
        known.record_load(10, 10 * seconds)
    return known


@pytest.mark.parametrize("times", [0.1, 0.9, 1.1, 10])
def test_what_takes_longer_to_load_than_to_compute_is_computed(times: float) -> None:
    assert estimate(*[times * COMPUTE_SECONDS] * 4).decide(10, 0) == ("load" if times < 1 else "compute")


def test_until_enough_is_known_blocks_are_loaded() -> None:
    assert estimate(*[10 * COMPUTE_SECONDS] * 3).decide(10, 0) == "load"
    knows_no_steps = LoadOrCompute(BLOCK)
    for _ in range(4):
        knows_no_steps.record_load(10, 1000)
    assert knows_no_steps.decide(10, 0) == "load"


def test_loads_that_stalled_do_not_count_while_another_was_quick() -> None:
    assert estimate(0.5 * COMPUTE_SECONDS, *[100 * COMPUTE_SECONDS] * 3).decide(10, 0) == "load"


def test_the_more_run_the_more_a_load_may_take_since_computing_would_delay_them() -> None:
    known = estimate(*[3.5 * COMPUTE_SECONDS] * 4)
    decisions = [known.decide(10, num_running) for num_running in range(5)]
    assert decisions == ["compute"] * 3 + ["load"] * 2


def test_a_load_too_short_to_matter_is_never_skipped() -> None:
    known = LoadOrCompute(BLOCK)
    known.record_step(1000, 1e-6)
    for _ in range(4):
        known.record_load(10, 0.04)
    assert known.decide(10, 0) == "load"
    assert known.decide(20, 0) == "compute"


def test_now_and_then_a_load_is_tried_again() -> None:
    known = estimate(*[10 * COMPUTE_SECONDS] * 4)
    decisions = [known.decide(10, 0) for _ in range(48)]
    assert decisions == (["compute"] * 15 + ["load"]) * 3


def test_one_quick_load_brings_the_pool_back() -> None:
    known = estimate(*[10 * COMPUTE_SECONDS] * 4)
    known.record_load(10, COMPUTE_SECONDS)
    assert known.decide(10, 0) == "load"


def test_computing_is_known_from_the_last_thousands_of_tokens() -> None:
    known = estimate(*[10 * COMPUTE_SECONDS] * 4)
    for _ in range(20):
        known.record_step(2048, 2048 * 20 * COMPUTE_SECONDS / BLOCK)
    assert known.decide(10, 0) == "load"


def test_it_says_what_it_knows() -> None:
    assert repr(estimate(0.002)) == "a block takes 2.00 ms to load, 100.00 ms to compute"
    assert repr(LoadOrCompute(BLOCK)) == "a block takes ? ms to load, ? ms to compute"
