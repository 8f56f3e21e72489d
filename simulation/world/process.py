"""Process: what an operating system would keep apart: a clock, random numbers, threads, and an end.

Modules are shared, as there is one interpreter: what production code keeps in a module is common to all processes.
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

# Virtual time begins at this second of Unix time; machines have run for a while by then.
EPOCH, UPTIME = 1_800_000_000, 10_000


class Clock:
    """The clocks of one process.

    Args:
        offset: seconds by which ``time.time`` is ahead of the true time.
        rate: seconds of these clocks in a true second.
        uptime: ``time.monotonic`` when the world began.
    """

    def __init__(self, scheduler: Scheduler, *, offset: float = 0.0, rate: float = 1.0, uptime: float = UPTIME) -> None:
        self.rate = rate
        self._scheduler = scheduler
        self._offset = round(offset * SECOND)
        self._uptime = round(uptime * SECOND)

    def monotonic_ns(self) -> int:
        """``time.monotonic_ns`` there."""
        now = self._scheduler.now
        return self._uptime + (now if self.rate == 1.0 else round(now * self.rate))

    def time_ns(self) -> int:
        """``time.time_ns`` there."""
        return EPOCH * SECOND + self._offset + self._elapsed()

    def step(self, seconds: float) -> None:
        """Set ``time.time`` forward, or back; ``monotonic`` does not notice."""
        self._offset += round(seconds * SECOND)

    def _elapsed(self) -> int:
        now = self._scheduler.now
        return now if self.rate == 1.0 else round(now * self.rate)


class Process:
    """A simulated process; its threads run production code, whose clocks and random numbers are the process's.

    Args:
        name: also its host's name on the network, if ``host`` is not given.
        host: its address on the network.
        clock: its clocks; the true time if not given.
        life: how many processes had this name before: each has random numbers of its own.
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
        """How late its event loops are on average, half of the times that they wake."""
        self._num_pauses = 0

    def __repr__(self) -> str:
        return f"<process {self.name} {'paused' if self._num_pauses else 'runs' if self.is_alive else 'is gone'}>"

    @property
    def runs(self) -> bool:
        """Whether its threads may run."""
        return self.is_alive and not self._num_pauses

    def start_thread(self, target: Callable[[], Any], name: str = "main") -> SimThread:
        """Run ``target`` on a thread of this process."""
        return self.scheduler.spawn(self, target, name)

    def start_loop(self, main: Callable[[], Coroutine[Any, Any, Any]], name: str = "main") -> SimThread:
        """Run the coroutine of ``main`` in an event loop of its own, on a thread of this process."""
        from simulation.world.loop import SimulatedLoop

        def run() -> None:
            loop = SimulatedLoop(self)
            self.loops.append(loop)
            loop.run_main(main())

        return self.start_thread(run, name)

    def pause(self) -> None:
        """Let its threads not run: SIGSTOP, a long garbage collection, no CPU; its connections stay."""
        self.trace.add(self.name, "pauses")
        self._num_pauses += 1
        self.scheduler.hold_process(self)

    def resume(self) -> None:
        """Undo one ``pause``."""
        if not self.is_alive:
            return
        self._num_pauses -= 1
        if not self._num_pauses:
            self.trace.add(self.name, "goes on")
            self.scheduler.release_process(self)

    def crash(self, *, silently: bool = False) -> None:
        """End it: its threads never run again, its ports are free.

        Args:
            silently: as a machine that loses power: its peers hear nothing.
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
