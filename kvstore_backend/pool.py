"""The engine's view of the pool: block hashes in, block bytes out.

``open_store`` is the one place where a store is chosen and wrapped in its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from kvstore_backend.backend import Health, Status, StorageBackend, StoreStats, Value, check_values
from kvstore_backend.config import FileSettings, MemorySettings, MooncakeSettings, PoolConfig
from kvstore_backend.namespace import Namespace
from kvstore_backend.stores import mooncake
from kvstore_backend.stores.file import FileStore
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.stores.mooncake import MooncakeStore

__all__ = ["BlockPool", "default_backend", "open_pool", "open_store"]


class BlockPool:
    """Look up, load and save the KV blocks of one namespace in one backend.

    Blocks are named by their chained hashes (``block_hash.extend_block_hashes``), in the order of the sequence, so
    what is of use is always a *leading* run of them. Nothing a pool does raises: a block that cannot be vouched for
    counts as not there. Calls may come from several threads; ``close`` makes every later call a miss.
    """

    def __init__(self, backend: StorageBackend, namespace: Namespace) -> None:
        """Take over ``backend``: closing this pool closes it."""
        self.namespace = namespace
        self._backend = backend

    def __repr__(self) -> str:
        return f"BlockPool({self._backend!r}, namespace={self.namespace.digest})"

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks the pool has now. A ``load`` may still find fewer: blocks are evicted meanwhile."""
        return _leading(self._backend.exists(self._keys(hashes)))

    def load(self, hashes: Sequence[bytes], targets: Sequence[Value]) -> int:
        """Read block ``i`` into ``targets[i]``; how many leading blocks arrived whole.

        The contents of every target from the returned number on are unspecified.

        Raises:
            ValueError: numbers of hashes and targets differ, or a target is empty or has a negative size.
        """
        return _leading(self._backend.get(self._keys(hashes), targets))

    def save(self, hashes: Sequence[bytes], sources: Sequence[Value]) -> list[Status]:
        """Store block ``i`` from ``sources[i]``, sending only those the pool says it lacks.

        Where the pool could not even say whether it has a block, nothing is sent and the answer is ``FAILED``: a put
        would wait for the same dead pool once more.

        Raises:
            ValueError: as ``load``.
        """
        keys = self._keys(hashes)
        check_values(keys, sources)
        statuses = self._backend.exists(keys)
        missing = [i for i, status in enumerate(statuses) if status is Status.ABSENT]
        stored = self._backend.put([keys[i] for i in missing], [sources[i] for i in missing])
        for i, status in zip(missing, stored, strict=True):
            statuses[i] = status
        return statuses

    def register(self, address: int, nbytes: int) -> None:
        """Announce memory that sources and targets will lie in; call it once per allocation, before using it."""
        self._backend.register(address, nbytes)

    def unregister(self, address: int, nbytes: int) -> None:
        """Take back a ``register``, before that memory is freed."""
        self._backend.unregister(address, nbytes)

    def health(self) -> Health:
        """Whether the pool works now, and one sentence on it."""
        return self._backend.health()

    def stats(self) -> StoreStats:
        """The store's own figures."""
        return self._backend.stats()

    def close(self) -> None:
        """Close the backend; a second call does nothing."""
        self._backend.close()

    def __enter__(self) -> BlockPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _keys(self, hashes: Sequence[bytes]) -> list[str]:
        return [self.namespace.key(block_hash) for block_hash in hashes]


def open_pool(config: PoolConfig, namespace: Namespace) -> BlockPool:
    """Open the configured store for one namespace.

    Raises:
        PoolUnavailable: the store cannot be opened: library missing, master unreachable, folder not writable.
    """
    return BlockPool(open_store(config), namespace)


def open_store(config: PoolConfig) -> StorageBackend:
    """Open the configured store, wrapped in its layers.

    Raises:
        PoolUnavailable: as ``open_pool``.
    """
    match config.store:
        case MooncakeSettings():
            return MooncakeStore(config.store)
        case FileSettings():
            return FileStore(config.store.path, config.store.size)
        case MemorySettings():
            return MemoryStore(config.store.size)


def default_backend() -> str:
    """``mooncake`` where its library can be loaded, else ``file``, which needs nothing."""
    return "mooncake" if mooncake.is_installed() else "file"


def _leading(statuses: Sequence[Status]) -> int:
    """How many of the first statuses are ``OK`` without a gap."""
    return next((i for i, status in enumerate(statuses) if not status), len(statuses))
