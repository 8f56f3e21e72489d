"""The one interface of every store and of every wrapper around one, and the answers it may give.

Exceptions that leave this package::

    KVStoreError
    ├── ConfigError        a configuration that cannot be used; also a ValueError
    └── PoolUnavailable    the store could not be opened (no master, no folder, library missing)

A *caller's* mistake in a call (lengths that differ, a negative size, an empty key) is a plain
``ValueError``, raised at once. Nothing a *pool* does raises out of a call: it is a ``Status``.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "HEADROOM_BYTES",
    "ConfigError",
    "Health",
    "KVStoreError",
    "PoolUnavailable",
    "Span",
    "Status",
    "StorageBackend",
    "StoreStats",
    "Value",
    "check_keys",
    "check_values",
    "memory_views",
    "split_by_size",
]

HEADROOM_BYTES = 128
"""Bytes that memory registered with ``headroom`` leaves free before each value, which stays aligned by that."""


class KVStoreError(Exception):
    """Base of every exception this package raises on its own account."""


class ConfigError(KVStoreError, ValueError):
    """A configuration that cannot be used: one sentence, naming the key, the value and a right one."""


class PoolUnavailable(KVStoreError):
    """The store could not be opened: one sentence, naming the address or folder and a remedy.

    Attributes:
        pause_seconds: opening it stopped the whole process for a while; it should not be tried again before.
    """

    def __init__(self, message: str, pause_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.pause_seconds = pause_seconds


class Status(enum.Enum):
    """The answer for one key. Only ``OK`` is true, so ``if status:`` never takes a failure for a hit."""

    OK = "ok"
    """Stored, read in full, present, or removed."""
    ABSENT = "absent"
    """The pool answered, and it does not have this value: not the key, or, of a read, another size under it."""
    FAILED = "failed"
    """Nothing may be concluded: an error, a time-out, no room."""

    def __bool__(self) -> bool:
        return self is Status.OK


class Span(NamedTuple):
    """A piece of memory: ``nbytes`` bytes at ``address``. Its owner keeps it alive during the call."""

    address: int
    nbytes: int


Value = Sequence[Span]
"""One value as scatter/gather: its bytes are the spans' bytes, one after another."""


class Health(NamedTuple):
    """The state of a store as it sees it: ``ok`` and one sentence of detail for an operator."""

    ok: bool
    detail: str


@dataclass(frozen=True)
class StoreStats:
    """Figures a store knows of itself; ``None`` where it cannot know.

    ``keys`` and ``used_bytes`` count the values in this store (for Mooncake: the whole cluster, as its master
    reports it); ``capacity_bytes`` is the limit it evicts at.
    """

    kind: str
    keys: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None


