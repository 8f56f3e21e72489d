"""Blocks that are written in one sharding and read in another are plain slices of the whole KV, or misses."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_backend import Namespace, Status, Value
from kvstore_backend.pool import BlockPool
from kvstore_backend.resharding import gather
from kvstore_backend.resharding.family import HEAD, TOKEN, ShardingFamily, find_family
from kvstore_backend.resharding.gather import Gatherer
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend
from kvstore_backend.wrappers.tiered import TieredBackend
from kvstore_backend.wrappers.wrapper import Wrapper
from tests.support.memory import Memory
from tests.support.recut import WholeKV, store_blocks
from tests.support.waiting import wait_until

NAMES = ("layer", "kv", HEAD, TOKEN, "dim")
ORDERS = [(0, 1, 2, 3, 4), (0, 2, 1, 3, 4), (0, 1, 3, 2, 4), (3, 0, 2, 1, 4)]
TOKENS = 64
TOKEN_IDS = list(range(TOKENS))


def namespace(heads: int, tp_size: int, block_size: int, rank: int = 0) -> Namespace:
    return Namespace("m", "uint8", block_size, 2, max(1, heads // tp_size), 3, "any", tp_size=tp_size, tp_rank=rank)


def whole_kv(heads: int, layers: int = 2, order: Sequence[int] = ORDERS[0]) -> WholeKV:
    array = np.random.default_rng(heads).integers(0, 256, (layers, 2, heads, TOKENS, 3), dtype=np.uint8)
    return WholeKV(array, order)


def family_of(whole: WholeKV, own: Namespace) -> ShardingFamily:
    axes = [(NAMES[axis], whole.array.shape[axis]) for axis in whole.order]
    return find_family(own, whole.num_heads, axes, block_sizes=(4, 8, 16, 32))


def write(store: MemoryStore, whole: WholeKV, sharding: Namespace) -> list[bytes]:
    """Store the blocks of all ranks; return the hashes."""
    for rank in range(sharding.tp_size):
        hashes = store_blocks(BlockPool(CheckedBackend(store), replace(sharding, tp_rank=rank)), whole, TOKEN_IDS)
    return hashes


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_gathered_block_is_a_plain_slice_of_the_whole_kv(data: st.DataObject) -> None:
    heads, layers = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8])), data.draw(st.integers(1, 3))
    sizes = [size for size in (1, 2, 4, 8, 16) if heads % size == 0 or size % heads == 0]
    writer, reader = data.draw(st.sampled_from(sizes)), data.draw(st.sampled_from(sizes))
    stored, wanted = data.draw(st.sampled_from([4, 8, 16, 32])), data.draw(st.sampled_from([4, 8, 16, 32]))
    whole = whole_kv(heads, layers, data.draw(st.sampled_from(ORDERS)))
    own = namespace(heads, reader, wanted, data.draw(st.integers(0, reader - 1)))
    first = data.draw(st.integers(0, TOKENS // wanted - 1))
    count = data.draw(st.integers(1, TOKENS // wanted - first))
    store, sharding = MemoryStore(1 << 20), namespace(heads, writer, stored)
    names = write(store, whole, sharding)
    family = family_of(whole, own)
    gatherer = Gatherer(CheckedBackend(store), family)
    nbytes = family.block_bytes(own)
    memories = [Memory(nbytes) for _ in range(count)]
    parts = data.draw(st.sampled_from([1, 2, 3]))
    split = [nbytes // parts] * (parts - 1) + [nbytes - (parts - 1) * (nbytes // parts)]
    targets = [memory.spans(*split) for memory in memories]
    assert gatherer.read_blocks(sharding, names, first, targets) == count
    for index, memory in enumerate(memories, first):
        assert memory.content == whole.block(own, index)


class Reading:
    """A reader with TP 1 and blocks of 8 tokens; TP 2 wrote blocks of ``stored`` tokens."""

    def __init__(self, store: MemoryStore, stored: int = 8, deadline: float = 10.0) -> None:
        self.store = store
        self.whole = whole_kv(4)
        self.sharding = namespace(4, 2, stored)
        self.names = write(store, self.whole, self.sharding)
        self.own = namespace(4, 1, 8)
        self.family = family_of(self.whole, self.own)
        self.memories = [Memory(self.family.block_bytes(self.own)) for _ in range(TOKENS // 8)]
        self.stack = GuardedBackend(lambda: CheckedBackend(store), Deadlines(deadline, deadline))
        self.stack.wait_ready(None)
        self.gatherer = Gatherer(self.stack, self.family)

    def read(self) -> int:
        return self.gatherer.read_blocks(self.sharding, self.names, 0, [memory.value for memory in self.memories])

    def key(self, block: int, rank: int) -> str:
        return replace(self.sharding, tp_rank=rank).key(self.names[block])

    def check_targets(self) -> list[bool]:
        """Return for each target whether it has its block; the others must be unchanged."""
        right = [memory.content == self.whole.block(self.own, i) for i, memory in enumerate(self.memories)]
        for memory, is_right in zip(self.memories, right, strict=True):
            assert is_right or memory.content == b"\xee" * memory.nbytes
        return right


@pytest.mark.parametrize(("stored", "whole"), [(8, 3), (16, 6), (4, 1)])
def test_a_block_that_lacks_a_piece_is_a_miss_and_its_memory_is_unchanged(stored: int, whole: int) -> None:
    reading = Reading(MemoryStore(1 << 20), stored)
    reading.store.remove([reading.key(3, 1)])
    assert reading.read() == whole
    assert reading.check_targets() == [i < whole for i in range(8)]


def test_a_piece_of_another_size_is_a_miss() -> None:
    reading = Reading(MemoryStore(1 << 20))
    reading.store.remove([reading.key(2, 0)])
    wrong = Memory(b"x" * 77)
    reading.store.put([reading.key(2, 0)], [wrong.value])
    assert reading.read() == 2
    assert reading.check_targets() == [i < 2 for i in range(8)]


def test_a_piece_that_does_not_verify_is_a_miss_and_is_removed() -> None:
    reading = Reading(MemoryStore(1 << 20))
    key = reading.key(5, 1)
    stored = reading.store._values[key]
    reading.store._values[key] = stored[:-1] + bytes([stored[-1] ^ 1])
    assert reading.read() == 5
    assert reading.check_targets() == [i < 5 for i in range(8)]
    assert reading.store.exists([key]) == [Status.ABSENT]


def test_a_piece_of_another_rank_in_its_place_is_a_miss() -> None:
    reading = Reading(MemoryStore(1 << 20))
    reading.store._values[reading.key(0, 0)] = reading.store._values[reading.key(0, 1)]
    assert reading.read() == 0
    assert not any(reading.check_targets())


class HangingStore(MemoryStore):
    """The first read hangs until ``resume`` is set, and then overwrites its targets."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.resume = threading.Event()
        self.targets: list[Sequence[Value]] = []

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        self.targets.append(targets)
        if len(self.targets) == 1:
            self.resume.wait(60)
            for address, nbytes in (span for target in targets for span in target):
                ctypes.memset(address, 0xFF, nbytes)
        return super().get(keys, targets)


