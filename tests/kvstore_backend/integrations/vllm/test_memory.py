"""Where the bytes of vLLM's blocks lie, in the layouts that its attention backends want."""

from __future__ import annotations

import pytest
import torch

from kvstore_backend import ConfigError
from kvstore_backend.integrations.vllm.memory import KVMemory


def test_a_layer_is_one_span_where_its_part_of_a_block_lies_in_one_piece() -> None:
    tensors = {f"l{i}": torch.arange(4 * 2 * 3 * 5.0).reshape(4, 2, 3, 5) for i in range(2)}
    ((one,), (two,)) = ([value] for value in KVMemory(tensors, 4).locate_blocks([1, 3]))
    assert [span.nbytes for span in one] == [120, 120]
    assert [span.address for span in two] == [tensor.data_ptr() + 3 * 120 for tensor in tensors.values()]


def test_heads_before_blocks_are_a_span_each() -> None:
    tensor = torch.zeros(2, 4, 3, 5).transpose(0, 1)
    memory = KVMemory({"l": tensor}, 4)
    (value,) = memory.locate_blocks([2])
    assert [span.nbytes for span in value] == [60, 60]
    assert [span.address - tensor.data_ptr() for span in value] == [2 * 60, 4 * 60 + 2 * 60]
    assert memory.layout == "torch.float32[h2,n3,c5]"


def test_a_block_of_the_scheduler_may_be_several_of_the_kernel() -> None:
    memory = KVMemory({"l": torch.zeros(8, 2, 3, 5)}, 4)
    assert memory.block_bytes == 2 * 120
    assert memory.layout == "torch.float32[k2,h2,n3,c5]"


def test_axes_that_lie_in_another_order_are_another_layout() -> None:
    one, other = torch.zeros(4, 2, 3, 5), torch.zeros(4, 3, 2, 5).transpose(1, 2)
    assert one.shape == other.shape
    assert KVMemory({"l": one}, 4).layout != KVMemory({"l": other}, 4).layout


def test_layers_that_share_memory_count_once() -> None:
    tensor = torch.zeros(4, 2, 3, 5)
    assert KVMemory({"a": tensor, "b": tensor}, 4).num_layers == 1


def test_layers_that_differ_are_refused() -> None:
    with pytest.raises(ConfigError, match="differ in layout"):
        KVMemory({"a": torch.zeros(4, 2, 3, 5), "b": torch.zeros(4, 2, 3, 6)}, 4)


def test_memory_that_is_neither_the_hosts_nor_a_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match="host memory or on a GPU"):
        KVMemory({"a": torch.zeros(4, 2, 3, 5, device="meta")}, 4)
