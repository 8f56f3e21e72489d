"""Reads and writes the blocks of KV memory as rows of bytes, for any layout, with one operation per tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["KVTensors"]

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class KVTensors:
    """Blocks of KV memory in one tensor or several, such as one for each layer, which are copied as rows of bytes.

    The row of a block has the block's elements of the first tensor, then of the second, and so on. The elements of a
    tensor are in the order of memory, outermost axis first. So a block has the same bytes in the pool as without
    staging (``DirectMemory`` with ``KVMemory.locate_blocks``). A *kernel block* is a block of the attention kernel,
    which may be smaller than a block of the pool.

    Args:
        tensors: tensors ``[kernel block, ...]`` of any dtype, on one device, which do not share memory. If the block
            axis is not the first one, as in ``[K or V, block, ...]``, the caller moves it (``movedim``, a view).
        num_blocks: number of blocks; each consists of the same number of successive kernel blocks.

    Attributes:
        num_blocks: number of blocks.
        block_bytes: bytes of one block, in all tensors.
        device: device of the tensors.

    Raises:
        ValueError: a tensor's number of kernel blocks is not a multiple of ``num_blocks``, or the tensors are on
            several devices.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], num_blocks: int) -> None:
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1:
            raise ValueError(f"KV memory must be on one device, but it is on {', '.join(map(str, devices)) or 'none'}")
        self.num_blocks = num_blocks
        self.device = devices.pop()
        layouts = [_describe(tensor, num_blocks) for tensor in tensors]
        ends = list(itertools.accumulate(layout.nbytes for layout in layouts))
        self.block_bytes = ends[-1]
        # Elements of every dtype are moved as integers, as wide as the layout allows, because wide integers are
        # fastest.
        unit = math.gcd(8, self.block_bytes, *(number for layout in layouts for number in layout.numbers))
        self._unit = _UNITS[unit]
        # Each tensor, and the columns that its values have in the row of a block.
        self._parts = [
            (layout.view_as(unit), slice((end - layout.nbytes) // unit, end // unit))
            for layout, end in zip(layouts, ends, strict=True)
        ]

    def gather(self, index: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy blocks of KV memory to ``rows``.

        Args:
            index: indices of the blocks, int64 ``[n]``, on the device.
            rows: uint8 ``[n, block_bytes]`` on the device. Between rows there may be gaps of a multiple of 8 bytes.
        """
        for part, row in self._pairs(rows):
            torch.index_select(part, 0, index, out=row)

    def scatter(self, index: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy ``rows`` to blocks of KV memory, with the arguments of ``gather``; no index may occur twice."""
        for part, row in self._pairs(rows):
            part.index_copy_(0, index, row)

    def _pairs(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each tensor ``[block, ...]`` with its part of the rows, which has the shape ``[n, ...]``."""
        units = rows.view(self._unit)
        return [(tensor, units[:, columns].unflatten(1, tensor.shape[1:])) for tensor, columns in self._parts]


@dataclass(frozen=True, eq=False)
class _Layout:
    """Layout of the blocks of one tensor in memory: sizes and strides of the axes, in bytes."""

    tensor: torch.Tensor
    blocks: tuple[int, int]  # number of blocks, and the stride between them
    axes: list[tuple[int, int]]  # size and stride of each axis of a block, outermost first
    run: int  # contiguous bytes at the end of the axes

    @property
    def offset(self) -> int:
        """Offset of the tensor in its memory, in bytes."""
        return int(self.tensor.storage_offset()) * self.tensor.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes of one block in this tensor."""
        return math.prod(size for size, _ in self.axes) * self.run

    @property
    def numbers(self) -> list[int]:
        """Offsets, strides and sizes in bytes.

        The size of the integers by which a block is copied must divide each of these numbers.
        """
        return [self.offset, self.blocks[1], self.run, self.nbytes, *(stride for _, stride in self.axes)]

    def view_as(self, unit: int) -> torch.Tensor:
        """Return a view of the tensor's memory as integers of ``unit`` bytes, ``[block, *axes, integers]``."""
        axes = [self.blocks, *self.axes, (self.run // unit, unit)]
        shape, strides = [size for size, _ in axes], [stride // unit for _, stride in axes]
        view = torch.empty(0, dtype=_UNITS[unit], device=self.tensor.device)
        return view.set_(self.tensor.untyped_storage(), self.offset // unit, shape, strides)


def _describe(tensor: torch.Tensor, num_blocks: int) -> _Layout:
    """Return the layout of a tensor ``[kernel block, ...]``. Axes of a block that are contiguous are merged to one."""
    if tensor.shape[0] % num_blocks:
        text = f"a tensor has {tensor.shape[0]} kernel blocks, which is not a multiple of {num_blocks} blocks"
        raise ValueError(text)
    size = tensor.element_size()
    per_block = tensor.shape[0] // num_blocks
    axes = [(n, stride * size) for n, stride in zip((per_block, *tensor.shape[1:]), tensor.stride(), strict=True)]
    outer = sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: (-axis[1], -axis[0]))
    run = size
    while outer and outer[-1][1] == run:
        run *= outer.pop()[0]
    return _Layout(tensor, (num_blocks, per_block * tensor.stride(0) * size), _merge(outer), run)


def _merge(axes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge each axis with the next axis if the stride of the first equals the size of the next axis in bytes."""
    merged: list[tuple[int, int]] = []
    for size, stride in axes:
        if merged and merged[-1][1] == size * stride:
            size *= merged.pop()[0]
        merged.append((size, stride))
    return merged
