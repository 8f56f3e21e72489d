"""Process: a simulated process, with its own clock, random numbers and threads; it can pause and crash.

All processes share the modules of one interpreter. So values in a module of production code are common to all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from simulation.world.scheduler import SECOND, Scheduler, SimThread

if TYPE_CHECKING:
    from simulation.world.loop import SimulatedLoop
    from simulation.world.network import Network
    from simulation.world.trace import Trace

__all__ = ["EPOCH", "Clock", "Process"]

# Unix time at the beginning of virtual time, and the value of ``time.monotonic`` at this moment.
EPOCH, UPTIME = 1_800_000_000, 10_000


class Clock:
    """The clocks of one process.

    Args:
        scheduler: has the virtual time.
        offset: seconds by which ``time.time`` is ahead of virtual time.
        rate: seconds of these clocks in a second of virtual time.
        uptime: ``time.monotonic`` at the beginning of virtual time.
    """

    def __init__(self, scheduler: Scheduler, *, offset: float = 0.0, rate: float = 1.0, uptime: float = UPTIME) -> None:
        self.rate = rate
        self._scheduler = scheduler
        self._offset = round(offset * SECOND)
        self._uptime = round(uptime * SECOND)

    def monotonic_ns(self) -> int:
        """Return the value of ``time.monotonic_ns`` in this process."""
        now = self._scheduler.now
        return self._uptime + (now if self.rate == 1.0 else round(now * self.rate))

    def time_ns(self) -> int:
        """Return the value of ``time.time_ns`` in this process."""
        return EPOCH * SECOND + self._offset + self._elapsed()

    def step(self, seconds: float) -> None:
        """Move ``time.time`` forward, or back if ``seconds`` is negative. ``time.monotonic`` does not change."""
        self._offset += round(seconds * SECOND)

    def _elapsed(self) -> int:
        now = self._scheduler.now
        return now if self.rate == 1.0 else round(now * self.rate)


class Process:
    """A simulated process. Its threads run production code, which sees the clocks and random numbers of the process.

    Args:
        scheduler: runs its threads.
        name: the name of the process.
        trace: the timeline of the run.
        network: the network.
        host: the host on which it runs; default: a host with the name of the process.
        clock: its clocks; default: virtual time.
        life: number of earlier processes with this name. Each has its own random numbers.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        name: str,
        trace: Trace,
        network: Network,
        *,
        host: str = "",
        clock: Clock | None = None,
        life: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.name = name
        self.host = host or name
        self.trace = trace
        self.network = network
        self.clock = clock or Clock(scheduler)
        again = (str(life),) if life else ()
        self.random: random.Random = scheduler.stream("random", name, *again)
        self.entropy: random.Random = scheduler.stream("urandom", name, *again)
        self.pid = network.take_pid()
        network.on_process_start(self.host)
        self.is_alive = True
        self.threads: list[SimThread] = []
        self.waiting: list[SimThread] = []
        self.loops: list[SimulatedLoop] = []
        self.signal_handlers: dict[int, Callable[[], None]] = {}
        self.on_crash: list[Callable[[], None]] = []
        self.lags: random.Random = scheduler.stream("lag", name)
        self.lag_seconds = 0.0
        """Mean delay of its event loops after a wait; half of the waits have a delay."""
        self.spreads_over_turns = False
        """Whether its event loops need several turns for callbacks that others add at one moment (``loop.py``)."""
        self._num_pauses = 0

    def __repr__(self) -> str:
        return f"<process {self.name} {'paused' if self._num_pauses else 'runs' if self.is_alive else 'has ended'}>"

    @property
    def runs(self) -> bool:
        """Whether its threads may run."""
        return self.is_alive and not self._num_pauses

    def start_thread(self, target: Callable[[], Any], name: str = "main") -> SimThread:
        """Run ``target`` on a thread of this process."""
        return self.scheduler.spawn(self, target, name)

    def start_loop(self, main: Callable[[], Coroutine[Any, Any, Any]], name: str = "main") -> SimThread:
        """Run the coroutine of ``main`` in a new event loop, on a new thread of this process."""
        from simulation.world.loop import SimulatedLoop

        def run() -> None:
            loop = SimulatedLoop(self)
            self.loops.append(loop)
            loop.run_main(main())

        return self.start_thread(run, name)

    def pause(self) -> None:
        """Stop all threads for a while, as SIGSTOP or a long garbage collection does. Connections stay open."""
        self.trace.add(self.name, "pauses")
        self._num_pauses += 1
        self.scheduler.hold_process(self)

    def resume(self) -> None:
        """End one ``pause``. If there were several, all must be ended before threads run again."""
        if not self.is_alive:
            return
        self._num_pauses -= 1
        if not self._num_pauses:
            self.trace.add(self.name, "goes on")
            self.scheduler.release_process(self)

    def crash(self, *, silently: bool = False) -> None:
        """Kill the process: its threads never run again, and its sockets are closed.

        Args:
            silently: whether its host loses power, so that other hosts get no message.
        """
        if not self.is_alive:
            return
        self.trace.add(self.name, "loses power" if silently else "is killed")
        self.is_alive = False
        self.scheduler.hold_process(self)
        self.waiting.clear()
        self.network.on_process_end(self, silently=silently)
        for callback in self.on_crash:
            callback()
