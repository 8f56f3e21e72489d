"""Store in this process's own memory: for tests, for one process, and as a fast tier."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from kvstore_backend.backend import Health, Status, StorageBackend, Value, memory_views

__all__ = ["MemoryStore"]


class MemoryStore(StorageBackend):
    """Store that copies values into a dictionary. Above ``capacity_bytes``, it evicts the least recently used values.

    Bytes are copied without the lock, because a stored value never changes.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Create an empty store.

        Raises:
            ValueError: ``capacity_bytes`` is not positive.
        """
        if capacity_bytes <= 0:
            raise ValueError(f"capacity_bytes is {capacity_bytes}; it must be positive")
        self._capacity = capacity_bytes
        self._values: OrderedDict[str, bytes] = OrderedDict()
        self._used = 0
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._values)} keys, {self._used} of {self._capacity} bytes"
        return f"MemoryStore({state})"

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        return [self._put_value(key, value) for key, value in zip(keys, values, strict=True)]

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        return [self._get_value(key, target) for key, target in zip(keys, targets, strict=True)]

    def exists(self, keys: Sequence[str]) -> list[Status]:
        with self._lock:
            if self._closed:
                return [Status.FAILED] * len(keys)
            return [Status.OK if key in self._values else Status.ABSENT for key in keys]

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        return [self._remove_key(key) for key in keys]

    def clear(self, prefix: str) -> Status:
        with self._lock:
            if self._closed:
                return Status.FAILED
            for key in [key for key in self._values if key.startswith(prefix)]:
                self._used -= len(self._values.pop(key))
        return Status.OK

    def health(self) -> Health:
        return Health(not self._closed, repr(self))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._values.clear()
            self._used = 0

    def _put_value(self, key: str, value: Value) -> Status:
        with self._lock:
            if self._closed:
                return Status.FAILED
            if key in self._values:
                return Status.OK
        stored = b"".join(memory_views(value))
        with self._lock:
            if self._closed or len(stored) > self._capacity:
                return Status.FAILED
            if key not in self._values:
                self._values[key] = stored
                self._used += len(stored)
                while self._used > self._capacity:
                    self._used -= len(self._values.popitem(last=False)[1])
            return Status.OK

    def _get_value(self, key: str, target: Value) -> Status:
        with self._lock:
            if self._closed:
                return Status.FAILED
            stored = self._values.get(key)
            if stored is None:
                return Status.ABSENT
            if len(stored) != sum(nbytes for _, nbytes in target):
                return Status.ABSENT
            self._values.move_to_end(key)
        source, start = memoryview(stored), 0
        for view in memory_views(target):
            view[:] = source[start : start + len(view)]
            start += len(view)
        return Status.OK

    def _remove_key(self, key: str) -> Status:
        with self._lock:
            if self._closed:
                return Status.FAILED
            stored = self._values.pop(key, None)
            if stored is None:
                return Status.ABSENT
            self._used -= len(stored)
            return Status.OK