class StorageBackend(abc.ABC):
    """Batched put / get / exists / remove of immutable values.

    Callers call ``put``, ``keep``, ``get``, ``exists``, ``remove`` and ``clear``, which check their arguments and hand
    them to ``_put``, ``_keep``, ``_get``, ``_exists``, ``_remove`` and ``_clear``: those are a store's to write, and
    trust their arguments. A backend around a backend calls those of the inner one, so that a batch is checked once, at
    the door it came in by.

    Rules that every implementation keeps, and ``tests/kvstore_backend/conformance`` checks:

    - All calls are batches, answered by one ``Status`` per key in the order asked. An empty batch answers ``[]``.
    - A value is immutable: a put of a key that is present answers ``OK`` and changes nothing.
    - ``get`` fills *all* of the target's bytes or does not answer ``OK``. A stored value of any other size than the
      target's is ``ABSENT``. After an answer other than ``OK`` the target's contents are unspecified.
    - Memory is the caller's: spans are read (put) or written (get) only while the call runs. (A backend that gives
      calls up is the exception; ``wait_for_late_calls`` reports when they have ended.)
    - ``register`` announces memory that spans will point into; stores that need no registration ignore it.
    - Calls may come from several threads at once.
    - After ``close`` every call answers ``FAILED`` for each key, and a second ``close`` does nothing.
    """

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        """Store ``values[i]`` under ``keys[i]``; ``OK`` means it is readable now.

        The exception is Mooncake, which says so of a key that another client has only begun to write: it is readable
        in a moment, or, if that client dies, not at all.

        Raises:
            ValueError: lengths differ, an empty key, an empty value or a negative size.
        """
        check_values(keys, values)
        return self._put(keys, values)

    def keep(self, keys: Sequence[str], values: Sequence[Value], seconds: float) -> list[Status]:
        """Store ``values[i]`` under ``keys[i]`` also where that is present, and spare it from eviction for a time.

        For as long as there is something else to evict. A store that knows no such thing stores those that are absent.

        Args:
            keys: of values that are to be kept.
            values: theirs, whether or not they are stored already.
            seconds: for how long from now; 0: it is evicted like any other again.

        Raises:
            ValueError: as ``put``, or ``seconds`` is negative.
        """
        check_values(keys, values)
        if seconds < 0:
            raise ValueError(f"seconds is {seconds}; it must not be negative")
        return self._keep(keys, values, seconds)

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        """Read ``keys[i]`` into the memory of ``targets[i]``.

        Raises:
            ValueError: as ``put``.
        """
        check_values(keys, targets)
        return self._get(keys, targets)

    def exists(self, keys: Sequence[str]) -> list[Status]:
        """Say which keys are present now; a present one may still be evicted before it is read.

        Raises:
            ValueError: an empty key.
        """
        check_keys(keys)
        return self._exists(keys)

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        """Remove keys; ``ABSENT`` where there was nothing to remove.

        With ``force`` also those that somebody may be reading now: for values that nobody should read.

        Raises:
            ValueError: an empty key.
        """
        check_keys(keys)
        return self._remove(keys, force=force)

    def clear(self, prefix: str) -> Status:
        """Remove every key that begins with ``prefix``, also those that somebody may be reading now.

        Returns:
            ``OK`` when none is left but those put meanwhile; ``FAILED`` where that cannot be said.

        Raises:
            ValueError: ``prefix`` is empty, which would be everybody's keys.
        """
        check_keys([prefix])
        return self._clear(prefix)

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:  # noqa: B027 - many need nothing
        """Announce ``nbytes`` bytes at ``address`` that later spans lie in (RDMA needs it).

        Args:
            address: where the memory begins.
            nbytes: its size.
            headroom: before the first span of every value in this memory there are ``HEADROOM_BYTES`` bytes of it that
                calls may overwrite. A header then travels in one piece with its value, which over TCP saves as much
                time as 50 KiB take.
        """

    def unregister(self, address: int, nbytes: int) -> None:  # noqa: B027 - most stores need nothing
        """Take back a ``register`` of the same memory, before that memory is freed."""

    @property
    def is_ready(self) -> bool:
        """False while calls are answered ``FAILED`` without being made, so that callers may spare themselves."""
        return True

    def wait_for_late_calls(self, seconds: float) -> bool:
        """Wait until no call that was given up touches callers' memory any more.

        After a put or get answered ``FAILED``, its memory may be used for something else once this is true. Only
        stacks that give up on calls (``guarded.py``) ever have to wait.

        Returns:
            False if some call still runs after ``seconds``.
        """
        return True

    def flush_writes(self, seconds: float) -> bool:
        """Wait until other clients of the pool can read every value put so far, or it has been given up.

        Only stacks that write later (``write_behind.py``) ever have to wait.

        Returns:
            False if ``seconds`` were not enough.
        """
        return True

    def exists_for_all(self, keys: Sequence[str]) -> list[Status]:
        """``exists`` as another instance would be answered: without the copies that only this one has.

        Raises:
            ValueError: an empty key.
        """
        check_keys(keys)
        return self._exists_for_all(keys)

    def drop_own_copies(self, prefix: str) -> bool:
        """Drop what only this process has of the keys that begin with ``prefix``: copies, and writes on their way.

        The pool that others share is left as it is; a write that is being sent goes on.

        Returns:
            False if some copies may be left.
        """
        return True

    @abc.abstractmethod
    def health(self) -> Health:
        """Whether the store works now, as far as it can tell without moving data."""

    @abc.abstractmethod
    def stats(self) -> StoreStats:
        """The store's own figures."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back the connections, threads and memory that were taken."""

    @abc.abstractmethod
    def _put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        """``put``, of arguments that were checked."""

    def _keep(self, keys: Sequence[str], values: Sequence[Value], seconds: float) -> list[Status]:
        """``keep``, of arguments that were checked."""
        return self._put(keys, values)

    @abc.abstractmethod
    def _get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        """``get``, of arguments that were checked."""

    @abc.abstractmethod
    def _exists(self, keys: Sequence[str]) -> list[Status]:
        """``exists``, of keys that were checked."""

    def _exists_for_all(self, keys: Sequence[str]) -> list[Status]:
        """``exists_for_all``, of keys that were checked."""
        return self._exists(keys)

    def _get_for_all(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        """``get`` without the copies that only this instance has, and without leaving one; of checked arguments."""
        return self._get(keys, targets)

    @abc.abstractmethod
    def _remove(self, keys: Sequence[str], *, force: bool) -> list[Status]:
        """``remove``, of keys that were checked."""

    def _clear(self, prefix: str) -> Status:
        """``clear``, of a prefix that was checked; ``FAILED`` for a store that cannot list its keys."""
        return Status.FAILED


def check_keys(keys: Sequence[str]) -> None:
    """Raise ``ValueError`` unless every key is a non-empty string."""
    with contextlib.suppress(TypeError):
        "".join(keys)
        if all(keys):
            return  # many times quicker than looking at each
    for i, key in enumerate(keys):
        if not isinstance(key, str) or not key:
            raise ValueError(f"keys[{i}] is {key!r}; a key is a non-empty string")


def check_values(keys: Sequence[str], values: Sequence[Value]) -> None:
    """Raise ``ValueError`` unless there is one non-empty value of sane spans for each (valid) key."""
    check_keys(keys)
    if len(keys) != len(values):
        raise ValueError(f"{len(keys)} keys but {len(values)} values; they must correspond one to one")
    for i, value in enumerate(values):
        total = 0
        for address, nbytes in value:
            if address <= 0 or nbytes < 0:
                raise ValueError(
                    f"values[{i}] has {Span(address, nbytes)}; an address is positive and a size not negative"
                )
            total += nbytes
        if total == 0:
            raise ValueError(f"values[{i}] is empty; a value has at least one byte")


def split_by_size(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """The parts of ``sizes``, in their order, that each add up to at most so much, or have one member."""
    first = total = 0
    for i, size in enumerate(sizes):
        if i > first and total + size > most:
            yield slice(first, i)
            first, total = i, 0
        total += size
    if sizes:
        yield slice(first, len(sizes))


def memory_views(value: Value) -> list[memoryview]:
    """One writable view of bytes per non-empty span. Valid only as long as the caller's memory is."""
    return [memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") for address, nbytes in value if nbytes]
