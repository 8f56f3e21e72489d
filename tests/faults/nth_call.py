"""A store whose n-th call fails, counted over all kinds of calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal

from kvstore_backend.backend import Status, StorageBackend, Value
from kvstore_backend.wrappers.wrapper import Wrapper

__all__ = ["How", "NthCall"]

How = Literal["raises", "hangs"]


class NthCall(Wrapper):
    """A wrapper whose n-th call raises an exception, or waits until ``let_go``.

    Args:
        store: a correct store.
        number: the number of that call, from 0 on; -1 for none.
        how: whether the call raises or hangs.
    """

    def __init__(self, store: StorageBackend, number: int = -1, how: How = "raises") -> None:
        super().__init__(store)
        self.number, self.how = number, how
        self.count = 0
        """The number of calls."""
        self.is_closed = False
        self._lock = threading.Lock()
        self._go = threading.Event()

    def let_go(self) -> None:
        """Let the hanging call continue."""
        self._go.set()

    def _go_wrong(self) -> None:
        with self._lock:
            is_wrong = self.count == self.number
            self.count += 1
        if is_wrong and self.how == "raises":
            raise RuntimeError(f"call {self.number} raises, which no store may do")
        if is_wrong:
            self._go.wait()

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        self._go_wrong()
        return super().put(keys, values)

    def keep(self, keys: Sequence[str], values: Sequence[Value], seconds: float) -> list[Status]:
        self._go_wrong()
        return super().keep(keys, values, seconds)

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        self._go_wrong()
        return super().get(keys, targets)

    def exists(self, keys: Sequence[str]) -> list[Status]:
        self._go_wrong()
        return super().exists(keys)

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        self._go_wrong()
        return super().remove(keys, force=force)

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        """Fail, or register."""
        self._go_wrong()
        super().register(address, nbytes, headroom=headroom)

    def unregister(self, address: int, nbytes: int) -> None:
        """Fail, or unregister."""
        self._go_wrong()
        super().unregister(address, nbytes)

    def close(self) -> None:
        """Close the store, also after a failure."""
        self.is_closed = True
        super().close()
