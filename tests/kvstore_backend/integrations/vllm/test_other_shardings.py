"""Instances of different tensor-parallel sizes share blocks if each head has memory of its own in a block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from kvstore_backend import BlockPool, Namespace, StorageBackend
from kvstore_backend.integrations.vllm.memory import KVMemory
from kvstore_backend.integrations.vllm.route import Route, open_route
from kvstore_backend.integrations.vllm.scheduler import SchedulerHalf
from kvstore_backend.integrations.vllm.worker import WorkerHalf
from kvstore_backend.resharding import find_family
from kvstore_backend.resharding.family import HEAD
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.checked import CheckedBackend
from tests.kvstore_backend.integrations.vllm.test_halves import (
    BLOCK,
    LAYERS,
    NUM_BLOCKS,
    Blocks,
    Instance,
    Request,
    content,
    make_request,
)
from tests.support.recut import leave_marker

HEADS = 4
TABLE = [0, 1, 2, 3, 4, 5]


def head_first(heads: int) -> torch.Tensor:
    """vLLM's order on CPU: ``[block, head, token, content]``."""
    return torch.zeros(NUM_BLOCKS, heads, BLOCK, 6)


def token_first(heads: int) -> torch.Tensor:
    """The order of some backends: heads within tokens."""
    return torch.zeros(NUM_BLOCKS, BLOCK, heads, 6).transpose(1, 2)


def head_outside(heads: int) -> torch.Tensor:
    """Heads before blocks."""
    return torch.zeros(heads, NUM_BLOCKS, BLOCK, 6).transpose(0, 1)


