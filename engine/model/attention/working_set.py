"""Working sets: copies on a GPU of the blocks that a step reads of an offloaded sequence.

Working sets are needed because attention on a GPU cannot read host memory. A sequence has one working set for each
layer. A working set is contiguous, so that attention reads it without a gather::

    slot      0 ............................ n - 1 │ n
    block     initial, recalled and window blocks  │ the newest block, with the tokens that it has

The order of the slots does not matter, because keys include their positions (RoPE). If a step needs other blocks than
the step before, the new blocks are copied to the slots of blocks that are not needed any more. Each KV head chooses its
own blocks, so a slot has different blocks for different heads.

The original blocks are in host memory, and the newest one in KV memory.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.model.device_copies import send_tensor

__all__ = ["WorkingSet"]


class WorkingSet:
    """The working set of one offloaded sequence in one layer: copies on a GPU of the blocks that a step reads.

    Args:
        num_slots: maximum number of blocks for each KV head, including the newest one.
        like: KV memory ``[block, layer, 2, kv_head, token, head_dim]``. The working set takes its dtype, its device
            and its sizes of ``kv_head``, ``token`` and ``head_dim``.
    """

    def __init__(self, num_slots: int, like: torch.Tensor) -> None:
        _, self._num_layers, _, self._kv_heads, self._block_size, head_dim = like.shape
        self._num_slots = num_slots
        self.kv = like.new_empty(2, self._kv_heads, num_slots * self._block_size, head_dim)
        """K and V of all slots, ``[k/v, kv_head, slot * token, head_dim]``."""
        self._pages = self.kv.view(2 * self._kv_heads * num_slots, -1)
        self._block_in_slot = torch.full((self._kv_heads, num_slots), -1, dtype=torch.long)
        self._num_full = -1  # number of slots before that of the newest block

    def fill(self, wanted: torch.Tensor, source: torch.Tensor, layer: int) -> int:
        """Copy missing full blocks from host memory, so that the working set has exactly the wanted blocks.

        Args:
            wanted: the wanted blocks, bool, ``[kv_head, block of the sequence]``, in host memory. It is true for the
                same number of blocks in each head.
            source: the blocks of the sequence, ``[block, layer, 2, kv_head, token, head_dim]``, in host memory.
            layer: the layer to copy.

        Returns:
            The number of copies: one for each missing block of each KV head.
        """
        count = int(wanted[0].sum())
        held = self._block_in_slot[:, :count]
        kept = (held >= 0) & wanted.gather(1, held.clamp(min=0))
        # The last column stands for blocks that are not wanted any more.
        present = wanted.new_zeros(wanted.shape[0], wanted.shape[1] + 1)
        present.scatter_(1, torch.where(kept, held, wanted.shape[1]), True)
        # Both lists are sorted by head, and in each head as many blocks are missing as slots are free. So the n-th
        # missing block gets the n-th free slot.
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
        """Copy the tokens of the newest block that the working set does not have yet.

        Args:
            newest: the newest block in KV memory, ``[2, kv_head, token, head_dim]``.
            filled: number of tokens in this block.
        """
        start = self._num_full * self._block_size
        have = self._num_newest if self._num_newest < filled else 0
        self.kv[:, :, start + have : start + filled] = newest[:, :, have:filled]
        self._num_newest = filled

    def attend(self, queries: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Compute attention of one token to all blocks of the working set.

        Args:
            queries: the queries of the token, ``[kv_head, group, head_dim]``.
            scale: factor of the scores, or None for 1 / sqrt(head_dim).

        Returns:
            The output, ``[kv_head, group, head_dim]``.
        """
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
