"""How many values a store in memory has."""

from __future__ import annotations

from kvstore_backend.backend import StorageBackend
from kvstore_backend.stores.memory import MemoryStore

__all__ = ["count_keys"]


def count_keys(store: StorageBackend) -> int:
    """The number of values in a ``MemoryStore``, or in the one behind a stand-in."""
    memory = getattr(store, "_sound", store)
    assert isinstance(memory, MemoryStore)
    return len(memory._values)
