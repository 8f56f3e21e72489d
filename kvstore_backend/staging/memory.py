"""KV memory as ``Transfers`` reach it by way of host buffers; the pool touches nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvstore_backend.backend import HEADROOM_BYTES
from kvstore_backend.staging.codec import Codec
from kvstore_backend.staging.cuda import CudaDevice
from kvstore_backend.staging.device import Device
from kvstore_backend.staging.ring import Buffer, Registry, Ring
from kvstore_backend.staging.stand_in import StandInDevice
from kvstore_backend.staging.tensors import KVTensors
from kvstore_backend.transfers import Event, Window

__all__ = ["StagedMemory"]

# At 3 GB/s of a pool a buffer takes 10 ms, and at 25 GB/s of a GPU's bus 1 ms: copies end while the pool works.
# Headroom included, as torch rounds pinned memory up to a power of two.
_BUFFER_BYTES = 32 << 20

# One that the pool reads or writes, and one that is copied meanwhile.
_DEPTH = 2


class StagedMemory:
    """Blocks on their way through two rings of buffers, one for loads and one for saves. For any thread.

    Args:
        kv: the KV memory.
        registry: told of every buffer: the pool.
        codec: the form of blocks in the pool; not given: as in KV memory.
        device: of the KV memory; not given: CUDA for tensors there, else the stand-in.
        buffer_bytes: as many blocks as fit with their headroom pass at once, but one at least and no more than there
            are.
        incoming_bytes: buffers for loads that are kept, in all; two at least.
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
    """One direction: a ring of buffers, a stream, and memory of the device laid out as a buffer.

    The stream runs one copy after another, so one piece of such memory serves all of them.
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
        self.ring = Ring(device, registry, self.capacity, nbytes, depth)  # last: what is registered is taken back

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
        """The first ``count`` rows in the device's memory, ``[count, bytes]`` without their headroom."""
        return self._staging.view(-1, self._stride)[:count, HEADROOM_BYTES:]


class _StagedWindow:
    """A buffer that holds leading ones of ``blocks``."""

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
