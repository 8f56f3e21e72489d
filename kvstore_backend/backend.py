"""The interface that every store and every wrapper implements, and the answers it may give.

Exceptions that leave this package::

    KVStoreError
    ├── ConfigError        a configuration that cannot be used; also a ValueError
    └── PoolUnavailable    the store could not be opened (no master, no folder, library missing)

A *caller's* mistake in a call of ``BlockPool`` (lengths that differ, a negative size) raises a plain ``ValueError``
immediately. A *pool's* failure never raises: the call returns a ``Status``.
"""

from __future__ import annotations

import abc
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
    "check_values",
    "memory_views",
    "split_by_size",
]

HEADROOM_BYTES = 128
"""Free bytes before each value in memory that is registered with ``headroom``. Values stay aligned to this size."""


class KVStoreError(Exception):
    """Base of every exception that this package itself raises."""


class ConfigError(KVStoreError, ValueError):
    """A configuration that cannot be used. The message is one sentence with the key, the value and a correct value."""


class PoolUnavailable(KVStoreError):
    """The store could not be opened. The message is one sentence with the address or folder and a remedy.

    Attributes:
        pause_seconds: the failed opening stopped the whole process for a while; callers should wait this long before
            the next try.
    """

    def __init__(self, message: str, pause_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.pause_seconds = pause_seconds


class Status(enum.Enum):
    """Answer for one key. Only ``OK`` is true, so ``if status:`` never takes a failure for a hit."""

    OK = "ok"
    """The value was stored, read in full, present, or removed."""
    ABSENT = "absent"
    """The pool answered, and it does not have this value: the key is absent or, for a read, the value has another
    size.
    """
    FAILED = "failed"
    """The state is not known: an error, a time-out, or no capacity."""

    def __bool__(self) -> bool:
        return self is Status.OK


class Span(NamedTuple):
    """A piece of memory: ``nbytes`` bytes at ``address``. Its owner keeps it alive during the call."""

    address: int
    nbytes: int


Value = Sequence[Span]
"""A value as scatter/gather list: its bytes are the bytes of the spans, one after another."""


class Health(NamedTuple):
    """State of a store as the store sees it: ``ok``, and one sentence of detail for an operator."""

    ok: bool
    detail: str


@dataclass(frozen=True)
class StoreStats:
    """Measurements that a store has of itself; ``None`` where it cannot know.

    ``keys`` and ``used_bytes`` count the values in this store (for Mooncake: in the whole cluster, as its master
    reports it). The store evicts when ``capacity_bytes`` is reached.
    """

    kind: str
    keys: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None


class StorageBackend(abc.ABC):
    """Batched put / get / exists / remove of immutable values.

    ``BlockPool`` checks the arguments of its callers; stores and wrappers trust theirs. Keys are non-empty, each has
    one value, and a value has at least one byte.

    Rules that every implementation follows, and that ``tests/kvstore_backend/conformance`` checks:

    - All calls are batches. They return one ``Status`` per key, in the order of the keys. An empty batch gives ``[]``.
    - A value is immutable: a put of a key that is present returns ``OK`` and changes nothing.
    - ``get`` fills *all* of the target's bytes or does not return ``OK``. A stored value of another size than the
      target is ``ABSENT``. After an answer other than ``OK`` the target's contents are unspecified.
    - The caller owns the memory: spans are read (put) or written (get) only while the call runs. (A backend that gives
      calls up is the exception; ``wait_for_late_calls`` reports when they have ended.)
    - ``register`` announces memory that later spans are in; stores that need no registration ignore it.
    - Several threads may call concurrently.
    - After ``close`` every call returns ``FAILED`` for each key, and a second ``close`` does nothing.
    """

    @abc.abstractmethod
    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        """Store ``values[i]`` under ``keys[i]``; ``OK`` means that clients can read it now.

        The exception is Mooncake: it also returns ``OK`` for a key that another client is still writing. That key is
        readable a moment later, or never if that client dies.
        """

    def keep(self, keys: Sequence[str], values: Sequence[Value], seconds: float) -> list[Status]:
        """Store ``values[i]`` under ``keys[i]``, also if the key is present, and protect it from eviction for a time.

        A protected value is evicted only if there is nothing else to evict. A store without this feature stores only
        the values that are absent.

        Args:
            keys: keys of the values to protect.
            values: the values, whether or not they are already stored.
            seconds: duration from now; with 0 the value can be evicted like any other again.
        """
        return self.put(keys, values)

    @abc.abstractmethod
    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        """Read ``keys[i]`` into the memory of ``targets[i]``."""

    def get_for_all(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        """Call ``get`` without using or creating copies that only this instance has."""
        return self.get(keys, targets)

    @abc.abstractmethod
    def exists(self, keys: Sequence[str]) -> list[Status]:
        """Return which keys are present now; a present value may still be evicted before it is read."""

    def exists_for_all(self, keys: Sequence[str]) -> list[Status]:
        """Return the ``exists`` that another instance would get: without the copies that only this instance has."""
        return self.exists(keys)

    @abc.abstractmethod
    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        """Remove keys; ``ABSENT`` where there was nothing to remove.

        ``force`` also removes values that a client may be reading now: for values that no client should read.
        """

    def clear(self, prefix: str) -> Status:
        """Remove every key that begins with ``prefix``, also values that a client may be reading now.

        Returns:
            ``OK`` if only values that were put during the call are left; ``FAILED`` if that is not certain, as from a
            store that cannot list its keys.
        """
        return Status.FAILED

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:  # noqa: B027 - many need nothing
        """Announce ``nbytes`` bytes at ``address`` that later spans will be in (RDMA needs this).

        Args:
            address: start of the memory.
            nbytes: size of the memory.
            headroom: whether the memory has ``HEADROOM_BYTES`` bytes before the first span of every value, which calls
                may overwrite. A header then travels in one piece with its value. Over TCP this saves the time of a
                transfer of 50 KiB.
        """

    def unregister(self, address: int, nbytes: int) -> None:  # noqa: B027 - most stores need nothing
        """Undo a ``register`` of the same memory, before that memory is freed."""

    @property
    def is_ready(self) -> bool:
        """Whether calls reach the store. While False, calls return ``FAILED`` immediately, so callers can skip them."""
        return True

    def wait_for_late_calls(self, seconds: float) -> bool:
        """Wait until no call that was given up can still touch callers' memory.

        After a put or get returned ``FAILED``, its memory may be used again only once this returns True. Only wrappers
        that give calls up (``guarded.py``) ever wait here.

        Returns:
            False if a call still runs after ``seconds``.
        """
        return True

    def flush_writes(self, seconds: float) -> bool:
        """Wait until every earlier put has ended: other clients of the pool can read the value, or it was given up.

        Only wrappers that write later (``write_behind.py``) ever wait here.

        Returns:
            False if ``seconds`` were not enough.
        """
        return True

    def drop_own_copies(self, prefix: str) -> bool:
        """Drop everything that only this process has for keys that begin with ``prefix``: copies, and queued writes.

        The shared pool does not change; a write that is being sent continues.

        Returns:
            False if some copies may be left.
        """
        return True

    @abc.abstractmethod
    def health(self) -> Health:
        """Report whether the store works now, as far as it can know without moving data."""

    @abc.abstractmethod
    def stats(self) -> StoreStats:
        """Return the store's own measurements."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the connections, threads and memory of the backend."""


def check_values(keys: Sequence[str], values: Sequence[Value]) -> None:
    """Raise ``ValueError`` unless there is one non-empty value with valid spans for each key."""
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
    """Split ``sizes``, in order, into parts that each have one member or add up to at most ``most``."""
    first = total = 0
    for i, size in enumerate(sizes):
        if i > first and total + size > most:
            yield slice(first, i)
            first, total = i, 0
        total += size
    if sizes:
        yield slice(first, len(sizes))


def memory_views(value: Value) -> list[memoryview]:
    """Return one writable view of bytes per non-empty span. Views are valid only while the caller's memory is."""
    return [memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") for address, nbytes in value if nbytes]
