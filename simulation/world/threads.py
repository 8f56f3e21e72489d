"""The classes of ``threading`` and ``queue`` for simulated threads.

They have the behaviour of the standard library's classes, as far as our packages use it. Locks are not fair, as in
CPython: a release wakes a waiting thread, but another thread may take the lock before it.
"""

from __future__ import annotations

import _thread
import queue as real_queue
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from simulation.world.scheduler import FIRST_IDENT, SimThread, current

__all__ = [
    "Barrier",
    "BoundedSemaphore",
    "Condition",
    "Event",
    "Lock",
    "Queue",
    "RLock",
    "Semaphore",
    "SimpleQueue",
    "Thread",
    "ThreadLocal",
    "Timer",
    "current_thread",
    "get_ident",
]

_Item = TypeVar("_Item")


class _Waiters:
    """The threads that wait for one lock, event or other object."""

    __slots__ = ("_threads",)

    def __init__(self) -> None:
        self._threads: deque[SimThread] = deque()

    def __len__(self) -> int:
        return len(self._threads)

    def wait(self, seconds: float | None, event: str) -> bool:
        scheduler = current()
        thread = scheduler.running
        if thread is None:
            raise RuntimeError(f"code outside of simulated threads would wait for {event}")
        self._threads.append(thread)
        is_woken = scheduler.block(seconds, event)
        if is_woken or thread not in self._threads:  # woken after its time had ended, but before it ran again
            return True
        self._threads.remove(thread)
        return False

    def wake_one(self) -> None:
        if self._threads:
            current().wake(self._threads.popleft())


class Lock:
    """The simulated ``threading.Lock``."""

    def __init__(self) -> None:
        self._is_locked = False
        self._waiters = _Waiters()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = current()
        scheduler.preempt_here()
        give_up_at = None if timeout < 0 else scheduler.now + timeout * 1e9
        while self._is_locked:
            if not blocking:
                return False
            seconds = None if give_up_at is None else (give_up_at - scheduler.now) / 1e9
            if (seconds is not None and seconds <= 0) or not self._waiters.wait(seconds, "a lock"):
                return False
        self._is_locked = True
        return True

    def release(self) -> None:
        if not self._is_locked:
            raise RuntimeError("release unlocked lock")
        self._is_locked = False
        self._waiters.wake_one()
        current().preempt_here()

    def locked(self) -> bool:
        return self._is_locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock:
    """The simulated ``threading.RLock``."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner = self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = get_ident()
        if self._owner != me or not self._count:
            if not self._lock.acquire(blocking, timeout):
                return False
            self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        if self._owner != get_ident() or not self._count:
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = 0
            self._lock.release()

    def _is_owned(self) -> bool:
        return self._count > 0 and self._owner == get_ident()

    def _release_save(self) -> int:
        count, self._count = self._count, 1
        self.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        self.acquire()
        self._count = count

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """The simulated ``threading.Condition``."""

    def __init__(self, lock: Any = None) -> None:
        self._lock: Any = RLock() if lock is None else lock
        self.acquire: Callable[..., bool] = self._lock.acquire
        self.release: Callable[[], None] = self._lock.release
        self._sleepers = _Waiters()

    def __enter__(self) -> bool:
        return bool(self._lock.__enter__())

    def __exit__(self, *exc: Any) -> None:
        self._lock.__exit__(*exc)

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_owned():
            raise RuntimeError("cannot wait on un-acquired lock")
        if timeout is not None and timeout <= 0:
            timeout = 0.0
        scheduler, thread = current(), current().running
        assert thread is not None, "code outside of simulated threads would wait"
        self._sleepers._threads.append(thread)  # before the release, so that no notification is lost
        released = _Released(self._lock)
        # Other threads may run during the release. If one of them notifies this thread, it is no longer a sleeper.
        is_woken = thread not in self._sleepers._threads or scheduler.block(timeout, "a condition")
        if thread in self._sleepers._threads:
            self._sleepers._threads.remove(thread)
            is_woken = False
        released.restore()
        return is_woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        scheduler = current()
        give_up_at = None if timeout is None else scheduler.now + timeout * 1e9
        result = predicate()
        while not result:
            left = None if give_up_at is None else (give_up_at - scheduler.now) / 1e9
            if left is not None and left <= 0:
                break
            self.wait(left)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        if not self._is_owned():
            raise RuntimeError("cannot notify on un-acquired lock")
        for _ in range(min(n, len(self._sleepers))):
            self._sleepers.wake_one()

    def notify_all(self) -> None:
        self.notify(len(self._sleepers))

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned() if hasattr(self._lock, "_is_owned") else self._lock.locked())


class _Released:
    """Releases a lock for the time of a wait; ``restore`` takes it again."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._state = lock._release_save() if hasattr(lock, "_release_save") else lock.release()

    def restore(self) -> None:
        if hasattr(self._lock, "_acquire_restore"):
            self._lock._acquire_restore(self._state)
        else:
            self._lock.acquire()


