"""A checkpoint like that of the examples, but smaller, for tests that do not measure the duration of computations."""

from __future__ import annotations

import unittest.mock
from pathlib import Path
from typing import Any

from engine import make_model

__all__ = ["write_few_words"]

_SMALL: dict[str, Any] = {
    "HIDDEN": 128,
    "LAYERS": 2,
    "INTERMEDIATE": 64,
    "HEADS": 4,
    "KV_HEADS": 2,
    "HEAD_DIM": 32,
}


def write_few_words(folder: Path) -> Path:
    """Write a small checkpoint of ``engine.make_model``. It generates words, too, and needs 1 ms for each."""
    with unittest.mock.patch.multiple(make_model, **_SMALL):
        make_model.make_model(folder)
    return folder
