"""A pool that is slower than computing is left alone, and tried again; anything else is loaded."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.load_or_compute import LoadOrCompute
from kvstore_backend.stores.memory import MemoryStore
from tests.engine.checkpoints import VOCAB_SIZE
from tests.engine.faulty_store import FaultyStore
from tests.engine.running import Engine

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
    assert estimate(*[times * COMPUTE_SECONDS] * 4).should_load(10, 0) == (times < 1)


def test_until_enough_is_known_blocks_are_loaded() -> None:
    assert estimate(*[10 * COMPUTE_SECONDS] * 3).should_load(10, 0)
    knows_no_steps = LoadOrCompute(BLOCK)
    for _ in range(4):
        knows_no_steps.record_load(10, 1000)
    assert knows_no_steps.should_load(10, 0)


def test_loads_that_stalled_do_not_count_while_another_was_quick() -> None:
    assert estimate(0.5 * COMPUTE_SECONDS, *[100 * COMPUTE_SECONDS] * 3).should_load(10, 0)


def test_the_more_run_the_more_a_load_may_take_since_computing_would_delay_them() -> None:
    known = estimate(*[3.5 * COMPUTE_SECONDS] * 4)
    assert [known.should_load(10, num_running) for num_running in range(5)] == [False, False, False, True, True]


def test_a_load_too_short_to_matter_is_never_skipped() -> None:
    known = LoadOrCompute(BLOCK)
    known.record_step(1000, 1e-6)
    for _ in range(4):
        known.record_load(10, 0.04)
    assert known.should_load(10, 0)
    assert not known.should_load(20, 0)


def test_now_and_then_a_load_is_tried_again() -> None:
    known = estimate(*[10 * COMPUTE_SECONDS] * 4)
    decisions = [known.should_load(10, 0) for _ in range(48)]
    assert decisions == ([False] * 15 + [True]) * 3


def test_one_quick_load_brings_the_pool_back() -> None:
    known = estimate(*[10 * COMPUTE_SECONDS] * 4)
    known.record_load(10, COMPUTE_SECONDS)
    assert known.should_load(10, 0)


def test_computing_is_known_from_the_last_thousands_of_tokens() -> None:
    known = estimate(*[10 * COMPUTE_SECONDS] * 4)
    for _ in range(20):
        known.record_step(2048, 2048 * 20 * COMPUTE_SECONDS / BLOCK)
    assert known.should_load(10, 0)


def test_it_says_what_it_knows() -> None:
    assert repr(estimate(0.002)) == "<LoadOrCompute: a block takes 2.00 ms to load, 100.00 ms to compute>"
    assert repr(LoadOrCompute(BLOCK)) == "<LoadOrCompute: a block takes ? ms to load, ? ms to compute>"


def test_an_instance_computes_what_a_slow_pool_has_until_the_pool_is_quick_again(tiny_checkpoint: Path) -> None:
    prompts = [random.Random(seed).choices(range(VOCAB_SIZE), k=33) for seed in range(22)]
    store = FaultyStore(MemoryStore(64 << 20))
    with Engine(tiny_checkpoint, store=store) as engine:
        answers = [engine.answer(prompt).wait() for prompt in prompts]
    with Engine(tiny_checkpoint, store=store) as engine:
        engine.answer([1] * 15)  # some steps to learn from
        store.load_seconds = 0.25
        asked = [engine.answer(prompt) for prompt in prompts[:5]]
        store.load_seconds = 0.0
        asked += [engine.answer(prompt) for prompt in prompts[5:]]
    assert [one.wait() for one in asked] == answers
    loaded = [one.sequence.pool_cached_tokens for one in asked]
    assert loaded == [32] * 4 + [0] * 15 + [32] * 3
