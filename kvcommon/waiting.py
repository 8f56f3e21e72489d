"""Waits for an event with a time limit, without losing a cancellation of the task."""

from __future__ import annotations

import asyncio

__all__ = ["wait_for_event"]


async def wait_for_event(event: asyncio.Event, seconds: float) -> bool:
    """Wait until ``event`` is set, for at most ``seconds``; return whether it is set.

    ``asyncio.wait_for`` is not used: if a task is cancelled in the same turn of the event loop in which the event is
    set, ``wait_for`` of Python 3.10 and 3.11 loses the cancellation. A task that loops until it is cancelled would then
    never end.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting], timeout=seconds)
    finally:
        waiting.cancel()
    return event.is_set()
