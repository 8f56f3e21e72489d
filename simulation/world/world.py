"""World: the frame of a world: build it, let its plan happen, check it all the time and at rest."""

from __future__ import annotations

import functools
import gc
import logging
import random
import time
from collections import Counter
from dataclasses import dataclass
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
    """What an oracle saw that must not be. ``oracle`` names the rule; failures of one rule are taken for the same."""

    oracle: str
    what: str

    def __str__(self) -> str:
        return f"{self.oracle}: {self.what}"


@dataclass
class Outcome:
    """How a run ended; without failures the seed found nothing."""

    world: str
    seed: int
    failures: list[Failure]
    plan: Plan
    trace: str
    virtual_seconds: float
    real_seconds: float


class World:
    """A world is a subclass with a ``name`` and these methods; ``world/`` does the rest.

    - ``draw_plan(draw)``: the settings and the events, drawn from ``draw`` and from nothing else.
    - ``build()``: makes the processes (``make_process``) and starts what runs in them: a thread by
      ``process.start_thread(function)``, a program of asyncio by ``process.start_loop(coroutine_function)``. Production
      objects are made on these threads, so that they see the process's clock; ``build`` runs on none and may not wait.
    - ``perform(event)``: makes an event of the plan happen; runs on no thread, so what waits gets a thread.
    - ``check()``: the continuous oracles, called each ``check_seconds`` of virtual time.
    - ``is_at_rest()``: whether all that the plan began has ended; asked once all events have happened.
    - ``check_at_rest()``: the last oracles. If there is no rest within ``max_seconds``, that is a failure.

    An oracle reports by ``self.fail(oracle, what)``. Tracebacks in the log, exceptions that end a thread, and those
    that no task retrieved are failures without further ado. What happens goes to ``self.trace.add(who, what)``.
    Randomness of actors comes from ``self.stream(purpose, ...)``; a stream for each actor, so that one actor's draws do
    not move another's. Iterate over no set of objects, and use no ``id`` or ``hash``: equal seeds must be equal runs.

    Attributes:
        scheduler, network, trace: of this run.
        plan: what happens.
        failures: what oracles have reported.
    """

    name: ClassVar[str] = ""
    max_seconds: ClassVar[float] = 600.0
    check_seconds: ClassVar[float] = 1.0
    preempt: ClassVar[float] = 0.05
    """The probability that a thread gives up the CPU when it takes or releases a lock."""
    allowed_tracebacks: ClassVar[tuple[str, ...]] = ()
    """Beginnings of log messages that may have a traceback."""
    lags: ClassVar[tuple[float, ...]] = (0.0, 0.0, 0.003, 0.03)
    """How late event loops are on average, in seconds; the seed draws one. What comes meanwhile comes in one turn."""

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

    def draw_plan(self, draw: random.Random) -> Plan:
        """See the class."""
        raise NotImplementedError

    def build(self) -> None:
        """See the class."""
        raise NotImplementedError

    def perform(self, event: Event) -> None:
        """See the class."""
        raise NotImplementedError

    def check(self) -> None:
        """See the class."""

    def is_at_rest(self) -> bool:
        """See the class."""
        return True

    def check_at_rest(self) -> None:
        """See the class."""

    @property
    def now(self) -> float:
        """Virtual seconds since the world began."""
        return self.scheduler.now / SECOND

    def stream(self, *purpose: str) -> random.Random:
        """The seed's random numbers for a purpose."""
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
        """A process; of two with one name the later one is the restarted one.

        Args:
            machine: the clock of a machine that it is on; one of its own, as of ``Clock``, if not given.
        """
        clock = machine or Clock(self.scheduler, offset=offset, rate=rate, uptime=uptime)
        life = self._num_lives[name]
        self._num_lives[name] += 1
        process = Process(self.scheduler, name, self.trace, self.network, host=host, clock=clock, life=life)
        process.lag_seconds = self.lag_seconds
        self.processes[name] = process
        return process

    def fail(self, oracle: str, what: str) -> None:
        """Report that a rule is broken; the run goes on."""
        if len(self.failures) < 50:
            self.failures.append(Failure(oracle, what))
            self.trace.add("ORACLE", f"{oracle}: {what}")

    def run(self, plan: Plan | None = None) -> Outcome:
        """Run the world to its end."""
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
        gc.disable()  # when it runs depends on much that the seed does not decide
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
        self.perform(event)

    def _note_failures(self) -> None:
        for failure in self.scheduler.failures:
            self.fail("exception", failure)
        self.scheduler.failures.clear()


class _LogHandler(logging.Handler):
    """Production code's log goes into the trace; a traceback there is a failure."""

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
    """Run a world of this kind; with a plan, that one instead of the one that the seed draws."""
    return kind(seed).run(plan)
