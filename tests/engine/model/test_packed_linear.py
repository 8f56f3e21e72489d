"""Packed linear layers compute what the layers they replace do."""

from __future__ import annotations

import copy

import pytest
import torch

from engine.model.packed_linear import PackedLinear, pack_linears, round_up_rows


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 100, 129])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_what_the_layer_does(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    linear, inputs = torch.nn.Linear(48, 80, bias=bias), torch.randn(1, rows, 48)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(inputs), linear(inputs))


def test_layers_meet_few_numbers_of_rows_and_few_rows_too_many() -> None:
    assert len({round_up_rows(rows) for rows in range(1, 2049)}) == 16 + 7 * 8
    assert all(rows <= round_up_rows(rows) <= 1.125 * rows for rows in range(1, 2049))


def test_every_float32_layer_is_packed_wherever_it_is_and_nothing_else() -> None:
    class Special(torch.nn.Linear):
        pass

    half = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    model = torch.nn.ModuleList(
        [torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4)), half, Special(4, 4)]
    )
    pack_linears(model)
    kinds = [type(module) for module in model.modules() if not list(module.children())]
    assert kinds == [PackedLinear, PackedLinear, torch.nn.Linear, Special]


def test_an_embedding_that_shares_its_weight_with_a_packed_layer_keeps_it() -> None:
    embedding, head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    before = copy.deepcopy(embedding)
    model = torch.nn.ModuleList([embedding, head])
    pack_linears(model)
    tokens = torch.arange(10)
    with torch.inference_mode():
        torch.testing.assert_close(model[0](tokens), before(tokens))
        torch.testing.assert_close(model[1](model[0](tokens)), before.weight @ before.weight.T)
