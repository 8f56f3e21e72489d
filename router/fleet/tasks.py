"""Background work that nobody awaits, kept alive until it is done; and the same work for many instances at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

__all__ = ["Tasks", "gather_spread"]

_log = logging.getLogger("router.fleet.tasks")
_STARTED_AT_ONCE = 50

_Result = TypeVar("_Result")


class Tasks:
    """Tasks that nobody awaits; asyncio itself keeps only weak references to them."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def run_in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run ``work`` now; an exception it raises is logged."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    async def close(self, patience: float) -> None:
        """Give the tasks that still run ``patience`` seconds to end, then cancel them."""
        if self._running:
            await asyncio.wait(self._running, timeout=patience)
        for task in self._running:
            task.cancel()

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("background work failed", exc_info=task.exception())


async def gather_spread(works: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """``asyncio.gather`` of many ``works``, a few of which start in one turn of the event loop.

    A thousand that start in one turn, each with a connection to open, keep every other request waiting for 20 ms.
    """
    tasks: list[asyncio.Task[_Result]] = []
    try:
        for work in works:
            tasks.append(asyncio.ensure_future(work))
            if len(tasks) % _STARTED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
