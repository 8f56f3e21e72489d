"""KV memory that ``Transfers`` reach through host buffers; the pool touches only those buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvstore_backend.backend import HEADROOM_BYTES
from kvstore_backend.staging.cuda import CudaDevice
from kvstore_backend.staging.device import Codec, Device
from kvstore_backend.staging.ring import Buffer, Registry, Ring
from kvstore_backend.staging.stand_in import StandInDevice
from kvstore_backend.staging.tensors import KVTensors
from kvstore_backend.transfers import Event, Window

__all__ = ["StagedMemory"]

# A buffer takes 10 ms at a pool's 3 GB/s, and 1 ms at a GPU bus's 25 GB/s: copies end while the pool works. The size
# includes headroom, because torch rounds pinned memory up to a power of two.
_BUFFER_BYTES = 32 << 20

# One buffer for the pool to read or write, and one for a copy at the same time.
_DEPTH = 2


class StagedMemory:
    """KV memory with two rings of buffers, one for loads and one for saves. Any thread may call it.

    Args:
        kv: the KV memory.
        registry: where every buffer is registered: the pool.
        codec: the form of blocks in the pool; default: the form in KV memory.
        device: the device of the KV memory; default: CUDA for CUDA tensors, otherwise the stand-in.
        buffer_bytes: size of a buffer with headroom, which limits the blocks of one window: at least one, at most all.
        incoming_bytes: total size of the ring for loads; at least two buffers.
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


class _Lane:
    """One direction: a ring of buffers, a stream, and device memory with the layout of a buffer.

    The stream runs one copy after another, so all of them use the same device memory.
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
        # Last, so that a failure leaves nothing registered.
        self.ring = Ring(device, registry, self.capacity, nbytes, depth)

    def fetch(self, buffer: Buffer, blocks: Sequence[int], after: Event | None) -> Event:
        """Begin to copy ``blocks`` to the beginning of the buffer."""
        return self._copy(buffer, blocks, after, [self._gather, self._leave])

    def deliver(self, buffer: Buffer, blocks: Sequence[int], after: Event | None) -> Event:
        """Begin to copy as many blocks from the beginning of the buffer to ``blocks``."""
        return self._copy(buffer, blocks, after, [self._arrive, self._scatter])

    def _copy(
        self, buffer: Buffer, blocks: Sequence[int], after: Event | None, steps: list[Callable[[Buffer, int], None]]
    ) -> Event:
        number = partial(self._number, buffer, blocks)
        buffer.copied = self._stream.queue([number, *(partial(step, buffer, len(blocks)) for step in steps)], after)
        return buffer.copied

    # The steps of a copy, on the stream.

    def _number(self, buffer: Buffer, blocks: Sequence[int]) -> None:
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

    def _leave(self, buffer: Buffer, count: int) -> None:
        size = count * self._stride
        buffer.memory[:size].copy_(self._staging[:size], non_blocking=True)

    def _arrive(self, buffer: Buffer, count: int) -> None:
        size = count * self._stride
        self._staging[:size].copy_(buffer.memory[:size], non_blocking=True)

    def _scatter(self, buffer: Buffer, count: int) -> None:
        rows = self._rows(count)
        self._kv.scatter(self._index[:count], self._codec.decode(rows) if self._codec else rows)

    def _rows(self, count: int) -> torch.Tensor:
        """Return the first ``count`` rows in the device's memory, ``[count, bytes]`` without their headroom."""
        return self._staging.view(-1, self._stride)[:count, HEADROOM_BYTES:]


class _StagedWindow:
    """Window of a buffer with the leading ones of ``blocks``."""

    def __init__(self, lane: _Lane, blocks: Sequence[int], after: Event | None) -> None:
        self._lane = lane
        self._after = after
        self._blocks = blocks[: lane.capacity]
        self._buffer = lane.ring.take()
        self._copied: Event | None = None
        self.values = self._buffer.values(len(self._blocks))

    def fetch(self) -> None:
        """Begin to copy the blocks to the buffer."""
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
