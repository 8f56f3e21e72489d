"""Holdings: all values in a pool, which operator commands list, measure, copy, pin and remove.

An engine knows only the keys that it requests. An operator needs a list of all keys: a Mooncake master lists them over
HTTP, a folder has them as files. A value here is the bytes that are stored under a key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias, TypeVar
from urllib.parse import unquote

import httpx
import numpy as np
from numpy.typing import NDArray

from kvstore_backend.backend import PoolUnavailable, Span, Status, StorageBackend
from kvstore_backend.config import DEFAULT_TENANT, FileSettings, MooncakeSettings
from kvstore_backend.stores.file import FileStore
from kvstore_backend.stores.file.folder import Block, find_refusal, scan_blocks
from kvstore_backend.stores.mooncake import MooncakeStore
from kvstore_backend.stores.mooncake_admin import MasterAdmin

__all__ = ["FolderHoldings", "Holdings", "MooncakeHoldings", "StoredBytes"]

_Answer = TypeVar("_Answer")

StoredBytes = NDArray[np.uint8]
"""Bytes that a store has under a key. For a block, they are a header and the payload."""


class _Values:
    """Reads, writes, pins and removes values of a pool through a store, which is opened when it is first needed.

    Args:
        join: opens the store. The store must give no memory to the pool, because the memory is freed when the command
            ends.
    """

    def __init__(self, join: Callable[[], StorageBackend]) -> None:
        self._join = join
        self._joined: StorageBackend | None = None

    def read_values(self, keys: Sequence[str], sizes: Sequence[int]) -> list[StoredBytes | None]:
        """Read values, given their sizes in bytes; return None for a value that could not be read."""
        memory = np.empty(sum(sizes), dtype=np.uint8)
        ends = list(accumulate(sizes))
        values = [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        with self._register([memory]):
            statuses = self._store.get(keys, [_as_spans(value) for value in values])
        return [value if status else None for value, status in zip(values, statuses, strict=True)]

    def write_values(self, keys: Sequence[str], values: Sequence[StoredBytes]) -> list[Status]:
        """Store values under keys that the pool lacks. Values that the pool has do not change."""
        with self._register(values):
            return self._store.put(keys, [_as_spans(value) for value in values])

    def keep_values(self, keys: Sequence[str], values: Sequence[StoredBytes], seconds: float) -> list[Status]:
        """Write values again that the pool has, and pin them for ``seconds``; 0 removes the pins."""
        with self._register(values):
            return self._store.keep(keys, [_as_spans(value) for value in values], seconds)

    def remove_keys(self, keys: Sequence[str]) -> list[Status]:
        """Remove keys and their values, including values that a client may be reading now."""
        return self._store.remove(keys, force=True)

    def remove_and_count(self, keys: Sequence[str]) -> int:
        """Remove keys like ``remove_keys``; return the number of removed keys.

        Raises:
            PoolUnavailable: some of the keys could not be removed.
        """
        statuses = self.remove_keys(keys)
        removed, failed = statuses.count(Status.OK), statuses.count(Status.FAILED)
        if failed:
            raise PoolUnavailable(
                f"{removed} blocks were removed; {failed} could not be removed and may still be in the pool; try again"
            )
        return removed

    def close(self) -> None:
        """Close the store, if it was opened."""
        if self._joined is not None:
            self._joined.close()
            self._joined = None

    @contextlib.contextmanager
    def _register(self, values: Sequence[StoredBytes]) -> Iterator[None]:
        """Register the memory of ``values`` with the store for the ``with`` block, because RDMA needs this."""
        with contextlib.ExitStack() as registered:
            for span in {span for value in values for span in _as_spans(value) if span.nbytes}:
                self._store.register(*span)
                registered.callback(self._store.unregister, *span)
            yield

    @property
    def _store(self) -> StorageBackend:
        if self._joined is None:
            self._joined = self._join()
        return self._joined


class MooncakeHoldings(_Values):
    """All values of one tenant in a Mooncake pool. Mooncake 0.3.13 lists only the keys of the tenant ``default``."""

    can_keep = True
    """Whether the pool can pin values."""

    def __init__(self, settings: MooncakeSettings, admin: MasterAdmin) -> None:
        super().__init__(lambda: MooncakeStore(replace(settings, global_segment_size=0, enable_ssd_offload=False)))
        self._settings = settings
        self._admin = admin

    @cached_property
    def is_listed(self) -> bool:
        """Whether the master lists this tenant's keys. Without tenants, all keys are listed as keys of ``default``."""
        return self._settings.tenant_id == DEFAULT_TENANT or not self._ask(self._admin.has_tenants)

    @property
    def has_other_tenants(self) -> bool:
        """Whether keys of other tenants are listed, too: a tenant is set, but the master does not separate tenants."""
        return self.is_listed and self._settings.tenant_id != DEFAULT_TENANT

    def list_keys(self) -> list[str]:
        """Return all keys of the tenant.

        Raises:
            PoolUnavailable: the master does not list this tenant's keys.
        """
        if self.is_listed:
            return self._ask(lambda: list(self._admin.stream_keys()))
        raise PoolUnavailable(
            f"Mooncake lists only the keys of tenant {DEFAULT_TENANT!r}, so those of {self._settings.tenant_id!r} "
            "cannot be listed; give a namespace and a prefix, from which the keys can be computed"
        )

    def find_sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Return the size of each key's value in bytes; None for a key without a value."""
        if self.is_listed:
            return self._ask(lambda: self._admin.fetch_sizes(keys))
        return self._client.measure_values(keys)

    def remove_prefix(self, prefix: str) -> int:
        """Remove all keys that begin with ``prefix``, which must not be empty; return the number of removed keys."""
        removed = self._client.clear_and_count(prefix)
        if removed is None:
            raise PoolUnavailable(
                f"the master at {self._settings.master_server_addr} failed to remove the keys, so some or all may "
                "remain; check that the master answers (kvstore doctor), and repeat the command"
            )
        return removed

    def count_pins(self) -> int | None:
        """Return the number of values that are pinned now; None if the master does not report it."""
        kept = self._ask(self._admin.fetch_metrics).get("master_soft_pin_key_count")
        return None if kept is None else int(kept)

    def _ask(self, ask: Callable[[], _Answer]) -> _Answer:
        try:
            return ask()
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as exc:
            text = f"the report of the master at {self._admin.address} about its keys cannot be read: {exc}"
            raise PoolUnavailable(text) from exc

    @property
    def _client(self) -> MooncakeStore:
        assert isinstance(self._store, MooncakeStore)
        return self._store


