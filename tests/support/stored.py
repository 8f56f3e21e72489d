"""The number of values in a memory store."""

from __future__ import annotations

from kvstore_backend.backend import StorageBackend
from kvstore_backend.stores.memory import MemoryStore

__all__ = ["count_keys"]


def count_keys(store: StorageBackend) -> int:
    """Return the number of values in a ``MemoryStore``, or in the one behind a wrapper of a test."""
    memory = getattr(store, "_sound", store)
    assert isinstance(memory, MemoryStore)
    return len(memory._values)