class TPInstance(Instance):
    """An instance with ``ranks`` ranks, each with its own memory for its heads."""

    def __init__(
        self,
        store: StorageBackend,
        ranks: int,
        make_layer: Callable[[int], torch.Tensor] = head_first,
        route: Route = "direct",
    ) -> None:
        heads = max(1, HEADS // ranks)
        self.ranks = [[make_layer(heads) for _ in range(LAYERS)] for _ in range(ranks)]
        self.workers = []
        for rank, layers in enumerate(self.ranks):
            memory = KVMemory({f"layers.{i}": layer for i, layer in enumerate(layers)}, NUM_BLOCKS)
            own = Namespace("m", "float32", BLOCK, LAYERS, heads, 3, memory.layout, tp_size=ranks, tp_rank=rank)
            family = find_family(own, HEADS, memory.axes, layout_of=memory.layout_of)
            pool = BlockPool(store, own)
            leave_marker(pool)
            self.workers.append(WorkerHalf(pool, memory, family, route=open_route(route, memory, pool)))
        self.blocks = Blocks()
        self.scheduler = SchedulerHalf(store, BLOCK)
        self.scheduler.learn_namespaces([worker.namespace for worker in self.workers], self.workers[0].family)
        self.scheduler.bind_blocks(self.blocks)

    def list_heads(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield for each head of each layer the head's number, the layer's number, and the head's memory by block."""
        for rank, layers in enumerate(self.ranks):
            for number, layer in enumerate(layers):
                for head in range(layer.shape[1]):
                    yield rank * HEADS // len(self.ranks) + head, number, layer[:, head]

    def compute(self, request: Request, table: list[int]) -> None:
        self.scheduler.on_allocation(request, lambda: table, 0)
        for block_hash, block in zip(request.block_hashes, table, strict=False):
            for head, layer, memory in self.list_heads():
                memory[block] = content(block_hash, layer) + head / 64 + torch.arange(6) / 1024
        self.step({request.request_id: request.num_tokens}, {request.request_id: table})
        request.num_computed_tokens = request.num_tokens
        self.scheduler.on_request_end(request, table)
        self.end_transfers()

    def has(self, request: Request, index: int, block: int) -> bool:
        return all(
            bool(
                (
                    memory[block] == content(request.block_hashes[index], layer) + head / 64 + torch.arange(6) / 1024
                ).all()
            )
            for head, layer, memory in self.list_heads()
        )


@pytest.fixture
def store() -> StorageBackend:
    return CheckedBackend(MemoryStore(1 << 20))


@pytest.mark.parametrize(
    ("writer", "reader", "make_layer"),
    [
        *((*sizes, head_first) for sizes in [(1, 2), (1, 4), (2, 1), (2, 4), (4, 2), (8, 1), (1, 8)]),
        *((*sizes, layer) for sizes in [(1, 2), (4, 1)] for layer in (token_first, head_outside)),
    ],
)
def test_an_instance_loads_blocks_of_another_tensor_parallel_size(
    store: StorageBackend, writer: int, reader: int, make_layer: Callable[[int], torch.Tensor]
) -> None:
    with (
        contextlib.closing(TPInstance(store, writer, make_layer)) as first,
        contextlib.closing(TPInstance(store, reader, make_layer)) as second,
    ):
        first.compute(make_request(), TABLE)
        again = make_request(name="b")
        assert second.load(again, TABLE[::-1]).blocks == set()
        assert all(second.has(again, i, TABLE[::-1][i]) for i in range(5))
        assert [worker.take_counts()[worker.namespace.digest]["gather ok"] for worker in second.workers] == [5] * reader


def test_blocks_of_another_sharding_are_gathered_through_host_buffers(store: StorageBackend) -> None:
    one, other = TPInstance(store, 2, head_outside, "staged"), TPInstance(store, 1, head_outside, "staged")
    with contextlib.closing(one) as first, contextlib.closing(other) as second:
        first.compute(make_request(), TABLE)
        loaded = second.load(request := make_request(name="b"), TABLE)
        assert (loaded.requests, loaded.blocks) == ({"b"}, set())
        assert all(second.has(request, i, TABLE[i]) for i in range(5))


def test_a_load_continues_with_own_blocks_after_those_of_another_sharding(store: StorageBackend) -> None:
    with contextlib.closing(TPInstance(store, 2)) as first, contextlib.closing(TPInstance(store, 1)) as second:
        first.compute(make_request(10), TABLE)
        second.compute(make_request(), TABLE)
        BlockPool(store, second.workers[0].namespace).remove_blocks(make_request().block_hashes[:2])
        second.load(again := make_request(name="b"), TABLE)
        assert all(second.has(again, i, i) for i in range(5))
        assert second.workers[0].take_counts()[second.workers[0].namespace.digest]["gather ok"] == 2


def test_a_block_with_a_part_evicted_after_the_look_up_is_computed(store: StorageBackend) -> None:
    with contextlib.closing(TPInstance(store, 2)) as first, contextlib.closing(TPInstance(store, 1)) as second:
        first.compute(make_request(), TABLE)
        again = make_request(name="b")
        matched = second.match_request(again)
        BlockPool(store, first.workers[1].namespace).remove_blocks(again.block_hashes[3:])
        second.scheduler.on_allocation(again, lambda: TABLE, matched)
        loaded = second.step({}, {})
        assert (matched, loaded.blocks) == (20, {3, 4})
        assert all(second.has(again, i, i) for i in range(3))
        assert not any(layer[3:5].any() for layer in second.ranks[0])


def test_blocks_with_another_order_of_axes_are_not_loaded(store: StorageBackend) -> None:
    with (
        contextlib.closing(TPInstance(store, 2, token_first)) as first,
        contextlib.closing(TPInstance(store, 1, head_first)) as second,
    ):
        first.compute(make_request(), TABLE)
        assert second.match_request(make_request(name="b")) == 0


def test_memory_of_three_axes_reports_no_axes() -> None:
    assert KVMemory({"l": torch.zeros(4, 3, 5)}, 4).axes == ()


def test_a_rank_with_one_head_knows_the_layout_of_several_heads() -> None:
    for make_layer in (head_first, token_first, head_outside):
        one, two = (KVMemory({"l": make_layer(heads)}, NUM_BLOCKS) for heads in (1, 2))
        assert one.layout_of(2) == two.layout
        assert two.layout_of(1) == one.layout
        assert [name for name, _ in one.axes] == [name for name, _ in two.axes]
        assert dict(one.axes)[HEAD] == 1
