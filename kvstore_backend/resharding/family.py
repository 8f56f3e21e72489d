"""Finds the shardings of a model whose blocks a reader can read, and where these blocks overlap the reader's.

The KV of a model is divided in two ways: by heads among the ranks of an instance, and by tokens into blocks. Two
namespaces that differ only in these divisions contain the same numbers; they are *peers*. If there are more ranks than
KV heads, several successive ranks have the same head, as in vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvstore_backend.namespace import Namespace

__all__ = ["HEAD", "TOKEN", "TP_SIZES", "Extent", "ShardingFamily", "find_family"]

HEAD, TOKEN = "head", "token"
"""Names of the two axes of a block that have different sizes in different shardings."""

TP_SIZES = (1, 2, 4, 8, 16)
"""Tensor-parallel sizes that peers may have."""


class Extent(NamedTuple):
    """Part of the KV of a sequence: successive heads and successive tokens, in all layers."""

    heads: range
    tokens: range

    def overlap(self, other: Extent) -> Extent:
        """Return the part that both extents contain; one of its ranges is empty if there is no common part."""
        return Extent(_common(self.heads, other.heads), _common(self.tokens, other.tokens))


@dataclass(frozen=True)
class ShardingFamily:
    """Namespace of a reader, and the other shardings of the same model (peers) whose blocks it can read.

    Attributes:
        own: namespace of the reader.
        num_heads: number of KV heads of the whole model.
        axes: name and size of each axis of a block of ``own``, the outermost in memory first. The size of the last axis
            is in bytes. One axis has the name ``HEAD``. If peers may have other block sizes, one has the name
            ``TOKEN``.
        peers: other shardings that may exist, each as the namespace of its rank 0.
    """

    own: Namespace
    num_heads: int
    axes: tuple[tuple[str, int], ...]
    peers: tuple[Namespace, ...]

    def of_tenant(self, tenant: str) -> ShardingFamily:
        """Return a copy of this family in which all namespaces belong to ``tenant``."""
        peers = tuple(replace(sharding, tenant=tenant) for sharding in self.peers)
        return replace(self, own=replace(self.own, tenant=tenant), peers=peers)

    def shape_of(self, sharding: Namespace) -> tuple[int, ...]:
        """Return the sizes of the axes of one block of ``sharding``."""
        sizes = {HEAD: sharding.num_kv_heads, TOKEN: sharding.block_size}
        return tuple(sizes.get(name, size) for name, size in self.axes)

    def block_bytes(self, sharding: Namespace) -> int:
        """Return the size of one block of ``sharding`` in bytes."""
        return math.prod(self.shape_of(sharding))

    def heads_of(self, sharding: Namespace) -> range:
        """Return the KV heads that the rank with the namespace ``sharding`` has."""
        first = sharding.tp_rank * self.num_heads // sharding.tp_size
        return range(first, first + sharding.num_kv_heads)

    def ranks_with(self, sharding: Namespace, heads: range) -> list[Namespace]:
        """Return the namespaces of as few ranks of ``sharding`` as possible that together have all of ``heads``."""
        step = max(1, sharding.tp_size // self.num_heads)  # number of ranks that have the same head
        ranks = (replace(sharding, tp_rank=rank) for rank in range(0, sharding.tp_size, step))
        return [rank for rank in ranks if _common(self.heads_of(rank), heads)]

    def index_of(self, part: Extent, whole: Extent) -> tuple[slice, ...]:
        """Return the numpy index that selects ``part`` from an array with the bytes of ``whole``."""
        places = {HEAD: (part.heads, whole.heads), TOKEN: (part.tokens, whole.tokens)}
        return tuple(_place(*places[name]) if name in places else slice(None) for name, _ in self.axes)


def find_family(
    own: Namespace,
    num_heads: int,
    axes: Sequence[tuple[str, int]],
    *,
    block_sizes: Iterable[int] = (),
    layout_of: Callable[[int], str] | None = None,
) -> ShardingFamily:
    """Return the shardings in which a reader with the namespace ``own`` can read blocks.

    Their tensor-parallel size is one of ``TP_SIZES``, and is a multiple or a divisor of the number of heads. Their
    block size is that of ``own``, or one of ``block_sizes`` that is a multiple or a divisor of it.

    Args:
        own: namespace of the reader.
        num_heads: number of KV heads of the whole model.
        axes: name and size of each axis of a block, as in ``ShardingFamily``.
        block_sizes: other block sizes that peers may have; only with an axis ``TOKEN``.
        layout_of: returns ``Namespace.layout`` for a rank with a given number of heads. If it is None, all ranks have
            the layout of ``own``.

    Returns:
        The family; it has no peers if the heads cannot be divided evenly among the ranks of ``own``.
    """
    family = ShardingFamily(own, num_heads, tuple(axes), ())
    if not _divides(num_heads, own.tp_size) or own.num_kv_heads != _heads_per_rank(num_heads, own.tp_size):
        return family
    sizes = {own.block_size, *(size for size in block_sizes if _divides(size, own.block_size))}
    shardings = [
        replace(
            own,
            tp_size=tp_size,
            tp_rank=0,
            num_kv_heads=(heads := _heads_per_rank(num_heads, tp_size)),
            block_size=size,
            layout=layout_of(heads) if layout_of else own.layout,
        )
        for tp_size in TP_SIZES
        if _divides(num_heads, tp_size)
        for size in sorted(sizes)
    ]
    return replace(family, peers=tuple(sharding for sharding in shardings if not _is_same_sharding(sharding, own)))


def _heads_per_rank(num_heads: int, tp_size: int) -> int:
    return max(1, num_heads // tp_size)


def _divides(one: int, other: int) -> bool:
    """Return whether one of the two numbers is a multiple of the other."""
    return one % other == 0 or other % one == 0


def _is_same_sharding(one: Namespace, other: Namespace) -> bool:
    return (one.tp_size, one.block_size) == (other.tp_size, other.block_size)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _place(part: range, whole: range) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)
