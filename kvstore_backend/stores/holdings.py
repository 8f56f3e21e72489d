"""The values of a pool, for an operator: listed, measured, copied, kept and removed, by the means of each store.

An engine knows the keys that it asks for, and no others. An operator wants to know which there are: a Mooncake master
lists them over HTTP, a folder has them as files. Values are bytes here, as they are stored.
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

__all__ = ["FolderHoldings", "Holdings", "MooncakeHoldings", "StoredBytes", "wrap_bytes"]

_Answer = TypeVar("_Answer")

StoredBytes = NDArray[np.uint8]
"""A value as it is stored: of a block, header and payload."""


class _Values:
    """Values that are moved through a store, which is joined when that is first needed: listing takes none.

    Args:
        join: opens the store, giving it nothing: memory that a command gave would be gone with its end.
    """

    def __init__(self, join: Callable[[], StorageBackend]) -> None:
        self._join = join
        self._joined: StorageBackend | None = None

    def read_values(self, keys: Sequence[str], sizes: Sequence[int]) -> list[StoredBytes | None]:
        """The values, whose sizes are known; None where one is not there any more."""
        memory = np.empty(sum(sizes), dtype=np.uint8)
        ends = list(accumulate(sizes))
        values = [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        with self._register([memory]):
            statuses = self._store.get(keys, [_as_spans(value) for value in values])
        return [value if status else None for value, status in zip(values, statuses, strict=True)]

    def write_values(self, keys: Sequence[str], values: Sequence[StoredBytes]) -> list[Status]:
        """Store values under keys that are absent; the others stay as they are."""
        with self._register(values):
            return self._store.put(keys, [_as_spans(value) for value in values])

    def keep_values(self, keys: Sequence[str], values: Sequence[StoredBytes], seconds: float) -> list[Status]:
        """Spare values, which are stored so already, from eviction for ``seconds``; with 0 no longer."""
        with self._register(values):
            return self._store.keep(keys, [_as_spans(value) for value in values], seconds)

    def remove_keys(self, keys: Sequence[str]) -> list[Status]:
        """Remove keys, also those that somebody may be reading now."""
        return self._store.remove(keys, force=True)

    def close(self) -> None:
        """Leave the pool, if it was joined."""
        if self._joined is not None:
            self._joined.close()
            self._joined = None

    @contextlib.contextmanager
    def _register(self, values: Sequence[StoredBytes]) -> Iterator[None]:
        """Have the store know the memory of ``values`` in the block: RDMA moves no other bytes."""
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
    """The values of one tenant of a Mooncake cluster.

    Mooncake 0.3.13's master lists the keys of the tenant ``default`` and of no other.
    """

    can_keep = True
    """Whether it can spare values from eviction."""

    def __init__(self, settings: MooncakeSettings, admin: MasterAdmin) -> None:
        super().__init__(lambda: MooncakeStore(replace(settings, global_segment_size=0, enable_ssd_offload=False)))
        self._settings = settings
        self._admin = admin

    @cached_property
    def is_listed(self) -> bool:
        """Whether it tells its keys: without tenants everybody's are those of ``default``."""
        return self._settings.tenant_id == DEFAULT_TENANT or not self._ask(self._admin.has_tenants)

    def list_keys(self) -> list[str]:
        """Every key."""
        if self.is_listed:
            return self._ask(lambda: list(self._admin.stream_keys()))
        raise PoolUnavailable(
            f"Mooncake lists the keys of no tenant but {DEFAULT_TENANT!r}, so those of {self._settings.tenant_id!r} "
            "cannot be listed: name a namespace, or a prefix whose keys can be told"
        )

    def find_sizes(self, keys: Sequence[str]) -> list[int | None]:
        """The bytes of each value; None where there is none."""
        if self.is_listed:
            return self._ask(lambda: self._admin.fetch_sizes(keys))
        return self._client.measure_values(keys)

    def remove_prefix(self, prefix: str) -> int:
        """Remove every key that begins with ``prefix``, which must not be empty; how many were removed."""
        removed = self._client.clear_and_count(prefix)
        if removed is None:
            raise PoolUnavailable(f"the master at {self._settings.master_server_addr} did not say what it removed")
        return removed

    def count_pins(self) -> int | None:
        """How many values are spared from eviction now; None: that cannot be said."""
        kept = self._ask(self._admin.fetch_metrics).get("master_soft_pin_key_count")
        return None if kept is None else int(kept)

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


class FolderHoldings(_Values):
    """The values in the folder of a file store."""

    can_keep = False
    is_listed = True

    def __init__(self, settings: FileSettings) -> None:
        """Look at the folder, which must be a pool's already.

        Raises:
            PoolUnavailable: it is not there, or not a pool's.
        """
        super().__init__(lambda: FileStore(settings.path, settings.size))
        self._settings = settings
        if not settings.path.is_dir():
            raise PoolUnavailable(f"folder {settings.path} does not exist: no process has opened this pool yet")
        if refusal := find_refusal(settings.path):
            reason, remedy = refusal
            raise PoolUnavailable(f"folder {settings.path} {reason}: {remedy}")

    def list_keys(self) -> list[str]:
        """Every key."""
        return list(self._scan())

    def find_sizes(self, keys: Sequence[str]) -> list[int | None]:
        """The bytes of each value; None where there is none."""
        blocks = self._scan()
        return [blocks[key].nbytes if key in blocks else None for key in keys]

    def count_pins(self) -> None:
        """There are none."""

    def remove_prefix(self, prefix: str) -> int:
        """Remove every key that begins with ``prefix``; how many were removed.

        Raises:
            PoolUnavailable: some of them are still there, or may be.
        """
        statuses = self.remove_keys([key for key in self._scan() if key.startswith(prefix)])
        removed, failed = statuses.count(Status.OK), statuses.count(Status.FAILED)
        if failed:
            raise PoolUnavailable(f"{removed} blocks removed, but {failed} could not be: they may be in the pool still")
        return removed

    def _scan(self) -> dict[str, Block]:
        """The values by their keys; of a key too long for a file's name, by the name that it has instead."""
        try:
            return {unquote(Path(block.path).stem): block for block in scan_blocks(self._settings.path / "blocks")}
        except OSError as exc:
            raise PoolUnavailable(f"folder {self._settings.path} cannot be read: {exc.strerror}") from exc


Holdings: TypeAlias = MooncakeHoldings | FolderHoldings
"""The values of one pool; methods raise ``PoolUnavailable`` where it cannot be reached."""


def wrap_bytes(data: bytes) -> StoredBytes:
    """A value of these bytes."""
    return np.frombuffer(data, dtype=np.uint8)


def _as_spans(value: StoredBytes) -> list[Span]:
    return [Span(value.ctypes.data, value.nbytes)]
