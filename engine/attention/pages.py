"""Attention of one query a sequence to chosen blocks, each KV head to blocks of its own.

A page is one block's part of one layer's K or V for one head: one contiguous span of memory
``[block, layer, 2, kv_head, token, head_dim]``. Page 0 is that of block 0, layer 0, K, head 0.

A CPU reads pages where they lie, a few at a time: as many as stay in its cache between the read and the attention to
them, which for the memory is one read and no write. What pieces give is put together by the sums of their weights. A
GPU reads all pages of a layer and of all sequences at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["PIECE_BYTES", "PageReader"]

PIECE_BYTES = 4 << 20
"""K and V that stay in a CPU's cache. 2 to 8 MiB measure alike, 1 MiB and 16 MiB a third slower."""


class PageReader:
    """Reads memory of one shape, in one thread.

    Args:
        like: memory ``[block, layer, 2, kv_head, token, head_dim]``, whose dtype and device what is read has.
    """

    def __init__(self, like: torch.Tensor) -> None:
        _, self._num_layers, _, self._kv_heads, block_size, self._head_dim = like.shape
        self._page_size = block_size * self._head_dim
        pages_of_block = 2 * self._kv_heads
        at_once = max(1, PIECE_BYTES // (pages_of_block * self._page_size * like.element_size()))
        self._piece = like.new_empty(at_once * pages_of_block, self._page_size)
        kinds = torch.arange(2, device=like.device)[:, None, None]
        heads = torch.arange(self._kv_heads, device=like.device)[:, None]
        self._first_pages = kinds * self._kv_heads + heads  # [2, kv_head, 1]

    def attend_in_pieces(
        self,
        queries: torch.Tensor,
        memory: torch.Tensor,
        blocks: torch.Tensor,
        layer: int,
        newest: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        """Attention of one sequence's queries, on a CPU.

        Args:
            queries: ``[kv_head, group, head_dim]``.
            memory: where the blocks lie.
            blocks: ``[kv_head, n]``, all of whose tokens are attended to.
            newest: K and V beside them, ``[2, kv_head, token, head_dim]``.
            scale: of scores; None: one over the root of ``head_dim``.

        Returns:
            Of the shape of ``queries``.
        """
        outputs, weights = [], []
        for keys, values in chain([newest[:, None]], self._read_pieces(memory, blocks, layer)):
            # What the public function calls on a CPU, but it keeps the logarithm of the weights' sum to itself.
            output, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                queries[None], keys, values, scale=scale
            )
            outputs.append(output)
            weights.append(weight)
        shares = torch.cat(weights).softmax(0)[..., None]
        return (shares * torch.cat(outputs)).sum(0).to(queries.dtype)

    def attend_at_once(
        self,
        queries: torch.Tensor,
        memory: torch.Tensor,
        blocks: torch.Tensor,
        layer: int,
        mask: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        """Attention of several sequences' queries, without a wait for the device.

        Args:
            queries: ``[sequences, kv_head, group, head_dim]``.
            memory: where the blocks lie.
            blocks: ``[sequences, kv_head, n]``.
            mask: which of their tokens are attended to, ``[sequences, 1, 1, n * token]``.
            scale: of scores; None: one over the root of ``head_dim``.

        Returns:
            Of the shape of ``queries``.
        """
        pages = self._find_pages(blocks[:, None], layer).transpose(0, 1)
        read = memory.view(-1, self._page_size).index_select(0, pages.flatten())
        keys, values = read.view(2, *blocks.shape[:2], -1, self._head_dim)
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)

    def _read_pieces(self, memory: torch.Tensor, blocks: torch.Tensor, layer: int) -> Iterator[torch.Tensor]:
        """K and V of some blocks after the other, ``[2, 1, kv_head, tokens, head_dim]``, each gone with the next."""
        if not blocks.numel():
            return
        every_page = memory.view(-1, self._page_size)
        at_once = len(self._piece) // (2 * self._kv_heads)
        for some in self._find_pages(blocks, layer).split(at_once, -1):
            piece = self._piece[: some.numel()]
            torch.index_select(every_page, 0, some.flatten(), out=piece)
            yield piece.view(2, 1, self._kv_heads, -1, self._head_dim)

    def _find_pages(self, blocks: torch.Tensor, layer: int) -> torch.Tensor:
        """Blocks ``[..., kv_head, n]`` -> their pages ``[..., 2, kv_head, n]``, given an axis for K and V or none."""
        return (blocks * self._num_layers + layer) * (2 * self._kv_heads) + self._first_pages
