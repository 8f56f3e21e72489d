"""Where the bytes of vLLM's blocks lie, in the layouts that its attention backends want."""

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
    with pytest.raises(ConfigError, match="different layouts"):
        KVMemory({"a": torch.zeros(4, 2, 3, 5), "b": torch.zeros(4, 2, 3, 6)}, 4)


def test_memory_that_is_neither_the_hosts_nor_a_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match="host memory or on a GPU"):
        KVMemory({"a": torch.zeros(4, 2, 3, 5, device="meta")}, 4)


ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (1, 2, 0, 3)]


def make_layers(order: tuple[int, ...], layers: int, kernel_blocks: int, *, is_one_piece: bool) -> list[torch.Tensor]:
    """Layers whose axes lie in this order, in allocations of their own or the layers of a block together."""
    shape = (4 * kernel_blocks, 2, 3, 5)
    stored = [shape[axis] for axis in order]
    back = [order.index(axis) for axis in range(4)]
    if is_one_piece:  # block, layer, ...
        whole = torch.zeros(stored[0], layers, *stored[1:])
        made = [whole[:, layer].permute(back) for layer in range(layers)]
    else:
        made = [torch.zeros(stored).permute(back) for _ in range(layers)]
    for number, tensor in enumerate(made):
        tensor.copy_(torch.arange(tensor.numel()).reshape(shape) + 1000.0 * (number + 1))
    return made


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
def test_bytes_of_a_block_lie_in_the_order_that_the_layout_names(order: tuple[int, ...]) -> None:
    memory = KVMemory({"l": make_layers(order, 1, 2, is_one_piece=False)[0]}, 4)
    sizes = {0: "k2", 1: "h2", 2: "n3", 3: "c5"}
    assert memory.layout == f"torch.float32[{','.join(sizes[axis] for axis in order)}]"
    names = {0: ("k", 2), 1: (HEAD, 2), 2: ("n", 3), 3: ("c", 5)}
    assert memory.axes == (("layer", 1), *(names[axis] for axis in order), ("byte", 4))


def test_axes_of_size_one_are_no_part_of_a_layout_but_heads_stay_an_axis() -> None:
    memory = KVMemory({"l": torch.zeros(4, 1, 3, 5)}, 4)
    assert memory.layout == "torch.float32[n3,c5]"
    assert memory.axes == (("layer", 1), (HEAD, 1), ("n", 3), ("c", 5), ("byte", 4))
    assert memory.layout_of(1) == "torch.float32[n3,c5]"
    assert memory.layout_of(2) == "torch.float32[h2,n3,c5]"


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_the_layout_of_other_heads_is_the_one_that_such_memory_has(heads: int) -> None:
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        two, other = (torch.zeros([(4, n, 3, 5)[axis] for axis in order]).permute(order) for n in (2, heads))
        assert KVMemory({"l": two}, 4).layout_of(heads) == KVMemory({"l": other}, 4).layout


def test_memory_of_other_than_four_axes_has_no_axis_of_heads() -> None:
    memory = KVMemory({"l": torch.zeros(4, 3, 5)}, 4)
    assert memory.axes == ()
    assert memory.layout == "torch.float32[h3,n5]"
    assert KVMemory({"l": torch.zeros(4, 2, 3, 5, 2)}, 4).axes == ()


def test_blocks_that_are_no_whole_number_of_kernel_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="layer l has 7 kernel blocks, which is not a multiple of 4 blocks"):
        KVMemory({"l": torch.zeros(7, 4, 3, 5)}, 4)


