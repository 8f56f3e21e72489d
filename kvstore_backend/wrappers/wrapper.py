"""What layers around one backend have in common: they pass on what is not their concern."""

from __future__ import annotations

from kvstore_backend.backend import Health, Status, StorageBackend, StoreStats

__all__ = ["Layer"]


class Layer(StorageBackend):
    """A backend around ``store``, which it owns: closing the layer closes the store."""

    def __init__(self, store: StorageBackend) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store!r})"

    def clear(self, prefix: str) -> Status:
        return self._store.clear(prefix)

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        self._store.register(address, nbytes, headroom=headroom)

    def unregister(self, address: int, nbytes: int) -> None:
        self._store.unregister(address, nbytes)

    @property
    def is_ready(self) -> bool:
        return self._store.is_ready

    def settle(self, seconds: float) -> bool:
        return self._store.settle(seconds)

    def drain(self, seconds: float) -> bool:
        return self._store.drain(seconds)

    def health(self) -> Health:
        return self._store.health()

    def stats(self) -> StoreStats:
        return self._store.stats()

    def close(self) -> None:
        self._store.close()
