"""Faults of the pool change no response, and all blocks become free.

The expected responses are those of an instance without a pool, which ``test_answers.py`` compares with transformers.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.pool.pool_connector import PoolConnector
from engine.scheduling.request import State
from kvstore_backend import PoolUnavailable, StorageBackend
from kvstore_backend.staging import StagedMemory
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend
from tests.engine.checkpoints import VOCAB_SIZE
from tests.engine.faulty_store import Fault, FaultyStore
from tests.engine.running import Engine, SubmittedRequest
from tests.support.stored import count_keys
from tests.support.waiting import wait_until

MAX_TOKENS = 20
LENGTHS = (1, 16, 17, 33, 48, 65, 100)
PROMPTS = [random.Random(length).choices(range(VOCAB_SIZE), k=length) for length in LENGTHS]
LONG = PROMPTS[-1]


@pytest.fixture(scope="module")
def answers(tiny_checkpoint: Path) -> dict[int, list[int]]:
    """The expected tokens of each prompt, by its length."""
    with Engine(tiny_checkpoint) as engine:
        return {len(prompt): engine.answer(prompt, MAX_TOKENS).wait() for prompt in PROMPTS}


@pytest.fixture(scope="module")
def filled_store(tiny_checkpoint: Path) -> MemoryStore:
    store = MemoryStore(64 << 20)
    with Engine(tiny_checkpoint, store=FaultyStore(store)) as engine:
        for prompt in PROMPTS:
            engine.answer(prompt, 1)
    return store


@pytest.fixture
def store(filled_store: MemoryStore) -> Iterator[FaultyStore]:
    """The filled pool, without a fault at first."""
    faulty = FaultyStore(filled_store)
    yield faulty
    faulty.go_on()


def check_answers(all_submitted: Sequence[SubmittedRequest], answers: dict[int, list[int]]) -> None:
    for submitted in all_submitted:
        assert submitted.wait() == answers[submitted.sequence.num_prompt_tokens]


def check_end(engine: Engine, all_submitted: Sequence[SubmittedRequest], answers: dict[int, list[int]]) -> None:
    check_answers(all_submitted, answers)
    assert all(submitted.saved.wait(30) for submitted in all_submitted)
    engine.wait_until_idle()
    assert [submitted.times_saved for submitted in all_submitted] == [1] * len(all_submitted)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use staging buffers for few blocks, as on a GPU."""
    monkeypatch.setattr("engine.core.PoolConnector", functools.partial(PoolConnector, staged=True))
    monkeypatch.setattr("engine.pool.staging.StagedMemory", functools.partial(StagedMemory, buffer_bytes=20_000))


@pytest.mark.parametrize("memory", ["large", "small", "staged"])
@pytest.mark.parametrize("fault", Fault)
def test_no_fault_of_the_pool_changes_a_response(
    tiny_checkpoint: Path,
    store: FaultyStore,
    answers: dict[int, list[int]],
    fault: Fault,
    memory: str,
    request: pytest.FixtureRequest,
) -> None:
    if memory == "staged":
        request.getfixturevalue("staged")
    num_blocks = 9 if memory == "small" else 64
    store.fault = fault
    with Engine(tiny_checkpoint, store=store, num_blocks=num_blocks, save_outputs=True) as engine:
        check_end(engine, [engine.begin(prompt, MAX_TOKENS) for prompt in PROMPTS], answers)


@pytest.mark.usefixtures("staged")
def test_a_late_staged_read_holds_no_block_and_changes_no_response(
    tiny_checkpoint: Path, store: FaultyStore, answers: dict[int, list[int]]
) -> None:
    deadlines = Deadlines(lookup_seconds=10, transfer_seconds=0.2)
    with Engine(tiny_checkpoint, store=GuardedBackend(lambda: store, deadlines), num_blocks=20) as engine:
        store.hang_loads()
        submitted = engine.answer(LONG, MAX_TOKENS)
        assert submitted.wait() == answers[len(LONG)]
        assert store.hanging.is_set()
        engine.wait_until_idle()
        store.go_on()
        for prompt in PROMPTS:
            assert engine.answer(prompt, MAX_TOKENS).wait() == answers[len(prompt)]


def test_only_blocks_that_arrived_count_as_cached(
    tiny_checkpoint: Path, store: FaultyStore, answers: dict[int, list[int]]
) -> None:
    store.fault = Fault.FAILS_AFTER_FIRST_BLOCK
    with Engine(tiny_checkpoint, store=store) as engine:
        submitted = engine.answer(LONG, MAX_TOKENS)
        assert submitted.sequence.pool_cached_tokens == 16
        assert submitted.wait() == answers[len(LONG)]


def test_a_pool_that_recovers_is_used_again(
    tiny_checkpoint: Path, store: FaultyStore, answers: dict[int, list[int]]
) -> None:
    with Engine(tiny_checkpoint, store=store) as engine:
        store.fault = Fault.ALL_RAISE
        assert engine.answer(PROMPTS[-2], MAX_TOKENS).sequence.pool_cached_tokens == 0
        store.fault = Fault.NOTHING
        assert engine.answer(LONG, MAX_TOKENS).sequence.pool_cached_tokens == 96