def test_a_late_call_writes_only_to_memory_that_nobody_uses() -> None:
    store = HangingStore()
    reading = Reading(store, deadline=0.1)
    assert reading.read() == 0
    assert not any(reading.check_targets())
    assert reading.read() == 0  # at once: the pool is not used while the call runs
    store.resume.set()
    assert reading.stack.wait_for_late_calls(60)
    assert not any(reading.check_targets())
    wait_until(lambda: reading.stack.is_ready, "the breaker to close")
    assert reading.read() == 8
    assert all(reading.check_targets())


def test_a_read_during_a_late_call_occupies_no_buffer() -> None:
    store = HangingStore()
    reading = Reading(store, deadline=0.1)
    gatherer = Gatherer(TieredBackend(MemoryStore(1 << 20), reading.stack), reading.family)
    for _ in range(3):
        assert gatherer.read_blocks(reading.sharding, reading.names, 0, [reading.memories[0].value]) == 0
    assert len(gatherer._buffers._free) == 1
    store.resume.set()


def test_targets_of_another_size_than_a_block_are_refused() -> None:
    reading = Reading(MemoryStore(1 << 20))
    wrong = Memory(reading.memories[0].nbytes - 1)
    with pytest.raises(ValueError, match="each target must have 384 bytes"):
        reading.gatherer.read_blocks(reading.sharding, reading.names, 0, [reading.memories[0].value, wrong.value])


