"""Blocks lent to a hand-over come back, whenever the hand-over ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engine.disaggregation import BlockMemory
from tests.engine.event_loop import in_event_loop


@in_event_loop
async def test_blocks_that_were_reserved_for_who_has_just_been_cancelled_are_given_back() -> None:
    lent, given_back = object(), []
    answers: list[Any] = []
    core: Any = SimpleNamespace(
        reserve_blocks=lambda hashes, num_tokens, answer: answers.append(answer),
        cancel_reservation=lambda reservation, clear: given_back.append(reservation),
    )
    runner: Any = SimpleNamespace(vocab_size=1, shape=SimpleNamespace(block_size=1))
    prompt: Any = SimpleNamespace(hashes=[], num_tokens=1)
    memory = BlockMemory(core, runner, transfer=None, memory=None)  # type: ignore[arg-type]
    asking = asyncio.create_task(memory.reserve_blocks(prompt))
    await asyncio.sleep(0)

    answers[0](lent)
    asyncio.get_running_loop().call_soon(asking.cancel)  # after the answer is there, and before it is taken
    with pytest.raises(asyncio.CancelledError):
        await asking

    assert given_back == [lent]
