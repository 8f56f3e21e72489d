"""Signal: an event of the fleet, and the callbacks that it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

__all__ = ["Signal"]

P = ParamSpec("P")


class Signal(Generic[P]):
    """One kind of event. Its callbacks are called in the order in which they subscribed."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[P, None]] = []

    def subscribe(self, callback: Callable[P, None]) -> None:
        """Call ``callback`` at each event from now on."""
        self._callbacks.append(callback)

    def emit(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call all subscribers."""
        for callback in self._callbacks:
            callback(*args, **kwargs)
