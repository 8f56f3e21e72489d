"""Threads for calls that may never return, and changes of objects after a fork.

The end of the process does not wait for these threads. ``concurrent.futures.ThreadPoolExecutor`` is not used, because
it joins its threads when the interpreter ends: a native call that hangs would prevent the end of the process.

A forked child has the memory of its parent, but not the parent's threads. A lock that another thread held at the fork
is never released in the child. ``after_fork`` registers an object, and its ``on_fork`` is called in the child.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

__all__ = ["DaemonThreads", "Forked", "after_fork"]

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class DaemonThreads:
    """Group of daemon threads that run queued work. A thread is started when it is needed.

    The threads end after ``close``, or when this object has no references any more.

    Args:
        count: maximum number of threads.
        name: beginning of the threads' names.
        start_thread: called on each new thread before its work; exceptions are logged.
    """

    def __init__(self, count: int, name: str, start_thread: Callable[[], None] | None = None) -> None:
        self._count = count
        self._name = name
        self._start_thread = start_thread
        self._lock = threading.Lock()  # guards the next two attributes; no work is queued after ``close``
        self._is_closed = False
        self._started = 0
        self._idle = threading.Semaphore(0)
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        weakref.finalize(self, self._work.put, None).atexit = False
        after_fork(self)

    def submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Queue ``work``; return a future for its result or exception.

        Raises:
            RuntimeError: ``close`` was called, or no thread can be started.
        """
        future: Future[_Result] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"the threads {self._name} were closed, so they accept no more work")
            self._work.put(_Work(future, work))  # before a thread is started, because a thread without work is idle
            if self._started < self._count and not self._idle.acquire(blocking=False):
                self._start_another(future)
        return future

    def _start_another(self, future: Future[Any]) -> None:
        """Start a thread. If no thread can be started and none runs, cancel ``future`` and raise ``RuntimeError``."""
        run = _Runner(self._work, self._idle, self._start_thread)
        try:
            threading.Thread(target=run, name=f"{self._name}-{self._started}", daemon=True).start()
        except RuntimeError:
            if not self._started:
                future.cancel()
                raise
        else:
            self._started += 1

    def close(self) -> None:
        """Accept no more work, and cancel queued work, without waiting for running work."""
        with self._lock:
            self._is_closed = True
        try:
            while True:
                if (dropped := self._work.get_nowait()) is not None:
                    dropped.future.cancel()
        except queue.Empty:
            self._work.put(None)

    def on_fork(self) -> None:
        """Replace lock and queue in a forked child, which has no threads. Only the parent does the queued work."""
        self._lock = threading.Lock()
        self._started = 0
        self._idle = threading.Semaphore(0)
        self._work = queue.SimpleQueue()
        weakref.finalize(self, self._work.put, None).atexit = False


@dataclass(eq=False, slots=True)
class _Work:
    """Function that a thread will run, and the future that gets the function's result."""

    future: Future[Any]
    run: Callable[[], Any]

    def do(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.run()
        except BaseException as exc:
            self.future.set_exception(exc)
        else:
            self.future.set_result(result)


@dataclass(eq=False)
class _Runner:
    """Main function of a thread.

    It has no reference to the ``DaemonThreads`` object, so that Python can free that object.
    """

    work: queue.SimpleQueue[_Work | None]
    idle: threading.Semaphore
    start_thread: Callable[[], None] | None

    def __call__(self) -> None:
        if self.start_thread is not None:
            try:
                self.start_thread()
            except Exception:
                logger.exception(
                    "The setup function of a thread raised an exception; the thread runs without this setup"
                )
        while (work := self._next()) is not None:
            work.do()
            del work  # an idle thread must not keep references
        self.work.put(None)  # so that the next thread ends too

    def _next(self) -> _Work | None:
        try:
            return self.work.get_nowait()
        except queue.Empty:
            self.idle.release()
            return self.work.get()


class Forked(Protocol):
    """Interface of an object that must change in a forked child."""

    def on_fork(self) -> None:
        """Disable or renew the object in a forked child.

        The child has no other threads, and locks that other threads held at the fork are never released.
        """


_FORKED: weakref.WeakSet[Any] = weakref.WeakSet()


def after_fork(forked: Forked) -> None:
    """Call ``forked.on_fork`` in every forked child, as long as ``forked`` exists."""
    _FORKED.add(forked)


def _call_forked() -> None:
    for forked in list(_FORKED):
        try:
            forked.on_fork()
        except Exception:
            logger.exception("%s cannot be used in this forked process", type(forked).__name__)


os.register_at_fork(after_in_child=_call_forked)
