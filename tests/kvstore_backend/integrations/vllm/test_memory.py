"""The addresses of the bytes of vLLM's blocks, in the layouts of its attention backends."""

from __future__ import annotations

import ctypes
import mmap
from types import SimpleNamespace

import pytest
import torch

from kvstore_backend import ConfigError
from kvstore_backend.backend import Span
from kvstore_backend.integrations.vllm.memory import GroupedMemory, KVMemory, _prefer_large_pages
from kvstore_backend.resharding.family import HEAD


def test_a_layer_with_a_contiguous_part_of_the_block_is_one_span() -> None:
    tensors = {f"l{i}": torch.arange(4 * 2 * 3 * 5.0).reshape(4, 2, 3, 5) for i in range(2)}
    ((one,), (two,)) = ([value] for value in KVMemory(tensors, 4).locate_blocks([1, 3]))
    assert [span.nbytes for span in one] == [120, 120]
    assert [span.address for span in two] == [tensor.data_ptr() + 3 * 120 for tensor in tensors.values()]


def test_each_head_is_a_span_if_heads_come_before_blocks() -> None:
    tensor = torch.zeros(2, 4, 3, 5).transpose(0, 1)
    memory = KVMemory({"l": tensor}, 4)
    (value,) = memory.locate_blocks([2])
    assert [span.nbytes for span in value] == [60, 60]
    assert [span.address - tensor.data_ptr() for span in value] == [2 * 60, 4 * 60 + 2 * 60]
    assert memory.layout == "torch.float32[h2,n3,c5]"


def test_a_block_of_the_scheduler_can_have_several_kernel_blocks() -> None:
    memory = KVMemory({"l": torch.zeros(8, 2, 3, 5)}, 4)
    assert memory.block_bytes == 2 * 120
    assert memory.layout == "torch.float32[k2,h2,n3,c5]"


def test_another_order_of_axes_in_memory_is_another_layout() -> None:
    one, other = torch.zeros(4, 2, 3, 5), torch.zeros(4, 3, 2, 5).transpose(1, 2)
    assert one.shape == other.shape
    assert KVMemory({"l": one}, 4).layout != KVMemory({"l": other}, 4).layout


def test_layers_that_share_memory_are_counted_once() -> None:
    tensor = torch.zeros(4, 2, 3, 5)
    assert KVMemory({"a": tensor, "b": tensor}, 4).num_layers == 1


def test_layers_with_different_layouts_are_refused() -> None:
    with pytest.raises(ConfigError, match="different layouts"):
        KVMemory({"a": torch.zeros(4, 2, 3, 5), "b": torch.zeros(4, 2, 3, 6)}, 4)


def test_memory_of_neither_the_host_nor_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="host memory or on a GPU"):
        KVMemory({"a": torch.zeros(4, 2, 3, 5, device="meta")}, 4)


ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (1, 2, 0, 3)]


def make_layers(order: tuple[int, ...], layers: int, kernel_blocks: int, *, is_one_piece: bool) -> list[torch.Tensor]:
    """Return layers with their axes in this order, in one allocation for each layer, or in one for all."""
    shape = (4 * kernel_blocks, 2, 3, 5)
    stored = [shape[axis] for axis in order]
    back = [order.index(axis) for axis in range(4)]
    if is_one_piece:  # block, layer, ...
        whole = torch.zeros(stored[0], layers, *stored[1:])
        tensors = [whole[:, layer].permute(back) for layer in range(layers)]
    else:
        tensors = [torch.zeros(stored).permute(back) for _ in range(layers)]
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(tensor.numel()).reshape(shape) + 1000.0 * (number + 1))
    return tensors


def read_span(span: Span) -> bytes:
    return ctypes.string_at(span.address, span.nbytes)


