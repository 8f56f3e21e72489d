"""Blocks as they are stored, read from a pool in batches and checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvstore_backend.backend import split_by_size
from kvstore_backend.cli.operator.scope import Scope
from kvstore_backend.stores.holdings import Holdings, StoredBytes
from kvstore_backend.wrappers.checked import find_fault

__all__ = ["Batch", "find_present", "read_batches"]

_BATCH_BYTES = 32 << 20


class Batch(NamedTuple):
    """Some blocks.

    Attributes:
        keys: keys of the blocks that arrived undamaged.
        values: their values, headers included.
        gone: number of blocks that were evicted meanwhile, or did not arrive.
        damaged: number of blocks that failed the check.
    """

    keys: list[str]
    values: list[StoredBytes]
    gone: int
    damaged: int


def find_present(scope: Scope, holdings: Holdings) -> tuple[list[str], list[int]]:
    """Return the keys of a scope that the pool has, and the bytes of each value.

    Raises:
        PoolUnavailable: the pool does not answer.
    """
    keys = scope.name_keys(holdings)
    found = [(key, size) for key, size in zip(keys, holdings.find_sizes(keys), strict=True) if size is not None]
    return [key for key, _ in found], [size for _, size in found]


def read_batches(holdings: Holdings, keys: Sequence[str], sizes: Sequence[int]) -> Iterator[Batch]:
    """Read blocks, a batch at a time."""
    for part in split_by_size(sizes, _BATCH_BYTES):
        yield _read_batch(holdings, keys[part], sizes[part])


def _read_batch(holdings: Holdings, keys: Sequence[str], sizes: Sequence[int]) -> Batch:
    read = zip(keys, holdings.read_values(keys, sizes), strict=True)
    arrived = [(key, value) for key, value in read if value is not None]
    whole = [(key, value) for key, value in arrived if find_fault(key, value) is None]
    return Batch(
        [key for key, _ in whole],
        [value for _, value in whole],
        gone=len(keys) - len(arrived),
        damaged=len(arrived) - len(whole),
    )
