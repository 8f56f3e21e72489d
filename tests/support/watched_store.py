"""A memory store that remembers what it is told beside keys and values."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_backend.backend import Status, Value
from kvstore_backend.stores.memory import MemoryStore

__all__ = ["WatchedStore"]


class WatchedStore(MemoryStore):
    """For tests of what wrappers hand on."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.memory: list[tuple[str, int, int, bool]] = []
        """The calls of ``register`` and ``unregister``: name, address, size, headroom."""
        self.forced: list[bool] = []
        """``force`` of each call of ``remove``."""
        self.kept: list[tuple[int, float]] = []
        """The number of keys and ``seconds`` of each call of ``keep``."""

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        """Remember it."""
        self.memory.append(("register", address, nbytes, headroom))

    def unregister(self, address: int, nbytes: int) -> None:
        """Remember it."""
        self.memory.append(("unregister", address, nbytes, False))

    def keep(self, keys: Sequence[str], values: Sequence[Value], seconds: float) -> list[Status]:
        """Remember how many, and for how long."""
        self.kept.append((len(keys), seconds))
        return super().keep(keys, values, seconds)

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        """Remember ``force``."""
        self.forced.append(force)
        return super().remove(keys, force=force)
