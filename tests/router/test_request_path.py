"""A chat completion at a prefill/decode pair passes few files, and docs/architecture.md lists them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.router.request_path import RequestPath, trace_request

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
MAX_FILES = 20


@pytest.fixture(scope="module")
def path() -> RequestPath:
    return trace_request()


def test_a_chat_completion_at_a_pair_passes_few_files(path: RequestPath) -> None:
    assert len(path.files) <= MAX_FILES, path.files


def test_the_architecture_page_lists_these_files_in_order(path: RequestPath) -> None:
    listed = re.findall(r"^\d+\. `router/([^`]+)`", ARCHITECTURE.read_text(), re.MULTILINE)
    assert listed == path.files


def test_the_path_begins_at_the_client_and_reaches_both_instances(path: RequestPath) -> None:
    names = [call.function.rpartition(".")[2] for call in path.calls]
    assert names[0] == "data_received"  # the client's request
    assert names.count("data_received") == 5  # prefill's response; decode's head and two pieces


def test_a_request_that_does_not_wait_is_served_without_a_task(path: RequestPath) -> None:
    assert not [event for event in path.events if event.resumed or event.function.endswith("ServingRequest._run")]
