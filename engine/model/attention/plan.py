"""Makes the tables of the blocks that sparse attention reads in one step.

Each sequence has a row with the indices of its blocks. All columns except the recalled blocks are known before a layer
has chosen blocks::

    column    0      │ 1 .............................. │ .................. │ ......
    index     newest │ initial blocks, the window, and  │ recalled blocks,   │ padding
                     │ others that all heads read       │ the best one first │
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.model.device_copies import send_tensor
from engine.scheduling.retrieval_config import BlockPartition

__all__ = ["StepPlan"]


class StepPlan:
    """The tables of the blocks that sparse attention reads in one step, for layers that read the same number of blocks.

    Args:
        partitions: for each sequence the numbers of its initial, recalled and window blocks.
        rows: for each sequence its row in the search index and in the other tables that have a row per sequence.
        newest: for each sequence the block of KV memory with its newest token, and the number of tokens in this block.
        block_size: number of tokens in a block.
        device: the device of the tables.
    """

    def __init__(
        self,
        partitions: Sequence[BlockPartition],
        rows: Sequence[int],
        newest: Sequence[tuple[int, int]],
        block_size: int,
        device: torch.device,
    ) -> None:
        self.lengths = [partition.num_read for partition in partitions]
        """For each sequence, the number of blocks that each KV head reads."""
        self.newest = newest
        shared = [_list_shared(partition) for partition in partitions]
        columns, tokens = torch.arange(max(self.lengths)), torch.arange(block_size)
        lengths, num_shared = torch.tensor([self.lengths, [len(numbers) for numbers in shared]])[:, :, None, None]
        blocks, filled = torch.tensor(newest).t()[:, :, None, None]
        is_full = (columns > 0) & (columns < lengths)
        numbers = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in shared], batch_first=True)
        # Most of these are ``[sequences, 1, columns]``.
        tensors = (
            torch.tensor(rows),
            blocks,
            torch.nn.functional.pad(numbers, (0, len(columns) - numbers.shape[1]))[:, None],
            columns >= num_shared,
            (columns - num_shared).clamp(min=0),
            is_full,
            (is_full[..., None] | ((columns[:, None] == 0) & (tokens < filled[..., None]))).flatten(2)[:, :, None],
        )
        moved = [send_tensor(tensor, device) for tensor in tensors]
        self._rows, self._newest, self._numbers, self._is_recalled, self._ranks, self._is_full, self.mask = moved
        """``mask``: the tokens that are read, ``[sequences, 1, 1, columns * block_size]``."""

    def number_blocks(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the complete table: indices of blocks, ``[sequences, kv_head, columns]``.

        Args:
            chosen: the indices of the blocks that searches have chosen, ``[row, kv_head, n]``; the rows are all rows of
                the search index, not only ``rows``.
        """
        chosen = chosen[self._rows]
        return self._numbers.where(~self._is_recalled, chosen.gather(2, self._ranks.expand(-1, chosen.shape[1], -1)))

    def find_blocks(self, numbers: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return for each block index in ``numbers`` the block in memory, in the same shape.

        For padding it is the newest block of the sequence. Any other block might be in use by a load, and might contain
        NaN, which a mask does not remove.

        Args:
            numbers: the result of ``number_blocks``.
            places: for each row of the search index, the block in memory for each full block of its sequence,
                ``[row, index]``.
        """
        found = places[self._rows][:, None].expand(-1, numbers.shape[1], -1).gather(2, numbers)
        return found.where(self._is_full, self._newest)


def _list_shared(partition: BlockPartition) -> list[int]:
    """Return the indices of the blocks that all KV heads read, the newest block first."""
    last, stop = partition.num_blocks - 1, partition.num_initial
    if partition.num_recalled == partition.num_outside:
        stop = partition.window_start
    return [last, *range(stop), *range(partition.window_start, last)]
