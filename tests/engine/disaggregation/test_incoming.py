"""Received blocks: all blocks of a prompt move to KV memory, or none."""

from __future__ import annotations

import ctypes

import pytest
import torch

from engine.disaggregation.incoming import IncomingBlocks, digest_values
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
def incoming(kv: torch.Tensor) -> IncomingBlocks:
    """Incoming blocks 4, 1 and 5, through a staging buffer for two blocks."""
    pool = BlockPool(MemoryStore(1), NAMESPACE)
    memory = StagedMemory(KVTensors([kv], len(kv)), pool, buffer_bytes=2 * (NBYTES + HEADROOM_BYTES))
    return IncomingBlocks(memory, [4, 1, 5])


def write(incoming: IncomingBlocks) -> list[str]:
    """Write all blocks, as another instance does; return their digests."""
    addresses = incoming.open_windows()
    for address, content in zip(addresses, CONTENTS, strict=True):
        ctypes.memmove(address, content, NBYTES)
    return digest_values([(Span(address, NBYTES),) for address in addresses])


def test_blocks_are_in_kv_memory_after_the_move(kv: torch.Tensor, incoming: IncomingBlocks) -> None:
    assert incoming.move_in(write(incoming))
    assert [bytes(kv[block].tolist()) for block in (4, 1, 5)] == CONTENTS
    assert not kv[[0, 2, 3]].any()


def test_bytes_with_another_digest_change_no_block(kv: torch.Tensor, incoming: IncomingBlocks) -> None:
    digests = write(incoming)
    assert not incoming.move_in([*digests[:2], "another"])
    assert not kv.any()


def test_no_block_is_moved_after_close(kv: torch.Tensor, incoming: IncomingBlocks) -> None:
    digests = write(incoming)
    incoming.close()
    assert not incoming.move_in(digests)
    assert not kv.any()


def test_no_window_is_opened_after_close(incoming: IncomingBlocks) -> None:
    incoming.close()
    assert incoming.open_windows() == []