@pytest.mark.parametrize("is_one_piece", [False, True])
@pytest.mark.parametrize("kernel_blocks", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_the_spans_of_a_block_hold_its_bytes_and_no_others(
    order: tuple[int, ...], kernel_blocks: int, is_one_piece: bool
) -> None:
    layers = make_layers(order, 3, kernel_blocks, is_one_piece=is_one_piece)
    memory = KVMemory({f"l{number}": layer for number, layer in enumerate(layers)}, 4)
    values = memory.locate_blocks(range(4))
    for block, value in enumerate(values):
        found = torch.frombuffer(bytearray(b"".join(map(read_span, value))), dtype=torch.float32)
        expected = torch.cat([layer[block * kernel_blocks : (block + 1) * kernel_blocks].flatten() for layer in layers])
        assert sorted(found.tolist()) == sorted(expected.tolist())
        assert sum(span.nbytes for span in value) == memory.block_bytes == 3 * kernel_blocks * 2 * 3 * 5 * 4


@pytest.mark.parametrize("order", ORDERS)
def test_the_layout_has_the_order_of_the_axes_in_memory(order: tuple[int, ...]) -> None:
    memory = KVMemory({"l": make_layers(order, 1, 2, is_one_piece=False)[0]}, 4)
    sizes = {0: "k2", 1: "h2", 2: "n3", 3: "c5"}
    assert memory.layout == f"torch.float32[{','.join(sizes[axis] for axis in order)}]"
    names = {0: ("k", 2), 1: (HEAD, 2), 2: ("n", 3), 3: ("c", 5)}
    assert memory.axes == (("layer", 1), *(names[axis] for axis in order), ("byte", 4))


def test_the_layout_omits_axes_of_size_one_but_axes_include_a_single_head() -> None:
    memory = KVMemory({"l": torch.zeros(4, 1, 3, 5)}, 4)
    assert memory.layout == "torch.float32[n3,c5]"
    assert memory.axes == (("layer", 1), (HEAD, 1), ("n", 3), ("c", 5), ("byte", 4))
    assert memory.layout_of(1) == "torch.float32[n3,c5]"
    assert memory.layout_of(2) == "torch.float32[h2,n3,c5]"


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_layout_of_returns_the_layout_of_memory_with_that_many_heads(heads: int) -> None:
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        two, other = (torch.zeros([(4, n, 3, 5)[axis] for axis in order]).permute(order) for n in (2, heads))
        assert KVMemory({"l": two}, 4).layout_of(heads) == KVMemory({"l": other}, 4).layout


def test_memory_with_more_or_fewer_than_four_axes_reports_no_axes() -> None:
    memory = KVMemory({"l": torch.zeros(4, 3, 5)}, 4)
    assert memory.axes == ()
    assert memory.layout == "torch.float32[h3,n5]"
    assert KVMemory({"l": torch.zeros(4, 2, 3, 5, 2)}, 4).axes == ()


def test_a_fractional_number_of_kernel_blocks_per_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer l has 7 kernel blocks, which is not a multiple of 4 blocks"):
        KVMemory({"l": torch.zeros(7, 4, 3, 5)}, 4)


@pytest.mark.parametrize("kernel_blocks", [1, 2])
def test_only_the_given_blocks_are_cleared(kernel_blocks: int) -> None:
    layers = make_layers((0, 1, 2, 3), 2, kernel_blocks, is_one_piece=False)
    memory = KVMemory({str(number): layer for number, layer in enumerate(layers)}, 4)
    memory.clear_blocks([1, 3])
    for layer in layers:
        is_zero = [bool((layer[block] == 0).all()) for block in range(4 * kernel_blocks)]
        assert is_zero == [block // kernel_blocks in (1, 3) for block in range(4 * kernel_blocks)]


def test_clear_blocks_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = KVMemory({"l": torch.zeros(4, 2, 3, 5)}, 4)
    waited: list[bool] = []
    assert memory.record_event() is None
    monkeypatch.setattr(memory, "record_event", lambda: SimpleNamespace(synchronize=lambda: waited.append(True)))
    memory.clear_blocks([1])
    assert waited == [True]


def test_events_and_marks_are_made_by_the_gpu_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def __init__(self, device: torch.device) -> None:
            assert device.type == "cpu", "this test has no GPU"

        def record_event(self) -> str:
            return "event"

        def make_mark(self) -> str:
            return "mark"

        def bind_thread(self) -> None:
            bound.append(self)

    bound: list[Device] = []
    monkeypatch.setattr("kvstore_backend.staging.cuda.CudaDevice", Device)
    memory = KVMemory({"l": torch.zeros(4, 2, 3, 5)}, 4)
    memory.bind_thread()
    assert not bound, "host memory needs no GPU"
    memory.is_on_device = True
    results: list[object] = [memory.record_event(), memory.make_mark()]
    assert results == ["event", "mark"]
    memory.bind_thread()
    assert len(bound) == 1


def test_an_allocation_is_listed_once_with_all_its_bytes() -> None:
    whole = torch.zeros(3, 4, 2, 3, 5)
    other = torch.zeros(4, 2, 3, 5)
    memory = KVMemory({"a": whole[1], "b": whole[2], "c": other}, 4)
    assert memory.list_allocations() == [
        Span(whole.data_ptr(), 3 * 4 * 2 * 3 * 5 * 4),
        Span(other.data_ptr(), 4 * 2 * 3 * 5 * 4),
    ]


class TestMergedLayers:
    """One tensor for all layers, if the bytes of a block have the same order in it."""

    @pytest.mark.parametrize("kernel_blocks", [1, 2])
    @pytest.mark.parametrize(("order", "layers"), [((0, 1, 2, 3), 3), ((0, 2, 1, 3), 2), ((0, 1, 2, 3), 2)])
    def test_contiguous_layers_are_merged_if_a_block_is_one_kernel_block(
        self, order: tuple[int, ...], layers: int, kernel_blocks: int
    ) -> None:
        tensors = make_layers(order, layers, kernel_blocks, is_one_piece=True)
        memory = KVMemory({str(number): layer for number, layer in enumerate(tensors)}, 4)
        merged = memory.merge_layers()
        # With several kernel blocks in a block, all layers of one kernel block come before the next kernel block.
        if kernel_blocks > 1:
            assert len(merged) == layers
            return
        (one,) = merged
        assert one.shape == (4, layers, 2, 3, 5)
        assert all(bool((one[:, number] == layer).all()) for number, layer in enumerate(tensors))

    def test_successive_layers_in_one_allocation_are_merged(self) -> None:
        whole = torch.arange(3 * 8 * 2 * 3 * 5.0).reshape(3, 8, 2, 3, 5)
        memory = KVMemory({str(number): layer for number, layer in enumerate(whole)}, 4)
        (one,) = memory.merge_layers()
        assert bool((one == whole.transpose(0, 1)).all())

    def test_the_first_layer_can_begin_inside_the_allocation(self) -> None:
        whole = torch.arange(4 * 4 * 2 * 3 * 5.0).reshape(4, 4, 2, 3, 5)
        memory = KVMemory({"b": whole[1], "c": whole[2], "d": whole[3]}, 4)
        (one,) = memory.merge_layers()
        assert bool((one == whole[1:].transpose(0, 1)).all())

    def test_a_single_layer_is_unchanged(self) -> None:
        memory = KVMemory({"l": torch.zeros(4, 2, 3, 5)}, 4)
        assert memory.merge_layers() is memory.tensors

    def test_layers_in_separate_allocations_are_not_merged(self) -> None:
        memory = KVMemory({str(number): torch.zeros(4, 2, 3, 5) for number in range(2)}, 4)
        assert memory.merge_layers() is memory.tensors

    def test_layers_at_unequal_distances_are_not_merged(self) -> None:
        whole = torch.zeros(5, 4, 2, 3, 5)
        memory = KVMemory({"a": whole[0], "b": whole[1], "c": whole[3]}, 4)
        assert memory.merge_layers() is memory.tensors

    def test_layers_in_descending_order_of_addresses_are_not_merged(self) -> None:
        whole = torch.zeros(2, 4, 2, 3, 5)
        memory = KVMemory({"a": whole[1], "b": whole[0]}, 4)
        assert memory.merge_layers() is memory.tensors

    def test_layers_inside_heads_are_not_merged(self) -> None:
        whole = torch.zeros(4, 2, 3, 3, 5)  # block, head, layer, token, content
        memory = KVMemory({str(layer): whole[:, :, layer] for layer in range(3)}, 4)
        assert memory.merge_layers() is memory.tensors


class TestLargePages:
    """Advice to the operating system to use large pages."""

    @pytest.fixture
    def madvise_calls(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
        calls: list[tuple[int, int, int]] = []

        def madvise(start: ctypes.c_void_p, length: ctypes.c_size_t, advice: int) -> None:
            calls.append((start.value or 0, length.value, advice))

        monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(madvise=madvise))
        return calls

    @pytest.mark.parametrize(
        ("address", "nbytes", "expected"),
        [
            (mmap.PAGESIZE, 10, (mmap.PAGESIZE, 10)),
            (mmap.PAGESIZE + 1, 2 * mmap.PAGESIZE, (2 * mmap.PAGESIZE, mmap.PAGESIZE + 1)),
            (1, mmap.PAGESIZE, (mmap.PAGESIZE, 1)),
            (1, mmap.PAGESIZE - 1, None),
            (1, 5, None),
        ],
    )
    def test_the_advice_begins_at_the_first_whole_page(
        self,
        madvise_calls: list[tuple[int, int, int]],
        monkeypatch: pytest.MonkeyPatch,
        address: int,
        nbytes: int,
        expected: tuple[int, int] | None,
    ) -> None:
        monkeypatch.setattr("sys.platform", "linux")
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
        _prefer_large_pages(Span(address, nbytes))
        assert madvise_calls == ([(*expected, 14)] if expected else [])

    def test_a_system_without_this_advice_gets_none(
        self, madvise_calls: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.platform", "darwin")
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
        _prefer_large_pages(Span(mmap.PAGESIZE, 10))
        monkeypatch.setattr("sys.platform", "linux")
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
        _prefer_large_pages(Span(mmap.PAGESIZE, 10))
        assert madvise_calls == []

    def test_host_memory_gets_the_advice(
        self, madvise_calls: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
        KVMemory({"l": torch.zeros(64, 2, 64, 64)}, 4)
        assert len(madvise_calls) == 1


class TestGroups:
    """Groups of layers in the same memory. The number of a block is ``group * num_blocks + id``."""

    def make_memory(self) -> tuple[torch.Tensor, GroupedMemory]:
        raw = torch.zeros(2, 4, 24)
        large = KVMemory({"a": raw[0].view(4, 1, 4, 6), "b": raw[1].view(4, 1, 4, 6)}, 4)
        small = KVMemory({"c": raw[0, :, :12].view(4, 1, 2, 6)}, 4)
        return raw, GroupedMemory([large, small])

    def test_a_block_has_the_bytes_of_the_layers_in_its_group(self) -> None:
        raw, memory = self.make_memory()
        two, one = memory.locate_blocks([3, 4 + 1])
        assert [span.address - raw.data_ptr() for span in two] == [3 * 96, 4 * 96 + 3 * 96]
        assert [(span.address - raw.data_ptr(), span.nbytes) for span in one] == [(96, 48)]
        assert memory.count_bytes([3, 4 + 1, 4 + 2]) == 2 * 96 + 2 * 48
        assert memory.list_allocations() == [Span(raw.data_ptr(), raw.nbytes)]
        assert memory.num_layers == 3

    def test_only_the_layers_of_the_blocks_group_are_cleared(self) -> None:
        raw, memory = self.make_memory()
        raw.fill_(1.0)
        memory.clear_blocks([4 + 1])
        assert raw[0, 1].tolist() == [0.0] * 12 + [1.0] * 12
        assert raw.sum() == raw.numel() - 12

    def test_layers_of_a_group_can_differ_with_is_mixed(self) -> None:
        layers = {"a": torch.zeros(4, 1, 2, 6), "b": torch.zeros(4, 1, 2, 6), "i": torch.zeros(4, 1, 2, 3)}
        memory = KVMemory(layers, 4, is_mixed=True)
        assert memory.layout == "2xtorch.float32[n2,c6] 1xtorch.float32[n2,c3]"
        assert memory.axes == ()
        assert memory.block_bytes == 2 * 48 + 24
