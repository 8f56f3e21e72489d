"""How many calls in router code one request takes; ``call_count`` says how they are counted, and shows them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.router.call_count import CallCount, count_calls

MAX_CALLS = 146


@pytest.fixture(scope="module")
def count() -> CallCount:
    return count_calls()


def test_a_streamed_request_to_a_pair_takes_few_calls(count: CallCount) -> None:
    assert len(count.calls) <= MAX_CALLS, count


def test_the_way_begins_at_the_client_and_reaches_both_instances(count: CallCount) -> None:
    names = [call.function.rpartition(".")[2] for call in count.calls]
    assert names[0] == "data_received"  # the client's request
    assert names.count("data_received") == 5  # prefill's response; decode's head and two pieces


def test_each_request_takes_the_same_calls(count: CallCount) -> None:
    assert count_calls().events == count.events


def test_the_program_shows_each_call_and_the_figures(count: CallCount) -> None:
    command = [sys.executable, "-m", "tests.router.call_count"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[-1] == str(count)
    assert len(lines) == len(count.events) + 1
