"""Host buffers through which blocks pass, used one after another, and registered with whoever moves their bytes."""

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

# One that the pool reads or writes, and one that is copied meanwhile.
_DEPTH = 2


class Registry(Protocol):
    """Whoever has to know the memory that bytes are moved from and to; a ``BlockPool`` is one."""

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        """Hear of memory; ``headroom``: values in it have ``HEADROOM_BYTES`` before them."""

    def unregister(self, address: int, nbytes: int) -> None:
        """Forget it."""


class Buffer:
    """Host memory for blocks, each with headroom before it.

    Args:
        device: copies to and from it.
        capacity: for how many blocks.
        nbytes: of a block.

    Attributes:
        memory: uint8 ``[capacity * stride]``: the rows with their headroom.
        blocks: int64 ``[capacity]``: the numbers of the blocks that are in it.
        copied: the end of the last copy to or from it; None: there was none.
    """

    def __init__(self, device: Device, capacity: int, nbytes: int) -> None:
        self._nbytes = nbytes
        self.stride = HEADROOM_BYTES + nbytes
        self.memory = device.allocate_host(capacity * self.stride)
        self.blocks = device.allocate_host(capacity * 8).view(torch.int64)
        self.copied: Event | None = None

    @property
    def span(self) -> Span:
        """Where it lies."""
        return Span(self.memory.data_ptr(), self.memory.nbytes)

    def values(self, count: int) -> list[Value]:
        """Where its first ``count`` blocks lie, for the pool."""
        address = self.memory.data_ptr() + HEADROOM_BYTES
        return [(Span(address + i * self.stride, self._nbytes),) for i in range(count)]


class Ring:
    """The buffers of one direction. A buffer is here, or with whoever took it, until that gives it back.

    One that stays away, as a call of the pool that was given up may still touch it, is made up for.

    Args:
        device: copies to and from the buffers.
        registry: told of each.
        capacity: blocks of a buffer.
        nbytes: of a block.
    """

    def __init__(self, device: Device, registry: Registry, capacity: int, nbytes: int) -> None:
        self._registry = registry
        self._device = device
        self._capacity = capacity
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._free: deque[Buffer] = deque()
        try:
            for _ in range(_DEPTH):
                self._free.append(self._add())
        except BaseException:
            self.close()
            raise

    def take(self) -> Buffer:
        """The buffer that was given back first, once its copy has ended."""
        with self._lock:
            buffer = self._free.popleft() if self._free else None
        if buffer is None:
            return self._add()
        if buffer.copied is not None:
            try:
                buffer.copied.synchronize()
            except Exception as exc:  # whoever began the copy hears how it went
                logger.debug("The last copy of a buffer failed: %s", exc)
            except BaseException:
                self.give_back(buffer)
                raise
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Let the buffer be taken again; no call of the pool touches it, but a copy may. From any thread."""
        with self._lock:
            is_wanted = len(self._free) < _DEPTH
            if is_wanted:
                self._free.append(buffer)
        if not is_wanted:
            self._registry.unregister(*buffer.span)

    def close(self) -> None:
        """Have the registry forget the buffers that are here."""
        while self._free:
            self._registry.unregister(*self._free.pop().span)

    def _add(self) -> Buffer:
        buffer = Buffer(self._device, self._capacity, self._nbytes)
        self._registry.register(*buffer.span, headroom=True)
        return buffer
