"""Finds the blocks of a long sequence that matter to a query, by one vector for each block and KV head.

The score of a block is the inner product of its representative with the query. A representative is made from a block's
keys ``k`` (after RoPE), and compared with a form of the query ``q``:

============  ====================  ========================  =================================================
``mean``      mean(k)               q                         the method's own
``mean_std``  mean(k), std(k)       q, |q|                    one deviation above the mean score
``min_max``   min(k), max(k)        min(q, 0), max(q, 0)      the greatest score that any key within these bounds
                                                              could have (Quest, Tang et al. 2024)
============  ====================  ========================  =================================================

The query heads that share a KV head share the recalled blocks. Each head turns its scores into shares (softmax), so
that no head dominates the others through the length of its query. A block's rank is its greatest share in any head.

An exact search is the fastest here: 1024 blocks take 0.2 ms per head; an approximate index takes longer and misses some
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.model.device_copies import send_numbers, send_tensor
from engine.scheduling.retrieval_config import REPRESENTATIVES

__all__ = ["BlockIndex", "Index", "Search", "best_blocks", "query_of", "representative_of", "width_of"]


def representative_of(kind: str, keys: torch.Tensor) -> torch.Tensor:
    """Compute the representatives of blocks.

    Args:
        kind: one of ``REPRESENTATIVES``.
        keys: ``[..., tokens, head_dim]``.

    Returns:
        ``[..., width]``.
    """
    if kind == "mean":
        return keys.mean(-2)
    if kind == "mean_std":
        return torch.cat([keys.mean(-2), keys.std(-2, correction=0)], -1)
    return torch.cat([keys.amin(-2), keys.amax(-2)], -1)


def width_of(kind: str, head_dim: int) -> int:
    """Return how many numbers a representative has."""
    return head_dim if kind == "mean" else 2 * head_dim


def query_of(kind: str, queries: torch.Tensor) -> torch.Tensor:
    """Convert queries ``[..., head_dim]`` to the form that is compared with representatives: ``[..., width]``."""
    if kind == "mean":
        return queries
    if kind == "mean_std":
        return torch.cat([queries, queries.abs()], -1)
    return torch.cat([queries.clamp(max=0), queries.clamp(min=0)], -1)


def best_blocks(scores: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return the blocks to recall for each KV head.

    Args:
        scores: ``[..., kv_heads, group, blocks]``, as inner products scaled like attention's; minus infinity for a
            block that must not be found.
        num_blocks: how many, at most as many as there are.

    Returns:
        Their numbers ``[..., kv_heads, num_blocks]``, the best first.
    """
    return scores.log_softmax(-1).amax(-2).topk(num_blocks, dim=-1).indices


class Search:
    """A search for several sequences, each in a row of the index. It is the same in all layers, so it is made once.

    Args:
        rows: the rows of these sequences.
        outside: for each sequence the range of blocks that are looked up: the first, and the end.
        num_blocks: the largest number of blocks that any sequence needs.
        device: the device of the index.
    """

    def __init__(
        self, rows: Sequence[int], outside: Sequence[tuple[int, int]], num_blocks: int, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.rows = rows
        self.all_rows = slice(min(rows), max(rows) + 1)
        """The span of these rows, including rows between them."""
        [self.places] = send_numbers([[row - min(rows) for row in rows]], device)
        """The positions of the requested rows in the span."""
        self.all_blocks = slice(min(first for first, _ in outside), max(stop for _, stop in outside))
        firsts, stops = torch.tensor(outside).t()[:, :, None, None, None]
        numbers = torch.arange(self.all_blocks.start, self.all_blocks.stop)
        self.hidden = send_tensor((numbers < firsts) | (numbers >= stops), device)
        """Blocks that a sequence does not look up, as a mask over all blocks, ``[sequences, 1, 1, blocks]``."""


class Index(Protocol):
    """Interface of an index that finds blocks, such as ``BlockIndex``."""

    def add_blocks(self, row: int, first: int, keys: torch.Tensor) -> None:
        """Add blocks to a row, from number ``first`` on: keys ``[blocks, layers, kv_heads, tokens, head_dim]``."""

    def search_blocks(self, layer: int, search: Search, queries: torch.Tensor, scale: float) -> torch.Tensor:
        """Find the best blocks for one query of each of several sequences, without a wait for the device.

        Args:
            layer: the layer of the blocks.
            search: the sequences, and which of their blocks are searched.
            queries: ``[sequences, kv_heads, group, head_dim]``.
            scale: the scale of attention's scores.

        Returns:
            Numbers of blocks ``[sequences, kv_heads, search.num_blocks]``, the best first. If a sequence looks up fewer
            blocks, its last numbers are undefined.
        """


class BlockIndex(Index):
    """The representatives of several sequences, each in a row of its own.

    Ownership: the user of a row adds a block before it searches for it; the next user need not clear anything.

    Args:
        kind: one of ``REPRESENTATIVES``.
        rows: the maximum number of concurrent sequences.
        num_layers, num_kv_heads, head_dim: the dimensions of KV memory.
        max_blocks: the maximum number of blocks of one sequence.
    """

    def __init__(
        self,
        kind: str,
        *,
        rows: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if kind not in REPRESENTATIVES:
            raise ValueError(f"{kind!r} is no representative; there are {', '.join(REPRESENTATIVES)}")
        self.kind = kind
        # The blocks of a row that belong to one head are contiguous: a search reads them as one matrix, without a copy.
        shape = (num_layers, rows, num_kv_heads, max_blocks, width_of(kind, head_dim))
        self._vectors = torch.empty(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Size of all rows in bytes."""
        return self._vectors.numel() * self._vectors.element_size()

    def add_blocks(self, row: int, first: int, keys: torch.Tensor) -> None:
        vectors = representative_of(self.kind, keys).permute(1, 2, 0, 3)
        self._vectors[:, row, :, first : first + len(keys)] = vectors

    def search_blocks(self, layer: int, search: Search, queries: torch.Tensor, scale: float) -> torch.Tensor:
        vectors = self._vectors[layer, search.all_rows, :, search.all_blocks]
        # The results of the rows between are not used: selecting rows would copy them.
        by_row = queries.new_zeros(len(vectors), *queries.shape[1:])
        by_row[search.places] = queries * scale
        scores = (query_of(self.kind, by_row) @ vectors.transpose(-1, -2))[search.places]
        return best_blocks(scores.masked_fill(search.hidden, -torch.inf), search.num_blocks) + search.all_blocks.start
