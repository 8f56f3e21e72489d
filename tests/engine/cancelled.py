"""A coroutine that is cancelled at a chosen await, as a client that leaves at that moment cancels it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

__all__ = ["CancelledAt"]


class CancelledAt:
    """Awaitable that runs ``coroutine`` and cancels it at its await number ``number``, counted from 0.

    ``is_cancelled`` says whether the coroutine had so many awaits.
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
            if isinstance(
                awaited, asyncio.Future
            ):  # as Task.cancel does; the task of this test does not see the future
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
