"""Shardings of one family, and the heads of each rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore_backend import Namespace
from kvstore_backend.resharding.family import HEAD, TOKEN, ShardingFamily, find_family

AXES = [("layer", 2), ("kv", 2), (HEAD, 4), (TOKEN, 64), ("dim", 32)]
OWN = Namespace("m", "float32", 64, 2, 4, 8, "layer,kv,head,token,dim")


def family(num_heads: int = 4, tp_size: int = 1, num_kv_heads: int = 4) -> ShardingFamily:
    own = replace(OWN, tp_size=tp_size, num_kv_heads=num_kv_heads)
    return find_family(own, num_heads, AXES, block_sizes=(16, 32, 64, 96, 128))


def test_peers_have_all_other_sizes_that_divide_evenly() -> None:
    shardings = {(sharding.tp_size, sharding.num_kv_heads, sharding.block_size) for sharding in family().peers}
    heads = {1: 4, 2: 2, 4: 1, 8: 1, 16: 1}
    assert shardings == {(tp, heads[tp], size) for tp in heads for size in (16, 32, 64, 128)} - {(1, 4, 64)}
    assert all(replace(sharding, tp_size=1, num_kv_heads=4, block_size=64) == OWN for sharding in family().peers)


def test_six_heads_are_divided_by_two_only() -> None:
    assert {sharding.tp_size for sharding in family(6, num_kv_heads=6).peers} == {1, 2}


def test_heads_that_are_not_divided_evenly_have_no_peers() -> None:
    assert family(5, tp_size=2, num_kv_heads=3).peers == ()


def test_a_layout_with_the_number_of_heads_differs_for_each_peer() -> None:
    found = find_family(replace(OWN, layout="h4"), 4, AXES, layout_of=lambda heads: f"h{heads}")
    assert {sharding.tp_size: sharding.layout for sharding in found.peers} == {2: "h2", 4: "h1", 8: "h1", 16: "h1"}


@pytest.mark.parametrize(
    ("tp_size", "heads", "ranks"),
    [
        (2, range(4), [0, 1]),
        (2, range(2, 4), [1]),
        (4, range(1, 3), [1, 2]),
        (8, range(4), [0, 2, 4, 6]),
        (1, range(3, 4), [0]),
    ],
)
def test_the_fewest_ranks_with_the_requested_heads_are_chosen(tp_size: int, heads: range, ranks: list[int]) -> None:
    sharding = replace(OWN, tp_size=tp_size, num_kv_heads=max(1, 4 // tp_size))
    assert [rank.tp_rank for rank in family().ranks_with(sharding, heads)] == ranks


def test_several_ranks_have_the_same_head_if_there_are_fewer_heads() -> None:
    ranks = [replace(OWN, tp_size=8, tp_rank=rank, num_kv_heads=1) for rank in range(8)]
    assert [family().heads_of(rank)[0] for rank in ranks] == [0, 0, 1, 1, 2, 2, 3, 3]
