"""Ends of requests: normal ones, aborts, stops of the instance, and errors of one request."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core import Prefilled
from engine.scheduling.request import Request, SamplingParams, Sequence, State
from engine.scheduling.scheduler import Reservation
from kvstore_backend import BlockPool, Status
from kvstore_backend.stores.memory import MemoryStore
from tests.engine.checkpoints import GROUPED, write_checkpoint
from tests.engine.faulty_store import FaultyStore
from tests.engine.running import Engine, SubmittedRequest
from tests.support.waiting import wait_until

PROMPT = list(range(1, 41))


@pytest.fixture
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with Engine(tiny_checkpoint, max_num_seqs=2) as running:
        yield running


@pytest.fixture(scope="module")
def answer(tiny_checkpoint: Path) -> list[int]:
    """The twelve tokens that the model generates after the prompt."""
    with Engine(tiny_checkpoint) as running:
        return running.answer(PROMPT, 12).wait()


@pytest.fixture
def allow_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The engine's steps wait until this event is set. It handles earlier aborts and requests before its next step."""
    go = threading.Event()
    run = engine.runner.run

    def run_after_go(chunks: Any) -> Any:
        go.wait()
        return run(chunks)

    monkeypatch.setattr(engine.runner, "run", run_after_go)
    yield go
    go.set()


def test_max_tokens_ends_a_response_with_length(engine: Engine, answer: list[int]) -> None:
    submitted = engine.answer(PROMPT, 5)
    assert (submitted.wait(), submitted.finish_reason) == (answer[:5], "length")


def test_an_end_token_ends_a_response_with_stop(engine: Engine, answer: list[int]) -> None:
    engine.runner.eos_token_ids = frozenset({answer[4]})
    submitted = engine.answer(PROMPT, 12)
    assert (submitted.wait(), submitted.finish_reason) == (answer[: answer.index(answer[4]) + 1], "stop")


def test_a_request_can_ignore_end_tokens(engine: Engine, answer: list[int]) -> None:
    engine.runner.eos_token_ids = frozenset({answer[4]})
    assert engine.answer(PROMPT, 12, ignore_eos=True).wait() == answer


def test_an_end_token_is_not_chosen_before_min_tokens(engine: Engine, answer: list[int]) -> None:
    engine.runner.eos_token_ids = frozenset({answer[0]})
    assert engine.answer(PROMPT, 12).wait() == answer[:1]
    assert len(engine.answer(PROMPT, 12, min_tokens=4).wait()) >= 4


def test_a_stop_token_of_the_request_ends_its_response(engine: Engine, answer: list[int]) -> None:
    submitted = engine.answer(PROMPT, 12, stop_token_ids=frozenset({answer[4]}), ignore_eos=True)
    assert (submitted.wait(), submitted.finish_reason) == (answer[: answer.index(answer[4]) + 1], "stop")


def test_an_abort_ends_running_and_waiting_sequences_but_changes_no_finished_one(
    engine: Engine, allow_steps: threading.Event
) -> None:
    running, neighbour, waiting = (engine.begin(PROMPT, 12) for _ in range(3))
    for submitted in (running, waiting, running):  # the second abort of a sequence has no effect
        engine.core.abort_sequence(submitted.sequence)
    allow_steps.set()
    for submitted in (running, waiting):
        submitted.wait()
        assert submitted.finish_reason == "abort"
        assert submitted.sequence.state is State.FINISHED
    neighbour.wait()
    assert neighbour.finish_reason == "length"
    engine.core.abort_sequence(neighbour.sequence)
    engine.wait_until_idle()
    assert [submitted.times_saved for submitted in (running, neighbour, waiting)] == [1, 1, 1]
    assert engine.metric("kvstore_requests_finished_total", reason="abort") == 2


