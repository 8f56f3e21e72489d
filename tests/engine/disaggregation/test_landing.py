"""What a prefill instance wrote gets into KV memory whole, once, or not at all."""

from __future__ import annotations

import ctypes

import pytest
import torch

from engine.disaggregation.landing import Landing, digest_values
from kvstore_backend import BlockPool, Span
from kvstore_backend.backend import HEADROOM_BYTES
from kvstore_backend.staging import KVTensors, StagedMemory
from kvstore_backend.stores.memory import MemoryStore
from tests.faults.blocks import NAMESPACE

NBYTES = 32
CONTENTS = [bytes([number]) * NBYTES for number in (7, 8, 9)]


@pytest.fixture
def kv() -> torch.Tensor:
    return torch.zeros(6, NBYTES, dtype=torch.uint8)


@pytest.fixture
def landing(kv: torch.Tensor) -> Landing:
    """For blocks 4, 1 and 5, by way of buffers of two."""
    pool = BlockPool(MemoryStore(1), NAMESPACE)
    return Landing(StagedMemory(KVTensors([kv], len(kv)), pool, buffer_bytes=2 * (NBYTES + HEADROOM_BYTES)), [4, 1, 5])


def write(landing: Landing) -> list[str]:
    """Write all of it, as another instance does; the digests."""
    addresses = landing.open_windows()
    for address, content in zip(addresses, CONTENTS, strict=True):
        ctypes.memmove(address, content, NBYTES)
    return digest_values([(Span(address, NBYTES),) for address in addresses])


def test_blocks_are_in_kv_memory_when_they_were_taken_in(kv: torch.Tensor, landing: Landing) -> None:
    assert landing.take_in(write(landing))
    assert [bytes(kv[block].tolist()) for block in (4, 1, 5)] == CONTENTS
    assert not kv[[0, 2, 3]].any()


def test_other_bytes_than_were_sent_touch_no_block(kv: torch.Tensor, landing: Landing) -> None:
    digests = write(landing)
    assert not landing.take_in([*digests[:2], "another"])
    assert not kv.any()


def test_a_landing_that_is_closed_takes_nothing_in(kv: torch.Tensor, landing: Landing) -> None:
    digests = write(landing)
    landing.close()
    assert not landing.take_in(digests)
    assert not kv.any()


def test_one_that_is_closed_before_it_was_opened_lends_nothing(landing: Landing) -> None:
    landing.close()
    assert landing.open_windows() == []
