"""KV memory for ``Transfers`` that moves blocks through host buffers. The pool reads and writes only these buffers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvstore_backend.backend import HEADROOM_BYTES
from kvstore_backend.staging.cuda import CudaDevice
from kvstore_backend.staging.device import Codec, Device
from kvstore_backend.staging.ring import Buffer, Registry, Ring
from kvstore_backend.staging.stand_in import StandInDevice
from kvstore_backend.staging.tensors import KVTensors
from kvstore_backend.transfers import Event, TransferMemory, Window

__all__ = ["StagedGroups", "StagedMemory"]

# Moving a buffer takes 10 ms with a pool of 3 GB/s, and 1 ms over a GPU's bus of 25 GB/s, so copies end while the pool
# works. The size includes the headroom, because torch rounds the size of pinned memory up to a power of two.
_BUFFER_BYTES = 32 << 20

# Minimum number of buffers in a ring: the pool uses one, while a copy uses the other.
_DEPTH = 2


class StagedMemory:
    """KV memory for ``Transfers``, with two rings of host buffers, one for loads and one for saves.

    Any thread may call the methods.

    Args:
        kv: the KV memory.
        registry: object with which all buffers are registered: the pool.
        codec: converts blocks to another form for the pool, or None to store them in the form of KV memory.
        device: the device of the KV memory, or None to use CUDA for CUDA tensors and the stand-in for other tensors.
        buffer_bytes: size of a buffer with headroom. A buffer has space for at least one block and at most all blocks.
        incoming_bytes: total size of the ring for loads; at least two buffers are allocated.
    """

    def __init__(
        self,
        kv: KVTensors,
        registry: Registry,
        codec: Codec | None = None,
        device: Device | None = None,
        buffer_bytes: int = _BUFFER_BYTES,
        incoming_bytes: int = 0,
    ) -> None:
        self._device: Device = device or (CudaDevice(kv.device) if kv.device.type == "cuda" else StandInDevice())
        with contextlib.ExitStack() as undo:
            self._incoming = _Lane(kv, registry, codec, self._device, buffer_bytes, incoming_bytes)
            undo.callback(self._incoming.ring.close)
            self._outgoing = _Lane(kv, registry, codec, self._device, buffer_bytes, 0)
            undo.pop_all()

    def record_event(self) -> Event | None:
        return self._device.record_event()

    def open_incoming(self, blocks: Sequence[int], after: Event | None) -> Window:
        return _StagedWindow(self._incoming, blocks, after)

    def open_outgoing(self, blocks: Sequence[int], after: Event | None) -> Window:
        window = _StagedWindow(self._outgoing, blocks, after)
        try:
            window.fetch()
        except BaseException:
            window.take_back()
            raise
        return window


class StagedGroups:
    """KV memory of several groups of layers for ``Transfers``. The memory of one call has blocks of one group only.

    The index of a block is ``group * num_blocks + id``.

    Args:
        groups: the memory of each group.
        num_blocks: number of blocks in KV memory.
    """

    def __init__(self, groups: Sequence[TransferMemory], num_blocks: int) -> None:
        self._groups = groups
        self._num_blocks = num_blocks
        self.record_event = groups[0].record_event

    def open_incoming(self, blocks: Sequence[int], after: Event | None) -> Window:
        number, own = self._take_group(blocks)
        return self._groups[number].open_incoming(own, after)

    def open_outgoing(self, blocks: Sequence[int], after: Event | None) -> Window:
        number, own = self._take_group(blocks)
        return self._groups[number].open_outgoing(own, after)

    def _take_group(self, blocks: Sequence[int]) -> tuple[int, list[int]]:
        """Return the group of the first block, and the ids of the leading blocks that belong to this group."""
        number = blocks[0] // self._num_blocks
        leading = itertools.takewhile(lambda block: block // self._num_blocks == number, blocks)
        return number, [block % self._num_blocks for block in leading]


class _Lane:
    """Path of all loads or of all saves: a ring of buffers, a stream, and device memory with the layout of a buffer.

    The stream runs one copy after another, so all copies use the same device memory.
    """

    def __init__(
        self,
        kv: KVTensors,
        registry: Registry,
        codec: Codec | None,
        device: Device,
        buffer_bytes: int,
        total_bytes: int,
    ) -> None:
        nbytes = codec.nbytes if codec else kv.block_bytes
        self._kv = kv
        self._codec = codec
        self._stride = HEADROOM_BYTES + nbytes
        self.capacity = max(1, min(kv.num_blocks, buffer_bytes // self._stride))
        self._stream = device.open_stream()
        self._staging = device.allocate(self.capacity * self._stride)
        self._index = device.allocate(self.capacity * 8).view(torch.int64)
        depth = max(_DEPTH, total_bytes // (self.capacity * self._stride))
        # Created last, so that nothing stays registered if one of the steps before fails.
        self.ring = Ring(device, registry, self.capacity, nbytes, depth)

    def fetch(self, buffer: Buffer, blocks: Sequence[int], after: Event | None) -> Event:
        """Copy ``blocks`` from KV memory to the buffer, after the event ``after``; return an event for the end."""
        return self._copy(buffer, blocks, after, [self._gather, self._copy_to_host])

    def deliver(self, buffer: Buffer, blocks: Sequence[int], after: Event | None) -> Event:
        """Copy the buffer to ``blocks`` in KV memory, after the event ``after``; return an event for the end."""
        return self._copy(buffer, blocks, after, [self._copy_to_device, self._scatter])

    def _copy(
        self, buffer: Buffer, blocks: Sequence[int], after: Event | None, steps: list[Callable[[Buffer, int], None]]
    ) -> Event:
        number = partial(self._copy_numbers, buffer, blocks)
        buffer.copied = self._stream.queue([number, *(partial(step, buffer, len(blocks)) for step in steps)], after)
        return buffer.copied

    # The copy steps, which run on the stream.

    def _copy_numbers(self, buffer: Buffer, blocks: Sequence[int]) -> None:
        numbers = buffer.blocks[: len(blocks)]
        numbers.copy_(torch.tensor(blocks))
        self._index[: len(blocks)].copy_(numbers, non_blocking=True)

    def _gather(self, buffer: Buffer, count: int) -> None:
        if self._codec is None:
            self._kv.gather(self._index[:count], self._rows(count))
        else:
            plain = self._staging.new_empty(count, self._kv.block_bytes)
            self._kv.gather(self._index[:count], plain)
            self._rows(count).copy_(self._codec.encode(plain))

    def _copy_to_host(self, buffer: Buffer, count: int) -> None:
        size = count * self._stride
        buffer.memory[:size].copy_(self._staging[:size], non_blocking=True)

    def _copy_to_device(self, buffer: Buffer, count: int) -> None:
        size = count * self._stride
        self._staging[:size].copy_(buffer.memory[:size], non_blocking=True)

    def _scatter(self, buffer: Buffer, count: int) -> None:
        rows = self._rows(count)
        self._kv.scatter(self._index[:count], self._codec.decode(rows) if self._codec else rows)

    def _rows(self, count: int) -> torch.Tensor:
        """Return the first ``count`` blocks in device memory without their headroom, as ``[count, bytes]``."""
        return self._staging.view(-1, self._stride)[:count, HEADROOM_BYTES:]


class _StagedWindow:
    """Memory for one call to the pool: a host buffer with as many leading blocks of ``blocks`` as fit into it."""

    def __init__(self, lane: _Lane, blocks: Sequence[int], after: Event | None) -> None:
        self._lane = lane
        self._after = after
        self._blocks = blocks[: lane.capacity]
        self._buffer = lane.ring.take()
        self._copied: Event | None = None
        self.values = self._buffer.values(len(self._blocks))

    def fetch(self) -> None:
        """Begin to copy the blocks from KV memory to the host buffer."""
        self._copied = self._lane.fetch(self._buffer, self._blocks, self._after)

    def deliver(self, count: int) -> None:
        if count:
            self._copied = self._lane.deliver(self._buffer, self._blocks[:count], self._after)

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def set_aside(self) -> bool:
        return False

    def take_back(self) -> None:
        self._lane.ring.give_back(self._buffer)
