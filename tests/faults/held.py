"""A store whose transfers a test holds at the door: before a byte of theirs was read or written."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstore_backend.backend import Status, StorageBackend, Value
from kvstore_backend.wrappers.wrapper import Wrapper

__all__ = ["Held"]


class Held(Wrapper):
    """Passes on everything; from ``hold`` to ``let_go`` puts and gets wait before they are passed on."""

    def __init__(self, store: StorageBackend) -> None:
        super().__init__(store)
        self.waiting = threading.Event()
        """Set when a call waits."""
        self._go = threading.Event()
        self.let_go()

    def hold(self) -> None:
        """Let puts and gets wait from now on."""
        self.waiting.clear()
        self._go.clear()

    def let_go(self) -> None:
        """Pass on all calls, those that wait too."""
        self._go.set()

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        self._wait()
        return super().put(keys, values)

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        self._wait()
        return super().get(keys, targets)

    def _wait(self) -> None:
        if not self._go.is_set():
            self.waiting.set()
            self._go.wait()
