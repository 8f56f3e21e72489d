"""Silence: for how long a worker was able to send a message, and did not.

A worker that gets no CPU is silent, too, but it does not hang. Killing this worker would lose its requests, and the
machine would have to start another process. So the time during which the worker waited for a CPU does not count. The
kernel reports this time:

state in /proc                          counts as silence
T (stopped), S (waits for an event)     yes
R (runnable), with a CPU                yes: one piece of work blocks its event loop
R, without a CPU                        no
D (waits for a disk, or memory)         no: such a process cannot even be killed
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Silence", "ThreadTimes", "read_thread_times"]

_NANOSECONDS = 1e9


class ThreadTimes(NamedTuple):
    """The state of a process's main thread, and the seconds for which it ran and waited, as the kernel reports them."""

    state: str
    ran: float
    """Seconds for which the thread had a CPU."""
    waited: float
    """Seconds for which the thread was runnable without a CPU; a wait counts when it has ended."""


def read_thread_times(pid: int) -> ThreadTimes | None:
    """Return the times of a process's main thread; None if this system does not report them."""
    folder = Path(f"/proc/{pid}/task/{pid}")
    try:
        # The program's name is in parentheses, and may itself contain parentheses.
        state, *fields = (folder / "stat").read_text().rpartition(")")[2].split()
        ran = (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    try:
        nanoseconds, waited, _ = map(int, (folder / "schedstat").read_text().split())
    except (OSError, ValueError):  # a kernel without CONFIG_SCHED_INFO
        return ThreadTimes(state, ran, 0.0)
    return ThreadTimes(state, nanoseconds / _NANOSECONDS, waited / _NANOSECONDS)


class Silence:
    """Measures for how long one worker could run, but has sent no message."""

    def __init__(
        self,
        pid: int,
        clock: Callable[[], float],
        read_times: Callable[[int], ThreadTimes | None] = read_thread_times,
    ) -> None:
        """
        Args:
            pid: process id of the worker.
            clock: clock in seconds. It stops while this process, which receives the messages, does not run.
            read_times: returns the times of the worker's main thread, which runs its event loop.
        """
        self._pid = pid
        self._clock = clock
        self._read_times = read_times
        self.note_message()

    def note_message(self) -> None:
        """Record that the worker has sent a message."""
        self.began_at = self._clock()
        """Time of the worker's last message."""
        self.is_reported = False
        """Whether this silence has been logged."""
        self._first: ThreadTimes | None = None
        self._last: ThreadTimes | None = None
        self._last_at = self.began_at
        self._waited_unseen = 0.0

    def measure(self) -> float:
        """Return for how many seconds the worker could run but sent nothing. Call this only while it is silent."""
        now, times = self._clock(), self._read_times(self._pid)
        waited = 0.0
        if times is not None:
            waited = self._count_waiting(times, now)
        return max(0.0, now - self.began_at - waited)

    def _count_waiting(self, times: ThreadTimes, now: float) -> float:
        """Return for how many seconds the worker has waited for a CPU or a disk since the first call of ``measure``."""
        if self._first is None or self._last is None:
            self._first = times
        elif times.state in "RD" and self._last.state in "RD":
            # The kernel adds a wait to its count only at the end of the wait. A wait in progress shows in a CPU time
            # that does not grow.
            self._waited_unseen += max(0.0, now - self._last_at - (times.ran - self._last.ran))
        self._last, self._last_at = times, now
        return max(self._waited_unseen, times.waited - self._first.waited)
