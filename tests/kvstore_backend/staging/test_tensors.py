"""KV memory as rows: in any layout, a block has the same bytes as without staging."""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Sequence

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from kvstore_backend.integrations.vllm.memory import KVMemory
from kvstore_backend.staging import KVTensors

NUM_BLOCKS = 5
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)

# The axes of a layer, kernel blocks first, and their order in memory, outermost first.
LAYOUTS = {
    "NHD": ((2, 4, 3, 8), (0, 2, 1, 3)),  # [block, head, token, content] with tokens outside of heads
    "HND": ((2, 4, 3, 8), (0, 1, 2, 3)),
    "K and V outermost": ((2, 2, 4, 3, 8), (1, 0, 2, 3, 4)),
    "K and V outermost, tokens outside": ((2, 2, 4, 3, 8), (1, 0, 3, 2, 4)),
    "heads outermost": ((2, 4, 3, 8), (1, 0, 2, 3)),
    "blocks innermost": ((2, 4, 3, 8), (1, 2, 3, 0)),
    "MLA": ((2, 3, 36), (0, 1, 2)),
    "MLA, an odd size": ((2, 3, 5), (0, 1, 2)),
    "cross-layer": ((2, 6, 2, 4, 3, 8), (0, 1, 2, 3, 4, 5)),
    "layers outermost": ((2, 6, 2, 4, 3, 8), (1, 2, 0, 3, 4, 5)),
    "an axis of one": ((2, 1, 4, 1, 8), (2, 0, 1, 3, 4)),
}


def make_tensor(shape: Sequence[int], order: Sequence[int], dtype: torch.dtype, gap: int = 0) -> torch.Tensor:
    """Make a tensor of random bytes with its axes in ``order`` in memory, after ``gap`` elements."""
    nbytes = (math.prod(shape) + gap) * dtype.itemsize
    flat = torch.frombuffer(bytearray(random.Random(nbytes).randbytes(nbytes)), dtype=torch.uint8).view(dtype)
    laid = flat[gap:].view([shape[axis] for axis in order])
    return laid.permute([order.index(axis) for axis in range(len(order))])


def read_blocks(memory: KVMemory, blocks: Sequence[int]) -> list[bytes]:
    """Return the bytes that the pool gets without staging."""
    return [b"".join(ctypes.string_at(*span) for span in value) for value in memory.locate_blocks(blocks)]


def make_rows(kv: KVTensors, count: int, headroom: int = 0) -> torch.Tensor:
    return torch.zeros(count, headroom + kv.block_bytes, dtype=torch.uint8)[:, headroom:]


def bytes_of(rows: torch.Tensor) -> list[bytes]:
    return [bytes(row.tolist()) for row in rows]


@st.composite
def layers_of_any_layout(draw: st.DrawFn) -> list[torch.Tensor]:
    sizes, order = draw(st.sampled_from(sorted(LAYOUTS.items())))[1]
    if draw(st.booleans()):
        order = tuple(draw(st.permutations(order)))
    shape = (NUM_BLOCKS * draw(st.integers(1, 3)), *sizes[1:])
    dtype, gap = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 3))
    return [make_tensor(shape, order, dtype, gap) for _ in range(draw(st.integers(1, 3)))]


@hypothesis.given(
    layers_of_any_layout(),
    st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=NUM_BLOCKS, unique=True),
    st.sampled_from((0, 128)),
)
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
def test_rows_have_the_bytes_that_direct_memory_moves(layers: list[torch.Tensor], blocks: list[int], gap: int) -> None:
    direct = KVMemory({str(i): layer for i, layer in enumerate(layers)}, NUM_BLOCKS)
    kv = KVTensors(layers, NUM_BLOCKS)
    rows, index = make_rows(kv, len(blocks), gap), torch.tensor(blocks)
    kv.gather(index, rows)
    assert kv.block_bytes == direct.block_bytes
    assert bytes_of(rows) == read_blocks(direct, blocks)
    before = read_blocks(direct, range(NUM_BLOCKS))
    others = torch.randint(0, 256, rows.shape, dtype=torch.uint8)
    rows.copy_(others)
    kv.scatter(index, rows)
    expected = dict(enumerate(before)) | dict(zip(blocks, bytes_of(others), strict=True))
    assert read_blocks(direct, range(NUM_BLOCKS)) == list(expected.values()), "other blocks do not change"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_every_layout_and_dtype_are_restored(name: str, dtype: torch.dtype) -> None:
    sizes, order = LAYOUTS[name]
    layers = [make_tensor((3 * NUM_BLOCKS, *sizes[1:]), order, dtype) for _ in range(2)]
    copies = [layer.clone() for layer in layers]
    kv = KVTensors(layers, NUM_BLOCKS)
    rows, index = make_rows(kv, 2), torch.tensor([4, 1])
    kv.gather(index, rows)
    for layer in layers:
        layer.view(torch.uint8 if dtype.itemsize == 1 else dtype).zero_()
    kv.scatter(index, rows)
    for layer, copy in zip(layers, copies, strict=True):
        for block in range(NUM_BLOCKS):
            part, was = (each[3 * block : 3 * block + 3].contiguous().view(torch.uint8) for each in (layer, copy))
            assert torch.equal(part, was if block in (4, 1) else torch.zeros_like(was))


def test_the_block_axis_may_be_moved_to_the_front() -> None:
    kv_first = make_tensor((2, NUM_BLOCKS, 4, 8), (0, 1, 2, 3), torch.float32)
    kv = KVTensors([kv_first.movedim(1, 0)], NUM_BLOCKS)
    rows = make_rows(kv, 1)
    kv.gather(torch.tensor([3]), rows)
    assert bytes_of(rows) == [bytes(kv_first[:, 3].contiguous().view(torch.uint8).flatten().tolist())]


def test_kernel_blocks_that_are_not_a_multiple_of_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="7 kernel blocks, which is not a multiple of 5 blocks"):
        KVTensors([torch.zeros(7, 4)], NUM_BLOCKS)


def test_an_empty_list_of_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="on one device, but it is on none"):
        KVTensors([], NUM_BLOCKS)
