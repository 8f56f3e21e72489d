"""Places of a vLLM block's bytes: one span per layer if the layout stores a layer's part of it in one piece.

vLLM gives each layer a tensor ``[kernel block, head, token, content]`` whose axes are in memory in the order that the
attention backend needs (``KVCacheLayout``): NHD, HND, heads before blocks, or all layers of a block in one piece, in
which case the tensors are views of one allocation. MLA has one head; FP8 has elements of one byte. A block of the
scheduler is one or several successive kernel blocks.

If a model has several KV cache groups (``groups.py``), the layers of different groups share the same memory: the bytes
of a block are those of the layers of the group that owns it. Then a block is given here as ``group * num_blocks + id``.
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

# Devices whose memory can be a source or target of blocks: the host, and GPUs (ROCm's are also called cuda).
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class _Layer:
    """One layer's part of block ``b``: pieces of ``nbytes`` at ``address + b * stride + offset`` for each offset."""

    address: int
    stride: int
    offsets: tuple[int, ...]
    nbytes: int


class KVMemory:
    """KV memory of one group of layers of a worker; describes it without copying it.

    Args:
        tensors: vLLM's ``kv_caches``: layer name -> tensor. Layers that share one tensor count once.
        num_blocks: number of the scheduler's blocks.
        is_mixed: whether layers may differ in layout, such as MLA and its indexer; then ``axes`` is empty.

    Attributes:
        tensors: the tensors of layers with their own memory, in the order of the layers.
        num_blocks: as given.
        is_on_device: whether they are on a GPU.
        layout: order and size of a block's axes in memory, the same for every layer; part of a namespace.
        axes: the same in the form of ``kvstore_backend.resharding``; empty if no axis is known to be the heads.
        num_layers: number of layers with their own memory.
        block_bytes: bytes of a block in all layers.

    Raises:
        ConfigError: the memory is neither the host's nor a GPU's, or its layers differ in an unsupported way.
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
                    f"layer {name} has {tensor.shape[0]} kernel blocks, no multiple of {num_blocks} blocks"
                )
        self.tensors = tuple(unique.values())
        self.num_blocks = num_blocks
        self.is_on_device = self.tensors[0].device.type != "cpu"
        layouts = [_describe_layout(self._order_axes(tensor), str(tensor.dtype)) for tensor in self.tensors]
        is_one = len(set(layouts)) == 1
        if not is_one and not is_mixed:
            raise ConfigError(
                f"layers differ in layout ({', '.join(sorted(set(layouts)))}); KVStoreConnector needs one"
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
        """Return all memory that spans may be in."""
        storages = [tensor.untyped_storage() for tensor in self.tensors]
        return [Span(*each) for each in {storage.data_ptr(): storage.nbytes() for storage in storages}.items()]

    def merge_layers(self) -> tuple[Any, ...]:
        """Return ``tensors``, or one tensor ``[kernel block, layer, ...]`` for all: then a copy takes one operation.

        They are merged if they are in one allocation at equal distances, and each layer's part of a block is before the
        next layer's, so that a block's bytes stay in the same order.
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
        """Return the spans of each block, in an order that is the same in every instance with this layout."""
        return [
            [
                Span(layer.address + block * layer.stride + offset, layer.nbytes)
                for layer in self._layers
                for offset in layer.offsets
            ]
            for block in blocks
        ]

    def count_bytes(self, blocks: Sequence[int]) -> int:
        """Return the total size of these blocks."""
        return len(blocks) * self.block_bytes

    def record_event(self) -> Event | None:
        """Record an event for all GPU work that the calling thread has queued; return None on the host."""
        if not self.is_on_device:
            return None
        from kvstore_backend.staging.cuda import CudaDevice  # this import loads torch

        return CudaDevice(self.tensors[0].device).record_event()

    def make_mark(self) -> Mark:
        """Return an event of the GPU with timing, not recorded yet."""
        from kvstore_backend.staging.cuda import CudaDevice  # this import loads torch

        return CudaDevice(self.tensors[0].device).make_mark()

    def bind_thread(self) -> None:
        """Make the memory's GPU the calling thread's GPU; do nothing for host memory."""
        if self.is_on_device:
            from kvstore_backend.staging.cuda import CudaDevice  # this import loads torch

            CudaDevice(self.tensors[0].device).bind_thread()

    def layout_of(self, heads: int) -> str:
        """Return the ``layout`` of this memory if it had that many heads; only for memory with ``axes``."""
        tensor = self.tensors[0]
        axes = [(name, heads if name == "h" else n, stride) for name, n, stride in self._order_axes(tensor, keep="h")]
        return _describe_layout([axis for axis in axes if axis[1] > 1], str(tensor.dtype))

    def clear_blocks(self, blocks: Iterable[int]) -> None:
        """Zero blocks after a failed read: attention multiplies masked positions by 0, and 0 * NaN is NaN."""
        for block, tensor in itertools.product(blocks, self.tensors):
            size = self._count_kernel_blocks(tensor)
            tensor[block * size : (block + 1) * size].zero_()
        if (cleared := self.record_event()) is not None:
            cleared.synchronize()

    def _count_kernel_blocks(self, tensor: Any) -> int:
        """Return how many kernel blocks a block of the scheduler has in this tensor."""
        return int(tensor.shape[0]) // self.num_blocks

    def _list_axes(self, tensor: Any) -> tuple[tuple[str, int], ...]:
        if tensor.dim() != 4:
            return ()
        axes = [(HEAD if name == "h" else name, n) for name, n, _ in self._order_axes(tensor, keep="h")]
        return (("layer", self.num_layers), *axes, ("byte", tensor.element_size()))

    def _order_axes(self, tensor: Any, keep: str = "") -> list[tuple[str, int, int]]:
        """Return the axes of one block: name, size, stride in bytes; the outermost in memory first.

        Axes of size 1 are left out, except the one named ``keep``: it comes after the others with its stride.
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
    """KV memory of several groups of layers in the same allocation; a block is ``group * num_blocks + id``.

    Args:
        groups: the memory of each group.
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
        """The tensors of all groups, some of them in the same memory."""
        return tuple(itertools.chain.from_iterable(group.tensors for group in self.groups))

    @property
    def num_layers(self) -> int:
        """Number of layers with their own blocks."""
        return sum(group.num_layers for group in self.groups)

    def list_allocations(self) -> list[Span]:
        """Return all memory that spans may be in, each allocation once."""
        return list(dict.fromkeys(span for group in self.groups for span in group.list_allocations()))

    def locate_blocks(self, blocks: Iterable[int]) -> list[Value]:
        """Return the spans of each block, in an order that is the same in every instance with these layouts."""
        return [value for number, block in self._split(blocks) for value in self.groups[number].locate_blocks([block])]

    def count_bytes(self, blocks: Iterable[int]) -> int:
        """Return the total size of these blocks."""
        return sum(self.groups[number].block_bytes for number, _ in self._split(blocks))

    def clear_blocks(self, blocks: Iterable[int]) -> None:
        """Zero blocks after a failed read, in the layers of their group."""
        for number, block in self._split(blocks):
            self.groups[number].clear_blocks([block])

    def _split(self, blocks: Iterable[int]) -> Iterable[tuple[int, int]]:
        """Return group and id of each block."""
        return (divmod(block, self.num_blocks) for block in blocks)


def _prefer_large_pages(span: Span) -> None:
    """Advise the system to commit memory in large pages when it is first written; the system may ignore this.

    By default memory is committed in pages of 4 KiB. A load of 15 MiB into memory that was never written took 350 ms
    with them on a busy machine, and 18 ms into memory that was written before.
    """
    if sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE"):
        start = -(-span.address // mmap.PAGESIZE) * mmap.PAGESIZE
        length = span.address + span.nbytes - start
        if length > 0:
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)


def _describe_layout(axes: Sequence[tuple[str, int, int]], dtype: str) -> str:
    return f"{dtype}[{','.join(f'{name}{size}' for name, size, _ in axes)}]"
