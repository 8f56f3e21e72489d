"""RDMA needs registered memory: the engine registers all memory that it moves to and from the pool."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.pool.pool_connector import PoolConnector
from engine.pool.staging import open_direct
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.wrapper import Wrapper
from tests.engine.running import Engine
from tests.support.device import TEST_DEVICE
from tests.support.strict_registration import StrictStore

PROMPT = list(range(100))


class NeverClosed(Wrapper):
    """A store that an engine does not close, because it is used again."""

    def close(self) -> None:
        pass


WAYS = ("direct", "staged") if TEST_DEVICE == "cpu" else ("staged",)


@pytest.mark.parametrize("staged", [way == "staged" for way in WAYS], ids=WAYS)
def test_blocks_are_saved_from_and_loaded_into_registered_memory(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, staged: bool
) -> None:
    monkeypatch.setattr("engine.core.PoolConnector", functools.partial(PoolConnector, staged=staged))
    strict = StrictStore(MemoryStore(64 << 20))
    for is_second in (False, True):
        with Engine(tiny_checkpoint, store=NeverClosed(CheckedBackend(strict))) as engine:
            submitted = engine.answer(PROMPT, 1)
            assert submitted.saved.wait(30)
            assert (submitted.sequence.pool_cached_tokens > 0) is is_second
    assert not strict.registered.complaints


def test_memory_of_a_device_is_not_accessed_directly() -> None:
    runner: Any = SimpleNamespace(kv=torch.empty(4, 2, device="meta"))
    registered: list[int] = []
    registry: Any = SimpleNamespace(register=lambda *span, **_: registered.append(span[0]))
    with pytest.raises(ValueError, match="KV memory is on meta, which the host cannot read"):
        open_direct(runner, registry)
    assert not registered