def test_running_decodes_continue_while_a_load_hangs_with_garbage_in_its_blocks(
    tiny_checkpoint: Path, store: FaultyStore, answers: dict[int, list[int]]
) -> None:
    store.hang_loads()
    with Engine(tiny_checkpoint, store=store) as engine:
        loading = engine.begin(LONG, MAX_TOKENS)
        assert store.hanging.wait(30)
        # Neither has a full block to load. They get different numbers of blocks, so one is padded.
        decoding = [engine.begin(prompt, MAX_TOKENS) for prompt in PROMPTS[:2]]
        check_answers(decoding, answers)
        store.go_on()
        check_end(engine, [loading, *decoding], answers)
        assert loading.sequence.pool_cached_tokens == 96


def test_loads_run_while_the_maximum_of_sequences_runs(
    tiny_checkpoint: Path, store: FaultyStore, answers: dict[int, list[int]]
) -> None:
    store.hang_loads()
    with Engine(tiny_checkpoint, store=store, max_num_seqs=1) as engine:
        running = engine.begin([1], 900)
        running.next()
        loading = engine.begin(LONG, MAX_TOKENS)
        assert store.hanging.wait(30)
        store.go_on()
        wait_until(lambda: engine.scheduler.ready, "the load to end")
        assert running.sequence.state is State.RUNNING
        engine.core.abort_sequence(running.sequence)
        check_end(engine, [loading], answers)
        assert loading.sequence.pool_cached_tokens == 96


def test_a_sequence_aborted_while_its_load_hangs_holds_its_blocks_until_the_load_ends(
    tiny_checkpoint: Path, store: FaultyStore
) -> None:
    store.hang_loads()
    with Engine(tiny_checkpoint, store=store, num_blocks=20) as engine:
        aborted = engine.begin(LONG)
        assert store.hanging.wait(30)
        engine.core.abort_sequence(aborted.sequence)
        assert aborted.wait() == []
        assert aborted.finish_reason == "abort"
        engine.answer(PROMPTS[0], 1)  # the engine handles the abort before this request
        assert engine.blocks.num_available == 20 - 7
        store.go_on()
        engine.wait_until_idle()
        assert aborted.times_saved == 1


@pytest.mark.parametrize("fault", [Fault.FAILS_AFTER_FIRST_BLOCK, Fault.RAISES_DURING_READ])
def test_garbage_of_an_aborted_load_changes_no_response(
    tiny_checkpoint: Path, store: FaultyStore, answers: dict[int, list[int]], fault: Fault
) -> None:
    store.hang_loads()
    with Engine(tiny_checkpoint, store=store, num_blocks=8) as engine:
        aborted = engine.begin(LONG)
        assert store.hanging.wait(30)
        engine.core.abort_sequence(aborted.sequence)
        store.fault = fault
        store.go_on()
        engine.wait_until_idle()
        check_end(engine, [engine.begin(prompt, MAX_TOKENS) for prompt in PROMPTS[:2]], answers)


def test_a_sequence_aborted_before_its_load_begins_ends_immediately(
    tiny_checkpoint: Path, store: FaultyStore, answers: dict[int, list[int]]
) -> None:
    store.hang_loads()
    with Engine(tiny_checkpoint, store=store) as engine:
        first = engine.begin(LONG, MAX_TOKENS)
        assert store.hanging.wait(30)
        queued = engine.begin(PROMPTS[-2])
        engine.core.abort_sequence(queued.sequence)
        assert queued.wait() == []
        store.go_on()
        check_end(engine, [first], answers)


def test_a_save_that_hangs_delays_no_response(
    tiny_checkpoint: Path, store: FaultyStore, answers: dict[int, list[int]]
) -> None:
    fresh = FaultyStore(MemoryStore(64 << 20))
    fresh.hang_saves()
    with Engine(tiny_checkpoint, store=fresh, num_blocks=20) as engine:
        all_submitted = [engine.begin(prompt, MAX_TOKENS) for prompt in PROMPTS]
        check_answers(all_submitted, answers)
        assert fresh.hanging.is_set()
        assert engine.blocks.num_available < 20
        assert engine.metric("kvstore_unsaved_blocks_total") > 0  # they were dropped and not queued
        fresh.go_on()
        check_end(engine, all_submitted, answers)


def test_at_most_a_quarter_of_the_blocks_waits_for_saves_that_hang(tiny_checkpoint: Path) -> None:
    fresh = FaultyStore(MemoryStore(64 << 20))
    fresh.hang_saves()
    with Engine(tiny_checkpoint, store=fresh, num_blocks=40) as engine:
        for first in (1, 2, 3):
            engine.begin([first] * 65, 1).wait()  # four full blocks
        wait_until(lambda: engine.metric("kvstore_unsaved_blocks_total"), "the blocks of one prompt to be dropped")
        fresh.go_on()
        engine.wait_until_idle()
        saved = count_keys(fresh)
        assert 8 <= saved <= 10  # all blocks of a step are saved, or none
        assert engine.metric("kvstore_unsaved_blocks_total") == 12 - saved


