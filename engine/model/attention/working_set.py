"""Copies that a GPU holds of the blocks of a sequence that lies in host memory, which attention cannot read.

A step reads one contiguous working set of each layer, so that attention is one plain read of it::

    slot      0 ............................ n - 1 │ n
    holds     initial, recalled and window blocks  │ the newest block, as far as it is filled

Keys carry their positions (RoPE), so the order of slots means nothing, and a working set is updated only where other
blocks are wanted than before: blocks no longer wanted give their slots to those newly wanted. Each KV head chooses for
itself, so a slot holds different blocks for different heads.

A working set is a cache: the truth is in host memory, and of the newest block in KV memory.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.model.device_copies import send_tensor

__all__ = ["WorkingSet"]


class WorkingSet:
    """K and V that steps read of one sequence in one layer.

    Args:
        num_slots: blocks that it can hold for each head, the newest one included.
        like: KV memory ``[block, layer, 2, kv_head, token, head_dim]``, whose dtype and device it has.
    """

    def __init__(self, num_slots: int, like: torch.Tensor) -> None:
        _, self._num_layers, _, self._kv_heads, self._block_size, head_dim = like.shape
        self._num_slots = num_slots
        self.kv = like.new_empty(2, self._kv_heads, num_slots * self._block_size, head_dim)
        """``[k/v, kv_head, slot * token, head_dim]``."""
        self._pages = self.kv.view(2 * self._kv_heads * num_slots, -1)
        self._block_in_slot = torch.full((self._kv_heads, num_slots), -1, dtype=torch.long)
        self._num_full = -1  # slots before the newest block's

    def fill(self, wanted: torch.Tensor, source: torch.Tensor, layer: int) -> int:
        """Bring in the blocks that are missing, so that it holds exactly the blocks that are wanted.

        Args:
            wanted: ``[kv_head, block of the sequence]`` in host memory, true for equally many blocks of each head.
            source: host memory ``[block of the sequence, layer, 2, kv_head, token, head_dim]`` to copy them from.

        Returns:
            How many blocks of a head were copied.
        """
        count = int(wanted[0].sum())
        held = self._block_in_slot[:, :count]
        kept = (held >= 0) & wanted.gather(1, held.clamp(min=0))
        present = wanted.new_zeros(wanted.shape[0], wanted.shape[1] + 1)  # the last column takes what is not kept
        present.scatter_(1, torch.where(kept, held, wanted.shape[1]), True)
        # Sorted by head, and each head lacks as many blocks as it has slots to spare: these pair up one to one.
        heads, missing = (wanted & ~present[:, :-1]).nonzero(as_tuple=True)
        _, slots = (~kept).nonzero(as_tuple=True)
        if len(missing):
            self._copy_blocks(source, layer, missing, heads, slots)
            self._block_in_slot[heads, slots] = missing
        self._block_in_slot[:, count:] = -1
        if count != self._num_full:
            self._num_full, self._num_newest = count, 0
        return len(missing)

    def append_newest(self, newest: torch.Tensor, filled: int) -> None:
        """Take in the new tokens of the newest block ``[2, kv_head, token, head_dim]``; ``filled`` are there."""
        start = self._num_full * self._block_size
        have = self._num_newest if self._num_newest < filled else 0
        self.kv[:, :, start + have : start + filled] = newest[:, :, have:filled]
        self._num_newest = filled

    @property
    def num_blocks(self) -> int:
        """Blocks that ``attend`` reads for each head, the newest included."""
        return self._num_full + 1

    def attend(self, queries: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of queries ``[kv_head, group, head_dim]`` to everything held; of the same shape."""
        length = self._num_full * self._block_size + self._num_newest
        keys, values = self.kv[:, None, :, :length]
        return scaled_dot_product_attention(queries[None], keys, values, scale=scale)[0]

    def _copy_blocks(
        self, source: torch.Tensor, layer: int, blocks: torch.Tensor, heads: torch.Tensor, slots: torch.Tensor
    ) -> None:
        every_page = source.view(-1, self._pages.shape[1])
        kinds = torch.arange(2)[:, None]
        from_pages = (((blocks * self._num_layers + layer) * 2 + kinds) * self._kv_heads + heads).flatten()
        to_pages = ((kinds * self._kv_heads + heads) * self._num_slots + slots).flatten()
        device = self._pages.device
        copied = every_page.index_select(0, from_pages)
        self._pages.index_copy_(0, send_tensor(to_pages, device), send_tensor(copied, device))
