"""Background tasks that no other task awaits, and a way to start many tasks without blocking the event loop."""

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
    """Runs background tasks. It stores references to them, because asyncio does not prevent their deletion."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def run_in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run ``work`` in a task. If it raises an exception, log it."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    async def close(self, patience: float) -> None:
        """Wait up to ``patience`` seconds for the running tasks, then cancel them."""
        if self._running:
            await asyncio.wait(self._running, timeout=patience)
        for task in self._running:
            task.cancel()

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a background task failed", exc_info=task.exception())


async def gather_spread(works: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Run all ``works`` like ``asyncio.gather``, but start only ``_STARTED_AT_ONCE`` in each turn of the event loop.

    If a thousand works started in one turn, and each opened a connection, every other request would wait for 20 ms.
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
