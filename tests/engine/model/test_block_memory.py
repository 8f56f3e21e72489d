"""Blocks that are reserved for a hand-over are released at its end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engine.disaggregation import BlockMemory
from tests.engine.event_loop import in_event_loop

# Blocks of one token, in one group of layers.
SCHEDULER = SimpleNamespace(groups=SimpleNamespace(count_held_blocks=lambda num_tokens: num_tokens))


@in_event_loop
async def test_a_reservation_is_released_if_its_task_is_cancelled_at_the_same_time() -> None:
    reservation, released = object(), []
    answers: list[Any] = []
    core: Any = SimpleNamespace(
        reserve_blocks=lambda hashes, num_tokens, answer: answers.append(answer),
        cancel_reservation=lambda cancelled, clear: released.append(cancelled),
        scheduler=SCHEDULER,
    )
    runner: Any = SimpleNamespace(vocab_size=1, shape=SimpleNamespace(block_size=1))
    prompt: Any = SimpleNamespace(hashes=[], num_tokens=1)
    memory = BlockMemory(core, runner, transfer=None, memory=None)  # type: ignore[arg-type]
    reserving = asyncio.create_task(memory.reserve_blocks(prompt))
    await asyncio.sleep(0)

    answers[0](reservation)
    asyncio.get_running_loop().call_soon(reserving.cancel)  # after the reservation is made, and before the task gets it
    with pytest.raises(asyncio.CancelledError):
        await reserving

    assert released == [reservation]


@in_event_loop
async def test_concurrent_hand_overs_reserve_no_more_blocks_than_the_limit() -> None:
    answers: list[Any] = []
    core: Any = SimpleNamespace(
        reserve_blocks=lambda hashes, num_tokens, answer: answers.append(answer), scheduler=SCHEDULER
    )
    runner: Any = SimpleNamespace(vocab_size=1, shape=SimpleNamespace(block_size=1))
    prompt: Any = SimpleNamespace(hashes=[], num_tokens=2)
    memory = BlockMemory(core, runner, transfer=None, memory=None, max_reserved=3)  # type: ignore[arg-type]
    first, second = (asyncio.create_task(memory.reserve_blocks(prompt)) for _ in range(2))
    await asyncio.sleep(0)
    num_asked = len(answers)
    for answer in answers:
        answer(None)

    assert (num_asked, await first, await second) == (1, None, None)
    third = asyncio.create_task(memory.reserve_blocks(prompt))  # a refused reservation is no longer counted
    await asyncio.sleep(0)
    answers[-1](None)
    await third
    assert len(answers) == num_asked + 1