class Event:
    """The simulated ``threading.Event``."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters = _Waiters()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        while len(self._waiters):
            self._waiters.wake_one()
        current().preempt_here()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        current().preempt_here()
        if not self._is_set:
            self._waiters.wait(None if timeout is None else max(0.0, timeout), "an event")
        return self._is_set


class Semaphore:
    """The simulated ``threading.Semaphore``."""

    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._waiters = _Waiters()

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        scheduler = current()
        scheduler.preempt_here()
        give_up_at = None if timeout is None else scheduler.now + timeout * 1e9
        while not self._value:
            if not blocking:
                return False
            left = None if give_up_at is None else (give_up_at - scheduler.now) / 1e9
            if (left is not None and left <= 0) or not self._waiters.wait(left, "a semaphore"):
                return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n
        for _ in range(n):
            self._waiters.wake_one()
        current().preempt_here()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class BoundedSemaphore(Semaphore):
    """The simulated ``threading.BoundedSemaphore``."""

    def __init__(self, value: int = 1) -> None:
        super().__init__(value)
        self._bound = value

    def release(self, n: int = 1) -> None:
        if self._value + n > self._bound:
            raise ValueError("Semaphore released too many times")
        super().release(n)


class Barrier:
    """The simulated ``threading.Barrier``, without ``abort``."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self._arrived = 0
        self._open = Event()

    def wait(self, timeout: float | None = None) -> int:
        gate, place = self._open, self._arrived
        self._arrived += 1
        if self._arrived == self.parties:
            self._arrived, self._open = 0, Event()
            gate.set()
        else:
            gate.wait(timeout)
        return place


class Thread:
    """The simulated ``threading.Thread``."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, tuple(args), dict(kwargs or {})
        self.name = name or f"Thread-{target.__name__ if target is not None else 'run'}"
        self.daemon = bool(daemon)
        self._thread: SimThread | None = None
        self._ended = Event()

    def __repr__(self) -> str:
        return f"<Thread {self.name}>"

    @property
    def ident(self) -> int | None:
        return self._thread.ident if self._thread is not None else None

    @property
    def native_id(self) -> int | None:
        return self.ident

    def start(self) -> None:
        if self._thread is not None:
            raise RuntimeError("threads can only be started once")
        scheduler = current()
        process = scheduler.running.process if scheduler.running is not None else None
        self._thread = scheduler.spawn(process, self.run, self.name)
        self._thread.public = self
        scheduler.preempt_here()

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def join(self, timeout: float | None = None) -> None:
        if self._thread is None:
            raise RuntimeError("cannot join thread before it is started")
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.is_ended

    def on_end(self) -> None:
        """Wake the threads that join this one. The scheduler calls this at the end of the thread."""
        self._ended.set()


class Timer(Thread):
    """The simulated ``threading.Timer``."""

    def __init__(self, interval: float, function: Callable[..., Any], args: Any = None, kwargs: Any = None) -> None:
        super().__init__(target=function, name="Timer", args=args or (), kwargs=kwargs)
        self.interval = interval
        self._is_cancelled = Event()

    def cancel(self) -> None:
        self._is_cancelled.set()

    def run(self) -> None:
        if not self._is_cancelled.wait(self.interval):
            super().run()


class ThreadLocal:
    """The simulated ``threading.local``."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        try:
            return _values_of(self)[name]
        except KeyError:
            return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _values_of(self)[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del _values_of(self)[name]
        except KeyError:
            raise AttributeError(name) from None


_outside: dict[int, dict[str, Any]] = {}


def _values_of(local: ThreadLocal) -> dict[str, Any]:
    thread = current().running
    return (thread.locals if thread is not None else _outside).setdefault(id(local), {})


class SimpleQueue(Generic[_Item]):
    """``queue.SimpleQueue``. ``put`` does not let another thread run, because a finaliser may call it."""

    def __init__(self) -> None:
        self._items: deque[_Item] = deque()
        self._waiters = _Waiters()

    def put(self, item: _Item, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        self._waiters.wake_one()

    def put_nowait(self, item: _Item) -> None:
        self.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> _Item:
        scheduler = current()
        scheduler.preempt_here()
        give_up_at = None if timeout is None else scheduler.now + timeout * 1e9
        while not self._items:
            left = None if give_up_at is None else (give_up_at - scheduler.now) / 1e9
            if not block or (left is not None and left <= 0) or not self._waiters.wait(left, "a queue"):
                raise real_queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> _Item:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Queue(SimpleQueue[_Item]):
    """The simulated ``queue.Queue``."""

    def __init__(self, maxsize: int = 0) -> None:
        super().__init__()
        self.maxsize = maxsize
        self._room = _Waiters()
        self._num_unfinished = 0
        self._finished = _Waiters()

    def put(self, item: _Item, block: bool = True, timeout: float | None = None) -> None:
        while self.maxsize and len(self._items) >= self.maxsize:
            if not block or not self._room.wait(timeout, "space in a queue"):
                raise real_queue.Full
        self._num_unfinished += 1
        super().put(item)

    def put_nowait(self, item: _Item) -> None:
        self.put(item, block=False)

    def get(self, block: bool = True, timeout: float | None = None) -> _Item:
        item = super().get(block, timeout)
        self._room.wake_one()
        return item

    def full(self) -> bool:
        return bool(self.maxsize) and len(self._items) >= self.maxsize

    def task_done(self) -> None:
        self._num_unfinished -= 1
        while not self._num_unfinished and len(self._finished):
            self._finished.wake_one()

    def join(self) -> None:
        while self._num_unfinished:
            self._finished.wait(None, "the end of a queue's work")


class _Outside:
    """The result of ``threading.current_thread`` if no simulated thread runs."""

    name = "outside"
    daemon = False
    ident = native_id = FIRST_IDENT - 1

    def is_alive(self) -> bool:
        return True


_OUTSIDE = _Outside()


def current_thread() -> Any:
    """The simulated ``threading.current_thread``."""
    thread = current().running
    if thread is None:
        return _OUTSIDE
    if thread.public is None:
        public = Thread(name=thread.name)
        public._thread = thread
        thread.public = public
    return thread.public


def get_ident() -> int:
    """``threading.get_ident``. In a real thread, such as one that ends while a world runs, it is the real identity."""
    scheduler, real = current(), _thread.get_ident()
    if real != scheduler.os_thread:
        return real
    thread = scheduler.running
    return FIRST_IDENT - 1 if thread is None else thread.ident
