"""Fixtures of the tests of whole systems."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.cluster import Instance, instance


@pytest.fixture(scope="session")
def model(few_words: Path) -> Path:
    """The checkpoint of all instances, smaller than that of the examples, so that tests are fast."""
    return few_words


@pytest.fixture(scope="session")
def cold(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """An instance without a pool. Its greedy responses are the expected ones."""
    folder = tmp_path_factory.mktemp("cold")
    with instance(folder, model, "--no-enable-prefix-caching") as running:
        yield running