def test_on_saved_is_called_after_the_last_output_and_after_the_save(tiny_checkpoint: Path) -> None:
    fresh = FaultyStore(MemoryStore(64 << 20))
    fresh.hang_saves()
    with Engine(tiny_checkpoint, store=fresh) as engine:
        submitted = engine.begin(LONG)
        submitted.wait()
        assert fresh.hanging.wait(30)
        assert not submitted.saved.is_set()
        fresh.go_on()
        assert submitted.saved.wait(30)
        assert count_keys(fresh) == 6


def test_an_instance_stops_while_a_load_hangs(tiny_checkpoint: Path, store: FaultyStore) -> None:
    store.hang_loads()
    with Engine(tiny_checkpoint, store=store) as engine:
        loading = engine.begin(LONG)
        assert store.hanging.wait(30)
    assert loading.wait() == []
    assert loading.finish_reason == "abort"


@pytest.mark.parametrize("problem", [PoolUnavailable("no master at 127.0.0.1:1"), RuntimeError("a broken library")])
def test_a_pool_that_is_unavailable_at_first_is_joined_later(
    tiny_checkpoint: Path, filled_store: MemoryStore, answers: dict[int, list[int]], problem: Exception
) -> None:
    is_available = False

    def open_store() -> StorageBackend:
        if not is_available:
            raise problem
        return FaultyStore(filled_store)

    with Engine(tiny_checkpoint, open_store=open_store, wait_for_pool=False) as engine:
        before = engine.answer(PROMPTS[-2], MAX_TOKENS)
        assert before.wait() == answers[len(PROMPTS[-2])]
        assert before.sequence.pool_cached_tokens == 0
        is_available = True
        engine.wait_for_pool()
        after = engine.answer(LONG, MAX_TOKENS)
        assert after.wait() == answers[len(LONG)]
        assert after.sequence.pool_cached_tokens == 96


def test_a_late_read_that_writes_garbage_changes_no_response(
    tiny_checkpoint: Path, store: FaultyStore, answers: dict[int, list[int]]
) -> None:
    deadlines = Deadlines(lookup_seconds=10, transfer_seconds=0.2)
    guarded = GuardedBackend(lambda: store, deadlines)
    with Engine(tiny_checkpoint, store=guarded, num_blocks=20) as engine:
        store.fault = Fault.FAILS_AFTER_FIRST_BLOCK
        store.hang_loads()
        # The response comes while the read hangs. It uses other blocks than the read, which may still write.
        submitted = engine.answer(LONG, MAX_TOKENS)
        assert submitted.wait() == answers[len(LONG)]
        assert (submitted.sequence.own_cached_tokens, submitted.sequence.pool_cached_tokens) == (0, 0)
        assert store.hanging.is_set()
        num_held = 6 if engine.late_calls_hold_blocks else 0
        wait_until(lambda: engine.blocks.num_available == 20 - num_held, f"all blocks but {num_held}")
        store.go_on()
        engine.wait_until_idle()
        for prompt in PROMPTS:
            assert engine.answer(prompt, MAX_TOKENS).wait() == answers[len(prompt)]


@pytest.mark.parametrize("call", ["load", "save"])
def test_a_call_that_never_ends_leaves_memory_for_the_longest_sequence(
    tiny_checkpoint: Path, filled_store: MemoryStore, answers: dict[int, list[int]], call: str
) -> None:
    """The longest sequence has eight blocks, and the memory has eleven."""
    store = FaultyStore(filled_store if call == "load" else MemoryStore(64 << 20))
    guarded = GuardedBackend(lambda: store, Deadlines(lookup_seconds=10, transfer_seconds=0.2))
    with Engine(tiny_checkpoint, store=guarded, num_blocks=11, max_model_len=128, budget=100) as engine:
        (store.hang_loads if call == "load" else store.hang_saves)()
        first = engine.begin(LONG, MAX_TOKENS)
        assert store.hanging.wait(30)
        others = [engine.begin([7, *LONG[1:]], 1), *(engine.begin(prompt, MAX_TOKENS) for prompt in PROMPTS)]
        assert len(others[0].wait()) == 1
        check_answers([first, *others[1:]], answers)
        assert store.hanging.is_set()
        store.go_on()
        engine.wait_until_idle()


def test_a_late_save_holds_its_blocks_until_it_ends(tiny_checkpoint: Path, answers: dict[int, list[int]]) -> None:
    store = FaultyStore(MemoryStore(64 << 20))
    guarded = GuardedBackend(lambda: store, Deadlines(lookup_seconds=10, transfer_seconds=0.2))
    with Engine(tiny_checkpoint, store=guarded, num_blocks=20) as engine:
        store.hang_saves()
        submitted = engine.answer(LONG, MAX_TOKENS)
        assert submitted.wait() == answers[len(LONG)]
        assert submitted.saved.wait(30)  # the save counts as ended, although it failed
        if engine.late_calls_hold_blocks:
            assert engine.blocks.num_available < 20
        else:
            engine.wait_until_idle()
        store.go_on()
        engine.wait_until_idle()
