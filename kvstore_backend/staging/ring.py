"""Ring of host buffers for blocks. The buffers are registered with the pool, and used one after another."""

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
    """Object with which memory for transfers is registered, such as a ``BlockPool``."""

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        """Register memory. With ``headroom``, each value in it has ``HEADROOM_BYTES`` free bytes before it."""

    def unregister(self, address: int, nbytes: int) -> None:
        """Undo ``register`` for the same memory."""


class Buffer:
    """Host memory for several blocks, each with headroom before it.

    Args:
        memory: uint8 ``[capacity * stride]``: the blocks with their headroom.
        blocks: int64 ``[capacity]``: the indices of these blocks in KV memory.
        nbytes: bytes of a block.
        is_spare: whether the buffer was allocated and registered alone, not with the other buffers of the ring.

    Attributes:
        copied: event for the end of the last copy from or to the buffer, or None if there was no copy.
    """

    def __init__(self, memory: torch.Tensor, blocks: torch.Tensor, nbytes: int, *, is_spare: bool) -> None:
        self._nbytes = nbytes
        self.memory = memory
        self.blocks = blocks
        self.is_spare = is_spare
        self.copied: Event | None = None

    @property
    def span(self) -> Span:
        """Address and size of the buffer in host memory."""
        return Span(self.memory.data_ptr(), self.memory.nbytes)

    def values(self, count: int) -> list[Value]:
        """Return the memory of the first ``count`` blocks in the buffer, for a call of the pool."""
        address, stride = self.memory.data_ptr() + HEADROOM_BYTES, HEADROOM_BYTES + self._nbytes
        return [(Span(address + i * stride, self._nbytes),) for i in range(count)]


class Ring:
    """Ring of host buffers for loads or for saves. A caller takes a buffer, uses it alone, and gives it back.

    All buffers are in one piece of memory, which needs one allocation and one registration. If all buffers are taken,
    for example because a call that missed its deadline still uses one, ``take`` creates a spare buffer.

    Args:
        device: the device that copies from and to the buffers.
        registry: object with which the memory of the buffers is registered.
        capacity: number of blocks in a buffer.
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
        """Return the buffer that has been free longest, for this caller alone.

        First, wait until the last copy from or to the buffer has ended.
        """
        with self._lock:
            buffer = self._free.popleft() if self._free else None
        if buffer is None:
            return self._make_spare()
        if buffer.copied is not None:
            try:
                buffer.copied.synchronize()
            except Exception as exc:  # the owner of the copy receives the error
                logger.debug("The last copy from or to a host buffer failed: %s", exc)
            except BaseException:
                self.give_back(buffer)
                raise
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Make a buffer available again.

        No call to the pool may use it any more; a copy may, because ``take`` waits for its end.
        """
        surplus = None
        with self._lock:
            self._free.append(buffer)
            if len(self._free) > self._depth:
                surplus = next(each for each in self._free if each.is_spare)
                self._free.remove(surplus)
        if surplus is not None:
            self._registry.unregister(*surplus.span)

    def close(self) -> None:
        """Unregister all buffers. All of them must have been given back."""
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
        """Allocate ``count`` buffers, one after another, in one piece of memory.

        Args:
            is_spare: whether the buffer is allocated and registered alone, not with the other buffers of the ring.
        """
        size = self._capacity * (HEADROOM_BYTES + self._nbytes)
        memory = self._device.allocate_host(count * size).split(size)
        numbers = self._device.allocate_host(count * self._capacity * 8).view(torch.int64).split(self._capacity)
        return [Buffer(*each, self._nbytes, is_spare=is_spare) for each in zip(memory, numbers, strict=True)]
