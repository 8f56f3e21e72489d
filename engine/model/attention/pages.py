"""Attention of one token per sequence to chosen blocks, which may be different blocks for each KV head.

A page is the part of a block for one layer, K or V, and one KV head. In memory ``[block, layer, 2, kv_head, token,
head_dim]`` it is contiguous. Page 0 is the K of block 0, layer 0 and KV head 0.

On a CPU the pages are divided into pieces that fit in the cache of a core. Each thread copies a piece into its buffer
and computes attention to it, so each page is read from memory only once. The outputs of the pieces are then combined,
weighted by the sums of their attention weights. Each piece is computed by one thread. If torch divided each small
operation among all threads, each operation would wait for the slowest thread, which takes many times as long if the
machine has other work.

On a GPU all pages of a layer are read together, for all sequences.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["PIECE_BYTES", "PageReader"]

PIECE_BYTES = 2 << 20
"""Number of bytes of K and V in a piece. With 2 and 4 MiB the time is the same; 1 and 8 MiB take 1.5 times as long."""


class PageReader:
    """Computes attention to chosen blocks of a memory. Do not use one object in several threads at the same time.

    Args:
        like: memory ``[block, layer, 2, kv_head, token, head_dim]``. The memory that is read later has the same dtype
            and device, and the same sizes except ``block``.
    """

    def __init__(self, like: torch.Tensor) -> None:
        _, self._num_layers, _, self._kv_heads, block_size, self._head_dim = like.shape
        self._page_size = block_size * self._head_dim
        pages_of_block = 2 * self._kv_heads
        self._at_once = max(1, PIECE_BYTES // (pages_of_block * self._page_size * like.element_size()))
        self._num_workers = torch.get_num_threads() if like.device.type == "cpu" else 0
        self._pieces = like.new_empty(self._num_workers, self._at_once * pages_of_block, self._page_size)
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
        """Compute attention of one token of one sequence, on a CPU.

        Args:
            queries: the queries of the token, ``[kv_head, group, head_dim]``.
            memory: the memory with the blocks.
            blocks: the blocks to read for each KV head, ``[kv_head, n]``; all tokens in them are read.
            layer: the layer to read.
            newest: K and V of further tokens to read, ``[2, kv_head, token, head_dim]``.
            scale: factor of the scores, or None for 1 / sqrt(head_dim).

        Returns:
            The output, ``[kv_head, group, head_dim]``.
        """
        every_page = memory.view(-1, self._page_size)
        pages = self._find_pages(blocks, layer).split(self._at_once, -1) if blocks.numel() else ()
        attend = functools.partial(self._attend_pieces, queries[None], every_page, scale)
        if len(pages) <= 1:
            parts = attend(pages, 0)
        else:
            workers, count = _start_workers(self._num_workers), self._num_workers
            futures = [workers.submit(attend, pages[worker::count], worker) for worker in range(count)]
            parts = [part for future in futures for part in future.result()]
        outputs, weights = zip(_attend(queries[None], newest[:, None], scale), *parts, strict=True)
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
        """Compute attention of one token of each sequence. The host does not wait for the device.

        Args:
            queries: the queries, ``[sequences, kv_head, group, head_dim]``.
            memory: the memory with the blocks.
            blocks: the blocks to read for each sequence and KV head, ``[sequences, kv_head, n]``.
            layer: the layer to read.
            mask: which tokens of these blocks count, ``[sequences, 1, 1, n * token]``.
            scale: factor of the scores, or None for 1 / sqrt(head_dim).

        Returns:
            The output, ``[sequences, kv_head, group, head_dim]``.
        """
        pages = self._find_pages(blocks[:, None], layer).transpose(0, 1)
        read = memory.view(-1, self._page_size).index_select(0, pages.flatten())
        keys, values = read.view(2, *blocks.shape[:2], -1, self._head_dim)
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)

    @torch.inference_mode()
    def _attend_pieces(
        self,
        queries: torch.Tensor,
        every_page: torch.Tensor,
        scale: float | None,
        pages: Sequence[torch.Tensor],
        worker: int,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Compute attention to pieces, one after the other, with the buffer of this worker.

        Args:
            queries: the queries, ``[1, kv_head, group, head_dim]``.
            every_page: the memory as pages, ``[page, elements]``.
            scale: factor of the scores, or None for 1 / sqrt(head_dim).
            pages: the pieces; each has page indices ``[2, kv_head, n]``.
            worker: the index of the worker.

        Returns:
            The output of each piece, and the logarithm of the sum of its weights.
        """
        parts = []
        for some in pages:
            piece = self._pieces[worker, : some.numel()]
            torch.index_select(every_page, 0, some.flatten(), out=piece)
            parts.append(_attend(queries, piece.view(2, 1, self._kv_heads, -1, self._head_dim), scale))
        return parts

    def _find_pages(self, blocks: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the page indices ``[..., 2, kv_head, n]`` of blocks.

        Args:
            blocks: blocks ``[kv_head, n]``, or ``[..., 1, kv_head, n]``.
            layer: the layer of the pages.
        """
        return (blocks * self._num_layers + layer) * (2 * self._kv_heads) + self._first_pages


def _attend(queries: torch.Tensor, kv: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention to K and V; return the output, and the logarithm of the sum of the weights.

    This calls an operator of torch directly, because ``scaled_dot_product_attention`` does not return the sum.
    """
    output, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, *kv, scale=scale)
    return output, weight


@functools.cache
def _start_workers(count: int) -> ThreadPoolExecutor:
    """Start ``count`` worker threads, in which torch does not divide operations among threads."""
    workers, all_there = ThreadPoolExecutor(count, "pages"), threading.Barrier(count)

    def start() -> None:
        torch.set_num_threads(1)
        all_there.wait()

    for started in [workers.submit(start) for _ in range(count)]:
        started.result()
    torch.set_num_threads(count)  # running threads are not changed; new threads get the number that was set last
    return workers
