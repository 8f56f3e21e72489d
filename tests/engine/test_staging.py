"""Staging: blocks pass through a buffer of fixed size unchanged, and on a GPU beside the engine's own work."""

from __future__ import annotations

import ctypes

import pytest
import torch

from engine.staging import StagedMemory, Staging
from kvstore_backend import BlockPool, Span
from kvstore_backend.backend import HEADROOM_BYTES
from kvstore_backend.stores.memory import MemoryStore
from tests.faults.blocks import NAMESPACE

SHAPE = (6, 2, 2, 1, 4, 8)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
    ),
]


def kv_memory(device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(SHAPE).numel(), device=device).to(dtype).view(SHAPE)


def read_buffer(staging: Staging, count: int) -> list[bytes]:
    return [ctypes.string_at(value[0].address, value[0].nbytes) for value in staging.values(count)]


def bytes_of(block: torch.Tensor) -> bytes:
    return bytes(block.cpu().contiguous().view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_fetched_blocks_are_the_bytes_of_kv_memory_in_the_order_asked_for(device: str, dtype: torch.dtype) -> None:
    kv = kv_memory(device, dtype)
    staging = Staging(kv)
    staging.fetch_blocks([4, 0, 5])
    assert read_buffer(staging, 3) == [bytes_of(kv[block]) for block in (4, 0, 5)]


@pytest.mark.parametrize("device", DEVICES)
def test_delivered_blocks_are_written_where_they_belong_and_nowhere_else(device: str) -> None:
    kv = kv_memory(device)
    expected = kv.clone()
    expected[5], expected[3] = kv[1], kv[2]
    staging = Staging(kv)
    staging.fetch_blocks([1, 2])
    kv[1:3] = 0  # delivered blocks come from the buffer
    expected[1:3] = 0
    staging.deliver_blocks([5, 3])
    assert torch.equal(kv.cpu(), expected.cpu())


def test_a_buffer_holds_a_block_however_large_and_no_more_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Staging(kv_memory("cpu")).capacity == 6
    monkeypatch.setattr("engine.staging._BUFFER_BYTES", 100)
    staging = Staging(kv_memory("cpu"))
    assert staging.capacity == 1
    (block,) = staging.values(1)[0]
    assert (block.address, block.nbytes) == (
        staging.span.address + HEADROOM_BYTES,
        staging.span.nbytes - HEADROOM_BYTES,
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_what_the_engine_began_before_is_fetched_and_the_buffer_is_pinned() -> None:
    kv = torch.zeros(SHAPE, device="cuda")
    staging = Staging(kv)
    torch.cuda._sleep(100_000_000)  # the engine is still computing ...
    kv[2] = 7  # ... the block to be saved
    staging.fetch_blocks([2])
    assert set(torch.frombuffer(bytearray(read_buffer(staging, 1)[0]), dtype=torch.float32).tolist()) == {7.0}
    assert staging.is_pinned


class Registered(MemoryStore):
    """Notes which memory is registered."""

    def __init__(self) -> None:
        super().__init__(1)
        self.spans: set[Span] = set()

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        assert headroom
        self.spans.add(Span(address, nbytes))

    def unregister(self, address: int, nbytes: int) -> None:
        self.spans.remove(Span(address, nbytes))


def test_a_buffer_that_was_set_aside_is_replaced_and_unregistered_when_it_is_taken_back() -> None:
    store, kv = Registered(), kv_memory("cpu")
    memory = StagedMemory(kv, BlockPool(store, NAMESPACE))
    late = memory.open_incoming([1, 2])
    (late_span,) = late.values[0]
    assert len(store.spans) == 2
    assert not late.set_aside(), "no block is set aside with it"
    assert len(store.spans) == 3
    (span,) = memory.open_incoming([1, 2]).values[0]
    assert span != late_span
    late.take_back()
    assert len(store.spans) == 2
    assert late_span.address - HEADROOM_BYTES not in {registered.address for registered in store.spans}


def test_a_window_takes_as_many_leading_blocks_as_a_buffer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = kv_memory("cpu")
    monkeypatch.setattr("engine.staging._BUFFER_BYTES", 2 * kv[0].numel() * kv.element_size())
    memory = StagedMemory(kv, BlockPool(MemoryStore(1), NAMESPACE))
    window = memory.open_outgoing([4, 0, 5])
    assert len(window.values) == 2
    assert [ctypes.string_at(*value[0]) for value in window.values] == [bytes_of(kv[block]) for block in (4, 0)]
