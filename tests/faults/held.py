"""A store whose transfers a test can delay before they read or write a byte."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstore_backend.backend import Status, StorageBackend, Value
from kvstore_backend.wrappers.wrapper import Wrapper

__all__ = ["Held"]


class Held(Wrapper):
    """A wrapper whose puts and gets wait between ``hold`` and ``let_go``."""

    def __init__(self, store: StorageBackend) -> None:
        super().__init__(store)
        self.waiting = threading.Event()
        """Set while a call waits."""
        self._go = threading.Event()
        self.let_go()

    def hold(self) -> None:
        """Make puts and gets wait from now on."""
        self.waiting.clear()
        self._go.clear()

    def let_go(self) -> None:
        """Let all calls continue, also those that wait."""
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
