"""Copies on a GPU of blocks in host memory, which its attention cannot read there.

A step reads one contiguous working set of each layer, so that attention is one plain read of it::

    slot      0 ............................ n - 1 │ n
    holds     initial, recalled and window blocks  │ the newest block, as far as it is filled

Keys carry their positions (RoPE), so the order of slots has no effect. A working set is updated only if a step needs
other blocks than before: the new blocks take the slots of blocks that are no longer needed. Each KV head chooses for
itself, so a slot holds different blocks for different heads.

A working set is a cache: the original blocks are in host memory, the newest one in KV memory.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.model.device_copies import send_tensor

__all__ = ["WorkingSet"]


class WorkingSet:
    """K and V that steps read of one sequence in one layer.

    Args:
        num_slots: the number of blocks that it can hold for each head, the newest one included.
        like: KV memory ``[block, layer, 2, kv_head, token, head_dim]``; the working set has its dtype and device.
    """

    def __init__(self, num_slots: int, like: torch.Tensor) -> None:
        _, self._num_layers, _, self._kv_heads, self._block_size, head_dim = like.shape
        self._num_slots = num_slots
        self.kv = like.new_empty(2, self._kv_heads, num_slots * self._block_size, head_dim)
        """``[k/v, kv_head, slot * token, head_dim]``."""
        self._pages = self.kv.view(2 * self._kv_heads * num_slots, -1)
        self._block_in_slot = torch.full((self._kv_heads, num_slots), -1, dtype=torch.long)
        self._num_full = -1  # number of slots before the newest block's

    def fill(self, wanted: torch.Tensor, source: torch.Tensor, layer: int) -> int:
        """Copy the missing blocks, so that the set holds exactly the wanted blocks.

        Args:
            wanted: ``[kv_head, block of the sequence]`` in host memory, true for the same number of blocks of each
                head.
            source: host memory ``[block of the sequence, layer, 2, kv_head, token, head_dim]`` to copy them from.
            layer: the layer to copy.

        Returns:
            The number of blocks of a head that were copied.
        """
        count = int(wanted[0].sum())
        held = self._block_in_slot[:, :count]
        kept = (held >= 0) & wanted.gather(1, held.clamp(min=0))
        # The last column is for slots with a block that is not wanted any more.
        present = wanted.new_zeros(wanted.shape[0], wanted.shape[1] + 1)
        present.scatter_(1, torch.where(kept, held, wanted.shape[1]), True)
        # Both lists are sorted by head, and each head misses as many blocks as it has unneeded slots: they pair one to
        # one.
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
        """Copy the new tokens of the newest block ``[2, kv_head, token, head_dim]``, which has ``filled`` tokens."""
        start = self._num_full * self._block_size
        have = self._num_newest if self._num_newest < filled else 0
        self.kv[:, :, start + have : start + filled] = newest[:, :, have:filled]
        self._num_newest = filled

    @property
    def num_blocks(self) -> int:
        """Number of blocks that ``attend`` reads for each head, the newest included."""
        return self._num_full + 1

    def attend(self, queries: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Compute attention to all blocks in the set; queries and result are ``[kv_head, group, head_dim]``."""
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
