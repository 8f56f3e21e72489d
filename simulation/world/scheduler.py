"""Scheduler: virtual time, timers, and simulated threads, of which exactly one runs.

A simulated thread is a greenlet. It runs until it blocks (``Scheduler.block``), or gives up the CPU at a lock with a
probability that the seed decides. Code takes no virtual time: time passes only when every thread waits. So the trace
does not depend on how often a loop of asyncio turns, which differs between versions of Python.

Timers' callbacks (deliveries of the network, faults) run between threads, on no thread. They use the greenlet of the
thread that begins to wait, which also chooses the next one.
"""

from __future__ import annotations

import _thread
import contextlib
import hashlib
import heapq
import math
import random
from asyncio import _get_running_loop, _set_running_loop
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import greenlet

if TYPE_CHECKING:
    from simulation.world.process import Process

__all__ = ["SECOND", "Livelock", "Scheduler", "SimThread", "Timer", "current"]

SECOND = 1_000_000_000
# So many turns of threads at one moment show that time stands still.
MAX_TURNS = 200_000
# A thread that reads clocks so often without waiting spins: it is made to wait this long.
MAX_CLOCK_READS, SPIN_NS = 20_000, SECOND // 1000
# Every simulated thread begins its life with this identity; never that of a real one.
FIRST_IDENT = 1 << 40

# Greenlets that are collected run their ``finally`` clauses, at a moment that nobody chose.
_ABANDONED: list[Any] = []
_current: Scheduler | None = None


class Livelock(Exception):
    """Threads run on and on, and virtual time stands still."""


def current() -> Scheduler:
    """The scheduler whose world runs.

    Raises:
        RuntimeError: none does.
    """
    if _current is None:
        raise RuntimeError("no simulated world runs")
    return _current


class Timer:
    """A callback at a moment of virtual time."""

    __slots__ = ("callback", "is_cancelled")

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        """Do not call it."""
        self.is_cancelled = True
        self.callback = _nothing


class SimThread:
    """A simulated thread; ``threads.Thread`` is what production code sees of it."""

    __slots__ = (
        "clock_reads",
        "greenlet",
        "ident",
        "is_blocked",
        "is_ended",
        "is_woken",
        "locals",
        "name",
        "preempts",
        "process",
        "public",
        "saved_loop",
        "timer",
        "wait_for",
    )

    def __init__(self, name: str, process: Process | None, ident: int, preempts: random.Random) -> None:
        self.name = name
        self.process = process
        self.ident = ident
        self.preempts = preempts
        self.greenlet: Any = None
        self.is_blocked = self.is_woken = self.is_ended = False
        self.timer: Timer | None = None
        self.wait_for = ""  # what it is blocked in, for people
        self.public: Any = None
        self.locals: dict[int, dict[str, Any]] = {}
        self.saved_loop: Any = None
        self.clock_reads = 0

    def __repr__(self) -> str:
        owner = self.process.name if self.process is not None else "-"
        return f"<thread {owner}/{self.name} {self.wait_for or 'runs'}>"


