"""Finds the addresses of a vLLM block's bytes, in all layers.

vLLM gives each layer a tensor ``[kernel block, head, token, content]``. A *kernel block* is a block of the attention
backend; a block of vLLM's scheduler is one or several successive kernel blocks. The order of the axes in memory depends
on the attention backend (``KVCacheLayout``): NHD, HND, heads before blocks, or all layers of a block in one piece, so
that the tensors are views of one allocation. MLA has one head; FP8 has elements of one byte. A block has one span per
layer if the layout stores a layer's part of it in one piece, otherwise several.

If a model has several KV cache groups (``kvstore_backend/groups.py``), the groups share the same memory: the bytes of a
block are those in the layers of the group that owns the block. The index of a block is then
``group * num_blocks + id``.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvstore_backend.backend import ConfigError, Span, Value
from kvstore_backend.integrations.vllm.clock import Mark
from kvstore_backend.resharding.family import HEAD
from kvstore_backend.transfers import Event

__all__ = ["GroupedMemory", "KVMemory"]

# Devices with memory from and to which blocks can be moved: the host, and GPUs (torch calls ROCm's GPUs cuda too).
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class _Layer:
    """Addresses of the blocks in one layer.

    Block ``b`` has ``nbytes`` bytes at ``address + b * stride + offset``, for each of ``offsets``.
    """

    address: int
    stride: int
    offsets: tuple[int, ...]
    nbytes: int


class KVMemory:
    """Describes a worker's KV memory for one group of layers: where the bytes of each block are.

    Args:
        tensors: vLLM's ``kv_caches``: layer name -> tensor. Layers that share one tensor count once.
        num_blocks: number of the scheduler's blocks.
        is_mixed: whether layers may have different layouts, such as MLA and its indexer.

    Attributes:
        tensors: the tensors of layers with their own memory, in the order of the layers.
        num_blocks: number of the scheduler's blocks.
        is_on_device: whether the tensors are on a GPU.
        layout: order and sizes of a block's axes in memory, as text for ``Namespace.layout``.
        axes: order and sizes of a block's axes, for ``kvstore_backend.resharding``; empty if the axis of the heads is
            not known, or if layers have different layouts.
        num_layers: number of layers with their own memory.
        block_bytes: bytes of a block in all layers.

    Raises:
        ConfigError: a tensor is neither in host memory nor on a GPU, its size does not match ``num_blocks``, or layers
            have different layouts without ``is_mixed``.
    """

    def __init__(self, tensors: Mapping[str, Any], num_blocks: int, *, is_mixed: bool = False) -> None:
        unique = {tensor.data_ptr(): tensor for tensor in tensors.values()}
        for name, tensor in tensors.items():
            if tensor.device.type not in _DEVICES:
                raise ConfigError(
                    f"layer {name} stores its KV on {tensor.device}; KVStoreConnector moves KV that is in host "
                    "memory or on a GPU, so run vLLM on one of these, or leave --kv-transfer-config out"
                )
            if tensor.shape[0] % num_blocks:
                raise ConfigError(
                    f"layer {name} has {tensor.shape[0]} kernel blocks, which is not a multiple of {num_blocks} blocks"
                )
        self.tensors = tuple(unique.values())
        self.num_blocks = num_blocks
        self.is_on_device = self.tensors[0].device.type != "cpu"
        layouts = [_describe_layout(self._order_axes(tensor), str(tensor.dtype)) for tensor in self.tensors]
        is_one = len(set(layouts)) == 1
        if not is_one and not is_mixed:
            raise ConfigError(
                f"layers have different layouts ({', '.join(sorted(set(layouts)))}); KVStoreConnector needs the same "
                "layout in all layers"
            )
        self.layout = layouts[0] if is_one else " ".join(f"{len([*run])}x{name}" for name, run in groupby(layouts))
        self.num_layers = len(self.tensors)
        self.axes = self._list_axes(self.tensors[0]) if is_one else ()
        self._layers = [self._locate_layer(tensor) for tensor in self.tensors]
        self.block_bytes = sum(len(layer.offsets) * layer.nbytes for layer in self._layers)
        if not self.is_on_device:
            for span in self.list_allocations():
                _prefer_large_pages(span)

    def list_allocations(self) -> list[Span]:
        """Return the allocations of memory that contain all tensors of KV."""
        storages = [tensor.untyped_storage() for tensor in self.tensors]
        return [Span(*each) for each in {storage.data_ptr(): storage.nbytes() for storage in storages}.items()]

    def merge_layers(self) -> tuple[Any, ...]:
        """Return one tensor ``[kernel block, layer, ...]`` for all layers, or one per layer if they cannot be merged.

        With one tensor, the copy of a block takes one operation. The tensors can be merged if they are in one
        allocation at equal distances, and each layer's part of a block is before the next layer's part, so that the
        bytes of a block keep their order.
        """
        first = self.tensors[0]
        offsets = [tensor.storage_offset() for tensor in self.tensors]
        distance = offsets[1] - offsets[0] if len(offsets) > 1 else 0
        sizes, strides = (self._count_kernel_blocks(first), *first.shape[1:]), first.stride()
        extent = max(size * stride for size, stride in zip(sizes, strides, strict=True) if size > 1)
        is_regular = all(
            tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and tensor.stride() == strides
            and tensor.shape == first.shape
            and tensor.dtype == first.dtype
            and offset == offsets[0] + number * distance
            for number, (tensor, offset) in enumerate(zip(self.tensors, offsets, strict=True))
        )
        if distance < extent or not is_regular:
            return self.tensors
        shape = (first.shape[0], len(offsets), *first.shape[1:])
        return (first.as_strided(shape, (strides[0], distance, *strides[1:]), offsets[0]),)

    def locate_blocks(self, blocks: Iterable[int]) -> list[Value]:
        """Return the spans of each block, in an order that is the same in all instances with the same ``layout``."""
        return [
            [
                Span(layer.address + block * layer.stride + offset, layer.nbytes)
                for layer in self._layers
                for offset in layer.offsets
            ]
            for block in blocks
        ]

    def count_bytes(self, blocks: Sequence[int]) -> int:
        """Return the total size of ``blocks`` in bytes."""
        return len(blocks) * self.block_bytes

    def record_event(self) -> Event | None:
        """Record an event for the end of all GPU work that this thread has queued; return None for host memory."""
        if not self.is_on_device:
            return None
        from kvstore_backend.staging.cuda import CudaDevice  # this import loads torch

        return CudaDevice(self.tensors[0].device).record_event()

    def make_mark(self) -> Mark:
        """Return a new event that records the time at which the GPU reaches it."""
        from kvstore_backend.staging.cuda import CudaDevice  # this import loads torch

        return CudaDevice(self.tensors[0].device).make_mark()

    def bind_thread(self) -> None:
        """Make the GPU of this memory the current GPU of the calling thread; do nothing for host memory."""
        if self.is_on_device:
            from kvstore_backend.staging.cuda import CudaDevice  # this import loads torch

            CudaDevice(self.tensors[0].device).bind_thread()

    def layout_of(self, heads: int) -> str:
        """Return the ``layout`` that this memory would have with ``heads`` heads; ``axes`` must not be empty."""
        tensor = self.tensors[0]
        axes = [(name, heads if name == "h" else n, stride) for name, n, stride in self._order_axes(tensor, keep="h")]
        return _describe_layout([axis for axis in axes if axis[1] > 1], str(tensor.dtype))

    def clear_blocks(self, blocks: Iterable[int]) -> None:
        """Set blocks to zero after a failed read, because old bytes may be NaN.

        Attention multiplies the values of masked positions by 0, and 0 * NaN is NaN.
        """
        for block, tensor in itertools.product(blocks, self.tensors):
            size = self._count_kernel_blocks(tensor)
            tensor[block * size : (block + 1) * size].zero_()
        if (cleared := self.record_event()) is not None:
            cleared.synchronize()

    def _count_kernel_blocks(self, tensor: Any) -> int:
        """Return the number of kernel blocks in each block of the scheduler, in this tensor."""
        return int(tensor.shape[0]) // self.num_blocks

    def _list_axes(self, tensor: Any) -> tuple[tuple[str, int], ...]:
        if tensor.dim() != 4:
            return ()
        axes = [(HEAD if name == "h" else name, n) for name, n, _ in self._order_axes(tensor, keep="h")]
        return (("layer", self.num_layers), *axes, ("byte", tensor.element_size()))

    def _order_axes(self, tensor: Any, keep: str = "") -> list[tuple[str, int, int]]:
        """Return name, size and stride in bytes of each axis of one block, the outermost axis in memory first.

        Axes of size 1 are omitted, except the axis ``keep``, which comes after other axes with the same stride.
        """
        size: int = tensor.element_size()
        names = ("k", "h", "n", "c", *map(str, range(tensor.dim())))
        sizes = (self._count_kernel_blocks(tensor), *tensor.shape[1:])
        axes = [(name, n, stride * size) for name, n, stride in zip(names, sizes, tensor.stride(), strict=False)]
        return sorted((axis for axis in axes if axis[1] > 1 or axis[0] == keep), key=lambda axis: (-axis[2], -axis[1]))

    def _locate_layer(self, tensor: Any) -> _Layer:
        nbytes: int = tensor.element_size()
        outer = self._order_axes(tensor)
        while outer and outer[-1][2] == nbytes:
            nbytes *= outer.pop()[1]
        steps: Sequence[range] = [range(0, n * stride, stride) for _, n, stride in outer]
        offsets = tuple(sum(step) for step in itertools.product(*steps))
        stride = self._count_kernel_blocks(tensor) * tensor.stride(0) * tensor.element_size()
        return _Layer(tensor.data_ptr(), stride, offsets, nbytes)


class GroupedMemory:
    """Describes a worker's KV memory for several groups of layers. The index of a block is ``group * num_blocks + id``.

    Args:
        groups: memory of each group. All groups use the same allocations.
    """

    def __init__(self, groups: Sequence[KVMemory]) -> None:
        self.groups = tuple(groups)
        self.num_blocks = groups[0].num_blocks
        self.is_on_device = groups[0].is_on_device
        # Events and threads belong to the device, which is the same for all groups.
        self.record_event = groups[0].record_event
        self.make_mark = groups[0].make_mark
        self.bind_thread = groups[0].bind_thread

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Tensors of all groups. Tensors of different groups may have the same memory."""
        return tuple(itertools.chain.from_iterable(group.tensors for group in self.groups))

    @property
    def num_layers(self) -> int:
        """Number of layers with their own memory, in all groups."""
        return sum(group.num_layers for group in self.groups)

    def list_allocations(self) -> list[Span]:
        """Return the allocations that contain all tensors, each once."""
        return list(dict.fromkeys(span for group in self.groups for span in group.list_allocations()))

    def locate_blocks(self, blocks: Iterable[int]) -> list[Value]:
        """Return the spans of each block, in an order that is the same in all instances with the same layouts."""
        return [value for number, block in self._split(blocks) for value in self.groups[number].locate_blocks([block])]

    def count_bytes(self, blocks: Iterable[int]) -> int:
        """Return the total size of ``blocks`` in bytes."""
        return sum(self.groups[number].block_bytes for number, _ in self._split(blocks))

    def clear_blocks(self, blocks: Iterable[int]) -> None:
        """Set blocks to zero after a failed read, each in the layers of its group."""
        for number, block in self._split(blocks):
            self.groups[number].clear_blocks([block])

    def _split(self, blocks: Iterable[int]) -> Iterable[tuple[int, int]]:
        """Yield for each block the index of its group, and its id in the group."""
        return (divmod(block, self.num_blocks) for block in blocks)


def _prefer_large_pages(span: Span) -> None:
    """Advise the operating system, which may ignore this, to use large pages for memory that was not written yet.

    By default, memory is allocated in pages of 4 KiB at the first write, which is slow: on a busy machine, a load of
    15 MiB took 350 ms into memory that was never written, and 18 ms into memory that was written before.
    """
    if sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE"):
        start = -(-span.address // mmap.PAGESIZE) * mmap.PAGESIZE
        length = span.address + span.nbytes - start
        if length > 0:
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)


def _describe_layout(axes: Sequence[tuple[str, int, int]], dtype: str) -> str:
    return f"{dtype}[{','.join(f'{name}{size}' for name, size, _ in axes)}]"
