"""The tables of a step: they contain each sequence's own blocks, and padding with its newest block."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.model.attention.plan import StepPlan
from engine.scheduling.retrieval_config import RetrievalConfig

BLOCK, HEADS = 16, 2


@given(
    contexts=st.lists(st.integers(1, 400), min_size=1, max_size=4),
    percent=st.sampled_from([0.1, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_a_plan_lists_the_blocks_of_each_partition(contexts: list[int], percent: float, seed: int) -> None:
    config = RetrievalConfig(BLOCK, BLOCK, 40, percent, 0, 0)
    partitions = [config.partition_blocks(context, 0) for context in contexts]
    rows = list(range(len(contexts)))[::-1]
    filled = [(context - 1) % BLOCK + 1 for context in contexts]
    newest = [(1000 + i, tokens) for i, tokens in enumerate(filled)]
    tested = StepPlan(partitions, rows, newest, BLOCK, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    places = torch.stack([torch.randperm(100, generator=generator) for _ in contexts])
    chosen = torch.zeros(len(contexts), HEADS, 100, dtype=torch.long)
    for row, part in zip(rows, partitions, strict=True):
        for head in range(HEADS):
            found = torch.randperm(part.num_outside, generator=generator) + part.num_initial
            chosen[row, head, : len(found)] = found
    numbers = tested.number_blocks(chosen)
    blocks = tested.find_blocks(numbers, places)
    mask = tested.mask.expand(-1, HEADS, -1, -1).unflatten(-1, (-1, BLOCK)).sum(-1)[:, :, 0]
    for i, part in enumerate(partitions):
        for head in range(HEADS):
            read = numbers[i, head, : tested.lengths[i]].tolist()
            assert read[0] == part.num_blocks - 1
            recalled = chosen[rows[i], head, : part.num_recalled].tolist()
            always = {*range(part.num_initial), *range(part.window_start, part.num_blocks)}
            assert len(read) == len(set(read)) == part.num_read
            assert set(read) == always | set(recalled)
            padding = [1000 + i] * (numbers.shape[-1] - len(read))
            assert blocks[i, head].tolist() == [1000 + i, *places[rows[i], read[1:]].tolist(), *padding]
            assert mask[i, head].tolist() == [filled[i], *[BLOCK] * (len(read) - 1), *[0] * len(padding)]
