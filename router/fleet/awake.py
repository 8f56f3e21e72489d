"""AwakeClock: a clock that stops while this process does not run.

A process does not run while it gets no CPU or is stopped, or while its machine sleeps. When it continues, timeouts have
expired, although messages that arrived in time are not read yet. So the time that other processes have to respond is
measured with this clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["AwakeClock"]

# The clock ticks every TICK_SECONDS. Between two ticks it advances by at most MAX_STEP_SECONDS: if the second tick is
# later, the event loop did not run.
TICK_SECONDS = 0.2
MAX_STEP_SECONDS = 0.375


class AwakeClock:
    """Counts the seconds in which the event loop of this process ran."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: monotonic clock in seconds. The ``AwakeClock`` starts with the same value, and falls behind while
                this process does not run.
        """
        self._clock = clock
        self._ticked_at = self._awake_at_tick = clock()

    @property
    def lost(self) -> float:
        """Total number of seconds for which this clock has stopped."""
        now = self._clock()
        return now - self._read(now)

    def now(self) -> float:
        """Return the time of this clock in seconds. ``keep_ticking`` must be running."""
        return self._read(self._clock())

    def tick(self) -> None:
        """Record that the event loop is running."""
        now = self._clock()
        self._awake_at_tick, self._ticked_at = self._read(now), now

    async def keep_ticking(self) -> None:
        """Call ``tick`` every ``TICK_SECONDS``, until this task is cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(TICK_SECONDS)

    def _read(self, now: float) -> float:
        return self._awake_at_tick + min(now - self._ticked_at, MAX_STEP_SECONDS)
