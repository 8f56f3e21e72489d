"""Removes, damages and adds values in a pool, as other clients, evictions and broken hardware do."""

from __future__ import annotations

import contextlib
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from kvstore_backend.backend import ConfigError, PoolUnavailable, Status
from kvstore_backend.cli.checks import require_admin
from kvstore_backend.config import DEFAULT_TENANT, MooncakeSettings, read_config
from kvstore_backend.stores.holdings import MooncakeHoldings, StoredBytes

__all__ = ["Tampering", "open_tampering"]

_FILLER_BYTES = 4 << 20
_MAX_FILLERS = 4096


class Tampering(Protocol):
    """Interface of an object that removes, damages and adds values in a pool."""

    def count_values(self) -> int:
        """Return the number of values in the pool."""

    def evict(self, share: float, keys: str = "") -> int:
        """Remove the fraction ``share`` of the values with keys that match the regular expression ``keys``.

        Returns the number of removed values.
        """

    def flip_bytes(self) -> int:
        """Invert all bytes of each value except its first quarter; return the number of changed values."""

    def truncate(self) -> int:
        """Cut off three quarters of each value; return the number of changed values."""

    def fill(self) -> int:
        """Add values until the pool accepts no more; return the number of added values."""

    def close(self) -> None:
        """Leave the pool."""


class _MooncakeTampering:
    """Removes, damages and adds values in a Mooncake pool, as one of the pool's clients."""

    def __init__(self, holdings: MooncakeHoldings) -> None:
        self._holdings = holdings
        self._random = random.Random(0)

    def count_values(self) -> int:
        return len(self._holdings.list_keys())

    def evict(self, share: float, keys: str = "") -> int:
        found = [key for key in self._holdings.list_keys() if re.search(keys, key)]
        chosen = [key for key in found if self._random.random() < share]
        return self._holdings.remove_keys(chosen).count(Status.OK) if chosen else 0

    def flip_bytes(self) -> int:
        return self._replace(lambda value: np.concatenate([value[: value.size // 4], ~value[value.size // 4 :]]))

    def truncate(self) -> int:
        return self._replace(lambda value: value[: max(1, value.size // 4)].copy())

    def fill(self) -> int:
        value = np.zeros(_FILLER_BYTES, dtype=np.uint8)
        for number in range(_MAX_FILLERS):
            if not self._holdings.write_values([f"certify-filler-{number}"], [value])[0]:
                return number
        return _MAX_FILLERS

    def close(self) -> None:
        fillers = [key for key in self._holdings.list_keys() if key.startswith("certify-filler-")]
        if fillers:
            self._holdings.remove_keys(fillers)
        self._holdings.close()

    def _replace(self, change: Callable[[StoredBytes], StoredBytes]) -> int:
        count = 0
        for key, size in self._list_sizes():
            value = self._holdings.read_values([key], [size])[0]
            if value is None:
                continue
            changed = change(value)
            self._holdings.remove_keys([key])
            count += bool(self._holdings.write_values([key], [changed])[0])
        return count

    def _list_sizes(self) -> list[tuple[str, int]]:
        keys = self._holdings.list_keys()
        sizes = self._holdings.find_sizes(keys) if keys else []
        return [(key, size) for key, size in zip(keys, sizes, strict=True) if size]


class _FolderTampering:
    """Removes and damages the files of a pool in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._random = random.Random(0)

    def count_values(self) -> int:
        return len(self._list_files())

    def evict(self, share: float, keys: str = "") -> int:
        chosen = [path for path in self._list_files(keys) if self._random.random() < share]
        for path in chosen:
            path.unlink(missing_ok=True)
        return len(chosen)

    def flip_bytes(self) -> int:
        return self._replace(lambda data: data[: len(data) // 4] + bytes(255 - byte for byte in data[len(data) // 4 :]))

    def truncate(self) -> int:
        return self._replace(lambda data: data[: max(1, len(data) // 4)])

    def fill(self) -> int:
        raise ConfigError("a pool in a folder cannot be filled; only a Mooncake pool can")

    def close(self) -> None:
        pass

    def _replace(self, change: Callable[[bytes], bytes]) -> int:
        count = 0
        for path in self._list_files():
            with contextlib.suppress(FileNotFoundError):  # the pool has removed it meanwhile
                data = path.read_bytes()
                with path.open("r+b") as file:
                    file.write(change(data))
                    file.truncate()
                count += 1
        return count

    def _list_files(self, keys: str = "") -> list[Path]:
        """Return the files with paths that match ``keys``, without links, which may lead to files outside the pool."""
        every = (Path(folder, name) for folder, _, names in os.walk(self._folder) for name in names)
        found = [path for path in every if re.search(keys, str(path))]
        return sorted(path for path in found if not path.is_symlink() and _has_one_name(path))


def _has_one_name(path: Path) -> bool:
    """Return whether ``path`` is a file that has no second hard link."""
    try:
        return path.is_file() and path.stat().st_nlink == 1
    except FileNotFoundError:
        return False


def open_tampering(pool: str, master_metrics: str) -> Tampering:
    """Join the pool of a recipe, to change its values.

    Args:
        pool: the URL of a Mooncake pool, or a folder.
        master_metrics: HOST:PORT of the metrics of Mooncake's master.

    Raises:
        ConfigError: ``pool`` is neither the URL of a Mooncake pool nor a folder.
        PoolUnavailable: the pool does not answer, or does not list its values.
    """
    if "://" not in pool:
        return _FolderTampering(Path(pool))
    config = read_config(pool)
    if config is None or not isinstance(config.store, MooncakeSettings):
        raise ConfigError(f"pool is {pool!r}; it must be mooncake://HOST:PORT?... or a folder")
    holdings = MooncakeHoldings(config.store, require_admin(config.store, master_metrics, "pool_metrics"))
    if not holdings.is_listed:
        raise PoolUnavailable(
            f"pool is {pool!r}; Mooncake lists only the values of tenant {DEFAULT_TENANT!r}, so those of "
            f"{config.store.tenant_id!r} cannot be found; remove tenant_id from the recipe"
        )
    return _MooncakeTampering(holdings)
