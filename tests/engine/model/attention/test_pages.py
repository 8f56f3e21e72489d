"""Attention to pages: it reads only the chosen blocks, with pieces of any size, in each dtype."""

from __future__ import annotations

import pytest
import torch

from engine.model.attention.pages import PageReader

BLOCKS, LAYERS, HEADS, GROUP, BLOCK, DIM = 12, 2, 3, 2, 4, 16
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def expected(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Compute attention in float64 by its definition, of ``[group, head_dim]`` to tokens ``[token, head_dim]``."""
    q, k, v = (tensor.double() for tensor in (queries, keys, values))
    return (torch.softmax(q @ k.T / DIM**0.5, -1) @ v).to(queries.dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("piece_bytes", [1, 3000, 1 << 20])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_attention_does_not_depend_on_the_size_of_pieces(
    dtype: torch.dtype, piece_bytes: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.attention.pages.PIECE_BYTES", piece_bytes)
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(BLOCKS, LAYERS, 2, HEADS, BLOCK, DIM, generator=generator).to(dtype)
    queries = torch.randn(HEADS, GROUP, DIM, generator=generator).to(dtype)
    blocks = torch.stack([torch.randperm(BLOCKS - 1, generator=generator)[:count] for _ in range(HEADS)])
    newest = memory[BLOCKS - 1, 1, :, :, :3]
    attended = PageReader(memory).attend_in_pieces(queries, memory, blocks, 1, newest, None)
    assert attended.dtype == dtype
    for head in range(HEADS):
        read = memory[blocks[head], 1, :, head].transpose(0, 1).flatten(1, 2)
        keys, values = torch.cat([read, newest[:, head]], 1)
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(attended[head], expected(queries[head], keys, values), rtol=0, atol=tolerance)


def test_sequences_of_different_lengths_in_one_read_attend_to_their_own_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(BLOCKS, LAYERS, 2, HEADS, BLOCK, DIM, generator=generator)
    queries = torch.randn(2, HEADS, GROUP, DIM, generator=generator)
    blocks = torch.randint(BLOCKS, (2, HEADS, 3), generator=generator)
    mask = torch.arange(3 * BLOCK) < torch.tensor([3 * BLOCK - 1, BLOCK])[:, None, None, None]
    attended = PageReader(memory).attend_at_once(queries, memory, blocks, 1, mask, None)
    for i, tokens in enumerate((3 * BLOCK - 1, BLOCK)):
        for head in range(HEADS):
            keys, values = memory[blocks[i, head], 1, :, head].transpose(0, 1).flatten(1, 2)[:, :tokens]
            torch.testing.assert_close(attended[i, head], expected(queries[i, head], keys, values))
