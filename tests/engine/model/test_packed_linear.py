"""Packed linear layers compute the same values as the layers that they replace."""

from __future__ import annotations

import copy

import pytest
import torch

from engine.model.packed_linear import PackedLinear, pack_linears, round_up_rows


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 100, 129])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_the_same_values_as_the_layer(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    linear, inputs = torch.nn.Linear(48, 80, bias=bias), torch.randn(1, rows, 48)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(inputs), linear(inputs))


def test_row_counts_are_rounded_to_few_values_with_few_extra_rows() -> None:
    assert len({round_up_rows(rows) for rows in range(1, 2049)}) == 16 + 7 * 8
    assert all(rows <= round_up_rows(rows) <= 1.125 * rows for rows in range(1, 2049))


def test_all_float32_layers_and_no_others_are_packed() -> None:
    class Special(torch.nn.Linear):
        pass

    half = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    model = torch.nn.ModuleList(
        [torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4)), half, Special(4, 4)]
    )
    pack_linears(model)
    kinds = [type(module) for module in model.modules() if not list(module.children())]
    assert kinds == [PackedLinear, PackedLinear, torch.nn.Linear, Special]


def test_an_embedding_with_the_weight_of_a_packed_layer_still_works() -> None:
    embedding, head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    before = copy.deepcopy(embedding)
    model = torch.nn.ModuleList([embedding, head])
    pack_linears(model)
    tokens = torch.arange(10)
    with torch.inference_mode():
        torch.testing.assert_close(model[0](tokens), before(tokens))
        torch.testing.assert_close(model[1](model[0](tokens)), before.weight @ before.weight.T)
