"""Waits with a time limit."""

from __future__ import annotations

import asyncio

import pytest

from kvcommon.waiting import wait_for_event


def test_the_wait_ends_when_the_event_is_set() -> None:
    async def run() -> bool:
        event = asyncio.Event()
        asyncio.get_running_loop().call_soon(event.set)
        return await wait_for_event(event, 60)

    assert asyncio.run(run())


def test_the_wait_ends_when_the_time_is_over() -> None:
    async def run() -> bool:
        return await wait_for_event(asyncio.Event(), 0.001)

    assert not asyncio.run(run())


@pytest.mark.parametrize("turns", range(4))
def test_a_cancellation_right_after_the_event_is_not_lost(turns: int) -> None:
    async def run() -> None:
        event = asyncio.Event()
        task = asyncio.ensure_future(wait_for_event(event, 60))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        event.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.done():
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
