"""What the whole system's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.make_model import make_model
from tests.end_to_end.cluster import Instance, instance


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint that the examples use."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture(scope="session")
def cold(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """An instance that computes everything itself: its greedy answers are the right ones."""
    folder = tmp_path_factory.mktemp("cold")
    with instance(folder, model, "--no-enable-prefix-caching") as running:
        yield running
