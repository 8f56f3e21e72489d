"""The values of a pool, for an operator: listed, measured, copied, kept and removed, by the means of each store.

An engine knows the keys that it asks for, and no others. Whoever looks after a pool wants to know which there are: a
Mooncake master lists them over HTTP, a folder has them as files. Values are bytes here, as they are stored.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, TypeVar
from urllib.parse import unquote

import httpx
import numpy as np
from numpy.typing import NDArray

from kvstore_backend.backend import PoolUnavailable, Span, Status, StorageBackend
from kvstore_backend.config import DEFAULT_TENANT, FileSettings, MooncakeSettings
from kvstore_backend.stores.file import FileStore
from kvstore_backend.stores.file.folder import Block, find_refusal, scan_blocks
from kvstore_backend.stores.mooncake import MooncakeStore
from kvstore_backend.stores.mooncake_admin import MasterAdmin, TenantAccount

__all__ = ["FolderHoldings", "Holdings", "MooncakeHoldings", "StoredBytes", "as_stored"]

_Answer = TypeVar("_Answer")

StoredBytes = NDArray[np.uint8]
"""A value as it is stored: of a block, header and payload."""


class Holdings(abc.ABC):
    """The values of one pool.

    Methods raise ``PoolUnavailable`` where the pool cannot be reached. The store is joined when it is first needed:
    what a listing tells takes no more than that.
    """

    _joined: StorageBackend | None = None

    can_keep: ClassVar[bool]
    """Whether the pool can spare values from eviction."""

    @property
    def is_listed(self) -> bool:
        """Whether the pool tells its keys."""
        return True

    @abc.abstractmethod
    def list_keys(self) -> list[str]:
        """Every key."""

    @abc.abstractmethod
    def find_sizes(self, keys: Sequence[str]) -> list[int | None]:
        """The bytes of each value; None where there is none."""

    @abc.abstractmethod
    def clear_prefix(self, prefix: str) -> int:
        """Remove every key that begins with ``prefix``, which must not be empty; how many were removed."""

    def count_kept(self) -> int | None:
        """How many values are spared from eviction now; None: that cannot be said."""
        return None

    def list_tenants(self) -> list[TenantAccount]:
        """The accounts of tenants, where the pool keeps them apart."""
        return []

    def read_values(self, keys: Sequence[str], sizes: Sequence[int]) -> list[StoredBytes | None]:
        """The values, whose sizes are known; None where one is not there any more."""
        values = [np.empty(size, dtype=np.uint8) for size in sizes]
        statuses = self._store.get(keys, [_as_spans(value) for value in values])
        return [value if status else None for value, status in zip(values, statuses, strict=True)]

    def write_values(self, keys: Sequence[str], values: Sequence[StoredBytes]) -> list[Status]:
        """Store values under keys that are absent; the others stay as they are."""
        return self._store.put(keys, [_as_spans(value) for value in values])

    def keep_values(self, keys: Sequence[str], values: Sequence[StoredBytes], seconds: float) -> list[Status]:
        """Spare values, which are stored so already, from eviction for ``seconds``; with 0 no longer."""
        return self._store.keep(keys, [_as_spans(value) for value in values], seconds)

    def remove_keys(self, keys: Sequence[str]) -> list[Status]:
        """Remove keys, also those that somebody may be reading now."""
        return self._store.remove(keys, force=True)

    def close(self) -> None:
        """Leave the pool, if it was joined."""
        if self._joined is not None:
            self._joined.close()
            self._joined = None

    @property
    def _store(self) -> StorageBackend:
        if self._joined is None:
            self._joined = self._join()
        return self._joined

    @abc.abstractmethod
    def _join(self) -> StorageBackend:
        """Open the store, giving it nothing: what an operator's command gave would be gone with its end."""


class MooncakeHoldings(Holdings):
    """The values of one tenant of a Mooncake cluster.

    Mooncake 0.3.13's master lists the keys of the tenant ``default`` and of no other.
    """

    can_keep = True

    def __init__(self, settings: MooncakeSettings, admin: MasterAdmin) -> None:
        self._settings = settings
        self._admin = admin

    @cached_property
    def is_listed(self) -> bool:
        """Without tenants everybody's keys are those of ``default``."""
        return self._settings.tenant_id == DEFAULT_TENANT or not self._ask(self._admin.has_tenants)

    def list_keys(self) -> list[str]:
        if self.is_listed:
            return self._ask(lambda: list(self._admin.list_keys()))
        raise PoolUnavailable(
            f"Mooncake lists the keys of no tenant but {DEFAULT_TENANT!r}, so those of {self._settings.tenant_id!r} "
            "cannot be listed: name a namespace, or a prefix whose keys can be told"
        )

    def find_sizes(self, keys: Sequence[str]) -> list[int | None]:
        if self.is_listed:
            return self._ask(lambda: self._admin.find_sizes(keys))
        return self._client.find_sizes(keys)

    def clear_prefix(self, prefix: str) -> int:
        removed = self._client.count_cleared(prefix)
        if removed is None:
            raise PoolUnavailable(f"the master at {self._settings.master_server_addr} did not say what it removed")
        return removed

    def count_kept(self) -> int | None:
        kept = self._ask(self._admin.fetch_metrics).get("master_soft_pin_key_count")
        return None if kept is None else int(kept)

    def list_tenants(self) -> list[TenantAccount]:
        return self._ask(self._admin.list_tenants)

    def _ask(self, ask: Callable[[], _Answer]) -> _Answer:
        try:
            return ask()
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as exc:
            text = f"what the master at {self._admin.address} tells of its keys cannot be read: {exc}"
            raise PoolUnavailable(text) from exc

    @property
    def _client(self) -> MooncakeStore:
        assert isinstance(self._store, MooncakeStore)
        return self._store

    def _join(self) -> MooncakeStore:
        return MooncakeStore(replace(self._settings, global_segment_size=0, enable_ssd_offload=False))


class FolderHoldings(Holdings):
    """The values in the folder of a file store."""

    can_keep = False

    def __init__(self, settings: FileSettings) -> None:
        """Look at the folder, which must be a pool's already.

        Raises:
            PoolUnavailable: it is not there, or not a pool's.
        """
        self._settings = settings
        if not settings.path.is_dir():
            raise PoolUnavailable(f"folder {settings.path} does not exist: no process has opened this pool yet")
        if refusal := find_refusal(settings.path):
            reason, remedy = refusal
            raise PoolUnavailable(f"folder {settings.path} {reason}: {remedy}")

    def list_keys(self) -> list[str]:
        return list(self._scan())

    def find_sizes(self, keys: Sequence[str]) -> list[int | None]:
        blocks = self._scan()
        return [blocks[key].nbytes if key in blocks else None for key in keys]

    def clear_prefix(self, prefix: str) -> int:
        keys = [key for key in self._scan() if key.startswith(prefix)]
        return self.remove_keys(keys).count(Status.OK)

    def _scan(self) -> dict[str, Block]:
        """The values by their keys; of a key too long for a file's name, by the name that it has instead."""
        try:
            return {unquote(Path(block.path).stem): block for block in scan_blocks(self._settings.path / "blocks")}
        except OSError as exc:
            raise PoolUnavailable(f"folder {self._settings.path} cannot be read: {exc.strerror}") from exc

    def _join(self) -> FileStore:
        return FileStore(self._settings.path, self._settings.size)


def as_stored(data: bytes) -> StoredBytes:
    """A value of these bytes."""
    return np.frombuffer(data, dtype=np.uint8)


def _as_spans(value: StoredBytes) -> list[Span]:
    return [Span(value.ctypes.data, value.nbytes)]
