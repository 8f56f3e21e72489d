"""Host buffers for the transfer of blocks, used one after another, and registered with the pool."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Protocol

import torch

from kvstore_backend.backend import HEADROOM_BYTES, Span, Value
from kvstore_backend.staging.device import Device
from kvstore_backend.transfers import Event

__all__ = ["Buffer", "Registry", "Ring"]

logger = logging.getLogger(__name__)


class Registry(Protocol):
    """Object that must know the memory of transfers; a ``BlockPool`` is one."""

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        """Register memory; ``headroom``: values in it have ``HEADROOM_BYTES`` before them."""

    def unregister(self, address: int, nbytes: int) -> None:
        """Unregister memory."""


class Buffer:
    """Host memory for blocks, each with headroom before it.

    Args:
        memory: uint8 ``[capacity * stride]``: the rows with their headroom.
        blocks: int64 ``[capacity]``: the numbers of the blocks in it.
        nbytes: bytes of a block.
        is_spare: whether it was registered separately, so that it can be unregistered separately.

    Attributes:
        copied: the end of the last copy to or from it; None: there was none.
    """

    def __init__(self, memory: torch.Tensor, blocks: torch.Tensor, nbytes: int, *, is_spare: bool) -> None:
        self._nbytes = nbytes
        self.memory = memory
        self.blocks = blocks
        self.is_spare = is_spare
        self.copied: Event | None = None

    @property
    def span(self) -> Span:
        """Place of the buffer in memory."""
        return Span(self.memory.data_ptr(), self.memory.nbytes)

    def values(self, count: int) -> list[Value]:
        """Return the places of its first ``count`` blocks, for the pool."""
        address, stride = self.memory.data_ptr() + HEADROOM_BYTES, HEADROOM_BYTES + self._nbytes
        return [(Span(address + i * stride, self._nbytes),) for i in range(count)]


class Ring:
    """Buffers of one direction. A buffer is either here, or with its taker until that gives it back.

    They are in one piece of memory, which takes one allocation and one registration. A buffer that does not come back,
    because a call that was given up may still touch it, is replaced by a spare one.

    Args:
        device: copies to and from the buffers.
        registry: where their memory is registered.
        capacity: blocks of a buffer.
        nbytes: bytes of a block.
        depth: number of buffers.
    """

    def __init__(self, device: Device, registry: Registry, capacity: int, nbytes: int, depth: int) -> None:
        self._registry = registry
        self._device = device
        self._capacity = capacity
        self._nbytes = nbytes
        self._depth = depth
        self._lock = threading.Lock()
        buffers = self._make(depth, is_spare=False)
        self._span = Span(buffers[0].memory.data_ptr(), sum(buffer.memory.nbytes for buffer in buffers))
        registry.register(*self._span, headroom=True)
        self._free = deque(buffers)

    def take(self) -> Buffer:
        """Take the buffer that was given back first, after its copy has ended."""
        with self._lock:
            buffer = self._free.popleft() if self._free else None
        if buffer is None:
            return self._make_spare()
        if buffer.copied is not None:
            try:
                buffer.copied.synchronize()
            except Exception as exc:  # the owner of the copy receives the error
                logger.debug("The last copy of a buffer failed: %s", exc)
            except BaseException:
                self.give_back(buffer)
                raise
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Make the buffer available again; no call of the pool touches it, but a copy may. Any thread may call this."""
        surplus = None
        with self._lock:
            self._free.append(buffer)
            if len(self._free) > self._depth:
                surplus = next(each for each in self._free if each.is_spare)
                self._free.remove(surplus)
        if surplus is not None:
            self._registry.unregister(*surplus.span)

    def close(self) -> None:
        """Unregister the buffers, all of which are here."""
        for buffer in self._free:
            if buffer.is_spare:
                self._registry.unregister(*buffer.span)
        self._free.clear()
        self._registry.unregister(*self._span)

    def _make_spare(self) -> Buffer:
        [buffer] = self._make(1, is_spare=True)
        self._registry.register(*buffer.span, headroom=True)
        return buffer

    def _make(self, count: int, *, is_spare: bool) -> list[Buffer]:
        """Return buffers in one piece of memory, one after another."""
        size = self._capacity * (HEADROOM_BYTES + self._nbytes)
        memory = self._device.allocate_host(count * size).split(size)
        numbers = self._device.allocate_host(count * self._capacity * 8).view(torch.int64).split(self._capacity)
        return [Buffer(*each, self._nbytes, is_spare=is_spare) for each in zip(memory, numbers, strict=True)]
