"""What the whole system's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.cluster import Instance, instance


@pytest.fixture(scope="session")
def model(few_words: Path) -> Path:
    """The checkpoint of all instances: computing takes the examples' model most of a test's time."""
    return few_words


@pytest.fixture(scope="session")
def cold(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """An instance that computes everything itself: its greedy answers are the right ones."""
    folder = tmp_path_factory.mktemp("cold")
    with instance(folder, model, "--no-enable-prefix-caching") as running:
        yield running
