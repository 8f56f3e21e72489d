"""The progress of a long prompt is logged every few seconds. That of a short one is not logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.scheduling.prefill_progress import EVERY_SECONDS, PrefillProgress
from engine.scheduling.request import Request, SamplingParams, Sequence
from engine.scheduling.scheduler import Chunk
from tests.engine.running import Engine

Compute = Callable[[Sequence, int, float], None]


@pytest.fixture
def compute() -> Compute:
    """Return a function that computes a chunk of a sequence, in a step of the given time."""
    now = [1000.0]
    progress = PrefillProgress(lambda: now[0])

    def compute_chunk(sequence: Sequence, num_tokens: int, seconds: float) -> None:
        now[0] += seconds
        chunk = Chunk(sequence, num_tokens)
        sequence.num_computed += num_tokens
        progress.record_chunk(chunk, seconds)

    return compute_chunk


def sequence_of(num_tokens: int, name: str = "r") -> Sequence:
    return Sequence(Request(name, (1,) * num_tokens, SamplingParams(1)), 64)


def test_the_log_has_the_computed_tokens_and_the_remaining_time(
    compute: Compute, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    long = sequence_of(32768)
    for _ in range(16):
        compute(long, 2048, 1.0)
    assert caplog.messages == [
        "prefill of request r: 10240 of 32768 tokens, ~11 s left",
        "prefill of request r: 20480 of 32768 tokens, ~6 s left",
        "prefill of request r: 30720 of 32768 tokens, ~1 s left",
    ]


def test_a_long_first_step_is_logged_at_its_end(compute: Compute, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    compute(sequence_of(4096), 2048, 60.0)
    assert caplog.messages == ["prefill of request r: 2048 of 4096 tokens, ~60 s left"]


@pytest.mark.parametrize("seconds", [EVERY_SECONDS / 3, 100.0])
def test_a_prompt_of_one_step_is_not_logged(compute: Compute, caplog: pytest.LogCaptureFixture, seconds: float) -> None:
    caplog.set_level(logging.INFO)
    compute(sequence_of(2048), 2048, seconds)
    assert caplog.messages == []


def test_the_remaining_time_is_right_after_a_preemption(compute: Compute, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    preempted = sequence_of(8192)
    compute(preempted, 4096, 1.0)
    compute(preempted, 2048, 1.0)
    preempted.num_computed = 0
    preempted.num_preemptions = 1
    compute(preempted, 2048, 10.0)
    compute(preempted, 2048, 5.0)
    assert caplog.messages == [
        "prefill of request r: 2048 of 8192 tokens, ~30 s left",
        "prefill of request r: 4096 of 8192 tokens, ~10 s left",
    ]


def test_an_engine_logs_the_progress_of_prompts_of_several_steps(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.scheduling.prefill_progress.EVERY_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    with Engine(tiny_checkpoint, budget=24) as engine:
        engine.answer(range(1, 101), 1)
        engine.answer([1, 2, 3], 3)
    lines = [message.rpartition(",")[0] for message in caplog.messages if "prefill of" in message]
    assert lines == [f"prefill of request 0: {computed} of 100 tokens" for computed in (24, 48, 72, 96)]
