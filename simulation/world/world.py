"""World: base class of worlds. It builds a world, runs the events of its plan, and checks it while it runs."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import random
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

from simulation.world.network import Network
from simulation.world.patches import patched, this_process
from simulation.world.plan import Event, Plan
from simulation.world.process import Clock, Process
from simulation.world.scheduler import SECOND, Livelock, Scheduler
from simulation.world.trace import Trace

__all__ = ["Failure", "Outcome", "World", "run_world"]


@dataclass(frozen=True)
class Failure:
    """A broken rule.

    Attributes:
        oracle: the name of the rule. Failures with the same name count as the same failure.
        message: description of the failure.
    """

    oracle: str
    message: str

    def __str__(self) -> str:
        return f"{self.oracle}: {self.message}"


@dataclass
class Outcome:
    """The result of a run. If it has no failures, the seed has found no defect."""

    world: str
    seed: int
    failures: list[Failure]
    plan: Plan
    trace: str
    virtual_seconds: float
    real_seconds: float


class World:
    """Base class of worlds. A subclass has a ``name``, and overrides methods from ``draw_plan`` to ``check_at_rest``.

    ``build``, ``perform`` and the checks run outside of simulated threads, so they must not wait. Work that waits needs
    a thread of a process (``Process.start_thread``, ``Process.start_loop``). Production objects must be created on such
    a thread, too, so that they see the clock of the process.

    An *oracle* is a rule that a world checks; it reports by ``fail``. A traceback in the log, an exception that ends a
    thread, and an exception that no task retrieves are also failures.

    The same seed must always give the same run. So actors take random numbers only from ``stream``, each from a stream
    of its own, and no code iterates over a set of objects or uses ``id`` or ``hash``.

    Attributes:
        scheduler, network, trace: those of this run.
        plan: the plan of this run.
        failures: the failures that were reported.
    """

    name: ClassVar[str] = ""
    max_seconds: ClassVar[float] = 600.0
    check_seconds: ClassVar[float] = 1.0
    preempt: ClassVar[float] = 0.05
    """Probability that a thread lets another one run when it takes or releases a lock."""
    allowed_tracebacks: ClassVar[tuple[str, ...]] = ()
    """Beginnings of log messages that may have a traceback."""
    lags: ClassVar[tuple[float, ...]] = (0.0, 0.0, 0.003, 0.03)
    """Possible mean delays of event loops in seconds; the seed chooses one. Events in a delay are handled together."""
    spreads_over_turns: ClassVar[bool] = False
    """Whether, with half of the seeds, callbacks that arrive together run in several turns of an event loop."""

    plan: Plan

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.scheduler = Scheduler(seed, preempt=self.preempt)
        self.trace = Trace(self.scheduler)
        self.network = Network(self.scheduler, self.trace)
        self.failures: list[Failure] = []
        self.processes: dict[str, Process] = {}
        self._num_lives: Counter[str] = Counter()
        self.lag_seconds = self.stream("lag").choice(self.lags)
        self._spreads = self.spreads_over_turns and self.stream("turns").random() < 0.5

    def draw_plan(self, draw: random.Random) -> Plan:
        """Return the settings and the events of a run. Take random numbers only from ``draw``."""
        raise NotImplementedError

    def build(self) -> None:
        """Create the processes (``make_process``), and start the programs that run in them."""
        raise NotImplementedError

    def perform(self, event: Event) -> None:
        """Make an event of the plan happen."""
        raise NotImplementedError

    def check(self) -> None:
        """Check the rules that must hold all the time. This is called each ``check_seconds`` of virtual time."""

    def is_at_rest(self) -> bool:
        """Return whether all work that the events have started has ended. This is called after the last event."""
        return True

    def check_at_rest(self) -> None:
        """Check the rules for a world at rest. It is a failure if there is no rest within ``max_seconds``."""

    @property
    def now(self) -> float:
        """Virtual time in seconds since the beginning."""
        return self.scheduler.now / SECOND

    def stream(self, *purpose: str) -> random.Random:
        """Return random numbers for a purpose, such as the name of an actor."""
        return self.scheduler.stream(*purpose)

    def make_process(
        self,
        name: str,
        *,
        host: str = "",
        machine: Clock | None = None,
        offset: float = 0.0,
        rate: float = 1.0,
        uptime: float = 10_000.0,
    ) -> Process:
        """Create a process. A second process with the same name is a restart of the first one.

        Args:
            name: the name of the process.
            host: the host on which it runs; default: a host with the name of the process.
            machine: the clocks of the host. Default: its own clocks with ``offset``, ``rate`` and ``uptime``.
        """
        clock = machine or Clock(self.scheduler, offset=offset, rate=rate, uptime=uptime)
        life = self._num_lives[name]
        self._num_lives[name] += 1
        process = Process(self.scheduler, name, self.trace, self.network, host=host, clock=clock, life=life)
        process.lag_seconds = self.lag_seconds
        process.spreads_over_turns = self._spreads
        self.processes[name] = process
        return process

    def fail(self, oracle: str, message: str) -> None:
        """Report that the rule ``oracle`` is broken. The run continues."""
        if len(self.failures) < 50:
            self.failures.append(Failure(oracle, message))
            self.trace.add("ORACLE", f"{oracle}: {message}")

    def run(self, plan: Plan | None = None) -> Outcome:
        """Run the world to its end, with ``plan`` or else with the plan of ``draw_plan``."""
        process_time = time.process_time
        began = process_time()
        self.plan = plan if plan is not None else self.draw_plan(self.stream("plan"))
        handler = _LogHandler(self)
        root = logging.getLogger()
        before, root.handlers[:] = list(root.handlers), [handler]
        level = root.level
        root.setLevel(logging.INFO)
        gc.collect()
        was_collecting = gc.isenabled()
        gc.disable()  # the moments of garbage collections do not depend on the seed alone
        try:
            with patched(self.scheduler, self.network):
                self._run()
        finally:
            root.handlers[:] = before
            root.setLevel(level)
            if was_collecting:
                gc.enable()
        return Outcome(
            self.name, self.seed, self.failures, self.plan, self.trace.text(), self.now, process_time() - began
        )

    def _run(self) -> None:
        self.build()
        for event in self.plan.events:
            self.scheduler.call_at(round(event.at * SECOND), functools.partial(self._perform, event))
        last = max((event.at for event in self.plan.events), default=0.0)
        try:
            while self.now < self.max_seconds:
                self.scheduler.run(self.scheduler.now + round(self.check_seconds * SECOND))
                self._note_failures()
                self.check()
                if self.now > last and self.is_at_rest():
                    break
            else:
                blocked = [str(thread) for thread in self.scheduler.threads if not thread.is_ended][:20]
                self.fail("rest", f"no rest after {self.max_seconds:g} s; threads: {blocked}")
            self.check_at_rest()
            gc.collect()
        except Livelock as exc:
            self.fail("livelock", str(exc))
        self._note_failures()

    def _perform(self, event: Event) -> None:
        self.trace.add("plan", str(event))
        # A copy, because worlds write into ``details``, and the plan runs again when a failure is shrunk.
        self.perform(replace(event, details=copy.deepcopy(event.details)))

    def _note_failures(self) -> None:
        for failure in self.scheduler.failures:
            self.fail("exception", failure)
        self.scheduler.failures.clear()


class _LogHandler(logging.Handler):
    """Adds the log lines of production code to the trace. A line with a traceback is a failure."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        process = this_process()
        message = record.getMessage()
        self._world.trace.add(process.name if process is not None else "-", f"{record.levelname} {message}")
        if (
            record.exc_info
            and record.exc_info[0] is not None
            and not message.startswith(self._world.allowed_tracebacks)
        ):
            text = logging.Formatter().formatException(record.exc_info)
            self._world.fail("traceback", f"{record.name}: {message}\n{text}")


def run_world(kind: type[World], seed: int, plan: Plan | None = None) -> Outcome:
    """Run a world of the class ``kind``, with ``plan`` or else with the plan that the seed draws."""
    return kind(seed).run(plan)
