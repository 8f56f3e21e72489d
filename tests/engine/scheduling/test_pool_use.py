"""A request without blocks from the pool has a reason, and a metric counts the reasons."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.scheduling.pool_use import Reason
from kvstore_backend import PoolUnavailable, StorageBackend
from kvstore_backend.stores.memory import MemoryStore
from tests.engine.checkpoints import VOCAB_SIZE
from tests.engine.faulty_store import Fault, FaultyStore
from tests.engine.running import Engine, SubmittedRequest

PROMPT = random.Random(1).choices(range(VOCAB_SIZE), k=65)
OTHER = random.Random(2).choices(range(VOCAB_SIZE), k=65)


def get_pool_use(submitted: SubmittedRequest) -> tuple[Reason, str]:
    return submitted.sequence.pool_use.reason, submitted.sequence.pool_use.text


def count_reasons(engine: Engine) -> dict[str, float]:
    """Return the numbers of requests for all reasons that occurred."""
    counts = {
        each.value: engine.metric("kvstore_pool_unused_requests_total", reason=each.value)
        for each in Reason
        if each is not Reason.HIT
    }
    return {reason: count for reason, count in counts.items() if count}


@pytest.fixture(scope="module")
def filled(tiny_checkpoint: Path) -> MemoryStore:
    """A pool with the prompt's blocks."""
    store = MemoryStore(64 << 20)
    with Engine(tiny_checkpoint, store=FaultyStore(store)) as engine:
        engine.answer(PROMPT, 1)
    return store


@pytest.fixture
def store(filled: MemoryStore) -> FaultyStore:
    return FaultyStore(filled)


@pytest.fixture
def engine(tiny_checkpoint: Path, store: FaultyStore) -> Iterator[Engine]:
    with Engine(tiny_checkpoint, store=store) as running:
        yield running


def test_a_prompt_is_shorter_than_a_block(engine: Engine) -> None:
    assert get_pool_use(engine.answer(PROMPT[:5], 1)) == (Reason.SHORT, "shorter than a block (5 of 16 tokens)")
    reason, text = get_pool_use(engine.answer(PROMPT[:16], 1))
    assert (reason, text.partition(",")[0]) == (Reason.SHORT, "not longer than a block (16 tokens)")
    assert count_reasons(engine) == {"short": 2}


def test_a_hit_has_no_such_reason(engine: Engine) -> None:
    assert get_pool_use(engine.answer(PROMPT, 1)) == (Reason.HIT, "the pool had 4 of 4 blocks, of which 4 arrived")
    assert count_reasons(engine) == {}


def test_a_prompt_is_not_in_the_pool(engine: Engine) -> None:
    assert get_pool_use(engine.answer(OTHER, 1)) == (Reason.ABSENT, "not in the pool (it lacks the first of 4 blocks)")
    assert count_reasons(engine) == {"absent": 1}


def test_the_own_cache_has_the_prompt(engine: Engine) -> None:
    engine.answer(PROMPT, 1)
    assert get_pool_use(engine.answer(PROMPT, 1)) == (Reason.OWN_CACHE, "own cache had all 4 blocks")
    assert count_reasons(engine) == {"own_cache": 1}


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault.ALL_FAIL, "the pool is not reachable: ALL_FAIL"),
        (Fault.GONE_AT_LOAD, "none of 4 blocks arrived (evicted meanwhile, damaged, or the pool is not reachable)"),
        (Fault.RAISES_DURING_READ, "the load failed; the log says why"),
    ],
)
def test_the_pool_fails(engine: Engine, store: FaultyStore, fault: Fault, text: str) -> None:
    store.fault = fault
    assert get_pool_use(engine.answer(PROMPT, 1)) == (Reason.FAILED, text)
    assert count_reasons(engine) == {"failed": 1}


def test_the_reason_contains_the_error_of_an_unavailable_pool(tiny_checkpoint: Path) -> None:
    def open_store() -> StorageBackend:
        raise PoolUnavailable("the master is down")

    with Engine(tiny_checkpoint, open_store=open_store, wait_for_pool=False) as engine:
        reason, text = get_pool_use(engine.answer(PROMPT, 1))
    assert reason is Reason.FAILED
    assert text.startswith("the pool is not reachable: not used for ")


def test_the_pool_is_slower_than_computing(engine: Engine, store: FaultyStore) -> None:
    store.load_seconds = 0.5
    answers = []
    for salt in range(5):
        for _ in range(2):  # the first request saves the blocks; the second one loads them, as the own cache is empty
            answers.append(engine.answer(PROMPT, 1, salt=str(salt)))
            free = engine.blocks.num_available
            engine.blocks.release_blocks(engine.blocks.allocate_blocks(free))
    reason, text = get_pool_use(answers[-1])
    assert reason is Reason.SLOW
    assert text.startswith("computing was expected to be faster (4 of 4 blocks are in the pool; a block takes 1")
    assert count_reasons(engine)["slow"] == 1


def test_there_is_no_pool(tiny_checkpoint: Path) -> None:
    with Engine(tiny_checkpoint) as engine:
        assert get_pool_use(engine.answer(PROMPT, 1))[0] is Reason.NO_POOL
        assert count_reasons(engine) == {"no_pool": 1}


def test_a_request_ends_during_its_load(engine: Engine, store: FaultyStore) -> None:
    store.hang_loads()
    submitted = engine.begin(PROMPT, 1)
    assert store.hanging.wait(30)
    engine.core.abort_sequence(submitted.sequence)
    submitted.wait()
    assert count_reasons(engine) == {"ended": 1}
    store.go_on()


def test_the_pool_has_a_part_of_the_prompt(engine: Engine) -> None:
    submitted = engine.answer(PROMPT[:48] + OTHER, 1)
    text = "the pool had 3 of 7 blocks, of which 3 arrived; it lacks block 3, which is new or was evicted"
    assert get_pool_use(submitted) == (Reason.HIT, text)


def test_an_instance_computes_blocks_of_a_slow_pool_until_the_pool_is_fast_again(tiny_checkpoint: Path) -> None:
    prompts = [random.Random(seed).choices(range(VOCAB_SIZE), k=33) for seed in range(22)]
    store = FaultyStore(MemoryStore(64 << 20))
    with Engine(tiny_checkpoint, store=store) as engine:
        answers = [engine.answer(prompt).wait() for prompt in prompts]
    with Engine(tiny_checkpoint, store=store) as engine:
        engine.answer([1] * 15)  # some steps, from which the engine learns the speed of computing
        store.load_seconds = 0.25
        submitted = [engine.answer(prompt) for prompt in prompts[:5]]
        store.load_seconds = 0.0
        submitted += [engine.answer(prompt) for prompt in prompts[5:]]
    assert [one.wait() for one in submitted] == answers
    loaded = [one.sequence.pool_cached_tokens for one in submitted]
    assert loaded == [32] * 4 + [0] * 15 + [32] * 3
    assert engine.metric("kvstore_load_or_compute_total", decision="load") == 7
    assert engine.metric("kvstore_load_or_compute_total", decision="compute") == 15


def test_a_sequence_counts_its_saved_blocks(tiny_checkpoint: Path) -> None:
    with Engine(tiny_checkpoint, store=MemoryStore(64 << 20)) as engine:
        saves = engine.answer(list(range(1, 50))).sequence.saves
        assert (saves.num_begun, saves.num_done) == (3, 3)
