"""Blocks lent to a hand-over come back, whenever the hand-over ends."""

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
async def test_blocks_that_were_reserved_for_who_has_just_been_cancelled_are_given_back() -> None:
    lent, given_back = object(), []
    answers: list[Any] = []
    core: Any = SimpleNamespace(
        reserve_blocks=lambda hashes, num_tokens, answer: answers.append(answer),
        cancel_reservation=lambda reservation, clear: given_back.append(reservation),
        scheduler=SCHEDULER,
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


@in_event_loop
async def test_hand_overs_that_ask_at_once_are_lent_no_more_than_the_limit() -> None:
    answers: list[Any] = []
    core: Any = SimpleNamespace(
        reserve_blocks=lambda hashes, num_tokens, answer: answers.append(answer), scheduler=SCHEDULER
    )
    runner: Any = SimpleNamespace(vocab_size=1, shape=SimpleNamespace(block_size=1))
    prompt: Any = SimpleNamespace(hashes=[], num_tokens=2)
    memory = BlockMemory(core, runner, transfer=None, memory=None, max_reserved=3)  # type: ignore[arg-type]
    first, second = (asyncio.create_task(memory.reserve_blocks(prompt)) for _ in range(2))
    await asyncio.sleep(0)
    asked = len(answers)
    for answer in answers:
        answer(None)

    assert (asked, await first, await second) == (1, None, None)
    third = asyncio.create_task(memory.reserve_blocks(prompt))  # what was refused counts no more
    await asyncio.sleep(0)
    answers[-1](None)
    await third
    assert len(answers) == asked + 1
