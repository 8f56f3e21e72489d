"""AwakeClock: how long this process could have noticed something.

A process that gets no CPU, is stopped, or whose machine sleeps hears of nothing meanwhile, and finds all time-outs over
when it goes on, before it has read what came in time. So what others must have done within some seconds is judged by
a clock that stands still for as long as this process does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["AwakeClock"]

# A tick that comes later than this after the one before shows that the loop did not run.
TICK_SECONDS = 0.1
MAX_STEP_SECONDS = 0.25


class AwakeClock:
    """Seconds in which the event loop of this process ran."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: seconds of a monotonic clock, which this one is equal to until it first stands still.
        """
        self._clock = clock
        self._ticked_at = self._awake_at_tick = clock()

    def __repr__(self) -> str:
        return f"<AwakeClock {self.lost:.1f} s behind>"

    @property
    def lost(self) -> float:
        """The seconds for which this clock has stood still."""
        now = self._clock()
        return now - self._read(now)

    def now(self) -> float:
        """The time by this clock, which ``keep_ticking`` must keep going."""
        return self._read(self._clock())

    def tick(self) -> None:
        """Note that the loop runs."""
        now = self._clock()
        self._awake_at_tick, self._ticked_at = self._read(now), now

    async def keep_ticking(self) -> None:
        """Tick, until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(TICK_SECONDS)

    def _read(self, now: float) -> float:
        return self._awake_at_tick + min(now - self._ticked_at, MAX_STEP_SECONDS)
