"""Attention of one query per sequence to chosen blocks; each KV head has its own blocks.

A page is one block's part of one layer's K or V for one head: one contiguous span of memory ``[block, layer, 2,
kv_head, token, head_dim]``. Page 0 is that of block 0, layer 0, K, head 0.

A CPU reads pages in place, a few at a time: as many as stay in a core's cache between the read and the attention. So
memory is read once and not written. The outputs of the pieces are combined by the sums of their weights. Each core
computes pieces by itself. If torch split every small operation over all cores, each would wait for the last one, which
takes many times as long on a machine with other work.

A GPU reads all pages of a layer and of all sequences together.
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
"""Bytes of K and V that stay in a core's cache. 2 and 4 MiB measured the same; 1 and 8 MiB took 1.5 times as long."""


class PageReader:
    """Reads memory of one shape, for one thread at a time.

    Args:
        like: memory ``[block, layer, 2, kv_head, token, head_dim]``; all memory that it reads has this dtype and
            device.
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
        """Compute attention of one sequence's queries, on a CPU.

        Args:
            queries: ``[kv_head, group, head_dim]``.
            memory: the memory that holds the blocks.
            blocks: ``[kv_head, n]``; the queries attend to all of their tokens.
            layer: the layer to read.
            newest: additional K and V, ``[2, kv_head, token, head_dim]``.
            scale: the scale of scores; None: one over the root of ``head_dim``.

        Returns:
            A tensor with the shape of ``queries``.
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
        """Compute attention of several sequences' queries, without a wait for the device.

        Args:
            queries: ``[sequences, kv_head, group, head_dim]``.
            memory: the memory that holds the blocks.
            blocks: ``[sequences, kv_head, n]``.
            layer: the layer to read.
            mask: which of their tokens the queries attend to, ``[sequences, 1, 1, n * token]``.
            scale: the scale of scores; None: one over the root of ``head_dim``.

        Returns:
            A tensor with the shape of ``queries``.
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
        """Compute attention to pages ``[2, kv_head, n]``, one piece after the other, through this worker's memory."""
        parts = []
        for some in pages:
            piece = self._pieces[worker, : some.numel()]
            torch.index_select(every_page, 0, some.flatten(), out=piece)
            parts.append(_attend(queries, piece.view(2, 1, self._kv_heads, -1, self._head_dim), scale))
        return parts

    def _find_pages(self, blocks: torch.Tensor, layer: int) -> torch.Tensor:
        """Convert blocks ``[..., kv_head, n]`` to their pages ``[..., 2, kv_head, n]``.

        More dimensions before ``kv_head`` need one of size 1 for K and V.
        """
        return (blocks * self._num_layers + layer) * (2 * self._kv_heads) + self._first_pages


def _attend(queries: torch.Tensor, kv: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention to K and V, and the log of the weights' sum, which the public function does not return."""
    output, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, *kv, scale=scale)
    return output, weight


@functools.cache
def _start_workers(count: int) -> ThreadPoolExecutor:
    """Start threads that run each operation on a single thread."""
    workers, all_there = ThreadPoolExecutor(count, "pages"), threading.Barrier(count)

    def start() -> None:
        torch.set_num_threads(1)
        all_there.wait()

    for started in [workers.submit(start) for _ in range(count)]:
        started.result()
    torch.set_num_threads(count)  # a running thread retains its number, but new threads get the last one set
    return workers
