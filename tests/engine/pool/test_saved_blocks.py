"""What an engine has in its cache it puts into the pool again where that has lost it, and nobody notices."""

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
    """It has answered all prompts, and the pool has their blocks."""
    monkeypatch.setattr(pool_connector, "Refill", partial(Refill, period=0.02))
    with Engine(tiny_checkpoint, store=store, num_blocks=128) as running:
        for prompt in PROMPTS:
            running.answer(prompt, 4)
        running.wait_until_idle()
        wait_for_a_look(looks)
        yield running


def lose_all(memory: MemoryStore, namespace: Namespace) -> None:
    assert memory.clear(namespace.prefix) is Status.OK


def test_a_pool_that_lost_everything_has_the_cached_prompts_again_and_others_read_them(
    tiny_checkpoint: Path, engine: Engine, store: FaultyStore, memory: MemoryStore
) -> None:
    answers = [engine.answer(prompt, 12).wait() for prompt in PROMPTS]
    lose_all(memory, engine.runner.namespace)
    wait_until(lambda: count_keys(memory) == BLOCKS, "all blocks")
    wait_until(lambda: engine.metric("kvstore_refilled_blocks_total") == BLOCKS, "the count")
    engine.wait_until_idle()
    with Engine(tiny_checkpoint, store=store) as other:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            asked = other.answer(prompt, 12)
            assert asked.wait() == answer
            assert asked.sequence.pool_cached_tokens == 96


def test_requests_go_on_while_blocks_that_are_put_again_hang(
    engine: Engine, store: FaultyStore, memory: MemoryStore
) -> None:
    right = engine.answer(PROMPTS[0], 12).wait()
    store.hang_saves()
    lose_all(memory, engine.runner.namespace)
    assert store.hanging.wait(30)
    assert engine.begin(PROMPTS[0], 12).wait() == right
    store.go_on()
    wait_until(lambda: count_keys(memory) == BLOCKS, "all blocks")
    engine.wait_until_idle()


def test_the_prefixes_used_last_are_still_the_last_to_be_reused(engine: Engine, memory: MemoryStore) -> None:
    engine.answer(PROMPTS[1], 4)
    before = list(engine.blocks.iterate_hashes())
    lose_all(memory, engine.runner.namespace)
    wait_until(lambda: engine.metric("kvstore_refilled_blocks_total") == BLOCKS, "all blocks")
    wait_until(lambda: list(engine.blocks.iterate_hashes()) == before, "the order of before")


def test_generated_text_that_was_never_saved_is_not_saved_now(engine: Engine, memory: MemoryStore) -> None:
    engine.answer(PROMPTS[0], 60)
    assert engine.blocks.num_cached_blocks > BLOCKS
    lose_all(memory, engine.runner.namespace)
    wait_until(lambda: engine.metric("kvstore_refilled_blocks_total") == BLOCKS, "all blocks")
    assert count_keys(memory) == BLOCKS


def test_what_an_operator_removes_stays_removed_while_its_prompts_are_asked_again(
    engine: Engine, memory: MemoryStore, looks: list[bool | None]
) -> None:
    right = [engine.answer(prompt, 12).wait() for prompt in PROMPTS]
    leave_mark(memory, engine.runner.namespace.digest)
    lose_all(memory, engine.runner.namespace)
    wait_until(lambda: True in looks, "the mark to be found")
    looks.clear()
    while len(looks) < 12:  # as many periods as a minute has where they take 5 s
        assert [engine.answer(prompt, 12).wait() for prompt in PROMPTS] == right
    assert count_keys(memory) == 1  # the mark
    assert engine.metric("kvstore_refilled_blocks_total") == 0

    other = random.Random(9).choices(range(VOCAB_SIZE), k=100)
    engine.answer(other, 4)
    assert count_keys(memory) == 1 + 6
    lose_all(memory, engine.runner.namespace)
    looks.clear()
    wait_until(lambda: len(looks) >= 12, "twelve periods")
    assert count_keys(memory) == 1  # six are too few to say that blocks were lost


def test_what_is_computed_after_a_clear_is_saved_and_put_again(
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
    wait_until(lambda: len(looks) >= 2, "a look at the blocks")
    lose_all(memory, engine.runner.namespace)
    wait_until(lambda: count_keys(memory) == 1 + BLOCKS, "all blocks")


def test_a_cached_prompt_that_is_to_be_kept_does_not_come_back_after_a_clear(
    engine: Engine, memory: MemoryStore, looks: list[bool | None]
) -> None:
    leave_mark(memory, engine.runner.namespace.digest)
    lose_all(memory, engine.runner.namespace)
    wait_until(lambda: True in looks, "the mark to be found")
    engine.answer(PROMPTS[0], 4, hints=(CacheHint(96, 3600.0),))
    assert count_keys(memory) == 1
