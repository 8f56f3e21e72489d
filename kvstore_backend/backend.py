"""Interface of stores and wrappers, and the types in its calls: statuses, spans, values, errors.

Exceptions that leave this package::

    KVStoreError
    ├── ConfigError        a configuration cannot be used; also a ValueError
    └── PoolUnavailable    the store could not be opened (no master, no folder, library missing)

A mistake of the *caller* of ``BlockPool`` (different lengths, a negative size) raises a plain ``ValueError``
immediately. A failure of the *pool* never raises an exception: the call returns a ``Status``. (A *store* raises
``PoolUnavailable`` in a call if it closed itself; ``guarded.py`` then opens another one.)
"""

from __future__ import annotations

import abc
import ctypes
import enum
from collections.abc import Iterator, Sequence
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
    "Value",
    "check_values",
    "memory_views",
    "split_by_size",
]

HEADROOM_BYTES = 128
"""Number of free bytes before each value in memory that is registered with ``headroom``.

A wrapper writes a header there. With this number, the values stay aligned.
"""


class KVStoreError(Exception):
    """Base class of the exceptions of this package."""


class ConfigError(KVStoreError, ValueError):
    """Error: a configuration cannot be used. The message is one sentence with the key, its value and a valid value."""


class PoolUnavailable(KVStoreError):
    """Error: the store could not be opened. The message is one sentence with the address or folder, and a remedy.

    Attributes:
        pause_seconds: time that callers should wait before they try again to open the store, because a failed try
            blocks the whole process for a moment.
    """

    def __init__(self, message: str, pause_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.pause_seconds = pause_seconds


class Status(enum.Enum):
    """Answer of a store for one key. Only ``OK`` is true, so ``if status:`` never treats a failure as a hit."""

    OK = "ok"
    """The value was stored, was read completely, is present, or was removed."""
    ABSENT = "absent"
    """The store lacks the value: the key is absent or, in a read, the value has another size than the target."""
    FAILED = "failed"
    """The state of the key is not known, because of an error or a timeout; or the store had no space for the value."""

    def __bool__(self) -> bool:
        return self is Status.OK


class Span(NamedTuple):
    """Piece of memory: ``nbytes`` bytes at ``address``. The caller must not free it during a call."""

    address: int
    nbytes: int


Value = Sequence[Span]
"""Memory of a value: the bytes of the value are the bytes of the spans, one after another (scatter/gather)."""


class Health(NamedTuple):
    """State of a store: whether the store works, and a sentence about its state for an operator."""

    ok: bool
    detail: str


class StorageBackend(abc.ABC):
    """Interface of stores and wrappers: puts, gets, look-ups and removals of immutable values, in batches.

    ``BlockPool`` checks the arguments of its callers; stores and wrappers do not check them again. A key is not empty,
    has one value, and a value has at least one byte.

    All implementations follow these rules, which ``tests/kvstore_backend/conformance`` checks:

    - All calls are batches. They return one ``Status`` per key, in the order of the keys. An empty batch returns
      ``[]``.
    - A value is immutable: a put of a key that is present returns ``OK`` and changes nothing.
    - ``get`` returns ``OK`` only if it has written *all* bytes of the target. If the stored value has another size than
      the target, the status is ``ABSENT``. If the status is not ``OK``, the contents of the target are not defined.
    - A call reads (put) or writes (get) the memory of its spans only until it returns. The exception is a *late* call,
      which missed its deadline, but still runs: ``wait_for_late_calls`` reports when no late call is left.
    - ``register`` declares memory that later spans use. Stores that need no registration ignore it.
    - Several threads may call the methods at the same time.
    - After ``close`` all calls return ``FAILED`` for each key, and a second ``close`` does nothing.
    """

    @abc.abstractmethod
    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        """Store ``values[i]`` under ``keys[i]``. ``OK`` means that all clients can read the value now.

        The exception is Mooncake, which also returns ``OK`` for a key that another client is writing. Its value can be
        read a moment later, or never if that client dies.
        """

    def keep(self, keys: Sequence[str], values: Sequence[Value], seconds: float) -> list[Status]:
        """Store ``values[i]`` under ``keys[i]``, even if the key is present, and pin the values for a time.

        A pinned value is evicted only if the store has no other value to evict. A store that cannot pin values stores
        only the values that are absent.

        Args:
            keys: keys of the values.
            values: the values; they may be stored already.
            seconds: duration of the pin from now; 0 removes the pin.
        """
        return self.put(keys, values)

    @abc.abstractmethod
    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        """Read the value of ``keys[i]`` to the memory of ``targets[i]``."""

    def get_for_all(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        """Read values like ``get``, but do not use or create copies that only this instance has."""
        return self.get(keys, targets)

    @abc.abstractmethod
    def exists(self, keys: Sequence[str]) -> list[Status]:
        """Return ``OK`` for each key that is present now. Its value may still be evicted before it is read."""

    def exists_for_all(self, keys: Sequence[str]) -> list[Status]:
        """Return ``OK`` for each key that other instances can read now; ignore copies that only this instance has."""
        return self.exists(keys)

    @abc.abstractmethod
    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        """Remove keys and their values; the status is ``ABSENT`` for a key that is not stored.

        With ``force``, values that a client may be reading now are removed, too.
        """

    def clear(self, prefix: str) -> Status:
        """Remove all keys that begin with ``prefix``, even if a client may be reading their values now.

        Returns:
            ``OK`` if all keys were removed, except keys that were put during the call; ``FAILED`` if some may be left,
            or if the store cannot remove keys by their beginning.
        """
        return Status.FAILED

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:  # noqa: B027 - many need nothing
        """Declare memory that the spans of later calls use, because RDMA needs registered memory.

        Args:
            address: beginning of the memory.
            nbytes: size of the memory.
            headroom: whether there are ``HEADROOM_BYTES`` free bytes before the first span of each value. A call may
                write a header there, and move header and value in one piece. Over TCP, this saves as much time as
                50 KiB of data take.
        """

    def unregister(self, address: int, nbytes: int) -> None:  # noqa: B027 - most stores need nothing
        """Undo ``register`` for the same memory. The caller must do this before it frees the memory."""

    @property
    def is_ready(self) -> bool:
        """Whether calls reach the store. While this is False, all calls return ``FAILED`` immediately."""
        return True

    def wait_for_late_calls(self, seconds: float) -> bool:
        """Wait until no late call (it missed its deadline, but still runs) can read or write the callers' memory.

        After a put or get that returned ``FAILED``, the caller may use the memory again only when this method has
        returned True. Only the wrapper with deadlines (``guarded.py``) has late calls.

        Returns:
            False if a late call still runs after ``seconds``.
        """
        return True

    def count_late_calls(self) -> int:
        """Return how many calls have missed their deadline until now, including those that have ended.

        If the number did not change during a call that returned ``FAILED``, the call is not late, and its caller may
        use the memory again.
        """
        return 0

    def flush_writes(self, seconds: float) -> bool:
        """Wait until all earlier puts have ended: other clients can read the values, or the writes have failed.

        Only the wrapper that writes in the background (``write_behind.py``) needs to wait.

        Returns:
            False if puts still run after ``seconds``.
        """
        return True

    def drop_own_copies(self, prefix: str) -> bool:
        """Drop this process's own copies and queued writes for all keys that begin with ``prefix``.

        The shared pool does not change. A write that has begun continues.

        Returns:
            False if some copies may be left.
        """
        return True

    @abc.abstractmethod
    def health(self) -> Health:
        """Return whether the store works now, without moving a value."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the connections, threads and memory of the backend."""


def check_values(keys: Sequence[str], values: Sequence[Value]) -> None:
    """Raise ``ValueError`` if a call's keys or values are invalid.

    There must be one value for each key. Each value must have at least one byte. Its spans (pieces of memory) must have
    positive addresses, and sizes that are not negative.
    """
    if len(keys) != len(values):
        raise ValueError(f"{len(keys)} keys but {len(values)} values; each key must have one value")
    for i, value in enumerate(values):
        total = 0
        for address, nbytes in value:
            if address <= 0 or nbytes < 0:
                raise ValueError(
                    f"values[{i}] has {Span(address, nbytes)}; an address must be positive, and a size not negative"
                )
            total += nbytes
        if total == 0:
            raise ValueError(f"values[{i}] is empty; a value must have at least one byte")


def split_by_size(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Split a list of ``sizes`` into slices, so that the sizes in a slice add up to at most ``most``; yield the slices.

    A size that is larger than ``most`` is alone in its slice.
    """
    first = total = 0
    for i, size in enumerate(sizes):
        if i > first and total + size > most:
            yield slice(first, i)
            first, total = i, 0
        total += size
    if sizes:
        yield slice(first, len(sizes))


def memory_views(value: Value) -> list[memoryview]:
    """Return a writable ``memoryview`` of each span that is not empty, valid until the memory is freed."""
    return [memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") for address, nbytes in value if nbytes]
