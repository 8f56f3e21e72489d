"""patched: for the time of a world, what production code takes from the standard library acts on the running process.

Only names that are looked up when they are used can be replaced: ``time.monotonic()``, not a name that was imported
from ``time``. ``docs/architecture.md`` lists the seams that this needs.
"""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import fcntl
import os
import queue
import random
import struct
import termios
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from simulation.world import threads
from simulation.world.network import Network
from simulation.world.process import EPOCH, Process
from simulation.world.scheduler import SECOND, Scheduler, current

__all__ = ["patched", "this_process"]

_RANDOM_FUNCTIONS = (
    *("betavariate", "choice", "choices", "expovariate", "gauss", "getrandbits", "lognormvariate", "normalvariate"),
    *("paretovariate", "randbytes", "randint", "random", "randrange", "sample", "shuffle", "triangular", "uniform"),
    "vonmisesvariate",
)


def this_process() -> Process | None:
    """The process whose thread runs."""
    thread = current().running
    return thread.process if thread is not None else None


@contextlib.contextmanager
def patched(scheduler: Scheduler, network: Network) -> Iterator[None]:
    """Replace the standard library's names while the block runs; the world's threads run within it."""
    spare = scheduler.stream("random outside of processes")
    with scheduler.active(), contextlib.ExitStack() as stack:
        for module, name, value in _replacements(scheduler, network, spare):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


def _replacements(scheduler: Scheduler, network: Network, spare: random.Random) -> Iterator[tuple[Any, str, Any]]:
    yield from _clocks(scheduler)
    for name in ("Barrier", "BoundedSemaphore", "Condition", "Event", "Lock", "RLock", "Semaphore", "Thread", "Timer"):
        yield threading, name, getattr(threads, name)
    yield threading, "local", threads.ThreadLocal
    yield threading, "current_thread", threads.current_thread
    for name in ("get_ident", "get_native_id"):
        yield threading, name, threads.get_ident
    yield queue, "SimpleQueue", threads.SimpleQueue
    yield queue, "Queue", threads.Queue
    # A real one, made when the module was imported, would be held while another thread runs.
    yield concurrent.futures.thread, "_global_shutdown_lock", threads.Lock()
    yield from _random_numbers(spare)
    yield os, "getpid", _getpid
    yield fcntl, "ioctl", lambda *args: _ioctl(network, *args)


def _clocks(scheduler: Scheduler) -> Iterator[tuple[Any, str, Any]]:
    def monotonic_ns() -> int:
        scheduler.note_clock_read()
        thread = scheduler.running
        if thread is None or thread.process is None:
            return scheduler.now
        return thread.process.clock.monotonic_ns()

    def time_ns() -> int:
        scheduler.note_clock_read()
        thread = scheduler.running
        if thread is None or thread.process is None:
            return EPOCH * SECOND + scheduler.now
        return thread.process.clock.time_ns()

    def monotonic() -> float:
        return monotonic_ns() / SECOND

    def sleep(seconds: float) -> None:
        scheduler.block(seconds)

    for name in ("monotonic", "perf_counter", "process_time", "thread_time"):
        yield time, name, monotonic
        yield time, name + "_ns", monotonic_ns
    yield time, "time", lambda: time_ns() / SECOND
    yield time, "time_ns", time_ns
    yield time, "sleep", sleep


def _random_numbers(spare: random.Random) -> Iterator[tuple[Any, str, Any]]:
    def numbers() -> random.Random:
        process = this_process()
        return spare if process is None else process.random

    def urandom(size: int) -> bytes:
        process = this_process()
        return (spare if process is None else process.entropy).randbytes(size)

    def dispatch(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(numbers(), name)(*args, **kwargs)

    class SeededRandom(_Random):
        """``random.Random``, whose seed is the world's where it is given none."""

        def __init__(self, seed: Any = None) -> None:
            super().__init__(urandom(8) if seed is None else seed)

    for name in _RANDOM_FUNCTIONS:
        yield random, name, dispatch(name)
    yield random, "Random", SeededRandom
    yield random, "_urandom", urandom  # of ``SystemRandom``, and so of ``secrets``
    yield os, "urandom", urandom
    yield uuid, "uuid1", lambda *_: uuid.UUID(bytes=urandom(16), version=1)


def _ioctl(network: Network, descriptor: int, request: int, *args: Any) -> Any:
    """Of a simulated connection, the bytes that wait to be acknowledged; on real descriptors, what it always does."""
    endpoint = network.endpoints.get(descriptor)
    if endpoint is None:
        return _real_ioctl(descriptor, request, *args)
    if request == termios.TIOCOUTQ:
        args[0][:4] = struct.pack("i", endpoint.unacknowledged)
    return 0


_real_ioctl = fcntl.ioctl
_Random = random.Random
_REAL_PID = os.getpid()


def _getpid() -> int:
    process = this_process()
    return _REAL_PID if process is None else process.pid
