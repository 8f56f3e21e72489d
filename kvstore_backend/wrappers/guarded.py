"""A deadline for every call, and a circuit breaker: a pool that hangs or dies costs callers one deadline, then nothing.

Native calls cannot be interrupted. Each runs on a worker thread; a caller waits for it until its deadline and then gets
``FAILED``. Such a call is *late*: it may still write into (or read from) the memory that it was given. Two rules make
late calls harmless:

- From the moment a call becomes late until it has ended the breaker is open: no second call queues behind it, and no
  caller that uses the same memory meanwhile gets ``OK`` for it.
- ``wait_for_late_calls`` reports when no late call is left; memory of a call that was ``FAILED`` must not be used for
  anything else before that. ``BlockPool`` and ``transfers.py`` follow this rule, so that engines do not have to.

States::

    open (no store yet) ──store opened──►  closed  ──a late call, or failures in a row──►  open
                                             ▲                                              │
                                             └──────── no late call left, probe answered ───┘

A store that answers slowly, as on a busy machine, is not a store that hangs. If an answer took a large part of its
deadline, or came after it, the deadlines of the next minute are longer, up to ``_MAX_STRETCH`` times. So a store that
hangs costs one deadline if it was quick before, and at most that many deadlines.

A caller that must finish at a certain time, and can wait until then, makes its calls inside ``answered_by``.

While the breaker is not closed a call costs a few microseconds. A keeper thread opens the store or probes it, so the
pool recovers without calls.

The registration of memory is a call with a deadline, like any other. If the store did not take a registration, because
the breaker was open, or the call raised or was late, the keeper repeats it before it closes the breaker: no transfer
begins with memory that the store does not know.

A process that is forked from one with a pool has none of these threads, and no connection of its own: there the breaker
is open permanently.
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
    StoreStats,
    Value,
)
from kvstore_backend.threads import after_fork

__all__ = ["Deadlines", "GuardedBackend", "answered_by"]

logger = logging.getLogger(__name__)

_PROBE_KEY = "kvstore-probe"
# Maximum number of callers inside native calls; another one waits for a worker within its own deadline.
_WORKERS = 8
# Number of successive look-ups and reads with FAILED for every key that opens the breaker.
_MAX_FAILURES = 3
_FIRST_PAUSE_SECONDS = 0.25
_MAX_PAUSE_SECONDS = 2.0
# An answer may take this many times as long as the slowest one of the last minute; deadlines are stretched for it.
_MARGIN = 4.0
_MAX_STRETCH = 5.0
_REMEMBER_SECONDS = 60.0
# A wait that ends this share of its deadline too late shows that this process got no CPU time.
_STARVED_SHARE = 0.2
# Leaving a Mooncake cluster takes one to two seconds.
_LEAVE_SECONDS = 5.0


@dataclass(frozen=True)
class Deadlines:
    """Time that a caller waits for each kind of call.

    exists, remove and stats: ``lookup_seconds``. put and get: ``transfer_seconds``. Both get more time for their keys
    at ``keys_per_second``, and for their bytes at ``bytes_per_second``. clear, which reads all keys (a folder of
    200,000 takes 3 s): ``clear_seconds``. Registration, for which RDMA must find the pages one by one:
    ``register_seconds``, and more time at ``register_bytes_per_second``.

    A Mooncake master on a machine at a load of 7 per core answered for 80,000 keys in 1.2 s, which is 67,000 a second.
    """

    lookup_seconds: float = 0.5
    transfer_seconds: float = 1.0
    bytes_per_second: float = 100e6
    clear_seconds: float = 20.0
    register_seconds: float = 5.0
    register_bytes_per_second: float = 1e9
    keys_per_second: float = 20e3

    def seconds_to_look_up(self, num_keys: int) -> float:
        """Return the seconds for a look-up of ``num_keys`` keys."""
        return self.lookup_seconds + num_keys / self.keys_per_second

    def seconds_for(self, values: Sequence[Value]) -> float:
        """Return the seconds for a transfer of ``values``."""
        nbytes = sum([nbytes for value in values for _, nbytes in value])
        return self.transfer_seconds + len(values) / self.keys_per_second + nbytes / self.bytes_per_second

    def seconds_to_register(self, nbytes: int) -> float:
        """Return the seconds to register or unregister ``nbytes`` of memory."""
        return self.register_seconds + nbytes / self.register_bytes_per_second


class _Moment(threading.local):
    """Time by which the calls of a thread must be answered; None: their deadlines count."""

    moment: float | None = None


_wanted_by = _Moment()


@contextlib.contextmanager
def answered_by(moment: float) -> Iterator[None]:
    """Make this thread's calls inside the block wait for an answer until ``moment`` of ``time.monotonic``, no longer.

    It replaces their deadlines: it is not stretched, and a starved process gets no second wait.
    """
    before, _wanted_by.moment = _wanted_by.moment, moment
    try:
        yield
    finally:
        _wanted_by.moment = before


class _AdaptiveDeadline:
    """Factor for deadlines, from the store's recent response times."""

    __slots__ = ("_share", "_until")

    def __init__(self) -> None:
        self._share = 0.0  # largest share of its deadline that a recent answer took
        self._until = 0.0

    def note_answer(self, share: float, now: float) -> None:
        """Record the share of its deadline that an answer took; more than 1 if it was late."""
        if (share >= self._share or now >= self._until) and share <= _MAX_STRETCH:
            self._share, self._until = share, now + _REMEMBER_SECONDS

    def stretch(self, now: float) -> float:
        """Return the factor by which deadlines are longer now."""
        return max(1.0, min(_MAX_STRETCH, _MARGIN * self._share)) if now < self._until else 1.0


