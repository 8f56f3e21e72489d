"""The index of blocks: representatives, and exact search that does not depend on the batch or on the order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.attention.block_index import BlockIndex, Search, query_of, representative_of
from engine.scheduling.retrieval_config import REPRESENTATIVES

HEADS, GROUP, DIM, BLOCK = 2, 3, 8, 64


def index(kind: str, rows: int = 3, max_blocks: int = 20) -> BlockIndex:
    return BlockIndex(
        kind,
        rows=rows,
        num_layers=2,
        num_kv_heads=HEADS,
        head_dim=DIM,
        max_blocks=max_blocks,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def random_keys(blocks: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(blocks, 2, HEADS, BLOCK, DIM, generator=generator)


def random_queries(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, HEADS, GROUP, DIM, generator=torch.Generator().manual_seed(seed))


def search(
    tested: BlockIndex, layer: int, rows: list[int], queries: torch.Tensor, searches: list[tuple[int, int, int]]
) -> list[torch.Tensor]:
    """Return, for each row, which blocks are chosen. ``searches`` have the first block, the last one, and the count."""
    request = Search(
        rows, [(first, last) for first, last, _ in searches], max(each[2] for each in searches), queries.device
    )
    found = tested.search_blocks(layer, request, queries, 0.5)
    chosen = []
    for numbers, (first, last, count) in zip(found, searches, strict=True):
        chosen.append(torch.zeros(HEADS, last - first, dtype=torch.bool).scatter_(1, numbers[:, :count] - first, True))
    return chosen


def expected(kind: str, keys: torch.Tensor, queries: torch.Tensor, count: int) -> torch.Tensor:
    """Choose blocks ``[kv_heads, blocks]`` for queries ``[kv_heads, group, dim]`` by the definition, block by block."""
    chosen = torch.zeros(HEADS, len(keys), dtype=torch.bool)
    for head in range(HEADS):
        scores = torch.empty(GROUP, len(keys))  # scaled like those of ``search``
        for g in range(GROUP):
            for block in range(len(keys)):
                k, q = keys[block, head], queries[head, g]
                if kind == "mean":
                    score = k.mean(0) @ q
                elif kind == "mean_std":
                    score = k.mean(0) @ q + k.std(0, correction=0) @ q.abs()
                else:
                    score = torch.maximum(k.amin(0) * q, k.amax(0) * q).sum()
                scores[g, block] = 0.5 * score
        chosen[head, scores.softmax(-1).amax(0).topk(count).indices] = True
    return chosen


@pytest.mark.parametrize("kind", REPRESENTATIVES)
@settings(max_examples=15, deadline=None)
@given(first=st.integers(0, 5), blocks=st.integers(1, 12), share=st.floats(0, 1), seed=st.integers(0, 1000))
def test_a_search_finds_the_blocks_with_the_highest_scores(
    kind: str, first: int, blocks: int, share: float, seed: int
) -> None:
    tested, keys, queries = index(kind), random_keys(first + blocks, seed), random_queries(1, seed)
    tested.add_blocks(1, 0, keys)
    count = max(1, int(share * blocks))
    [found] = search(tested, 1, [1], queries, [(first, first + blocks, count)])
    assert torch.equal(found, expected(kind, keys[first:, 1], queries[0], count))


@pytest.mark.parametrize("kind", REPRESENTATIVES)
def test_a_search_for_several_sequences_finds_the_same_blocks_as_for_each_alone(kind: str) -> None:
    tested, queries = index(kind), random_queries(2, 5)
    for row, blocks in ((0, 18), (2, 7)):
        tested.add_blocks(row, 0, random_keys(blocks, row))
    searches = [(1, 18, 4), (2, 7, 2)]
    together = search(tested, 0, [0, 2], queries, searches)
    for i, row in enumerate((0, 2)):
        [alone] = search(tested, 0, [row], queries[i : i + 1], searches[i : i + 1])
        assert torch.equal(together[i], alone)


@pytest.mark.parametrize("kind", REPRESENTATIVES)
def test_blocks_can_be_added_one_by_one_or_together(kind: str) -> None:
    at_once, one_by_one, keys = index(kind), index(kind), random_keys(6, 1)
    at_once.add_blocks(0, 0, keys)
    for i in range(6):
        one_by_one.add_blocks(0, i, keys[i : i + 1])
    found = [search(tested, 0, [0], random_queries(1, 2), [(0, 6, 3)])[0] for tested in (at_once, one_by_one)]
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", REPRESENTATIVES)
def test_a_representative_does_not_depend_on_the_order_of_tokens(kind: str) -> None:
    keys = random_keys(1, 3)[0, 0, :, :32]
    permuted = keys[:, torch.randperm(32, generator=torch.Generator().manual_seed(0))]
    torch.testing.assert_close(representative_of(kind, keys), representative_of(kind, permuted))


@given(seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_bounds_are_never_below_the_score_of_any_key(seed: int) -> None:
    keys, query = random_keys(1, seed)[0, 0, 0], random_queries(1, seed)[0, 0, 0]
    bound = representative_of("min_max", keys) @ query_of("min_max", query)
    assert bound >= (keys @ query).max() - 1e-5


def test_an_unknown_representative_is_refused() -> None:
    with pytest.raises(
        ValueError, match="the kind of representatives is 'median'; it must be one of min_max, mean_std, mean"
    ):
        index("median")
