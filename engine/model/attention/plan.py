"""The blocks that one step reads of each sequence, as far as known before a layer chooses: one row of numbers each.

column    0      │ 1 .................................. │ .................. │ ......
number    newest │ initial, window, others that all    │ recalled, the best │ padding
                 │ heads read                          │ first              │
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.model.device_copies import send_tensor
from engine.scheduling.retrieval_config import BlockPartition

__all__ = ["StepPlan"]


class StepPlan:
    """The plan for a step of several sequences, made once for all layers that read the same number of blocks.

    Args:
        partitions: the partitions of the sequences' blocks.
        rows: the sequences' rows in tables of all sequences.
        newest: for each sequence the block of KV memory that holds its newest tokens, and how many it holds.
        block_size: tokens in a block.
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
        """Number of blocks read of each sequence, for each head."""
        self.newest = newest
        shared = [_list_shared(partition) for partition in partitions]
        columns, tokens = torch.arange(max(self.lengths)), torch.arange(block_size)
        lengths, num_shared = torch.tensor([self.lengths, [len(numbers) for numbers in shared]])[:, :, None, None]
        blocks, filled = torch.tensor(newest).t()[:, :, None, None]
        is_full = (columns > 0) & (columns < lengths)
        numbers = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in shared], batch_first=True)
        # Each is ``[sequences, 1, columns]``, except the tokens.
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
        """``mask``: which tokens are read, ``[sequences, 1, 1, columns * block_size]``."""

    def number_blocks(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return numbers ``[sequences, kv_head, columns]``, from the chosen ones of all rows ``[row, kv_head, n]``."""
        chosen = chosen[self._rows]
        return self._numbers.where(~self._is_recalled, chosen.gather(2, self._ranks.expand(-1, chosen.shape[1], -1)))

    def find_blocks(self, numbers: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the blocks of memory for these numbers, in the same shape.

        A row is padded with its newest block: a masked NaN is still NaN, so padding must not be a block that a load may
        be writing.

        Args:
            numbers: the result of ``number_blocks``.
            places: for every row, the locations of its full blocks, ``[row, block]``.
        """
        found = places[self._rows][:, None].expand(-1, numbers.shape[1], -1).gather(2, numbers)
        return found.where(self._is_full, self._newest)


def _list_shared(partition: BlockPartition) -> list[int]:
    """Return the numbers of the blocks that all heads read, the newest first."""
    last, stop = partition.num_blocks - 1, partition.num_initial
    if partition.num_recalled == partition.num_outside:
        stop = partition.window_start
    return [last, *range(stop), *range(partition.window_start, last)]
