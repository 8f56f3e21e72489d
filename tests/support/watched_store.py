"""A memory store that records the other arguments of its calls."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_backend.backend import Status, Value
from kvstore_backend.stores.memory import MemoryStore

__all__ = ["WatchedStore"]


class WatchedStore(MemoryStore):
    """A memory store for tests of the arguments that wrappers pass on."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.memory: list[tuple[str, int, int, bool]] = []
        """The calls of ``register`` and ``unregister``: name, address, size, headroom."""
        self.forced: list[bool] = []
        """``force`` of each call of ``remove``."""
        self.kept: list[tuple[int, float]] = []
        """The number of keys and ``seconds`` of each call of ``keep``."""

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        """Record the call."""
        self.memory.append(("register", address, nbytes, headroom))

    def unregister(self, address: int, nbytes: int) -> None:
        """Record the call."""
        self.memory.append(("unregister", address, nbytes, False))

    def keep(self, keys: Sequence[str], values: Sequence[Value], seconds: float) -> list[Status]:
        """Record the number of keys, and the time."""
        self.kept.append((len(keys), seconds))
        return super().keep(keys, values, seconds)

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        """Record ``force``."""
        self.forced.append(force)
        return super().remove(keys, force=force)
