"""The index of sparse attention: finds the blocks of a long sequence that matter most to a query.

The index has one vector for each block and KV head, the representative of the block, which is computed from the keys
``k`` of the block (after RoPE). The score of a block is the inner product of its representative with a vector that is
computed from the query ``q``:

============  ====================  ========================  =================================================
kind          representative        vector of the query       meaning of the score
============  ====================  ========================  =================================================
``mean``      mean(k)               q                         the mean score of the keys
``mean_std``  mean(k), std(k)       q, |q|                    the mean score plus one standard deviation
``min_max``   min(k), max(k)        min(q, 0), max(q, 0)      an upper bound of the scores of the keys (Quest,
                                                              Tang et al. 2024)
============  ====================  ========================  =================================================

The query heads of one KV head read the same blocks. For each query head the scores become shares (softmax), so that
heads with long query vectors do not dominate. The rank of a block is its largest share among these heads.

The search compares all representatives, which takes 0.2 ms for 1024 blocks and one head. An approximate index took
longer and missed blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.model.device_copies import send_numbers, send_tensor
from engine.scheduling.retrieval_config import REPRESENTATIVES

__all__ = ["BlockIndex", "Index", "Search", "best_blocks", "query_of", "representative_of", "width_of"]


def representative_of(kind: str, keys: torch.Tensor) -> torch.Tensor:
    """Compute the representative of each block: the product with a query estimates how much attention the block gets.

    ``keys`` are the keys of the blocks, ``[..., tokens, head_dim]``. The result is ``[..., width]``. ``kind`` is one of
    ``REPRESENTATIVES``.
    """
    if kind == "mean":
        return keys.mean(-2)
    if kind == "mean_std":
        return torch.cat([keys.mean(-2), keys.std(-2, correction=0)], -1)
    return torch.cat([keys.amin(-2), keys.amax(-2)], -1)


def width_of(kind: str, head_dim: int) -> int:
    """Return the number of elements of the vector of a block that ``representative_of`` computes."""
    return head_dim if kind == "mean" else 2 * head_dim


def query_of(kind: str, queries: torch.Tensor) -> torch.Tensor:
    """Compute the vectors ``[..., width]`` of queries ``[..., head_dim]``, for the product with representatives."""
    if kind == "mean":
        return queries
    if kind == "mean_std":
        return torch.cat([queries, queries.abs()], -1)
    return torch.cat([queries.clamp(max=0), queries.clamp(min=0)], -1)


def best_blocks(scores: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return the blocks with the highest ranks for each KV head.

    Args:
        scores: the scores of the blocks, multiplied by the scale of attention, ``[..., kv_heads, group, blocks]``.
            Blocks with minus infinity have the lowest rank.
        num_blocks: number of blocks to return for each KV head.

    Returns:
        Indexes of blocks ``[..., kv_heads, num_blocks]``, the best first.
    """
    return scores.log_softmax(-1).amax(-2).topk(num_blocks, dim=-1).indices


class Search:
    """Describes a search in the index for several sequences. All layers use the same object.

    Args:
        rows: the row of each sequence in the index.
        outside: for each sequence the blocks to search, which are those that are not always read: the index of the
            first one, and the index after the last one.
        num_blocks: number of blocks to find for each sequence.
        device: the device of the index.
    """

    def __init__(
        self, rows: Sequence[int], outside: Sequence[tuple[int, int]], num_blocks: int, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.rows = rows
        self.all_rows = slice(min(rows), max(rows) + 1)
        """The smallest slice of the index that has the rows of all sequences."""
        [self.places] = send_numbers([[row - min(rows) for row in rows]], device)
        """The position of each sequence's row in ``all_rows``."""
        self.all_blocks = slice(min(first for first, _ in outside), max(stop for _, stop in outside))
        firsts, stops = torch.tensor(outside).t()[:, :, None, None, None]
        numbers = torch.arange(self.all_blocks.start, self.all_blocks.stop)
        self.hidden = send_tensor((numbers < firsts) | (numbers >= stops), device)
        """Mask of the blocks in ``all_blocks`` that are not searched for a sequence, ``[sequences, 1, 1, blocks]``."""


class Index(Protocol):
    """Interface of an index that finds blocks, such as ``BlockIndex``."""

    def add_blocks(self, row: int, first: int, keys: torch.Tensor) -> None:
        """Add blocks of a sequence to the index, in the row of the sequence.

        Args:
            row: the row of the sequence.
            first: the index of the first of these blocks in the sequence.
            keys: the keys of the blocks, ``[blocks, layers, kv_heads, tokens, head_dim]``.
        """

    def search_blocks(self, layer: int, search: Search, queries: torch.Tensor, scale: float) -> torch.Tensor:
        """Find the best blocks for one query of each sequence. The host does not wait for the device.

        Args:
            layer: the layer of the queries.
            search: the sequences, and the blocks to search.
            queries: the queries, ``[sequences, kv_heads, group, head_dim]``.
            scale: the scale of attention's scores.

        Returns:
            Indices of blocks in their sequences, ``[sequences, kv_heads, search.num_blocks]``, the best first. If
            fewer blocks of a sequence are searched, its last indices are undefined.
        """


class BlockIndex(Index):
    """An index that compares the query with the representatives of all blocks.

    Each sequence uses one row. A new sequence may use the row of an ended one without clearing it, because only blocks
    that the new sequence has added are searched.

    Args:
        kind: one of ``REPRESENTATIVES``.
        rows: maximum number of concurrent sequences.
        num_layers, num_kv_heads, head_dim: the dimensions of KV memory.
        max_blocks: maximum number of blocks of a sequence.
        dtype: dtype of the representatives.
        device: the device of the index.
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
            raise ValueError(f"the kind of representatives is {kind!r}; it must be one of {', '.join(REPRESENTATIVES)}")
        self.kind = kind
        # The representatives of one row and head are contiguous, so that a search reads them as a matrix, without copy.
        shape = (num_layers, rows, num_kv_heads, max_blocks, width_of(kind, head_dim))
        self._vectors = torch.empty(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Size of the index in bytes."""
        return self._vectors.numel() * self._vectors.element_size()

    def add_blocks(self, row: int, first: int, keys: torch.Tensor) -> None:
        vectors = representative_of(self.kind, keys).permute(1, 2, 0, 3)
        self._vectors[:, row, :, first : first + len(keys)] = vectors

    def search_blocks(self, layer: int, search: Search, queries: torch.Tensor, scale: float) -> torch.Tensor:
        vectors = self._vectors[layer, search.all_rows, :, search.all_blocks]
        # Rows of other sequences in this slice are computed, too: to select rows would copy them.
        by_row = queries.new_zeros(len(vectors), *queries.shape[1:])
        by_row[search.places] = queries * scale
        scores = (query_of(self.kind, by_row) @ vectors.transpose(-1, -2))[search.places]
        return best_blocks(scores.masked_fill(search.hidden, -torch.inf), search.num_blocks) + search.all_blocks.start
