"""Scheduler: virtual time, timers, and simulated threads. One thread runs at a time.

A simulated thread is a greenlet. It runs until it blocks (``Scheduler.block``). At a lock it may also let another
thread run; the seed decides. Running code takes no virtual time: time passes only when all threads wait. So the trace
does not depend on the number of turns of an event loop, which differs between versions of Python.

Callbacks of timers, such as deliveries of the network and faults, run between threads and belong to no thread. They run
in the greenlet of the thread that has just blocked, which also chooses the next thread.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
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
# Maximum number of switches between threads, or of turns of a loop, at one moment; more are a ``Livelock``.
MAX_TURNS = 200_000
# If a thread reads clocks more often than the first number without blocking, it must wait for the second one.
MAX_CLOCK_READS, SPIN_NS = 20_000, SECOND // 1000
# The identity of the first simulated thread. It is larger than those of real threads.
FIRST_IDENT = 1 << 40

# All greenlets, so that none is garbage-collected: it would run its ``finally`` clauses at an arbitrary moment.
_ABANDONED: list[Any] = []
_current: Scheduler | None = None


class Livelock(Exception):
    """Raised if threads or callbacks run again and again without blocking, so that virtual time does not pass."""


def current() -> Scheduler:
    """Return the scheduler of the world that runs.

    Raises:
        RuntimeError: no world runs.
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
        """Cancel the timer: its callback will not be called."""
        self.is_cancelled = True
        self.callback = _nothing


class SimThread:
    """A simulated thread. Production code has a ``threads.Thread`` object for it."""

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
        self.wait_for = ""  # the event that it waits for, for messages
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
        seed: the seed of all random numbers.
        preempt: the probability that a thread lets another one run when it takes or releases a lock.
    """

    def __init__(self, seed: int, *, preempt: float = 0.05) -> None:
        self.os_thread = _thread.get_ident()
        """Identity of the real thread in which all simulated threads run."""
        self.seed = seed
        self.preempt = preempt
        self.now = 0
        """Virtual time in nanoseconds since the beginning."""
        self.running: SimThread | None = None
        self.threads: list[SimThread] = []
        self.failures: list[str] = []
        """Texts about exceptions that ended threads or were not retrieved."""
        self._hub: Any = None
        self._ready: list[SimThread] = []
        self._heap: list[tuple[int, int, Timer]] = []
        self._num_timers = 0
        self._draws = self.stream("schedule")
        self._streams: dict[str, random.Random] = {}
        self._is_stopped = False
        self._until = self._num_turns = self._turned_at = 0

    def stream(self, *purpose: str) -> random.Random:
        """Return random numbers for a purpose. Draws for one purpose do not change the numbers for another one."""
        text = "/".join((str(self.seed), *purpose))
        return random.Random(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big"))

    def spawn(self, process: Process | None, target: Callable[[], Any], name: str) -> SimThread:
        """Create a thread that runs ``target`` when the scheduler chooses it."""
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
        """Record an exception of production code that no caller gets. ``World`` reports it as a failure."""
        if exc is not None:
            import traceback

            failure += "\n" + "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
        self.failures.append(failure)

    def call_at(self, at: int, callback: Callable[[], None]) -> Timer:
        """Call ``callback`` at the virtual time ``at`` (in nanoseconds), outside of threads."""
        timer = Timer(callback)
        self._num_timers += 1
        heapq.heappush(self._heap, (at if at > self.now else self.now, self._num_timers, timer))
        return timer

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call ``callback`` after ``seconds`` of virtual time, outside of threads."""
        return self.call_at(self.now + round(seconds * SECOND), callback)

    def block(self, seconds: float | None = None, wait_for: str = "sleep") -> bool:
        """Block the running thread until ``wake``, or for at most ``seconds`` of its process's clock.

        Returns:
            Whether the thread was woken.

        Raises:
            RuntimeError: no simulated thread is running.
        """
        thread = self.running
        if thread is None:
            raise RuntimeError(f"code outside of simulated threads would wait ({wait_for})")
        thread.is_blocked, thread.is_woken, thread.wait_for, thread.clock_reads = True, False, wait_for, 0
        timer = None
        if seconds is not None:
            if thread.process is not None and thread.process.clock.rate != 1.0:
                seconds /= thread.process.clock.rate
            timer = self.call_at(self.now + math.ceil(seconds * SECOND), functools.partial(self._unblock, thread))
        self._switch(thread)
        if timer is not None:
            timer.cancel()
        thread.wait_for = ""
        return thread.is_woken

    def wake(self, thread: SimThread) -> None:
        """Wake a thread, if it is blocked."""
        if thread.is_blocked:
            thread.is_woken = True
            self._unblock(thread)

    def preempt_here(self) -> None:
        """Let another thread run now, with the probability ``preempt``."""
        thread = self.running
        if thread is not None and self.preempt and thread.preempts.random() < self.preempt:
            self._make_ready(thread)
            self._switch(thread)

    def wait_for_time(self) -> None:
        """Block the running thread for a short time, because it has read clocks too often without blocking."""
        self.block(SPIN_NS / SECOND, "spinning on a clock")

    def stop(self) -> None:
        """End ``run`` when the calling thread blocks, or the calling callback returns."""
        self._is_stopped = True

    def run(self, until: int) -> None:
        """Run threads and timers until the virtual time ``until``, until ``stop``, or until nothing is left to run.

        Raises:
            Livelock: virtual time does not pass.
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
        """Let time pass until a thread can run, and choose one at random; return None if ``run`` must end.

        Raises:
            Livelock: virtual time does not pass.
        """
        heap = self._heap
        while not self._is_stopped:
            ready = self._ready
            # All timers of one moment are called before a thread runs.
            if ready and not (heap and heap[0][0] <= self.now):
                if self._turned_at != self.now:
                    self._num_turns, self._turned_at = 0, self.now
                self._num_turns += 1
                if self._num_turns > MAX_TURNS:
                    raise Livelock(f"threads run without blocking, so time does not pass: {ready[:5]}")
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
        """Make this scheduler the ``current`` one during the ``with`` block."""
        global _current
        before, _current = _current, self
        try:
            yield
        finally:
            _current = before

    def release_process(self, process: Process) -> None:
        """Make the threads of a process ready that have waited for the end of its pause."""
        for thread in process.waiting:
            self._ready.append(thread)
        process.waiting.clear()

    def hold_process(self, process: Process) -> None:
        """Stop the ready threads of a process that was paused or has crashed."""
        stopped = [thread for thread in self._ready if thread.process is process]
        self._ready = [thread for thread in self._ready if thread.process is not process]
        process.waiting += stopped

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
        """Choose the next thread, which may be the same one, and run it; return when ``thread`` is chosen again."""
        thread.saved_loop = _get_running_loop()
        _set_running_loop(None)
        self.running = None
        try:
            following = self._find_next()
        except BaseException as exc:  # from a timer's callback, so it does not belong to this thread
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
    """Return the main greenlet, to which a thread's greenlet returns at its end."""
    while now.parent is not None:
        now = now.parent
    return now
