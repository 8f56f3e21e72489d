"""Blocks pass through a ring of buffers unchanged; a buffer is not reused while a late call may use it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from kvstore_backend import BlockPool, Span
from kvstore_backend.backend import HEADROOM_BYTES, Status, Value
from kvstore_backend.staging import KVTensors, StagedGroups, StagedMemory, StandInDevice
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.transfers import Event, Outcome, Transfers, Window
from tests.faults.blocks import NAMESPACE, conversation
from tests.support.waiting import wait_until

SHAPE = (6, 2, 4, 8)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
    ),
]
HASHES = conversation(0, 6)


class Registered(MemoryStore):
    """Records the registered memory."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.spans: set[Span] = set()

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        assert headroom
        self.spans.add(Span(address, nbytes))

    def unregister(self, address: int, nbytes: int) -> None:
        self.spans.remove(Span(address, nbytes))


def make_layers(device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Make two layers in which all numbers differ."""
    count = torch.Size(SHAPE).numel()
    return [(torch.arange(count, device=device) + i * count).to(dtype).view(SHAPE) for i in range(2)]


def bytes_of(layers: Sequence[torch.Tensor], block: int) -> bytes:
    return b"".join(bytes(layer[block].cpu().contiguous().view(torch.uint8).flatten().tolist()) for layer in layers)


def stage(layers: Sequence[torch.Tensor], store: MemoryStore | None = None, blocks_per_buffer: int = 2) -> StagedMemory:
    kv = KVTensors(layers, len(layers[0]))
    return StagedMemory(
        kv,
        BlockPool(store or Registered(), NAMESPACE),
        buffer_bytes=blocks_per_buffer * (kv.block_bytes + HEADROOM_BYTES),
    )


def read_window(window: Window) -> list[bytes]:
    window.wait()
    return [ctypes.string_at(*value[0]) for value in window.values]


def write_window(window: Window, contents: Sequence[bytes]) -> None:
    for value, content in zip(window.values, contents, strict=False):
        ctypes.memmove(value[0].address, content, len(content))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_an_outgoing_window_has_the_leading_blocks_in_the_requested_order(device: str, dtype: torch.dtype) -> None:
    layers = make_layers(device, dtype)
    window = stage(layers).open_outgoing([4, 0, 5], None)
    assert read_window(window) == [bytes_of(layers, block) for block in (4, 0)], "as many as fit into a buffer"


@pytest.mark.parametrize("device", DEVICES)
def test_only_delivered_blocks_are_written_to_kv_memory(device: str) -> None:
    layers = make_layers(device)
    expected = [bytes_of(layers, block) for block in range(6)]
    window = stage(layers, blocks_per_buffer=3).open_incoming([5, 3, 1], None)
    write_window(window, [expected[0], expected[2], b"\xff" * len(expected[0])])
    window.deliver(2)
    window.wait()
    expected[5], expected[3] = expected[0], expected[2]
    assert [bytes_of(layers, block) for block in range(6)] == expected


@pytest.mark.parametrize("device", DEVICES)
def test_a_large_block_fills_a_buffer(device: str) -> None:
    layers = make_layers(device)
    kv = KVTensors(layers, 6)
    window = StagedMemory(kv, BlockPool(Registered(), NAMESPACE), buffer_bytes=1).open_outgoing([3, 4], None)
    assert read_window(window) == [bytes_of(layers, 3)]


def test_memory_created_in_inference_mode_is_copied_outside_of_it() -> None:
    with torch.inference_mode():
        layers = make_layers("cpu")
        memory = stage(layers)
    window = memory.open_incoming([1], None)
    write_window(window, [bytes_of(layers, 2)])
    window.deliver(1)
    window.wait()
    assert bytes_of(layers, 1) == bytes_of(layers, 2)


def test_a_window_of_groups_has_the_leading_blocks_of_one_group() -> None:
    first, second = make_layers("cpu"), [layer + 1000 for layer in make_layers("cpu")]
    groups = StagedGroups([stage(first), stage(second)], SHAPE[0])
    assert read_window(groups.open_outgoing([6 + 4, 6 + 0, 2], None)) == [bytes_of(second, 4), bytes_of(second, 0)]
    assert read_window(groups.open_outgoing([2, 6 + 2], None)) == [bytes_of(first, 2)]
    window = groups.open_incoming([6 + 1, 6 + 3, 1], None)
    write_window(window, [bytes_of(first, 4), bytes_of(first, 5)])
    window.deliver(2)
    window.wait()
    assert [bytes_of(second, block) for block in (1, 3)] == [bytes_of(first, block) for block in (4, 5)]


class TestBuffers:
    def test_all_memory_of_windows_is_registered_with_the_pool(self) -> None:
        store = Registered()
        window = stage(make_layers("cpu"), store).open_incoming([1, 2], None)
        assert len(store.spans) == 2, "one for each direction"
        for ((address, nbytes),) in window.values:
            assert any(
                span.address <= address - HEADROOM_BYTES and address + nbytes <= span.address + span.nbytes
                for span in store.spans
            )

    def test_windows_in_use_have_different_memory(self) -> None:
        memory = stage(make_layers("cpu"))
        windows = [memory.open_incoming([1], None), memory.open_incoming([2], None), memory.open_outgoing([3], None)]
        assert len({window.values[0][0] for window in windows}) == 3

    def test_a_buffer_that_is_set_aside_is_replaced_and_later_unregistered(self) -> None:
        store = Registered()
        memory = stage(make_layers("cpu"), store)
        late = memory.open_incoming([1, 2], None)
        assert not late.set_aside(), "no block is set aside"
        others = [memory.open_incoming([1, 2], None) for _ in range(2)]
        assert late.values not in [other.values for other in others]
        assert len(store.spans) == 3
        for window in (*others, late):
            window.take_back()
        assert len(store.spans) == 2

    def test_many_incoming_buffers_need_one_registration(self) -> None:
        store, kv = Registered(), KVTensors(make_layers("cpu"), 6)
        buffer_bytes = kv.block_bytes + HEADROOM_BYTES
        memory = StagedMemory(
            kv,
            BlockPool(store, NAMESPACE),
            buffer_bytes=buffer_bytes,
            incoming_bytes=5 * buffer_bytes + 1,
        )
        before = set(store.spans)
        windows = [memory.open_incoming([1], None) for _ in range(5)]
        assert len({window.values[0][0] for window in windows}) == 5
        assert store.spans == before
        assert sorted(span.nbytes for span in before) == [2 * buffer_bytes, 5 * buffer_bytes]

    @pytest.mark.parametrize("block_bytes", [1 << 10, 3 << 10, 1 << 13])
    def test_pinned_memory_is_not_larger_than_requested(self, block_bytes: int) -> None:
        """Torch rounds pinned memory up to a power of two, so more headroom would double it."""
        store, kv = Registered(), KVTensors([torch.zeros(100, block_bytes, dtype=torch.uint8)], 100)
        StagedMemory(kv, BlockPool(store, NAMESPACE), buffer_bytes=1 << 14, incoming_bytes=1 << 17)
        outgoing, incoming = sorted(span.nbytes for span in store.spans)
        assert outgoing <= 1 << 15
        assert incoming <= 1 << 17

    def test_a_buffer_is_reused_when_its_copy_has_ended(self) -> None:
        go = threading.Event()

        def wait() -> None:
            go.wait()

        device = StandInDevice(before_step=wait)
        kv = KVTensors(make_layers("cpu"), 6)
        memory = StagedMemory(
            kv, BlockPool(Registered(), NAMESPACE), device=device, buffer_bytes=kv.block_bytes + HEADROOM_BYTES
        )
        for block in (0, 1):
            window = memory.open_incoming([block], None)
            window.deliver(1)
            window.take_back()
        opened: list[Window] = []
        opening = threading.Thread(target=lambda: opened.append(memory.open_incoming([2], None)))
        opening.start()
        opening.join(0.05)
        assert not opened
        go.set()
        opening.join(30)
        assert opened


class Gate:
    """Counts calls, and delays them until it ``is_open``."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.num_calls = 0

    def pass_through(self) -> None:
        self.num_calls += 1
        assert self.is_open.wait(60)


class GatedStore(Registered):
    """A store that delays puts and gets until its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        self.gate.pass_through()
        return super().put(keys, values)

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        self.gate.pass_through()
        return super().get(keys, targets)


class TestOverlap:
    """The pool and the device work at the same time, each on a buffer."""

    @pytest.fixture
    def copies(self) -> Gate:
        return Gate()

    @pytest.fixture
    def store(self) -> GatedStore:
        return GatedStore()

    @pytest.fixture
    def transfers(self, store: GatedStore, copies: Gate) -> Iterator[Transfers]:
        kv, pool = KVTensors(make_layers("cpu"), 6), BlockPool(store, NAMESPACE)
        device = StandInDevice(before_step=copies.pass_through)
        memory = StagedMemory(kv, pool, device=device, buffer_bytes=2 * (kv.block_bytes + HEADROOM_BYTES))
        opened = Transfers(pool, memory, lambda event: event())
        yield opened
        copies.is_open.set()
        store.gate.is_open.set()
        opened.close()

    def test_the_next_blocks_are_read_while_the_previous_ones_are_copied(
        self, transfers: Transfers, store: GatedStore, copies: Gate
    ) -> None:
        copies.is_open.set()
        store.gate.is_open.set()
        outcomes: list[Outcome] = []
        transfers.save(HASHES, range(6), outcomes.append, lambda: None)
        wait_until(lambda: outcomes, "the save")
        copies.is_open.clear()
        store.gate.num_calls = 0
        transfers.load(HASHES, range(6), outcomes.append, lambda: None)
        wait_until(lambda: store.gate.num_calls == 2, "the second read")
        assert len(outcomes) == 1
        copies.is_open.set()
        wait_until(lambda: outcomes[1:], "the load")
        assert (outcomes[1].count, store.gate.num_calls) == (6, 3)

    def test_the_next_blocks_are_copied_while_the_previous_ones_are_written(
        self, transfers: Transfers, store: GatedStore, copies: Gate
    ) -> None:
        copies.is_open.set()
        outcomes: list[Outcome] = []
        transfers.save(HASHES, range(6), outcomes.append, lambda: None)
        wait_until(lambda: copies.num_calls == 2 * 3, "all steps of the second copy")
        assert store.gate.num_calls == 1
        store.gate.is_open.set()
        wait_until(lambda: outcomes, "the save")
        assert outcomes[0].count == 6


def test_blocks_are_saved_to_the_pool_and_loaded_again() -> None:
    layers = make_layers("cpu")
    pool = BlockPool(Registered(), NAMESPACE)
    kv = KVTensors(layers, 6)
    transfers = Transfers(
        pool, StagedMemory(kv, pool, buffer_bytes=2 * (kv.block_bytes + HEADROOM_BYTES)), lambda event: event()
    )
    expected = [bytes_of(layers, block) for block in range(6)]
    outcomes: list[Outcome] = []
    ended = threading.Semaphore(0)

    def on_end(outcome: Outcome) -> None:
        outcomes.append(outcome)
        ended.release()

    transfers.save(HASHES, range(6), on_end, lambda: None)
    assert ended.acquire(timeout=30)
    for layer in layers:
        layer.zero_()
    transfers.load(HASHES, [5, 4, 3, 2, 1, 0], on_end, lambda: None)
    assert ended.acquire(timeout=30)
    assert [(outcome.count, outcome.is_released) for outcome in outcomes] == [(6, True)] * 2
    assert [bytes_of(layers, block) for block in (5, 4, 3, 2, 1, 0)] == expected
    transfers.close()


class SizedDevice(StandInDevice):
    """Records the sizes of the allocated memory."""

    def __init__(self) -> None:
        super().__init__()
        self.device_bytes: list[int] = []
        self.host_bytes: list[int] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.device_bytes.append(nbytes)
        return super().allocate(nbytes)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        self.host_bytes.append(nbytes)
        return super().allocate_host(nbytes)


@pytest.mark.parametrize(("buffer_blocks", "capacity"), [(0.5, 1), (1, 1), (2.9, 2), (6, 6), (99, 6)])
def test_a_buffer_has_at_least_one_block_and_at_most_all(buffer_blocks: float, capacity: int) -> None:
    kv, device, store = KVTensors(make_layers("cpu"), 6), SizedDevice(), Registered()
    memory = StagedMemory(
        kv,
        BlockPool(store, NAMESPACE),
        device=device,
        buffer_bytes=int(buffer_blocks * (kv.block_bytes + HEADROOM_BYTES)),
    )
    row = HEADROOM_BYTES + kv.block_bytes
    assert sorted(device.device_bytes) == sorted([capacity * row, capacity * 8] * 2), "one lane per direction"
    assert sorted(device.host_bytes) == sorted([2 * capacity * row, 2 * capacity * 8] * 2), "two buffers per lane"
    assert {span.nbytes for span in store.spans} == {2 * capacity * row}
    for window in (memory.open_incoming(range(6), None), memory.open_outgoing(range(6), None)):
        assert len(window.values) == capacity
        addresses = [value[0].address for value in window.values]
        assert addresses == [addresses[0] + i * row for i in range(capacity)]
        assert {value[0].nbytes for value in window.values} == {kv.block_bytes}
        assert any(span.address + HEADROOM_BYTES == addresses[0] for span in store.spans)


class TestFaults:
    """Errors of a device; the buffers can be used again."""

    @pytest.fixture
    def memory(self) -> StagedMemory:
        return stage(make_layers("cpu"))

    def test_a_copy_that_cannot_begin_releases_its_buffer(
        self, memory: StagedMemory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise MemoryError("no memory")

        ring = memory._outgoing.ring
        with monkeypatch.context() as patched:
            patched.setattr(memory._outgoing._stream, "queue", fail)
            with pytest.raises(MemoryError, match="no memory"):
                memory.open_outgoing([1], None)
        assert len(ring._free) == 2
        assert read_window(memory.open_outgoing([1], None)) == [bytes_of(make_layers("cpu"), 1)]

    @pytest.mark.parametrize("error", [RuntimeError("the copy failed"), KeyboardInterrupt()])
    def test_a_buffer_is_reused_after_its_copy_failed(self, memory: StagedMemory, error: BaseException) -> None:
        class Failed:
            def synchronize(self) -> None:
                raise error

        ring = memory._incoming.ring
        first = ring.take()
        first.copied = Failed()
        ring.give_back(first)
        assert ring.take() is not first
        if isinstance(error, Exception):
            assert ring.take() is first
        else:
            with pytest.raises(KeyboardInterrupt):
                ring.take()
            assert list(ring._free) == [first]

    def test_a_window_waits_for_its_copy_and_raises_its_error(self, memory: StagedMemory) -> None:
        window = memory.open_incoming([1, 2], None)
        window.wait()  # no copy has begun yet
        window.deliver(0)
        window.wait()
        memory._incoming._kv.scatter = lambda *_: 1 / 0  # type: ignore[method-assign,assignment]
        window.deliver(1)
        with pytest.raises(ZeroDivisionError):
            window.wait()

    def test_a_closed_ring_has_no_registered_memory(self) -> None:
        store = Registered()
        memory = stage(make_layers("cpu"), store)
        memory._incoming.ring.close()
        assert len(store.spans) == 1
        memory._outgoing.ring.close()
        assert not store.spans


class Doubling:
    """A stand-in for a form of blocks, with each byte twice."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = 2 * nbytes

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.repeat_interleave(2, dim=1)

    def decode(self, encoded: torch.Tensor) -> torch.Tensor:
        return encoded[:, ::2].contiguous()


def test_blocks_may_have_another_form_in_the_pool_than_in_kv_memory() -> None:
    layers = make_layers("cpu")
    kv = KVTensors(layers, 6)
    memory = StagedMemory(kv, BlockPool(Registered(), NAMESPACE), Doubling(kv.block_bytes))
    plain = [bytes_of(layers, block) for block in range(6)]
    contents = read_window(memory.open_outgoing([4, 0], None))
    assert contents == [bytes(byte for byte in plain[block] for _ in range(2)) for block in (4, 0)]
    window = memory.open_incoming([1, 2], None)
    write_window(window, contents)
    window.deliver(2)
    window.wait()
    assert [bytes_of(layers, block) for block in range(6)] == [plain[0], plain[4], plain[0], *plain[3:]]


class TestTheStandIn:
    def test_steps_run_in_order_after_the_event_that_they_wait_for(self) -> None:
        class Ended:
            def synchronize(self) -> None:
                log.append("waited")

        log: list[str] = []
        stream = StandInDevice(lambda: log.append("thread"), lambda: log.append("step")).open_stream()
        first = stream.queue([lambda: log.append("a"), lambda: log.append("b")], Ended())
        second = stream.queue([lambda: log.append("c")], None)
        second.synchronize()
        first.synchronize()
        assert log == ["thread", "waited", "step", "a", "step", "b", "step", "c"]

    def test_a_stream_has_one_thread(self) -> None:
        stream, first_runs, go = StandInDevice().open_stream(), threading.Event(), threading.Event()
        log: list[str] = []
        first = stream.queue([first_runs.set, lambda: go.wait(30), lambda: log.append("first")], None)
        second = stream.queue([lambda: log.append("second")], None)
        assert first_runs.wait(30)
        go.set()
        second.synchronize()
        first.synchronize()
        assert log == ["first", "second"]

    def test_the_stand_in_has_host_memory_and_no_event(self) -> None:
        device = StandInDevice()
        assert device.record_event() is None
        for memory in (device.allocate(100), device.allocate_host(100)):
            assert (memory.dtype, memory.shape, memory.device.type) == (torch.uint8, (100,), "cpu")


def test_the_event_is_that_of_the_device() -> None:
    class EventDevice(StandInDevice):
        def record_event(self) -> Event | None:
            return ended

    class Ended:
        def synchronize(self) -> None: ...

    ended = Ended()
    kv = KVTensors(make_layers("cpu"), 6)
    assert StagedMemory(kv, BlockPool(Registered(), NAMESPACE), device=EventDevice()).record_event() is ended
    assert stage(make_layers("cpu")).record_event() is None
