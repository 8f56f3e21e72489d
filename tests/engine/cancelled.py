"""Cancels a coroutine at a given await, as a disconnected client does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

__all__ = ["CancelledAt"]


class CancelledAt:
    """Awaitable that runs ``coroutine`` and cancels it at await ``number``, counted from 0.

    ``is_cancelled`` is false if the coroutine ended before this await.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int) -> None:
        self._coroutine = coroutine
        self._number = number
        self.is_cancelled = False

    def __await__(self) -> Generator[Any, Any, Any]:
        count = 0
        try:
            awaited = self._coroutine.send(None)
            while count != self._number:
                count += 1
                yield awaited
                awaited = self._coroutine.send(None)
            self.is_cancelled = True
            if isinstance(awaited, asyncio.Future):  # as Task.cancel does; the test's task does not get the future
                awaited._asyncio_future_blocking = False
                awaited.cancel()
            awaited = self._coroutine.throw(asyncio.CancelledError())
            while True:
                yield awaited
                awaited = self._coroutine.send(None)
        except StopIteration as end:
            return end.value
        except asyncio.CancelledError:
            return None
