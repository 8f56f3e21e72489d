"""Checkpoints for many tests of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.make_model import make_model
from engine.model.checkpoint import load_tokenizer
from tests.engine.checkpoints import CHECKPOINTS, write_characters_in_parts, write_checkpoint
from tests.engine.gpu_form import run_as_on_gpu
from tests.support.device import TEST_DEVICE

# For models of this size, a second thread costs more time than it saves.
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def engines_as_on_gpu() -> Iterator[None]:
    """Run the code for GPUs in every engine if ``KVSTORE_TEST_DEVICE=stand-in`` is set."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if TEST_DEVICE == "stand-in":
            run_as_on_gpu(monkeypatch)
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 checkpoint without a tokenizer, for tests that work with any architecture."""
    return write_checkpoint(CHECKPOINTS["qwen2-grouped-untied"](), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def word_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that ``python -m engine.make_model`` writes, with tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("models") / "words"
    make_model(folder)
    return folder


@pytest.fixture(scope="session")
def characters_in_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint that generates words, and characters of several tokens."""
    return write_characters_in_parts(tmp_path_factory.mktemp("models") / "parts")


@pytest.fixture(scope="session")
def word_tokenizer(word_model: Path) -> Any:
    """The tokenizer of ``word_model``: byte level, one token for each word of its vocabulary."""
    return load_tokenizer(str(word_model))