class _Call:
    """One native call on a worker; the guard's lock protects all fields but the first four."""

    __slots__ = ("answer", "asked_at", "ended", "has_begun", "is_given_up", "seconds", "work")

    def __init__(self, work: Callable[[], Any], seconds: float) -> None:
        self.work = work
        self.seconds = seconds  # its deadline while nothing is slow
        self.asked_at = time.monotonic()
        self.answer: Any = None  # stays None if the work raised
        self.has_begun = False
        self.is_given_up = False
        self.ended = threading.Lock()  # locked until the end; an Event would cost a condition variable each
        self.ended.acquire()


class _Region:
    """Memory that a caller registered; a second registration is another object, because its pages may differ."""

    __slots__ = ("headroom", "nbytes")

    def __init__(self, nbytes: int, headroom: bool) -> None:
        self.nbytes = nbytes
        self.headroom = headroom


class GuardedBackend(StorageBackend):
    """Guard of the store that ``open_store`` opens.

    Args:
        open_store: opens the store; called on a separate thread until it does not raise.
        deadlines: how long callers wait.

    Attributes:
        late_calls: total number of calls that were given up while they ran.
        times_opened: how often the breaker opened after the store had been opened.
        raised_calls: number of calls that raised, which no store may do; the first is logged.
    """

    def __init__(self, open_store: Callable[[], StorageBackend], deadlines: Deadlines | None = None) -> None:
        self.deadlines = deadlines or Deadlines()
        self.late_calls = 0
        self.times_opened = 0
        self.raised_calls = 0
        self._open_store = open_store
        self._changed = threading.Condition()  # guards everything below; notified of late calls' ends and new states
        self._store: StorageBackend | None = None
        self._wanted: dict[int, _Region] = {}  # registered by callers, by address
        self._known: dict[int, _Region] = {}  # registered with the store
        self._being_told: set[int] = set()  # addresses that are being registered with the store
        self._is_closed = False
        self._trouble: str | None = "the store is being opened"  # reason for an open breaker; None: it is closed
        self._since = time.monotonic()
        self._num_late = 0
        self._failures = 0
        self._last_stats = StoreStats("unopened")
        self._pace = _AdaptiveDeadline()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        after_fork(self)
        try:
            for number in range(_WORKERS):
                # Daemon threads, because a call that never returns must not prevent the end of the process.
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
        """Wait until the breaker is closed; return False if it is still open after ``seconds`` (None: no limit)."""
        with self._changed:
            self._changed.wait_for(lambda: self._trouble is None or self._is_closed, seconds)
            return self._trouble is None

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        # A healthy pool may refuse puts when it is full, so they do not count as failures; nor does remove, with
        # leases.
        return self._ask_statuses(
            keys, self.deadlines.seconds_for(values), "put", lambda store: store.put(keys, values)
        )

    def keep(self, keys: Sequence[str], values: Sequence[Value], seconds: float) -> list[Status]:
        return self._ask_statuses(
            keys, self.deadlines.seconds_for(values), "keep", lambda store: store.keep(keys, values, seconds)
        )

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        seconds = self.deadlines.seconds_for(targets)
        return self._watch_failures(self._ask_statuses(keys, seconds, "get", lambda store: store.get(keys, targets)))

    def exists(self, keys: Sequence[str]) -> list[Status]:
        seconds = self.deadlines.seconds_to_look_up(len(keys))
        return self._watch_failures(self._ask_statuses(keys, seconds, "exists", lambda store: store.exists(keys)))

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        seconds = self.deadlines.seconds_to_look_up(len(keys))
        return self._ask_statuses(keys, seconds, "remove", lambda store: store.remove(keys, force=force))

    def clear(self, prefix: str) -> Status:
        answer = self._ask_store(self.deadlines.clear_seconds, "clear", lambda store: store.clear(prefix))
        return Status.FAILED if answer is None else answer

    def wait_for_late_calls(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._num_late == 0, seconds)

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        """Register memory; wait for the store up to a deadline, or not at all while the breaker is open."""
        with self._changed:
            self._wanted[address] = _Region(nbytes, headroom)
        self._tell_of_memory(address, nbytes)

    def unregister(self, address: int, nbytes: int) -> None:
        """Unregister memory; wait as ``register`` does."""
        with self._changed:
            self._wanted.pop(address, None)
        self._tell_of_memory(address, nbytes)

    def health(self) -> Health:
        """Report what the breaker knows, without a call to the store: this costs nothing and cannot hang."""
        if self._is_closed:
            return Health(False, self._trouble or "closed")
        if (trouble := self._trouble) is not None:
            return Health(False, f"set aside {time.monotonic() - self._since:.1f} s ago: {trouble}")
        return Health(True, f"answering: {self._store!r}")

    def stats(self) -> StoreStats:
        """Return the store's own measurements, or only its kind while it cannot be called."""
        stats = self._ask_store(self.deadlines.lookup_seconds, "stats", lambda store: store.stats())
        if stats is None:
            return StoreStats(self._last_stats.kind)
        self._last_stats = stats
        return self._last_stats

    def close(self) -> None:
        """Leave the store, within seconds even if it hangs."""
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
            logger.warning("The pool hangs, and was not closed: %r", store)
        for _ in range(_WORKERS):
            self._calls.put(None)

    def on_fork(self) -> None:
        """Close the guard in a child process: it has no worker, no keeper, and no connection of its own."""
        self._changed = threading.Condition()
        self._calls = queue.SimpleQueue()
        self._num_late = 0  # a late call touches only the parent's memory
        self._is_closed = True
        self._trouble = "this process was forked from the one that opened the pool: open the pool after the fork"

    def _ask_statuses(
        self, keys: Sequence[str], seconds: float, operation: str, ask: Callable[[StorageBackend], list[Status]]
    ) -> list[Status]:
        if not keys or self._trouble is not None:
            return [Status.FAILED] * len(keys)
        answer = self._ask_store(seconds, f"{operation} of {len(keys)} keys", ask)
        return answer if answer is not None and len(answer) == len(keys) else [Status.FAILED] * len(keys)

    def _ask_store(self, seconds: float, operation: str, ask: Callable[[StorageBackend], Any]) -> Any:
        """Return the answer of ``ask``; None if the breaker is open, the deadline has passed or the store raised."""
        store = self._store
        if self._trouble is not None or store is None:
            return None
        call = self._start_call(store, ask, seconds)
        is_answered = self._wait_for_call(call, operation)
        how = "answered" if is_answered else "given up"
        logger.debug("%s: %s after %.1f ms", operation, how, 1e3 * (time.monotonic() - call.asked_at))
        return call.answer if is_answered else None

    def _start_call(self, store: StorageBackend, ask: Callable[[StorageBackend], Any], seconds: float) -> _Call:
        call = _Call(lambda: ask(store), seconds)
        self._calls.put(call)
        return call

    def _wait_for_call(self, call: _Call, operation: str) -> bool:
        """Wait for ``call``; return False if it was given up; then the breaker is open if the call had begun.

        If this process was starved of CPU time during the wait, the store gets its deadline once more, because the
        store's threads, and a master on the same machine, were starved as well.
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
            if not call.has_begun:  # every worker was busy with calls that are within their own deadlines
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
                logger.log(level, "A store raised, which it may not; the call counts as failed", exc_info=True)
            self._end_call(call)

    def _end_call(self, call: _Call) -> None:
        with self._changed:
            if _says_something(call.answer):
                now = time.monotonic()
                self._pace.note_answer((now - call.asked_at) / call.seconds, now)
            if call.is_given_up:
                self._num_late -= 1
                self._changed.notify_all()
            call.ended.release()

    def _watch_failures(self, answer: list[Status]) -> list[Status]:
        """Open the breaker after several successive answers that were ``FAILED`` for every key."""
        if not answer or answer[0] is not Status.FAILED or answer.count(Status.FAILED) < len(answer):
            self._failures = 0
            return answer
        with self._changed:
            self._failures += 1
            if self._failures >= _MAX_FAILURES:
                self._open_breaker(f"{_MAX_FAILURES} look-ups or reads in a row failed for every key")
        return answer

    def _open_breaker(self, trouble: str) -> None:
        """Open the breaker, under the lock, unless it is already open."""
        if self._trouble is None:
            self._trouble, self._since = trouble, time.monotonic()
            self.times_opened += 1
            logger.warning("The pool is not used for now: %s", trouble)
            self._changed.notify_all()

    def _run_keeper(self) -> None:
        while self._wait_for_trouble():
            self._heal()

    def _wait_for_trouble(self) -> bool:
        """Wait until the breaker is open; return False if the guard is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._trouble is not None or self._is_closed)
            return not self._is_closed

    def _heal(self) -> None:
        """Repeat until the breaker is closed: wait for late calls to end, then open or probe the store, with pauses."""
        pause = _FIRST_PAUSE_SECONDS
        said = None
        while self._may_try():
            trouble, least_pause = self._try_store()
            if self._close_breaker_unless(trouble):
                logger.info("The pool is used after %.1f s without it: %r", time.monotonic() - self._since, self._store)
                return
            if trouble and trouble != said:
                logger.warning("The pool cannot be used, and is tried again: %s", trouble)
                said = trouble
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, max(pause, least_pause))
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _may_try(self) -> bool:
        """Wait until no late call is left; return False if the guard is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_late == 0 or self._is_closed)
            return not self._is_closed

    def _close_breaker_unless(self, trouble: str | None) -> bool:
        """Close the breaker if there is no ``trouble``; otherwise record the trouble."""
        with self._changed:
            if not self._is_closed:
                if not trouble and self._num_late:
                    trouble = "a call has not come back yet"
                if not trouble and self._list_untold():
                    trouble = "the store does not know all memory yet"
                self._trouble = trouble
                self._failures = 0
                self._changed.notify_all()
            return self._trouble is None

    def _try_store(self) -> tuple[str | None, float]:
        """Open or probe the store, and register memory with it.

        Returns None or the trouble, and the pause that it requires.
        """
        try:
            if self._store is None:
                self._adopt_store(self._open_store())
            elif trouble := self._probe_store():
                return trouble, 0.0
            with self._changed:
                store, untold = self._store, self._list_untold()
            if store is not None:
                # First what is no longer wanted: new memory may lie where that was.
                for address in untold:
                    self._tell_store(store, address, only_forgets=True)
                for address in untold:
                    self._tell_store(store, address)
        except PoolUnavailable as exc:
            return str(exc), exc.pause_seconds
        except Exception as exc:  # an error in a library, which another try may not meet
            logger.debug("Opening the store raised", exc_info=True)
            return f"{type(exc).__name__}: {exc}", 0.0
        return None, 0.0

    def _adopt_store(self, store: StorageBackend) -> None:
        with self._changed:
            if not self._is_closed:
                self._store = store
                return
        _close_store(store)  # close() ended before it could see this store

    def _tell_of_memory(self, address: int, nbytes: int) -> None:
        """Register or unregister memory with the store, as callers want; if that fails, the keeper repeats it."""
        seconds = self.deadlines.seconds_to_register(nbytes)
        what = f"registering {nbytes} bytes"
        self._ask_store(seconds, what, lambda store: self._tell_store(store, address))
        with self._changed:
            if not self._is_closed and self._wanted.get(address) is not self._known.get(address):
                self._open_breaker(f"{what} did not succeed")

    def _tell_store(self, store: StorageBackend, address: int, *, only_forgets: bool = False) -> None:
        """Make the store's registration at ``address`` match what callers want; ``only_forgets``: remove it only."""
        with self._changed:
            self._changed.wait_for(lambda: address not in self._being_told)
            wanted, known = self._wanted.get(address), self._known.get(address)
            if wanted is known or (only_forgets and known is None):
                return
            self._being_told.add(address)
        try:
            if known is not None:
                store.unregister(address, known.nbytes)
                known = None
            if wanted is not None and not only_forgets:
                store.register(address, wanted.nbytes, headroom=wanted.headroom)
                known = wanted
        finally:
            with self._changed:
                self._being_told.discard(address)
                if known is None:
                    self._known.pop(address, None)
                else:
                    self._known[address] = known
                self._changed.notify_all()

    def _list_untold(self) -> list[int]:
        """Return the addresses with another registration than callers want; the caller holds the lock."""
        addresses = {**self._wanted, **self._known}  # in one order, wherever memory lies
        return [each for each in addresses if self._wanted.get(each) is not self._known.get(each)]

    def _probe_store(self) -> str | None:
        """Probe the store with a look-up; return None or the trouble."""
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
        logger.exception("The store was not closed cleanly: %r", store)


def _says_something(answer: Any) -> bool:
    """Return whether the answer shows that the store works, even if late; a disconnected store returns ``FAILED``."""
    first = answer[0] if isinstance(answer, list) and answer else answer
    return first is not None and first is not Status.FAILED
