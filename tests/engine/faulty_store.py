"""A pool with faults that a test controls. A real Mooncake cluster cannot be made to fail at a given moment."""

from __future__ import annotations

import ctypes
import enum
import threading
import time
from collections.abc import Sequence

from kvstore_backend.backend import Health, Status, StorageBackend, Value

__all__ = ["Fault", "FaultyStore"]


class Fault(enum.Enum):
    """The fault of all calls from now on."""

    NOTHING = enum.auto()
    ALL_FAIL = enum.auto()
    """Every call returns FAILED."""
    ALL_RAISE = enum.auto()
    """Every call raises an error, which no store may do."""
    GONE_AT_LOAD = enum.auto()
    """Blocks that a look-up found are evicted before they are read."""
    FAILS_AFTER_FIRST_BLOCK = enum.auto()
    """A read loads one block, and writes NaN to the memory of the others."""
    RAISES_DURING_READ = enum.auto()
    """A read writes NaN to all its target memory, and raises an error."""
    REFUSES_SAVES = enum.auto()
    """Every save fails."""


class FaultyStore(StorageBackend):
    """Adds a fault to another store. It does not close that store, because other clients use it too.

    ``hang_loads`` and ``hang_saves`` make calls hang until ``go_on``. A load that hangs has written NaN to its targets.
    """

    def __init__(self, sound: StorageBackend, fault: Fault = Fault.NOTHING) -> None:
        self.fault = fault
        self.load_seconds = 0.0
        """Extra time of every read."""
        self.hanging = threading.Event()
        """Set when a call hangs."""
        self._sound = sound
        self._loads_go = threading.Event()
        self._saves_go = threading.Event()
        self.go_on()

    def hang_loads(self) -> None:
        self._loads_go.clear()

    def hang_saves(self) -> None:
        self._saves_go.clear()

    def go_on(self) -> None:
        """Continue all calls that hang. Later calls do not hang."""
        self.hanging.clear()
        self._loads_go.set()
        self._saves_go.set()

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        self._wait(self._saves_go)
        self._raise_if(Fault.ALL_RAISE)
        if self.fault in (Fault.ALL_FAIL, Fault.REFUSES_SAVES):
            return [Status.FAILED] * len(keys)
        return self._sound.put(keys, values)

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        if not self._loads_go.is_set():
            _fill_with_nan(targets)
        self._wait(self._loads_go)
        time.sleep(self.load_seconds)
        self._raise_if(Fault.ALL_RAISE)
        if self.fault is Fault.ALL_FAIL:
            return [Status.FAILED] * len(keys)
        if self.fault is Fault.GONE_AT_LOAD:
            return [Status.ABSENT] * len(keys)
        if self.fault is Fault.FAILS_AFTER_FIRST_BLOCK:
            _fill_with_nan(targets[1:])
            return self._sound.get(keys[:1], targets[:1]) + [Status.FAILED] * (len(keys) - 1)
        if self.fault is Fault.RAISES_DURING_READ:
            _fill_with_nan(targets)
            raise RuntimeError("the connection broke during the read")
        return self._sound.get(keys, targets)

    def exists(self, keys: Sequence[str]) -> list[Status]:
        self._raise_if(Fault.ALL_RAISE)
        return [Status.FAILED] * len(keys) if self.fault is Fault.ALL_FAIL else self._sound.exists(keys)

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        return self._sound.remove(keys, force=force)

    def health(self) -> Health:
        return Health(self.fault is Fault.NOTHING, self.fault.name)

    def close(self) -> None:
        pass

    def _wait(self, go: threading.Event) -> None:
        if not go.is_set():
            self.hanging.set()
            go.wait()

    def _raise_if(self, fault: Fault) -> None:
        if self.fault is fault:
            raise RuntimeError("the pool is broken")


def _fill_with_nan(targets: Sequence[Value]) -> None:
    """Set all bits, which is NaN in every floating-point type."""
    for target in targets:
        for address, nbytes in target:
            ctypes.memset(address, 0xFF, nbytes)
