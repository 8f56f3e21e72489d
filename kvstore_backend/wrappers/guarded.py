"""Gives every call a deadline, and stops the use of a pool that hangs or fails (circuit breaker).

A pool that hangs or dies delays each caller by one deadline; later calls fail immediately, until the pool answers
again.

Native calls cannot be interrupted. Each runs on a worker thread. Its caller waits until the deadline and then gets
``FAILED``. The call is *late* then: it may still write to or read from the memory of its arguments. Two rules make late
calls harmless:

- The breaker is open from the moment a call becomes late until the call has ended. So no second call waits behind the
  late call, and no caller gets ``OK`` for memory that the late call may still change.
- ``wait_for_late_calls`` reports when no late call is left. Before that, the memory of a call that returned ``FAILED``
  must not be used for anything else. ``BlockPool`` and ``transfers.py`` follow this rule, so that engines do not have
  to.

States::

    open (no store yet) ──store opened──►  closed  ──a late call, or failures in a row──►  open
                                             ▲                                              │
                                             └──────── no late call left, probe answered ───┘

A store may answer slowly without hanging, for example on a busy machine. If an answer took a large part of its
deadline, or came after it, the deadlines of the next minute are longer, up to ``_MAX_STRETCH`` times. So a store that
hangs delays callers by one deadline if it was fast before, and by at most ``_MAX_STRETCH`` deadlines.

A caller that needs the answers by a certain time, not by the deadlines here, makes its calls inside ``end_calls_at``.

While the breaker is open, a call returns after a few microseconds. The keeper, a thread, opens the store or probes it,
so the pool recovers without calls.

A call of the store may raise ``PoolUnavailable``: the store has closed itself, and the keeper opens another one.

Registering memory is a call with a deadline, like any other. If the store has not registered the memory, because the
breaker was open, or the call raised an exception or was late, the keeper repeats the call before it closes the breaker.
So no transfer begins with memory that the store does not know.

A forked child has no worker threads and no connection to the pool. In the child, the breaker is always open.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore_backend.backend import (
    Health,
    PoolUnavailable,
    Status,
    StorageBackend,
    Value,
)
from kvstore_backend.threads import after_fork

__all__ = ["Deadlines", "GuardedBackend", "end_calls_at"]

logger = logging.getLogger(__name__)

_PROBE_KEY = "kvstore-probe"
# Maximum number of native calls at the same time. A further call waits for a worker thread, within its own deadline.
_WORKERS = 8
# The breaker opens after this number of successive look-ups and reads that returned FAILED for every key.
_MAX_FAILURES = 3
_FIRST_PAUSE_SECONDS = 0.25
_MAX_PAUSE_SECONDS = 2.0
# Deadlines are this many times as long as the slowest answer of the last minute, if that is longer than normal.
_MARGIN = 4.0
_MAX_STRETCH = 5.0
_REMEMBER_SECONDS = 60.0
# If a wait ends later than its deadline by this share of the deadline, this process got no CPU time.
_STARVED_SHARE = 0.2
# Leaving a Mooncake cluster takes one to two seconds.
_LEAVE_SECONDS = 5.0


@dataclass(frozen=True)
class Deadlines:
    """Deadlines of the calls to a store: the time that a caller waits for an answer.

    - exists, remove: ``lookup_seconds``, plus one second for each ``keys_per_second`` keys.
    - put, keep, get: ``transfer_seconds``, plus one second for each ``keys_per_second`` keys and each
      ``bytes_per_second`` bytes.
    - register, unregister: ``register_seconds``, plus one second for each ``register_bytes_per_second`` bytes. RDMA
      must find the pages of the memory one by one.
    - clear: ``clear_seconds``. A clear reads all keys; in a folder with 200,000 values this takes 3 s.
    - probes: ``lookup_seconds``.

    On a machine with a load of 7 per core, a Mooncake master looked up 80,000 keys in 1.2 s (67,000 per second).
    """

    lookup_seconds: float = 0.5
    transfer_seconds: float = 1.0
    bytes_per_second: float = 100e6
    clear_seconds: float = 20.0
    register_seconds: float = 5.0
    register_bytes_per_second: float = 1e9
    keys_per_second: float = 20e3

    def seconds_to_look_up(self, num_keys: int) -> float:
        """Return the deadline, in seconds, of a look-up of ``num_keys`` keys."""
        return self.lookup_seconds + num_keys / self.keys_per_second

    def seconds_for(self, values: Sequence[Value]) -> float:
        """Return the deadline, in seconds, of a put or get of ``values``."""
        nbytes = sum([nbytes for value in values for _, nbytes in value])
        return self.transfer_seconds + len(values) / self.keys_per_second + nbytes / self.bytes_per_second

    def seconds_to_register(self, nbytes: int) -> float:
        """Return the deadline, in seconds, of a call that registers or unregisters ``nbytes`` of memory."""
        return self.register_seconds + nbytes / self.register_bytes_per_second


class _Moment(threading.local):
    """Time at which the calls of a thread end, or None if the calls end at their own deadlines."""

    moment: float | None = None


_wanted_by = _Moment()


@contextlib.contextmanager
def end_calls_at(moment: float) -> Iterator[None]:
    """Set the deadline of all calls of this thread in the ``with`` block to ``moment``, a time of ``time.monotonic``.

    The calls end at ``moment`` even if the store was slow before or this process got no CPU time. Other deadlines are
    longer in these cases.
    """
    before, _wanted_by.moment = _wanted_by.moment, moment
    try:
        yield
    finally:
        _wanted_by.moment = before


class _AdaptiveDeadline:
    """Computes the factor by which a store's deadlines must be longer, from the store's recent response times."""

    __slots__ = ("_share", "_until")

    def __init__(self) -> None:
        self._share = 0.0  # largest share of its deadline that a recent answer took
        self._until = 0.0

    def note_answer(self, share: float, now: float) -> None:
        """Record how long an answer of the store took, as a share of its deadline (above 1 for a late answer)."""
        if (share >= self._share or now >= self._until) and share <= _MAX_STRETCH:
            self._share, self._until = share, now + _REMEMBER_SECONDS

    def stretch(self, now: float) -> float:
        """Return the factor, 1 or more, by which all deadlines are multiplied now."""
        return max(1.0, min(_MAX_STRETCH, _MARGIN * self._share)) if now < self._until else 1.0


class _Call:
    """One native call on a worker thread.

    The lock of ``GuardedBackend`` protects ``has_begun``, ``is_given_up`` and ``ended``.
    """

    __slots__ = ("answer", "asked_at", "ended", "has_begun", "is_given_up", "seconds", "work")

    def __init__(self, work: Callable[[], Any], seconds: float) -> None:
        self.work = work
        self.seconds = seconds  # deadline while the store is not slow
        self.asked_at = time.monotonic()
        self.answer: Any = None  # stays None if the work raised
        self.has_begun = False
        self.is_given_up = False
        self.ended = threading.Lock()  # locked until the call ends; cheaper than an Event
        self.ended.acquire()


@dataclass(eq=False, slots=True)
class _Region:
    """One registration of memory by a caller.

    A later registration of the same address is a new object, because the memory may have other pages by then.
    """

    nbytes: int
    headroom: bool


class GuardedBackend(StorageBackend):
    """Wrapper with deadlines and a breaker, around the store that ``open_store`` opens.

    Args:
        open_store: opens the store. The keeper thread calls it again until it does not raise an exception, and when a
            call of the store has raised ``PoolUnavailable``.
        deadlines: time that callers wait for each kind of call.

    Attributes:
        late_calls: total number of calls that missed their deadline while they ran.
        times_opened: number of times that the breaker opened after the store had been opened.
        raised_calls: number of calls that raised an exception, which no store may do; the first one is logged as error.
    """

    def __init__(self, open_store: Callable[[], StorageBackend], deadlines: Deadlines | None = None) -> None:
        self.deadlines = deadlines or Deadlines()
        self.late_calls = 0
        self.times_opened = 0
        self.raised_calls = 0
        self._open_store = open_store
        self._changed = threading.Condition()  # guards all below; notified when a late call ends or the state changes
        self._store: StorageBackend | None = None
        self._wanted: dict[int, _Region] = {}  # memory that callers have registered, by address
        self._known: dict[int, _Region] = {}  # memory that is registered with the store, by address
        self._registering: set[int] = set()  # addresses that are being registered with the store
        self._is_closed = False
        self._trouble: str | None = "the store is being opened"  # why the breaker is open, or None if it is closed
        self._since = time.monotonic()  # time when the breaker opened
        self._num_late = 0
        self._failures = 0
        self._pace = _AdaptiveDeadline()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        after_fork(self)
        try:
            for number in range(_WORKERS):
                # The threads are daemons, because a call that never returns must not prevent the end of the process.
                threading.Thread(target=self._run_calls, name=f"pool-call-{number}", daemon=True).start()
            threading.Thread(target=self._run_keeper, name="pool-keeper", daemon=True).start()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        state = "closed permanently" if self._is_closed else f"open: {self._trouble}" if self._trouble else "closed"
        return f"GuardedBackend({self._store!r}, breaker {state}, {self._num_late} late)"

    @property
    def is_ready(self) -> bool:
        return self._trouble is None

    def wait_ready(self, seconds: float | None) -> bool:
        """Wait until the breaker is closed, without a limit if ``seconds`` is None; return False if it stays open."""
        with self._changed:
            self._changed.wait_for(lambda: self._trouble is None or self._is_closed, seconds)
            return self._trouble is None

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        # Failed puts do not open the breaker, because a working pool refuses puts when it is full. Failed removals do
        # not open it either, because a working pool refuses to remove blocks with a lease.
        return self._call_batch(keys, self.deadlines.seconds_for(values), "put", lambda store: store.put(keys, values))

    def keep(self, keys: Sequence[str], values: Sequence[Value], seconds: float) -> list[Status]:
        return self._call_batch(
            keys, self.deadlines.seconds_for(values), "keep", lambda store: store.keep(keys, values, seconds)
        )

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        seconds = self.deadlines.seconds_for(targets)
        return self._watch_failures(self._call_batch(keys, seconds, "get", lambda store: store.get(keys, targets)))

    def exists(self, keys: Sequence[str]) -> list[Status]:
        seconds = self.deadlines.seconds_to_look_up(len(keys))
        return self._watch_failures(self._call_batch(keys, seconds, "exists", lambda store: store.exists(keys)))

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        seconds = self.deadlines.seconds_to_look_up(len(keys))
        return self._call_batch(keys, seconds, "remove", lambda store: store.remove(keys, force=force))

    def clear(self, prefix: str) -> Status:
        answer = self._call_store(self.deadlines.clear_seconds, "clear", lambda store: store.clear(prefix))
        return Status.FAILED if answer is None else answer

    def wait_for_late_calls(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._num_late == 0, seconds)

    def count_late_calls(self) -> int:
        return self.late_calls

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        """Register memory with the store, and return at the deadline at the latest.

        While the breaker is open, return immediately; the keeper thread registers the memory before it closes the
        breaker.
        """
        with self._changed:
            self._wanted[address] = _Region(nbytes, headroom)
        self._update_registration(address, nbytes)

    def unregister(self, address: int, nbytes: int) -> None:
        """Unregister memory from the store, and return at the deadline at the latest.

        While the breaker is open, return immediately; the keeper thread unregisters the memory before it closes the
        breaker.
        """
        with self._changed:
            self._wanted.pop(address, None)
        self._update_registration(address, nbytes)

    def health(self) -> Health:
        """Return the state of the breaker, without a call to the store, so that this method cannot hang."""
        if self._is_closed:
            return Health(False, self._trouble or "closed")
        if (trouble := self._trouble) is not None:
            return Health(False, f"not used for {time.monotonic() - self._since:.1f} s: {trouble}")
        return Health(True, f"answering: {self._store!r}")

    def close(self) -> None:
        """Close the store. If the store hangs, return without closing it, after ``_LEAVE_SECONDS`` at the latest."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._trouble = "closed"
            self._changed.notify_all()
            is_late = self._num_late > 0
        store = self._store
        if store is not None and not is_late:
            leaving = threading.Thread(target=_close_store, args=(store,), name="pool-close", daemon=True)
            leaving.start()
            leaving.join(_LEAVE_SECONDS)
            is_late = leaving.is_alive()
        if is_late:
            logger.warning("The pool hangs, so its client stays open: %r", store)
        for _ in range(_WORKERS):
            self._calls.put(None)

    def on_fork(self) -> None:
        """Close this object in a forked child, which has no worker threads and no connection to the pool."""
        self._changed = threading.Condition()
        self._calls = queue.SimpleQueue()
        self._num_late = 0  # a late call touches only the parent's memory
        self._is_closed = True
        self._trouble = "this process was forked from the one that opened the pool: open the pool after the fork"

    def _call_batch(
        self, keys: Sequence[str], seconds: float, operation: str, work: Callable[[StorageBackend], list[Status]]
    ) -> list[Status]:
        if not keys or self._trouble is not None:
            return [Status.FAILED] * len(keys)
        answer = self._call_store(seconds, f"{operation} of {len(keys)} keys", work)
        return answer if answer is not None and len(answer) == len(keys) else [Status.FAILED] * len(keys)

    def _call_store(self, seconds: float, operation: str, work: Callable[[StorageBackend], Any]) -> Any:
        """Run ``work`` on a worker thread, and return its result.

        Returns None if the breaker is open, the deadline has passed or ``work`` raised an exception.
        """
        store = self._store
        if self._trouble is not None or store is None:
            return None
        call = self._start_call(store, work, seconds)
        is_answered = self._wait_for_call(call, operation)
        how = "answered" if is_answered else "given up"
        logger.debug("%s: %s after %.1f ms", operation, how, 1e3 * (time.monotonic() - call.asked_at))
        return call.answer if is_answered else None

    def _start_call(self, store: StorageBackend, work: Callable[[StorageBackend], Any], seconds: float) -> _Call:
        call = _Call(lambda: self._work_with(store, work), seconds)
        self._calls.put(call)
        return call

    def _work_with(self, store: StorageBackend, work: Callable[[StorageBackend], Any]) -> Any:
        """Return ``work(store)``; if the store cannot be used any more, return None, and the keeper opens another."""
        try:
            return work(store)
        except PoolUnavailable as exc:
            with self._changed:
                if self._store is store:
                    self._store = None
                    self._known.clear()
                    self._open_breaker(str(exc))
            return None

    def _wait_for_call(self, call: _Call, operation: str) -> bool:
        """Wait until ``call`` ends; return False if it did not end before its deadline.

        If the call had begun, it still runs, and the breaker opens. If this process got no CPU time during the wait,
        the call gets its deadline a second time, because the store's threads, and a master on the same machine, got no
        CPU time either.
        """
        moment = _wanted_by.moment
        if moment is None:
            seconds = call.seconds * self._pace.stretch(call.asked_at)
        else:
            seconds = max(0.0, moment - call.asked_at)
        if call.ended.acquire(timeout=seconds):
            return True
        is_starved = time.monotonic() - call.asked_at - seconds > _STARVED_SHARE * seconds
        if moment is None and is_starved and call.ended.acquire(timeout=seconds):
            return True
        with self._changed:
            if call.ended.acquire(blocking=False):
                return True
            call.is_given_up = True
            if not call.has_begun:  # all worker threads were busy with calls that have not reached their deadlines
                return False
            self._num_late += 1
            self.late_calls += 1
            self._open_breaker(f"{operation} took more than {seconds:.3g} s")
        return False

    def _run_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            with self._changed:
                if call.is_given_up:
                    continue
                call.has_begun = True
            try:
                call.answer = call.work()
            except Exception:
                self.raised_calls += 1
                level = logging.ERROR if self.raised_calls == 1 else logging.DEBUG
                logger.log(
                    level,
                    "A store raised an exception, which no store may do; the call counts as failed",
                    exc_info=True,
                )
            self._end_call(call)

    def _end_call(self, call: _Call) -> None:
        with self._changed:
            if _shows_working_store(call.answer):
                now = time.monotonic()
                self._pace.note_answer((now - call.asked_at) / call.seconds, now)
            if call.is_given_up:
                self._num_late -= 1
                self._changed.notify_all()
            call.ended.release()

    def _watch_failures(self, answer: list[Status]) -> list[Status]:
        """Return ``answer``; open the breaker if several successive answers were ``FAILED`` for every key."""
        if not answer or answer[0] is not Status.FAILED or answer.count(Status.FAILED) < len(answer):
            self._failures = 0
            return answer
        with self._changed:
            self._failures += 1
            if self._failures >= _MAX_FAILURES:
                self._open_breaker(f"{_MAX_FAILURES} look-ups or reads in a row failed for every key")
        return answer

    def _open_breaker(self, trouble: str) -> None:
        """Open the breaker if it is closed. The caller holds the lock."""
        if self._trouble is None:
            self._trouble, self._since = trouble, time.monotonic()
            self.times_opened += 1
            logger.warning("The pool is not used until a probe succeeds, because calls to it have failed: %s", trouble)
            self._changed.notify_all()

    def _run_keeper(self) -> None:
        while self._wait_for_trouble():
            self._recover()

    def _wait_for_trouble(self) -> bool:
        """Wait until the breaker is open; return False after ``close``."""
        with self._changed:
            self._changed.wait_for(lambda: self._trouble is not None or self._is_closed)
            return not self._is_closed

    def _recover(self) -> None:
        """Open the store, or probe it if it is open, with pauses, until it works; then close the breaker.

        Before each try, wait until all calls that missed their deadline have ended.
        """
        pause = _FIRST_PAUSE_SECONDS
        logged = None
        while self._may_try():
            trouble, least_pause = self._try_store()
            if self._close_breaker_unless(trouble):
                logger.info(
                    "The pool is used now, after %.1f s without it: %r", time.monotonic() - self._since, self._store
                )
                return
            if trouble and trouble != logged:
                logger.warning("The pool cannot be used and will be tried again: %s", trouble)
                logged = trouble
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, max(pause, least_pause))
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _may_try(self) -> bool:
        """Wait until all calls that missed their deadline have ended; return False after ``close``."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_late == 0 or self._is_closed)
            return not self._is_closed

    def _close_breaker_unless(self, trouble: str | None) -> bool:
        """Close the breaker and return True, or record why it stays open and return False.

        The breaker stays open if the store cannot be used (``trouble`` says why), a call still runs after its deadline,
        or memory is not registered with the store.
        """
        with self._changed:
            if not self._is_closed:
                if not trouble and self._num_late:
                    trouble = "a call to the store has not returned yet"
                if not trouble and self._list_outdated():
                    trouble = "not all memory is registered with the store yet"
                self._trouble = trouble
                self._failures = 0
                self._changed.notify_all()
            return self._trouble is None

    def _try_store(self) -> tuple[str | None, float]:
        """Open or probe the store, and register memory with it.

        Returns the reason why the store cannot be used (None if it can), and the seconds to wait before the next try.
        """
        try:
            if self._store is None:
                self._adopt_store(self._open_store())
            elif trouble := self._probe_store():
                return trouble, 0.0
            with self._changed:
                store, outdated = self._store, self._list_outdated()
            if store is not None:
                # First all old registrations are removed, because new memory may overlap old memory.
                for address in outdated:
                    self._register_with(store, address, only_unregisters=True)
                for address in outdated:
                    self._register_with(store, address)
        except PoolUnavailable as exc:
            return str(exc), exc.pause_seconds
        except Exception as exc:  # an error in a library, which may not occur in the next try
            logger.debug("The store could not be opened, or memory could not be registered with it", exc_info=True)
            return f"{type(exc).__name__}: {exc}", 0.0
        return None, 0.0

    def _adopt_store(self, store: StorageBackend) -> None:
        with self._changed:
            if not self._is_closed:
                self._store = store
                return
        _close_store(store)  # ``close`` has ended, so it does not close this store

    def _update_registration(self, address: int, nbytes: int) -> None:
        """Register or unregister the memory at ``address`` with the store, as callers requested.

        If the call fails, the breaker opens, and the keeper thread repeats the call.
        """
        seconds = self.deadlines.seconds_to_register(nbytes)
        what = f"registering {nbytes} bytes"
        self._call_store(seconds, what, lambda store: self._register_with(store, address))
        with self._changed:
            if not self._is_closed and self._wanted.get(address) is not self._known.get(address):
                self._open_breaker(f"{what} did not succeed")

    def _register_with(self, store: StorageBackend, address: int, *, only_unregisters: bool = False) -> None:
        """Register the memory at ``address`` with the store as callers requested.

        First, remove an outdated registration of this memory. With ``only_unregisters``, do only this.
        """
        with self._changed:
            self._changed.wait_for(lambda: address not in self._registering)
            wanted, known = self._wanted.get(address), self._known.get(address)
            if wanted is known or (only_unregisters and known is None):
                return
            self._registering.add(address)
        try:
            if known is not None:
                store.unregister(address, known.nbytes)
                known = None
            if wanted is not None and not only_unregisters:
                store.register(address, wanted.nbytes, headroom=wanted.headroom)
                known = wanted
        finally:
            with self._changed:
                self._registering.discard(address)
                if known is None or self._store is not store:
                    self._known.pop(address, None)
                else:
                    self._known[address] = known
                self._changed.notify_all()

    def _list_outdated(self) -> list[int]:
        """Return the addresses whose registration with the store is not the one that callers requested.

        The caller holds the lock.
        """
        addresses = {**self._wanted, **self._known}  # a dictionary, because its order does not depend on the addresses
        return [each for each in addresses if self._wanted.get(each) is not self._known.get(each)]

    def _probe_store(self) -> str | None:
        """Look up a key in the store; return why the store cannot be used, or None if it answers."""
        assert self._store is not None
        seconds = self.deadlines.lookup_seconds
        call = self._start_call(self._store, lambda store: store.exists([_PROBE_KEY]), seconds)
        if not self._wait_for_call(call, "a probe"):
            return f"a probe took more than {seconds:g} s"
        return None if call.answer in ([Status.OK], [Status.ABSENT]) else "a probe failed"


def _close_store(store: StorageBackend) -> None:
    try:
        store.close()
    except Exception:
        logger.exception("The store raised an exception when it was closed: %r", store)


def _shows_working_store(answer: Any) -> bool:
    """Return whether an answer of the store is neither an error nor ``FAILED``, so that the store works."""
    first = answer[0] if isinstance(answer, list) and answer else answer
    return first is not None and first is not Status.FAILED
