"""A namespace and its siblings: those of the same model whose blocks are cut otherwise, and which bytes are whose.

A model's KV is cut twice: by heads among the ranks of an instance, and by tokens into blocks. Two namespaces that
differ in nothing else hold the same numbers. Where there are more ranks than KV heads, several successive ranks hold
the same head, as vLLM has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvstore_backend.namespace import Namespace

__all__ = ["HEAD", "TOKEN", "TP_SIZES", "Extent", "Family", "find_family"]

HEAD, TOKEN = "head", "token"
"""Names of the two axes that cuts differ in."""

TP_SIZES = (1, 2, 4, 8, 16)
"""The tensor-parallel sizes that siblings are looked for under."""


class Extent(NamedTuple):
    """A piece of a model's KV: some successive heads at some successive tokens, in all layers."""

    heads: range
    tokens: range

    def overlap(self, other: Extent) -> Extent:
        """The part that both hold; a range of it is empty where they have nothing in common."""
        return Extent(_common(self.heads, other.heads), _common(self.tokens, other.tokens))


@dataclass(frozen=True)
class Family:
    """A namespace, and where its blocks' bytes lie in those of its siblings.

    Attributes:
        own: the namespace of who reads.
        num_heads: KV heads of the whole model.
        axes: name and size of each axis of one of ``own``'s blocks, the outermost in memory first; the last one's size
            is in bytes. One is called ``HEAD``. Where block sizes may differ, one is called ``TOKEN``.
        siblings: the other cuts that may exist, by the namespace of their rank 0.
    """

    own: Namespace
    num_heads: int
    axes: tuple[tuple[str, int], ...]
    siblings: tuple[Namespace, ...]

    def of_tenant(self, tenant: str) -> Family:
        """The same family among the blocks of ``tenant``."""
        siblings = tuple(replace(cut, tenant=tenant) for cut in self.siblings)
        return replace(self, own=replace(self.own, tenant=tenant), siblings=siblings)

    def shape_of(self, cut: Namespace) -> tuple[int, ...]:
        """The sizes of the axes of one block of ``cut``."""
        sizes = {HEAD: cut.num_kv_heads, TOKEN: cut.block_size}
        return tuple(sizes.get(name, size) for name, size in self.axes)

    def block_bytes(self, cut: Namespace) -> int:
        """The size of one block of ``cut``."""
        return math.prod(self.shape_of(cut))

    def heads_of(self, cut: Namespace) -> range:
        """The heads that the rank of ``cut`` holds."""
        first = cut.tp_rank * self.num_heads // cut.tp_size
        return range(first, first + cut.num_kv_heads)

    def ranks_with(self, cut: Namespace, heads: range) -> list[Namespace]:
        """The fewest ranks of ``cut`` that hold all of ``heads``."""
        step = max(1, cut.tp_size // self.num_heads)  # so many ranks hold the same
        ranks = (replace(cut, tp_rank=rank) for rank in range(0, cut.tp_size, step))
        return [rank for rank in ranks if _common(self.heads_of(rank), heads)]

    def index_of(self, part: Extent, whole: Extent) -> tuple[slice, ...]:
        """Where ``part`` lies in an array that holds ``whole``."""
        places = {HEAD: (part.heads, whole.heads), TOKEN: (part.tokens, whole.tokens)}
        return tuple(_place(*places[name]) if name in places else slice(None) for name, _ in self.axes)


def find_family(
    own: Namespace,
    num_heads: int,
    axes: Sequence[tuple[str, int]],
    *,
    block_sizes: Iterable[int] = (),
    layout_of: Callable[[int], str] | None = None,
) -> Family:
    """The family of ``own``, with every other cut that divides, or is divided by, its own.

    Args:
        own: whose.
        num_heads: KV heads of the whole model.
        axes: as ``Family`` has them.
        block_sizes: others that siblings may have, where the axes have a ``TOKEN``.
        layout_of: the layout in the namespace of a rank that holds so many heads; default: always the own one.

    Returns:
        A family without siblings, if the heads are not divided evenly among the ranks of ``own``.
    """
    family = Family(own, num_heads, tuple(axes), ())
    if not _divides(num_heads, own.tp_size) or own.num_kv_heads != _heads_per_rank(num_heads, own.tp_size):
        return family
    sizes = {own.block_size, *(size for size in block_sizes if _divides(size, own.block_size))}
    cuts = [
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
    return replace(family, siblings=tuple(cut for cut in cuts if not _is_same_cut(cut, own)))


def _heads_per_rank(num_heads: int, tp_size: int) -> int:
    return max(1, num_heads // tp_size)


def _divides(one: int, other: int) -> bool:
    """Whether one of the two is a multiple of the other."""
    return one % other == 0 or other % one == 0


def _is_same_cut(one: Namespace, other: Namespace) -> bool:
    return (one.tp_size, one.block_size) == (other.tp_size, other.block_size)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _place(part: range, whole: range) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)