def test_a_read_that_is_larger_than_the_buffer_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_backend.resharding.gather._BUFFER_BYTES", 1500)
    reading = Reading(MemoryStore(1 << 20))
    assert reading.read() == 8
    assert all(reading.check_targets())


class Registering(Wrapper):
    """Records the registered memory; has a late call while ``is_late`` is set."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(1 << 20))
        self.known: dict[int, tuple[int, bool]] = {}
        self.is_late = False
        self.ended = threading.Event()

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        self.known[address] = (nbytes, headroom)

    def unregister(self, address: int, nbytes: int) -> None:
        assert self.known.pop(address)[0] == nbytes

    def wait_for_late_calls(self, seconds: float) -> bool:
        return not self.is_late or self.ended.wait(seconds)


class TestBuffers:
    """Buffers for the pieces that are read."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gather, "_BUFFER_BYTES", 1000)

    def test_a_buffer_is_registered_with_headroom_and_reused_at_once(self) -> None:
        stack = Registering()
        buffers = gather._Buffers(stack)
        first = buffers.take(10)
        assert stack.known == {first.ctypes.data: (1000, True)}
        buffers.give_back(first, maybe_late=True)
        assert buffers._free == [first], "there was no late call"
        assert buffers.take(1000) is first
        buffers.give_back(first, maybe_late=False)
        assert len(stack.known) == 1

    def test_two_buffers_in_use_are_different_memory(self) -> None:
        buffers = gather._Buffers(Registering())
        assert buffers.take(10) is not buffers.take(10)

    def test_a_larger_buffer_replaces_one_that_is_too_small(self) -> None:
        stack = Registering()
        buffers = gather._Buffers(stack)
        buffers.give_back(buffers.take(10), maybe_late=False)
        larger = buffers.take(1001)
        assert stack.known == {larger.ctypes.data: (1001, True)}

    def test_all_buffers_are_unregistered_after_the_close(self) -> None:
        stack = Registering()
        buffers = gather._Buffers(stack)
        in_use = buffers.take(10)
        buffers.give_back(buffers.take(10), maybe_late=False)
        buffers.close()
        assert list(stack.known) == [in_use.ctypes.data]
        buffers.give_back(in_use, maybe_late=False)
        assert stack.known == {}

    def test_a_buffer_is_not_reused_before_its_late_call_has_ended(self) -> None:
        stack = Registering()
        stack.is_late = True
        buffers = gather._Buffers(stack)
        first = buffers.take(10)
        buffers.give_back(first, maybe_late=True)
        other = buffers.take(10)
        assert other is not first
        assert first.ctypes.data in stack.known
        buffers.give_back(other, maybe_late=False)
        assert buffers._free == [other], "the buffer is free at once if no call can be late"
        stack.ended.set()
        wait_until(lambda: len(buffers._free) == 2, "the buffer to be free")

    @pytest.mark.parametrize(("nbytes", "slot"), [(1, 256), (128, 256), (129, 384), (384, 512)])
    def test_a_slot_has_headroom_and_a_size_that_preserves_the_alignment(self, nbytes: int, slot: int) -> None:
        assert gather._slot_bytes(nbytes) == slot


def test_each_call_reads_as_many_pieces_as_the_buffer_has_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[int]] = []
    get = MemoryStore.get

    def get_and_record(store: MemoryStore, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        calls.append([target[0].address for target in targets])
        return get(store, keys, targets)

    monkeypatch.setattr(MemoryStore, "get", get_and_record)
    reading = Reading(MemoryStore(1 << 20))
    slot = gather._slot_bytes(reading.family.block_bytes(reading.sharding))
    monkeypatch.setattr(gather, "_BUFFER_BYTES", 6 * slot)  # three blocks of two pieces each
    assert reading.read() == 8
    assert [len(call) for call in calls] == [6, 6, 4]
    for addresses in calls:
        assert {later - earlier for earlier, later in pairwise(addresses)} == {slot}


def test_a_read_without_names_of_blocks_finds_nothing() -> None:
    reading = Reading(MemoryStore(1 << 20))
    reading.names = []
    assert reading.read() == 0


def test_a_read_after_a_close_finds_nothing() -> None:
    reading = Reading(MemoryStore(1 << 20))
    reading.stack.close()
    assert reading.read() == 0
