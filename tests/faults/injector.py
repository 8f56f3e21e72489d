"""A store with injected faults, such as those of a transport, a master or another client.

It simulates faults that a test cannot cause at the right time in a real pool.
"""

from __future__ import annotations

import ctypes
import enum
import threading
from collections.abc import Callable, Sequence

from kvstore_backend.backend import Health, Span, Status, StorageBackend, Value, memory_views

__all__ = ["Fault", "FaultInjector"]


class Fault(enum.Enum):
    """A fault of one call."""

    NOTHING = enum.auto()
    FAILED = enum.auto()
    """The call does nothing, and reports a failure."""
    FAILED_HALF_WAY = enum.auto()
    """A read writes wrong bytes to its targets and fails. A write succeeds, but reports a failure."""
    FAILED_FOR_SOME = enum.auto()
    """Every second key fails."""
    FALSE_ABSENT = enum.auto()
    """A present key is reported as absent."""
    FALSE_OK = enum.auto()
    """``OK``, but nothing was read or written."""
    SHORT_READ = enum.auto()
    """``OK``, but only the first half of each value was read."""
    FLIPPED_BIT = enum.auto()
    """``OK``, but one bit of each value is wrong."""
    STALE = enum.auto()
    """``OK``, but each value is the whole value of another key."""
    FEWER_ANSWERS = enum.auto()
    """One status is missing."""
    RAISES = enum.auto()
    """The store raises an exception, which is not allowed."""
    HANGS = enum.auto()
    """The call waits until ``go_on``. Then a read writes wrong bytes to its targets, and returns ``OK``."""


class FaultInjector(StorageBackend):
    """A wrapper of a correct store. Each call gets the next fault of ``faults``, and none after the last."""

    def __init__(self, sound: StorageBackend, faults: Sequence[Fault] = ()) -> None:
        self.faults = list(faults)
        self.calls: list[str] = []
        """The names of the calls, in order."""
        self.hanging = threading.Semaphore(0)
        """Released by every call that begins to hang."""
        self._sound = sound
        self._go = threading.Event()

    def go_on(self) -> None:
        """Let the hanging calls continue, and no further call hang."""
        self._go.set()

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        fault = self._next("put")
        if fault in (Fault.FALSE_OK, Fault.HANGS):
            return [Status.OK] * len(keys)
        if fault in (Fault.FLIPPED_BIT, Fault.SHORT_READ):
            changed = [bytearray(b"".join(memory_views(value))) for value in values]
            for value in changed:
                value[-1] ^= 1
            return self._put_bytes(keys, changed)
        if fault is Fault.FAILED_HALF_WAY:
            self._sound.put(keys, values)
        return self._spoilt(fault, keys, lambda: self._sound.put(keys, values))

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        fault = self._next("get")
        if fault in (Fault.HANGS, Fault.FAILED_HALF_WAY):
            _fill(targets, 0xFF)
        if fault in (Fault.HANGS, Fault.FALSE_OK):
            return [Status.OK] * len(keys)
        if fault is Fault.STALE:
            return self._sound.get([*keys[1:], *keys[:1]], targets)
        statuses = self._spoilt(fault, keys, lambda: self._sound.get(keys, targets))
        if fault is Fault.FLIPPED_BIT:
            for target in targets:
                memory_views(target)[-1][-1] ^= 0x10
        if fault is Fault.SHORT_READ:
            for target in targets:
                last = memory_views(target)[-1]
                last[len(last) // 2 :] = bytes(len(last) - len(last) // 2)
        return statuses

    def exists(self, keys: Sequence[str]) -> list[Status]:
        fault = self._next("exists")
        if fault in (Fault.FALSE_OK, Fault.HANGS):
            return [Status.OK] * len(keys)
        return self._spoilt(fault, keys, lambda: self._sound.exists(keys))

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        fault = self._next("remove")
        if fault in (Fault.FALSE_OK, Fault.HANGS):
            return [Status.OK] * len(keys)
        return self._spoilt(fault, keys, lambda: self._sound.remove(keys, force=force))

    def health(self) -> Health:
        return self._sound.health()

    def close(self) -> None:
        self._sound.close()

    def _next(self, call: str) -> Fault:
        self.calls.append(call)
        fault = self.faults.pop(0) if self.faults else Fault.NOTHING
        if fault is Fault.RAISES:
            raise RuntimeError("a store never raises, but this one does")
        if fault is Fault.HANGS:
            self.hanging.release()
            self._go.wait()
        return fault

    def _spoilt(self, fault: Fault, keys: Sequence[str], call: Callable[[], list[Status]]) -> list[Status]:
        if fault in (Fault.FAILED, Fault.FAILED_HALF_WAY):
            return [Status.FAILED] * len(keys)
        if fault is Fault.FALSE_ABSENT:
            return [Status.ABSENT] * len(keys)
        statuses = call()
        if fault is Fault.FAILED_FOR_SOME:
            return [Status.FAILED if i % 2 else status for i, status in enumerate(statuses)]
        return statuses[1:] if fault is Fault.FEWER_ANSWERS else statuses

    def _put_bytes(self, keys: Sequence[str], values: Sequence[bytearray]) -> list[Status]:
        spans = [[Span(ctypes.addressof(ctypes.c_char.from_buffer(value)), len(value))] for value in values]
        return self._sound.put(keys, spans)


def _fill(targets: Sequence[Value], byte: int) -> None:
    for target in targets:
        for address, nbytes in target:
            ctypes.memset(address, byte, nbytes)