class FolderHoldings(_Values):
    """All values in a pool that is a folder."""

    can_keep = False
    is_listed = True
    has_other_tenants = False

    def __init__(self, settings: FileSettings) -> None:
        """Check that the folder exists and belongs to a pool.

        Raises:
            PoolUnavailable: the folder does not exist, or does not belong to a pool.
        """
        super().__init__(lambda: FileStore(settings.path, settings.size))
        self._settings = settings
        if not settings.path.is_dir():
            raise PoolUnavailable(f"folder {settings.path} does not exist: no process has opened this pool yet")
        if refusal := find_refusal(settings.path):
            reason, remedy = refusal
            raise PoolUnavailable(f"folder {settings.path} {reason}: {remedy}")

    def list_keys(self) -> list[str]:
        """Return all keys in the folder."""
        return list(self.scan())

    def find_sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Return the size of each key's value in bytes; None for a key without a value."""
        blocks = self.scan()
        return [blocks[key].nbytes if key in blocks else None for key in keys]

    def count_pins(self) -> None:
        """Return None, because a folder has no pins."""

    def remove_prefix(self, prefix: str) -> int:
        """Remove all keys that begin with ``prefix``; return the number of removed keys.

        Raises:
            PoolUnavailable: some of the keys could not be removed.
        """
        return self.remove_and_count([key for key in self.scan() if key.startswith(prefix)])

    def scan(self) -> dict[str, Block]:
        """Return the file of each value, by key; by the file's name if the key is too long for a file name."""
        try:
            return {unquote(Path(block.path).stem): block for block in scan_blocks(self._settings.path / "blocks")}
        except OSError as exc:
            raise PoolUnavailable(f"folder {self._settings.path} cannot be read: {exc.strerror}") from exc


Holdings: TypeAlias = MooncakeHoldings | FolderHoldings
"""All values in one pool. The methods raise ``PoolUnavailable`` if the pool cannot be reached."""


def _as_spans(value: StoredBytes) -> list[Span]:
    return [Span(value.ctypes.data, value.nbytes)]