@pytest.mark.parametrize("kernel_blocks", [1, 2])
def test_blocks_are_cleared_and_no_others(kernel_blocks: int) -> None:
    layers = make_layers((0, 1, 2, 3), 2, kernel_blocks, is_one_piece=False)
    memory = KVMemory({str(number): layer for number, layer in enumerate(layers)}, 4)
    memory.clear_blocks([1, 3])
    for layer in layers:
        is_zero = [bool((layer[block] == 0).all()) for block in range(4 * kernel_blocks)]
        assert is_zero == [block // kernel_blocks in (1, 3) for block in range(4 * kernel_blocks)]


def test_clearing_on_a_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = KVMemory({"l": torch.zeros(4, 2, 3, 5)}, 4)
    waited: list[bool] = []
    assert memory.record_event() is None
    monkeypatch.setattr(memory, "record_event", lambda: SimpleNamespace(synchronize=lambda: waited.append(True)))
    memory.clear_blocks([1])
    assert waited == [True]


def test_events_and_marks_are_those_of_the_gpu_that_has_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def __init__(self, device: torch.device) -> None:
            assert device.type == "cpu", "the stand-in"

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
    assert not bound, "in host memory"
    memory.is_on_device = True
    made: list[object] = [memory.record_event(), memory.make_mark()]
    assert made == ["event", "mark"]
    memory.bind_thread()
    assert len(bound) == 1


def test_an_allocation_counts_once_with_all_of_its_bytes() -> None:
    whole = torch.zeros(3, 4, 2, 3, 5)
    other = torch.zeros(4, 2, 3, 5)
    memory = KVMemory({"a": whole[1], "b": whole[2], "c": other}, 4)
    assert memory.list_allocations() == [
        Span(whole.data_ptr(), 3 * 4 * 2 * 3 * 5 * 4),
        Span(other.data_ptr(), 4 * 2 * 3 * 5 * 4),
    ]


class TestMergedLayers:
    """One tensor for all layers, where a block's bytes keep their order in it."""

    @pytest.mark.parametrize("kernel_blocks", [1, 2])
    @pytest.mark.parametrize(("order", "layers"), [((0, 1, 2, 3), 3), ((0, 2, 1, 3), 2), ((0, 1, 2, 3), 2)])
    def test_layers_of_a_block_in_one_piece_are_one_tensor(
        self, order: tuple[int, ...], layers: int, kernel_blocks: int
    ) -> None:
        made = make_layers(order, layers, kernel_blocks, is_one_piece=True)
        memory = KVMemory({str(number): layer for number, layer in enumerate(made)}, 4)
        merged = memory.merge_layers()
        # Of several kernel blocks to a block, the layers of one come before the next one's.
        if kernel_blocks > 1:
            assert len(merged) == layers
            return
        (one,) = merged
        assert one.shape == (4, layers, 2, 3, 5)
        assert all(bool((one[:, number] == layer).all()) for number, layer in enumerate(made))

    def test_layers_one_after_another_in_one_allocation_are_one_tensor(self) -> None:
        whole = torch.arange(3 * 8 * 2 * 3 * 5.0).reshape(3, 8, 2, 3, 5)
        memory = KVMemory({str(number): layer for number, layer in enumerate(whole)}, 4)
        (one,) = memory.merge_layers()
        assert bool((one == whole.transpose(0, 1)).all())

    def test_the_first_need_not_begin_where_the_allocation_does(self) -> None:
        whole = torch.arange(4 * 4 * 2 * 3 * 5.0).reshape(4, 4, 2, 3, 5)
        memory = KVMemory({"b": whole[1], "c": whole[2], "d": whole[3]}, 4)
        (one,) = memory.merge_layers()
        assert bool((one == whole[1:].transpose(0, 1)).all())

    def test_one_layer_stays_as_it_is(self) -> None:
        memory = KVMemory({"l": torch.zeros(4, 2, 3, 5)}, 4)
        assert memory.merge_layers() is memory.tensors

    def test_layers_in_allocations_of_their_own_stay_apart(self) -> None:
        memory = KVMemory({str(number): torch.zeros(4, 2, 3, 5) for number in range(2)}, 4)
        assert memory.merge_layers() is memory.tensors

    def test_layers_at_unequal_distances_stay_apart(self) -> None:
        whole = torch.zeros(5, 4, 2, 3, 5)
        memory = KVMemory({"a": whole[0], "b": whole[1], "c": whole[3]}, 4)
        assert memory.merge_layers() is memory.tensors

    def test_layers_in_the_order_of_falling_addresses_stay_apart(self) -> None:
        whole = torch.zeros(2, 4, 2, 3, 5)
        memory = KVMemory({"a": whole[1], "b": whole[0]}, 4)
        assert memory.merge_layers() is memory.tensors

    def test_heads_of_all_layers_together_stay_apart(self) -> None:
        whole = torch.zeros(4, 2, 3, 3, 5)  # block, head, layer, token, content
        memory = KVMemory({str(layer): whole[:, :, layer] for layer in range(3)}, 4)
        assert memory.merge_layers() is memory.tensors


class TestLargePages:
    """The system is advised to commit the memory in large pages."""

    @pytest.fixture
    def advised(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
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
    def test_from_the_first_whole_page_on(
        self,
        advised: list[tuple[int, int, int]],
        monkeypatch: pytest.MonkeyPatch,
        address: int,
        nbytes: int,
        expected: tuple[int, int] | None,
    ) -> None:
        monkeypatch.setattr("sys.platform", "linux")
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
        _prefer_large_pages(Span(address, nbytes))
        assert advised == ([(*expected, 14)] if expected else [])

    def test_not_where_the_system_knows_no_such_advice(
        self, advised: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.platform", "darwin")
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
        _prefer_large_pages(Span(mmap.PAGESIZE, 10))
        monkeypatch.setattr("sys.platform", "linux")
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
        _prefer_large_pages(Span(mmap.PAGESIZE, 10))
        assert advised == []

    def test_for_all_memory_of_the_host(
        self, advised: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
        KVMemory({"l": torch.zeros(64, 2, 64, 64)}, 4)
        assert len(advised) == 1


class TestGroups:
    """Groups of layers in the same memory: a block is ``group * num_blocks + id``."""

    def make_memory(self) -> tuple[torch.Tensor, GroupedMemory]:
        raw = torch.zeros(2, 4, 24)
        large = KVMemory({"a": raw[0].view(4, 1, 4, 6), "b": raw[1].view(4, 1, 4, 6)}, 4)
        small = KVMemory({"c": raw[0, :, :12].view(4, 1, 2, 6)}, 4)
        return raw, GroupedMemory([large, small])

    def test_a_block_is_the_bytes_of_its_groups_layers(self) -> None:
        raw, memory = self.make_memory()
        two, one = memory.locate_blocks([3, 4 + 1])
        assert [span.address - raw.data_ptr() for span in two] == [3 * 96, 4 * 96 + 3 * 96]
        assert [(span.address - raw.data_ptr(), span.nbytes) for span in one] == [(96, 48)]
        assert memory.count_bytes([3, 4 + 1, 4 + 2]) == 2 * 96 + 2 * 48
        assert memory.list_allocations() == [Span(raw.data_ptr(), raw.nbytes)]
        assert memory.num_layers == 3

    def test_only_the_layers_of_its_group_are_zeroed(self) -> None:
        raw, memory = self.make_memory()
        raw.fill_(1.0)
        memory.clear_blocks([4 + 1])
        assert raw[0, 1].tolist() == [0.0] * 12 + [1.0] * 12
        assert raw.sum() == raw.numel() - 12

    def test_layers_of_a_group_may_differ_where_vllm_says_so(self) -> None:
        layers = {"a": torch.zeros(4, 1, 2, 6), "b": torch.zeros(4, 1, 2, 6), "i": torch.zeros(4, 1, 2, 3)}
        memory = KVMemory(layers, 4, is_mixed=True)
        assert memory.layout == "2xtorch.float32[n2,c6] 1xtorch.float32[n2,c3]"
        assert memory.axes == ()
        assert memory.block_bytes == 2 * 48 + 24
