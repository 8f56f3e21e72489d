"""Replaces names of the standard library while a world runs, so that production code uses the simulated process.

Only a name that is looked up at each use can be replaced, such as ``time.monotonic()``. A name that was imported from
``time``, or a ``default_factory``, cannot. Default arguments of functions in our packages are replaced, too.
``docs/architecture.md`` lists the rules that production code follows for this.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import contextlib
import fcntl
import os
import queue
import random
import struct
import sys
import termios
import threading
import time
import types
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from simulation.world import threads
from simulation.world.network import Network
from simulation.world.process import EPOCH, Process
from simulation.world.scheduler import MAX_CLOCK_READS, SECOND, Scheduler, current

__all__ = ["patched", "this_process"]

_PACKAGES = ("router", "kvstore_backend", "kvcommon", "engine")
_BUILTIN = (types.BuiltinFunctionType, types.MethodType)

_RANDOM_FUNCTIONS = (
    *("betavariate", "choice", "choices", "expovariate", "gauss", "getrandbits", "lognormvariate", "normalvariate"),
    *("paretovariate", "randbytes", "randint", "random", "randrange", "sample", "shuffle", "triangular", "uniform"),
    "vonmisesvariate",
)


def this_process() -> Process | None:
    """Return the process of the running thread; None: no simulated thread runs."""
    thread = current().running
    return thread.process if thread is not None else None


@contextlib.contextmanager
def patched(scheduler: Scheduler, network: Network) -> Iterator[None]:
    """Replace names of the standard library during the ``with`` block, in which the threads of the world run."""
    spare = scheduler.stream("random outside of processes")
    with scheduler.active(), contextlib.ExitStack() as stack:
        replaced: dict[Any, Any] = {}
        for module, name, value in _replacements(scheduler, network, spare):
            real = getattr(module, name)
            stack.callback(setattr, module, name, real)
            setattr(module, name, value)
            if module in (time, random):
                replaced[real] = value
        _replace_defaults(replaced, stack)
        yield


def _replace_defaults(replaced: dict[Any, Any], stack: contextlib.ExitStack) -> None:
    """Replace functions that are default arguments, as in ``clock: Callable[[], float] = time.monotonic``."""
    for function in _list_functions():
        defaults, named = function.__defaults__ or (), function.__kwdefaults__ or {}
        values = [*defaults, *named.values()]
        if any(isinstance(value, _BUILTIN) and value in replaced for value in values):
            stack.callback(setattr, function, "__defaults__", function.__defaults__)
            stack.callback(setattr, function, "__kwdefaults__", function.__kwdefaults__)
            function.__defaults__ = tuple(_swap(value, replaced) for value in defaults) or None
            function.__kwdefaults__ = {name: _swap(value, replaced) for name, value in named.items()} or None


def _swap(value: Any, replaced: dict[Any, Any]) -> Any:
    return replaced.get(value, value) if isinstance(value, _BUILTIN) else value


def _list_functions() -> Iterator[Any]:
    for name, module in list(sys.modules.items()):
        if module is None or not name.startswith(_PACKAGES):
            continue
        for value in list(vars(module).values()):
            if isinstance(value, types.FunctionType):
                yield value
            elif isinstance(value, type) and value.__module__ == name:
                yield from (each for each in vars(value).values() if isinstance(each, types.FunctionType))


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
    # A real lock would be held while another simulated thread runs.
    yield concurrent.futures.thread, "_global_shutdown_lock", threads.Lock()
    # At its end the interpreter would wake the threads in this dictionary.
    yield concurrent.futures.thread, "_threads_queues", weakref.WeakKeyDictionary()
    yield concurrent.futures.thread, "_worker", _run_work
    yield asyncio, "gather", _gather
    yield from _random_numbers(spare)
    yield os, "getpid", _getpid
    yield os, "setpriority", lambda *_: None  # simulated threads have no priority
    yield fcntl, "ioctl", lambda *args: _ioctl(network, *args)


def _run_work(executor_of: Callable[[], Any], work: Any, *_: object) -> None:
    """Run the work of a ``ThreadPoolExecutor`` on one of its threads, with the same locks in all versions of Python."""
    while (item := work.get()) is not None:
        item.run()
        del item
        if (executor := executor_of()) is not None:
            executor._idle_semaphore.release()
        del executor
    work.put(None)  # ends the other threads


def _gather(*awaitables: Any, **options: Any) -> asyncio.Future[Any]:
    """Do the same as ``asyncio.gather``, in the same turn in all versions of Python.

    Since Python 3.12 its future is done one turn earlier if all awaitables are done.
    """
    outer: asyncio.Future[Any] = _real_gather(*awaitables, **options)
    if not awaitables or not outer.done():
        return outer
    later: asyncio.Future[Any] = outer.get_loop().create_future()
    later.get_loop().call_soon(asyncio.futures._copy_future_state, outer, later)  # type: ignore[attr-defined]
    return later


_real_gather = asyncio.gather


def _clocks(scheduler: Scheduler) -> Iterator[tuple[Any, str, Any]]:
    def monotonic_ns() -> int:
        thread = scheduler.running
        if thread is None:
            return scheduler.now
        thread.clock_reads += 1
        if thread.clock_reads > MAX_CLOCK_READS:
            scheduler.wait_for_time()
        return scheduler.now if thread.process is None else thread.process.clock.monotonic_ns()

    def time_ns() -> int:
        thread = scheduler.running
        if thread is None:
            return EPOCH * SECOND + scheduler.now
        thread.clock_reads += 1
        if thread.clock_reads > MAX_CLOCK_READS:
            scheduler.wait_for_time()
        return EPOCH * SECOND + scheduler.now if thread.process is None else thread.process.clock.time_ns()

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
        """``random.Random``; without a given seed, the seed comes from the random numbers of the process."""

        def __init__(self, seed: Any = None) -> None:
            super().__init__(urandom(8) if seed is None else seed)

    for name in _RANDOM_FUNCTIONS:
        yield random, name, dispatch(name)
    yield random, "Random", SeededRandom
    yield random, "_urandom", urandom  # used by ``SystemRandom``, and so by ``secrets``
    yield os, "urandom", urandom
    yield uuid, "uuid1", lambda *_: uuid.UUID(bytes=urandom(16), version=1)


def _ioctl(network: Network, descriptor: int, request: int, *args: Any) -> Any:
    """Replace ``fcntl.ioctl``: for a simulated connection, return the number of unacknowledged bytes.

    For a real descriptor, call the real function.
    """
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
