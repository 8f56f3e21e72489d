"""What an operator or a trainer orders of a running instance, with FastDeploy's meaning.

A paused instance has no request: those that ran were aborted, and new ones are refused. Its own prefix cache is empty,
as FastDeploy's is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from engine.core import EngineCore
from engine.generation import Generations

__all__ = ["Control", "ControlFailed"]

log = logging.getLogger(__name__)

# As long as FastDeploy waits for the end of an order.
_ORDER_SECONDS = 600.0
_POLL_SECONDS = 0.005


class ControlFailed(Exception):
    """An order that cannot be carried out, in one sentence."""


class Control:
    """Carries out one order at a time; for the event loop's thread.

    Args:
        core: runs the requests.
        generations: the requests.
        on_change: called when ``is_paused`` has changed.
    """

    def __init__(self, core: EngineCore, generations: Generations, on_change: Callable[[], None]) -> None:
        self._core = core
        self._generations = generations
        self._on_change = on_change
        self._turn = asyncio.Lock()

    @property
    def is_paused(self) -> bool:
        """Whether requests are refused now."""
        return self._core.is_paused

    async def pause(self) -> None:
        """Refuse new requests, abort those that run, and empty the own prefix cache.

        Raises:
            ControlFailed: some did not end in time; new ones are refused nevertheless.
        """
        async with self._turn:
            await self._pause()

    async def resume(self) -> None:
        """Take requests again."""
        async with self._turn:
            self._set_paused(False)

    async def find_out_if_paused(self) -> bool:
        """Whether it is paused, once the orders before this question are carried out."""
        async with self._turn:
            return self.is_paused

    async def _pause(self) -> None:
        self._set_paused(True)
        try:
            await asyncio.wait_for(self._end_requests(), _ORDER_SECONDS)
        except (asyncio.TimeoutError, TimeoutError):
            raise ControlFailed(f"requests that run have not ended within {_ORDER_SECONDS:g} s") from None
        self._core.clear_prefix_cache()

    async def _end_requests(self) -> None:
        """Abort all requests, and wait until the engine has none."""
        while True:
            if not self._core.is_alive:
                raise ControlFailed("this instance's engine has ended; its log says why")
            self._generations.abort_all()
            if not self._generations.num_live and not await self._has_sequences():
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def _has_sequences(self) -> bool:
        scheduler = self._core.scheduler
        return await asyncio.wrap_future(self._core.call(lambda: scheduler.has_sequences))

    def _set_paused(self, is_paused: bool) -> None:
        if self._core.is_paused != is_paused:
            self._core.is_paused = is_paused
            log.info("Requests are %s", "refused: this instance is paused" if is_paused else "taken again")
            self._on_change()
