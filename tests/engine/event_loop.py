"""Tests that are coroutines."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["eventually", "in_event_loop"]

_DEADLINE_SECONDS = 120.0


def in_event_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine test in its own event loop, with a deadline. An uncaught error in a task fails it, too."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        uncaught: list[dict[str, Any]] = []

        async def run_with_deadline() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: uncaught.append(context))
            await asyncio.wait_for(test(*args, **kwargs), _DEADLINE_SECONDS)

        asyncio.run(run_with_deadline())
        assert uncaught == []

    return run


async def eventually(condition: Callable[[], object], awaited: str) -> None:
    """Wait until ``condition`` is true, while the event loop runs."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + _DEADLINE_SECONDS
    while not condition():
        assert loop.time() < give_up_at, f"waited {_DEADLINE_SECONDS:g} s for {awaited}"
        await asyncio.sleep(0.005)