class Scheduler:
    """Runs simulated threads in virtual time.

    Args:
        seed: decides every draw of ``stream``.
        preempt: the probability that a thread gives up the CPU at a lock.
    """

    def __init__(self, seed: int, *, preempt: float = 0.05) -> None:
        self.os_thread = _thread.get_ident()
        """The real thread in which all simulated ones run."""
        self.seed = seed
        self.preempt = preempt
        self.now = 0
        """Virtual nanoseconds since the world began."""
        self.running: SimThread | None = None
        self.threads: list[SimThread] = []
        self.failures: list[str] = []
        """What threads raised and nobody caught."""
        self._hub: Any = None
        self._ready: list[SimThread] = []
        self._heap: list[tuple[int, int, Timer]] = []
        self._num_timers = 0
        self._draws = self.stream("schedule")
        self._streams: dict[str, random.Random] = {}
        self._is_stopped = False
        self._until = self._num_turns = self._turned_at = 0

    def stream(self, *purpose: str) -> random.Random:
        """A stream of random numbers of its own for this purpose: more draws of one do not change another."""
        text = "/".join((str(self.seed), *purpose))
        return random.Random(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big"))

    def spawn(self, process: Process | None, target: Callable[[], Any], name: str) -> SimThread:
        """Start a thread, which runs ``target`` when its turn comes."""
        number = len(self.threads)
        owner = process.name if process is not None else ""
        thread = SimThread(name, process, FIRST_IDENT + number, self.stream("preempt", owner, name, str(number)))
        self.threads.append(thread)
        if process is not None:
            process.threads.append(thread)

        def run() -> None:
            try:
                target()
            except greenlet.GreenletExit:
                raise
            except BaseException as exc:
                self.report(f"thread {owner}/{name} ended with {type(exc).__name__}: {exc}", exc)
            finally:
                thread.is_ended = True
                if thread.public is not None:
                    thread.public.on_end()

        thread.greenlet = greenlet.greenlet(run, _hub_of(greenlet.getcurrent()))
        _ABANDONED.append(thread.greenlet)
        self._make_ready(thread)
        return thread

    def report(self, failure: str, exc: BaseException | None = None) -> None:
        """Note a failure of production code that no caller sees; ``World`` takes it for a defect."""
        if exc is not None:
            import traceback

            failure += "\n" + "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
        self.failures.append(failure)

    def call_at(self, at: int, callback: Callable[[], None]) -> Timer:
        """Call ``callback`` at this virtual nanosecond, on no thread."""
        timer = Timer(callback)
        self._num_timers += 1
        heapq.heappush(self._heap, (at if at > self.now else self.now, self._num_timers, timer))
        return timer

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call ``callback`` after so many virtual seconds, on no thread."""
        return self.call_at(self.now + round(seconds * SECOND), callback)

    def block(self, seconds: float | None = None, wait_for: str = "sleep") -> bool:
        """Let others run until ``wake`` or the end of ``seconds`` of the process's clock; whether it was woken.

        Raises:
            RuntimeError: no simulated thread calls; outside of them nothing may wait.
        """
        thread = self.running
        if thread is None:
            raise RuntimeError(f"code outside of simulated threads would wait ({wait_for})")
        thread.is_blocked, thread.is_woken, thread.wait_for, thread.clock_reads = True, False, wait_for, 0
        timer = None
        if seconds is not None:
            rate = thread.process.clock.rate if thread.process is not None else 1.0
            timer = self.call_at(self.now + max(0, math.ceil(seconds / rate * SECOND)), lambda: self._unblock(thread))
        self._switch(thread)
        if timer is not None:
            timer.cancel()
        thread.wait_for = ""
        return thread.is_woken

    def wake(self, thread: SimThread) -> None:
        """End ``block`` of a thread that is in it."""
        if thread.is_blocked:
            thread.is_woken = True
            self._unblock(thread)

    def preempt_here(self) -> None:
        """A point at which the CPU may go to another thread of this process."""
        thread = self.running
        if thread is not None and self.preempt and thread.preempts.random() < self.preempt:
            self._make_ready(thread)
            self._switch(thread)

    def wait_for_time(self) -> None:
        """Let time pass: the thread has read clocks ``MAX_CLOCK_READS`` times and done nothing else."""
        self.block(SPIN_NS / SECOND, "spinning on a clock")

    def stop(self) -> None:
        """End ``run`` once the thread or the callback that calls this gives up control."""
        self._is_stopped = True

    def run(self, until: int) -> None:
        """Run until this virtual nanosecond, until ``stop``, or until nothing is left to happen.

        Raises:
            Livelock: time stands still.
        """
        self._hub, self._is_stopped, self._until = greenlet.getcurrent(), False, until
        self._num_turns, self._turned_at = 0, self.now
        try:
            while (thread := self._find_next()) is not None:
                self.running = thread
                thread.greenlet.switch()
                self.running = None
        finally:
            self.running = None

    def _find_next(self) -> SimThread | None:
        """Let time pass until a thread can run, and draw one; None if ``run`` is to end.

        Raises:
            Livelock: time stands still.
        """
        heap = self._heap
        while not self._is_stopped:
            ready = self._ready
            # What arrives at one moment has all arrived before a thread looks.
            if ready and not (heap and heap[0][0] <= self.now):
                if self._turned_at != self.now:
                    self._num_turns, self._turned_at = 0, self.now
                self._num_turns += 1
                if self._num_turns > MAX_TURNS:
                    raise Livelock(f"threads run on and on: {ready[:5]}")
                return ready.pop(self._draws.randrange(len(ready)) if len(ready) > 1 else 0)
            if not heap or heap[0][0] > self._until:
                self.now = max(self.now, self._until)
                return None
            at, _, timer = heapq.heappop(heap)
            if not timer.is_cancelled:
                self.now = at
                timer.callback()
        return None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Be ``current`` while the block runs."""
        global _current
        before, _current = _current, self
        try:
            yield
        finally:
            _current = before

    def release_process(self, process: Process) -> None:
        """Let the threads go on that became ready while the process was paused."""
        for thread in process.waiting:
            self._ready.append(thread)
        process.waiting.clear()

    def hold_process(self, process: Process) -> None:
        """Let no thread of a process that is paused, or has crashed, run."""
        held = [thread for thread in self._ready if thread.process is process]
        self._ready = [thread for thread in self._ready if thread.process is not process]
        process.waiting += held

    def _unblock(self, thread: SimThread) -> None:
        if thread.is_blocked:
            self._make_ready(thread)

    def _make_ready(self, thread: SimThread) -> None:
        thread.is_blocked = False
        process = thread.process
        if process is None or process.runs:
            self._ready.append(thread)
        else:
            process.waiting.append(thread)

    def _switch(self, thread: SimThread) -> None:
        """Let the next thread run, which may be the same one, until it is this one's turn again."""
        thread.saved_loop = _get_running_loop()
        _set_running_loop(None)
        self.running = None
        try:
            following = self._find_next()
        except BaseException as exc:  # of a timer's callback, which is not this thread's
            self._hub.throw(exc)
            raise
        if following is None:
            self._hub.switch()
        elif following is not thread:
            self.running = following
            following.greenlet.switch()
        self.running = thread
        _set_running_loop(thread.saved_loop)
        thread.saved_loop = None


def _nothing() -> None:
    return None


def _hub_of(now: Any) -> Any:
    """The greenlet that a new one goes back to at its end: never the thread that started it."""
    while now.parent is not None:
        now = now.parent
    return now
