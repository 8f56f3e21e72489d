"""Waits for messages of hand-overs."""

from __future__ import annotations

import asyncio

import pytest

from engine.disaggregation.wire import receive_message
from tests.engine.event_loop import in_event_loop


@in_event_loop
async def test_a_cancellation_at_the_same_time_as_a_message_ends_the_wait() -> None:
    reader = asyncio.StreamReader()
    receiving = asyncio.create_task(receive_message(reader, 60.0))
    for _ in range(3):
        await asyncio.sleep(0)  # until it waits
    reader.feed_data(b'{"type": "alive"}\n')
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving


@in_event_loop
async def test_a_reader_still_works_after_a_timeout() -> None:
    reader = asyncio.StreamReader()
    with pytest.raises(asyncio.TimeoutError):
        await receive_message(reader, 0.01)
    reader.feed_data(b'{"type": "alive"}\n')
    assert await receive_message(reader, 60.0) == {"type": "alive"}
