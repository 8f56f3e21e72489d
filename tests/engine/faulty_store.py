"""A pool that breaks on demand, as real pools do on a bad day.

It stands in for a Mooncake cluster that breaks in ways that cannot be brought about on purpose at the right moment.
"""

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
    """Every answer is FAILED."""
    ALL_RAISE = enum.auto()
    """Every call raises, which no store may do."""
    GONE_AT_LOAD = enum.auto()
    """A block that a look-up found has been evicted when it is read."""
    FAILS_AFTER_FIRST_BLOCK = enum.auto()
    """A read brings one block and leaves NaN in the others' memory."""
    RAISES_HALF_WAY = enum.auto()
    """A read leaves NaN in all the memory it was given, and raises."""
    REFUSES_SAVES = enum.auto()
    """Nothing more is stored."""


class FaultyStore(StorageBackend):
    """A sound store behind a fault; closing it leaves the sound store open, for others use it too.

    ``hang_loads`` and ``hang_saves`` make calls wait until ``go_on``; a load that hangs has put NaN into its targets.
    """

    def __init__(self, sound: StorageBackend, fault: Fault = Fault.NOTHING) -> None:
        self.fault = fault
        self.load_seconds = 0.0
        """Added to the time of every read."""
        self.hanging = threading.Event()
        """Set when a call hangs."""
        self._sound = sound
        self._loads_go = threading.Event()
        self._saves_go = threading.Event()
        self.go_on()

    def hang_loads(self) -> None:
        """Loads hang from now on."""
        self._loads_go.clear()

    def hang_saves(self) -> None:
        """Saves hang from now on."""
        self._saves_go.clear()

    def go_on(self) -> None:
        """Calls that hang go on, and none hangs any more."""
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
        if self.fault is Fault.RAISES_HALF_WAY:
            _fill_with_nan(targets)
            raise RuntimeError("the connection broke half-way")
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
    """All bits set is NaN in every floating-point type."""
    for target in targets:
        for address, nbytes in target:
            ctypes.memset(address, 0xFF, nbytes)
