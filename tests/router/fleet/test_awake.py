"""A clock that stops while this process does not run."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.awake import MAX_STEP_SECONDS, TICK_SECONDS, AwakeClock


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_it_equals_the_other_clock_while_it_ticks() -> None:
    clock = Clock()
    awake = AwakeClock(clock)
    for _ in range(100):
        clock.now += 0.125
        awake.tick()
    assert awake.now() == clock.now == 1012.5
    assert awake.lost == 0.0


@pytest.mark.parametrize("is_noticed", [True, False])
def test_it_stops_while_it_does_not_tick_also_before_the_late_tick(is_noticed: bool) -> None:
    clock = Clock()
    awake = AwakeClock(clock)
    clock.now += 8.0 + MAX_STEP_SECONDS
    if is_noticed:
        awake.tick()
    assert awake.now() == 1000.0 + MAX_STEP_SECONDS
    assert awake.lost == 8.0


@given(st.lists(st.floats(0, 10), max_size=30))
def test_it_never_goes_back_and_is_never_faster_than_the_other_clock(steps: list[float]) -> None:
    clock = Clock()
    awake = AwakeClock(clock)
    before, lost = awake.now(), awake.lost
    for step in steps:
        clock.now += step
        awake.tick()
        assert before <= awake.now() <= before + min(step, MAX_STEP_SECONDS) + 1e-9
        assert awake.lost >= lost - 1e-9
        before, lost = awake.now(), awake.lost


def test_a_blocked_loop_is_detected() -> None:
    async def run() -> None:
        awake = AwakeClock()
        ticking = asyncio.ensure_future(awake.keep_ticking())
        await asyncio.sleep(2 * TICK_SECONDS)
        before, lost = awake.now(), awake.lost
        time.sleep(1.0)
        await asyncio.sleep(0)
        assert awake.now() - before <= MAX_STEP_SECONDS + 0.001
        assert awake.lost - lost >= 1.0 - MAX_STEP_SECONDS - 0.001
        ticking.cancel()

    asyncio.run(run())