def test_a_step_that_fails_ends_only_its_own_sequences(
    engine: Engine, answer: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, fail = engine.runner.run, threading.Event()
    fail.set()

    def fail_once(chunks: Any) -> Any:
        if len(chunks) == 2 and fail.is_set():
            fail.clear()
            raise RuntimeError("out of memory")
        return run(chunks)

    monkeypatch.setattr(engine.runner, "run", fail_once)
    failed, also_failed, waiting = (engine.begin(prompt, 12) for prompt in ([1], [2], PROMPT))
    for submitted in (failed, also_failed):
        submitted.wait()
        assert submitted.finish_reason == "error"
    assert waiting.wait() == answer
    assert "out of memory" in caplog.text
    assert engine.core.is_alive
    engine.wait_until_idle()


def test_all_requests_fail_after_a_permanent_device_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_waiting_request, is_lost = threading.Event(), threading.Event()
    run = engine.runner.run

    def fail(*_: Any) -> Any:
        is_lost.set()
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def fail_late(chunks: Any) -> Any:
        return fail() if has_waiting_request.is_set() else run(chunks)

    def wait_for_device() -> None:
        if is_lost.is_set():
            fail()

    monkeypatch.setattr(engine.runner, "run", fail_late)
    monkeypatch.setattr(engine.runner, "wait_for_device", wait_for_device)
    submitted = [engine.begin(PROMPT, 900) for _ in range(3)]  # one more than can run at the same time
    submitted[0].next()
    has_waiting_request.set()
    for one in submitted:
        one.wait()
        assert one.finish_reason == "error"
    wait_until(lambda: not engine.core.is_alive, "the engine to be no longer alive")
    later = engine.answer(PROMPT, 1)
    assert (later.wait(), later.finish_reason) == ([], "error")
    reserved: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine.core.reserve_blocks([], 16, reserved.put)
    assert reserved.get(timeout=60) is None
    assert "an illegal memory access" in caplog.text
    engine.wait_until_idle()


def test_later_requests_succeed_after_a_temporary_device_error(
    engine: Engine, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engine.runner.run

    def fail(chunks: Any) -> Any:
        monkeypatch.setattr(engine.runner, "run", run)
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(engine.runner, "run", fail)
    assert engine.answer(PROMPT, 12).finish_reason == "error"
    assert engine.core.is_alive
    assert engine.answer(PROMPT, 12).wait() == answer


def test_a_sequence_ends_alone_with_an_error_if_its_sampling_fails(engine: Engine, answer: list[int]) -> None:
    good = engine.begin(PROMPT, 12)
    good.next()
    every_token = frozenset(range(engine.runner.vocab_size))
    bad = engine.begin([1], 12, temperature=1.0, seed=0, min_tokens=1, stop_token_ids=every_token)
    assert (bad.wait(), bad.finish_reason) == ([], "error")
    assert (good.wait(), good.finish_reason) == (answer, "length")
    engine.wait_until_idle()


def test_a_message_to_the_engine_that_fails_ends_no_sequence(engine: Engine, answer: list[int]) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no receiver")

    running = engine.begin(PROMPT, 12)
    running.next()
    engine.core.reserve_blocks([], 10**9, fail)
    waiting = [engine.begin(PROMPT, 12) for _ in range(3)]
    assert [submitted.wait() for submitted in (running, *waiting)] == [answer] * 4


def test_a_hand_over_that_fails_ends_only_its_own_sequence_and_releases_its_blocks(
    engine: Engine, answer: list[int]
) -> None:
    running = engine.begin(PROMPT, 12)
    running.next()
    reserved: queue.SimpleQueue[Reservation | None] = queue.SimpleQueue()
    engine.core.reserve_blocks([], 1, reserved.put)
    too_short = reserved.get(timeout=30)
    assert too_short
    pending = SubmittedRequest(Sequence(Request("handed", tuple(PROMPT), SamplingParams(12)), engine.block_size))
    engine.core.submit(pending.sequence, pending.listener, Prefilled(too_short, 1, None))
    assert (pending.wait(), pending.finish_reason) == ([], "error")
    assert running.wait() == answer
    engine.wait_until_idle()


def test_a_sequence_that_does_not_fit_in_kv_memory_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"1025 tokens do not fit in KV memory, which has space for 1024"):
        engine.begin([1] * 25, 1000)
    assert engine.answer([1] * 24, 1).finish_reason == "length"


def test_a_stop_ends_running_and_waiting_sequences(tiny_checkpoint: Path) -> None:
    with Engine(tiny_checkpoint, max_num_seqs=1) as engine:
        submitted = [engine.begin(PROMPT, 900) for _ in range(3)]
        submitted[0].next()
    for one in submitted:
        one.wait()
        assert one.finish_reason == "abort"
    assert not engine.core.is_alive


def test_metrics_count_tokens_and_requests(engine: Engine) -> None:
    engine.answer(PROMPT, 5)
    engine.answer(PROMPT, 5)
    assert engine.metric("fastdeploy:prompt_tokens_total") == 80
    assert engine.metric("fastdeploy:generation_tokens_total") == 10
    assert engine.metric("fastdeploy:prefix_gpu_cache_token_num_total") == 32
    assert engine.metric("kvstore_prompt_tokens_total", origin="own_cache") == 32
    assert engine.metric("kvstore_prompt_tokens_total", origin="computed") == 48
    assert engine.metric("kvstore_requests_finished_total", reason="length") == 2
    assert engine.metric("fastdeploy:time_to_first_token_seconds_count") == 2
    assert engine.metric("fastdeploy:available_gpu_block_num") == 64


def test_each_token_comes_with_its_own_logprobs(engine: Engine, answer: list[int]) -> None:
    submitted = engine.begin(PROMPT, 3, logprobs=2)
    for token in answer[:3]:
        output = submitted.next()
        assert output.logprobs is not None
        assert output.logprobs.top[0] == (token, output.logprobs.chosen)


@pytest.fixture(autouse=True)
def only_expected_errors(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A test without ``fails`` in its name must log no error."""
    yield
    if "fails" not in request.node.name:
        assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_cleared_prefix_cache_fills_again_while_sequences_run(
    engine: Engine, allow_steps: threading.Event, answer: list[int]
) -> None:
    allow_steps.set()
    engine.answer(PROMPT, 1)
    assert engine.answer(PROMPT, 1).sequence.own_cached_tokens == 32
    allow_steps.clear()
    running = engine.begin(PROMPT, 12)
    wait_until(lambda: engine.scheduler.running, "the sequence to run")
    engine.core.clear_prefix_cache()
    allow_steps.set()
    assert running.wait() == answer
    assert engine.answer(PROMPT, 1).sequence.own_cached_tokens == 0
    assert engine.answer(PROMPT, 1).sequence.own_cached_tokens == 32
    engine.wait_until_idle()


def test_a_slow_stop_reports_the_cause_of_its_wait(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FaultyStore(MemoryStore(64 << 20))
    store.hang_saves()
    with Engine(tiny_checkpoint, store=store) as engine:
        go, run = threading.Event(), engine.runner.run

        def run_after_go(chunks: Any) -> Any:
            go.wait()
            return run(chunks)

        monkeypatch.setattr(engine.runner, "run", run_after_go)
        engine.begin(PROMPT, 100)
        wait_until(lambda: engine.scheduler.running, "the prompt to be computed")
        stopping = threading.Thread(target=engine.core.stop)
        stopping.start()
        assert engine.core.holds_stop_up == "the running step"
        go.set()
        wait_until(lambda: not engine.core.is_alive, "the loop to end")
        assert engine.core.holds_stop_up == "1 block that is being saved to the pool"
        store.go_on()
        stopping.join()


def test_blocks_of_a_prompt_with_nan_in_its_kv_are_not_shared(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk in the middle of the prompt has NaN. Its blocks are saved before the logits show it."""
    store = MemoryStore(64 << 20)
    with Engine(tiny_checkpoint, store=store, budget=16) as engine:
        expected = engine.answer(PROMPT, 4, salt="other").wait()
        run, num_steps = engine.runner.run, 0

        def run_and_corrupt(chunks: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            choices = run(chunks)
            if num_steps == 2:
                engine.runner.kv[chunks[0].sequence.block_table[1], 0] = float("nan")
            return choices

        monkeypatch.setattr(engine.runner, "run", run_and_corrupt)
        failed = engine.answer(PROMPT, 4)
        assert (failed.wait(), failed.finish_reason) == ([], "error")
        pool = BlockPool(store, engine.runner.namespace)
        wait_until(lambda: pool.exists(failed.sequence.hashes()[:2]) == [Status.OK, Status.ABSENT], "the removal")
        again = engine.answer(PROMPT, 4)
        assert (again.wait(), again.finish_reason) == (expected, "length")
        assert again.sequence.own_cached_tokens == engine.block_size
    with Engine(tiny_checkpoint, store=store, budget=16) as other:
        assert other.answer(PROMPT, 4).wait() == expected


@pytest.mark.parametrize("evicted", [False, True], ids=["cached", "evicted"])
def test_broken_blocks_before_a_sliding_window_are_not_shared(
    evicted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the logits show NaN, the first broken blocks are before the window, and may be only in the pool."""
    checkpoint = write_checkpoint(GROUPED["mistral"](), tmp_path)
    prompt, store = list(range(1, 151)), MemoryStore(64 << 20)
    with Engine(checkpoint, store=store, budget=16) as engine:
        expected = engine.answer(prompt, 4, salt="other").wait()
        run, num_steps = engine.runner.run, 0

        def run_and_corrupt(chunks: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            choices = run(chunks)
            if num_steps == 4:
                engine.runner.kv[chunks[0].sequence.block_table[2]] = float("nan")
            if num_steps == 8 and evicted:
                blocks = engine.blocks
                blocks.release_blocks(blocks.allocate_blocks(blocks.num_available))
            return choices

        monkeypatch.setattr(engine.runner, "run", run_and_corrupt)
        failed = engine.answer(prompt, 4)
        assert (failed.wait(), failed.finish_reason) == ([], "error")
        pool = BlockPool(store, engine.runner.namespace)
        wait_until(lambda: not any(pool.exists(failed.sequence.hashes()[2:])), "the removal")
        again = engine.answer(prompt, 4)
        assert (again.wait(), again.finish_reason) == (expected, "length")
    with Engine(checkpoint, store=store, budget=16) as other:
        assert other.answer(prompt, 4).wait() == expected


def test_the_memory_of_broken_blocks_does_not_break_later_sequences(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tiny_checkpoint, num_blocks=12) as engine:
        prompts = [PROMPT[:20], PROMPT[:37]]
        expected = [engine.answer(prompt, 4, salt="before").wait() for prompt in prompts]
        run = engine.runner.run

        def run_and_corrupt(chunks: Any) -> Any:
            choices = run(chunks)
            engine.runner.kv[chunks[0].sequence.block_table[0]] = float("nan")
            monkeypatch.setattr(engine.runner, "run", run)
            return choices

        monkeypatch.setattr(engine.runner, "run", run_and_corrupt)
        assert engine.answer(list(range(100, 240)), 4).wait() == []
        both = [engine.begin(prompt, 4, salt="after") for prompt in prompts]
        assert [submitted.wait() for submitted in both] == expected
