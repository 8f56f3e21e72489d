"""Working sets: after ``fill``, they contain the requested blocks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.attention.working_set import WorkingSet

SHAPE = (12, 2, 2, 3, 4, 5)  # blocks, layers, k/v, heads, tokens, head_dim


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_working_set_contains_the_blocks_of_the_last_request(data: st.DataObject) -> None:
    """Attention to it is equal to attention to these blocks in any order."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(SHAPE, generator=generator)
    tested, queries = WorkingSet(11, source), torch.randn(3, 2, 5, generator=generator)
    for _ in range(data.draw(st.integers(1, 4))):
        count = data.draw(st.integers(1, 10))
        requested = torch.zeros(3, 12, dtype=torch.bool)
        rows = [data.draw(st.permutations(range(12)))[:count] for _ in range(3)]
        for head, row in enumerate(rows):
            requested[head, row] = True
        copied = tested.fill(requested, source, 1)
        assert copied <= 3 * count
    assert tested.fill(requested, source, 1) == 0, "blocks of the working set were copied again"
    newest, filled = torch.randn(2, 3, 4, 5, generator=generator), data.draw(st.integers(1, 4))
    tested.append_newest(newest, filled)
    attended = tested.attend(queries, None)
    for head, row in enumerate(rows):
        blocks = source[data.draw(st.permutations(row)), 1, :, head]
        keys, values = torch.cat([blocks.transpose(0, 1).flatten(1, 2), newest[:, head, :filled]], 1)
        expected = torch.softmax(queries[head] @ keys.T / 5**0.5, -1) @ values
        torch.testing.assert_close(attended[head], expected)
