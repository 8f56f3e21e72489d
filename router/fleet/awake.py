"""AwakeClock: the time during which this process was able to notice events.

A process notices nothing while it gets no CPU or is stopped, or while its machine sleeps. When it continues, all
time-outs have expired, although it has not yet read messages that arrived in time. So deadlines of other processes are
measured with a clock that stops while this process does not run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["AwakeClock"]

# A tick later than this after the previous one means that the loop did not run in between.
TICK_SECONDS = 0.1
MAX_STEP_SECONDS = 0.25


class AwakeClock:
    """Counts the seconds in which the event loop of this process ran."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: monotonic clock in seconds. This clock starts with the same value, and falls behind whenever it
                stops.
        """
        self._clock = clock
        self._ticked_at = self._awake_at_tick = clock()

    def __repr__(self) -> str:
        return f"<AwakeClock {self.lost:.1f} s behind>"

    @property
    def lost(self) -> float:
        """Seconds for which this clock has been stopped in total."""
        now = self._clock()
        return now - self._read(now)

    def now(self) -> float:
        """Return the time of this clock. ``keep_ticking`` must be running."""
        return self._read(self._clock())

    def tick(self) -> None:
        """Note that the loop runs."""
        now = self._clock()
        self._awake_at_tick, self._ticked_at = self._read(now), now

    async def keep_ticking(self) -> None:
        """Tick until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(TICK_SECONDS)

    def _read(self, now: float) -> float:
        return self._awake_at_tick + min(now - self._ticked_at, MAX_STEP_SECONDS)
