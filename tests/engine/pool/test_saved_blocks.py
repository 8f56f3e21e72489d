"""Refill: an engine saves its cached blocks again if the pool has lost them, without an effect on requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from engine.pool import pool_connector
from engine.scheduling.cache_hints import CacheHint
from kvstore_backend import Status
from kvstore_backend.namespace import Namespace
from kvstore_backend.refill import Refill
from kvstore_backend.stores.memory import MemoryStore
from tests.engine.checkpoints import VOCAB_SIZE
from tests.engine.faulty_store import FaultyStore
from tests.engine.running import Engine
from tests.support.clearing import leave_mark, looks, wait_for_a_look
from tests.support.stored import count_keys
from tests.support.waiting import wait_until

__all__ = ["looks"]

PROMPTS = [random.Random(seed).choices(range(VOCAB_SIZE), k=100) for seed in range(4)]
BLOCKS = 6 * len(PROMPTS)


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(64 << 20)


@pytest.fixture
def store(memory: MemoryStore) -> Iterator[FaultyStore]:
    faulty = FaultyStore(memory)
    yield faulty
    faulty.go_on()


@pytest.fixture
def engine(
    tiny_checkpoint: Path, store: FaultyStore, looks: list[bool | None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    """An engine that has computed all prompts. The pool has their blocks."""
    monkeypatch.setattr(pool_connector, "Refill", partial(Refill, period=0.02))
    with Engine(tiny_checkpoint, store=store, num_blocks=128) as running:
        for prompt in PROMPTS:
            running.answer(prompt, 4)
        running.wait_until_idle()
        wait_for_a_look(looks)
        yield running


def lose_all(memory: MemoryStore, namespace: Namespace) -> None:
    assert memory.clear(namespace.prefix) is Status.OK


def test_a_pool_that_lost_all_blocks_gets_them_again_and_others_load_them(
    tiny_checkpoint: Path, engine: Engine, store: FaultyStore, memory: MemoryStore
) -> None:
    answers = [engine.answer(prompt, 12).wait() for prompt in PROMPTS]
    lose_all(memory, engine.runner.namespace)
    wait_until(lambda: count_keys(memory) == BLOCKS, "all blocks")
    wait_until(lambda: engine.metric("kvstore_refilled_blocks_total") == BLOCKS, "the count")
    engine.wait_until_idle()
    with Engine(tiny_checkpoint, store=store) as other:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            submitted = other.answer(prompt, 12)
            assert submitted.wait() == answer
            assert submitted.sequence.pool_cached_tokens == 96


def test_requests_continue_while_a_refill_hangs(engine: Engine, store: FaultyStore, memory: MemoryStore) -> None:
    expected = engine.answer(PROMPTS[0], 12).wait()
    store.hang_saves()
    lose_all(memory, engine.runner.namespace)
    assert store.hanging.wait(30)
    assert engine.begin(PROMPTS[0], 12).wait() == expected
    store.go_on()
    wait_until(lambda: count_keys(memory) == BLOCKS, "all blocks")
    engine.wait_until_idle()


def test_a_refill_does_not_change_the_order_of_reuse(engine: Engine, memory: MemoryStore) -> None:
    engine.answer(PROMPTS[1], 4)
    before = list(engine.blocks.iterate_hashes())
    lose_all(memory, engine.runner.namespace)
    wait_until(lambda: engine.metric("kvstore_refilled_blocks_total") == BLOCKS, "all blocks")
    wait_until(lambda: list(engine.blocks.iterate_hashes()) == before, "the earlier order")


def test_a_refill_does_not_save_generated_tokens_that_were_never_saved(engine: Engine, memory: MemoryStore) -> None:
    engine.answer(PROMPTS[0], 60)
    assert engine.blocks.num_cached_blocks > BLOCKS
    lose_all(memory, engine.runner.namespace)
    wait_until(lambda: engine.metric("kvstore_refilled_blocks_total") == BLOCKS, "all blocks")
    assert count_keys(memory) == BLOCKS


def test_cleared_blocks_are_not_saved_again_while_their_prompts_are_sent_again(
    engine: Engine, memory: MemoryStore, looks: list[bool | None]
) -> None:
    expected = [engine.answer(prompt, 12).wait() for prompt in PROMPTS]
    leave_mark(memory, engine.runner.namespace.digest)
    lose_all(memory, engine.runner.namespace)
    wait_until(lambda: True in looks, "the mark to be found")
    looks.clear()
    while len(looks) < 12:  # a minute with the usual period of 5 s
        assert [engine.answer(prompt, 12).wait() for prompt in PROMPTS] == expected
    assert count_keys(memory) == 1  # the mark
    assert engine.metric("kvstore_refilled_blocks_total") == 0

    other = random.Random(9).choices(range(VOCAB_SIZE), k=100)
    engine.answer(other, 4)
    assert count_keys(memory) == 1 + 6
    lose_all(memory, engine.runner.namespace)
    looks.clear()
    wait_until(lambda: len(looks) >= 12, "twelve periods")
    assert count_keys(memory) == 1  # six blocks are too few to detect a loss


def test_blocks_that_are_computed_after_a_clear_are_saved_and_refilled(
    engine: Engine, memory: MemoryStore, looks: list[bool | None]
) -> None:
    leave_mark(memory, engine.runner.namespace.digest)
    lose_all(memory, engine.runner.namespace)
    wait_until(lambda: True in looks, "the mark to be found")
    engine.core.clear_prefix_cache()
    for prompt in PROMPTS:
        engine.answer(prompt, 4)
    assert count_keys(memory) == 1 + BLOCKS
    looks.clear()
    wait_until(lambda: len(looks) >= 2, "a check of the blocks")
    lose_all(memory, engine.runner.namespace)
    wait_until(lambda: count_keys(memory) == 1 + BLOCKS, "all blocks")


def test_a_cached_prompt_with_a_hint_is_not_saved_again_after_a_clear(
    engine: Engine, memory: MemoryStore, looks: list[bool | None]
) -> None:
    leave_mark(memory, engine.runner.namespace.digest)
    lose_all(memory, engine.runner.namespace)
    wait_until(lambda: True in looks, "the mark to be found")
    engine.answer(PROMPTS[0], 4, hints=(CacheHint(96, 3600.0),))
    assert count_keys(memory) == 1
