from __future__ import annotations

import secrets
import struct
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_backend.backend import HEADROOM_BYTES, Span, Status, Value
from kvstore_backend.namespace import FORMAT_VERSION
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.checked import HEADER_BYTES, CheckedBackend
from tests.faults.blocks import NAMESPACE, conversation
from tests.faults.injector import Fault, FaultInjector
from tests.support.memory import Memory
from tests.support.watched_store import WatchedStore

OK, ABSENT, FAILED = Status.OK, Status.ABSENT, Status.FAILED
HASHES = conversation(0, 4)
KEY, OTHER_KEY = (NAMESPACE.key(block_hash) for block_hash in HASHES[:2])


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(1 << 24)


@pytest.fixture
def checked(store: MemoryStore) -> CheckedBackend:
    return CheckedBackend(store)


def stored_object(store: MemoryStore, key: str, payload_bytes: int) -> bytes:
    memory = Memory(HEADER_BYTES + payload_bytes)
    assert store.get([key], [memory.value]) == [OK]
    return memory.content


def replace(store: MemoryStore, key: str, content: bytes) -> None:
    memory = Memory(content)
    store.remove([key])
    assert store.put([key], [memory.value]) == [OK]


def test_a_stored_object_is_the_documented_header_and_the_payload(store: MemoryStore, checked: CheckedBackend) -> None:
    payload = Memory(b"payload")
    checked.put([KEY], [payload.value])
    stored = stored_object(store, KEY, 7)
    magic, version, zero, size, _, digest, block_hash = struct.unpack("<4sHHQQ16s32s", stored[:72])
    assert (magic, version, zero, size) == (b"KVBK", FORMAT_VERSION, 0, 7)
    assert (digest.hex(), block_hash) == (NAMESPACE.digest, HASHES[0])
    assert stored[72:128] == bytes(56)
    assert stored[128:] == b"payload"


@given(st.binary(min_size=1, max_size=200), st.integers(0), st.integers(0, 7))
def test_an_object_with_a_flipped_bit_is_not_delivered(payload: bytes, place: int, bit: int) -> None:
    store = MemoryStore(1 << 20)
    checked = CheckedBackend(store)
    source, target = Memory(payload), Memory(len(payload))
    checked.put([KEY], [source.value])
    damaged = bytearray(stored_object(store, KEY, len(payload)))
    damaged[place % len(damaged)] ^= 1 << bit
    replace(store, KEY, bytes(damaged))
    assert checked.get([KEY], [target.value]) == [ABSENT]
    assert sum(checked.rejected.values()) == 1
    assert store.exists([KEY]) == [ABSENT]


@pytest.mark.parametrize(
    ("offset", "reason"),
    [(0, "magic"), (4, "version"), (6, "reserved"), (8, "size"), (16, "checksum"), (24, "namespace"), (40, "hash")],
)
def test_a_rejected_object_is_counted_by_its_wrong_field(
    store: MemoryStore, checked: CheckedBackend, offset: int, reason: str
) -> None:
    source = Memory(b"payload")
    checked.put([KEY], [source.value])
    damaged = bytearray(stored_object(store, KEY, 7))
    damaged[offset] ^= 1
    replace(store, KEY, bytes(damaged))
    assert checked.get([KEY], [source.value]) == [ABSENT]
    assert checked.rejected == Counter([reason])


def test_the_object_of_another_block_is_not_delivered(store: MemoryStore, checked: CheckedBackend) -> None:
    one, other, target = Memory(b"one"), Memory(b"two"), Memory(3)
    checked.put([KEY, OTHER_KEY], [one.value, other.value])
    replace(store, KEY, stored_object(store, OTHER_KEY, 3))
    assert checked.get([KEY, OTHER_KEY], [target.value, other.value]) == [ABSENT, OK]
    assert checked.rejected == Counter(["hash"])


def test_the_object_of_another_namespace_is_not_delivered(store: MemoryStore, checked: CheckedBackend) -> None:
    key = KEY.replace(NAMESPACE.digest, "0" * 32)
    memory = Memory(b"one")
    checked.put([KEY], [memory.value])
    replace(store, key, stored_object(store, KEY, 3))
    assert checked.get([key], [memory.value]) == [ABSENT]
    assert checked.rejected == Counter(["namespace"])


def test_an_ok_without_any_bytes_is_a_miss(checked: CheckedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStore, "get", lambda self, keys, targets: [OK] * len(keys))
    target = Memory(100)
    assert checked.get([KEY], [target.value]) == [ABSENT]


def test_an_object_of_another_size_is_absent_and_removed(store: MemoryStore, checked: CheckedBackend) -> None:
    memory = Memory(b"payload")
    store.put([KEY], [memory.value])
    assert checked.get([KEY, OTHER_KEY], [memory.value] * 2) == [ABSENT, ABSENT]
    assert checked.rejected == Counter(["size"])
    assert store.exists([KEY]) == [ABSENT]
    assert checked.put([KEY], [memory.value]) == checked.get([KEY], [memory.value]) == [OK]


@pytest.mark.parametrize(
    ("fault", "rejected"), [(Fault.FLIPPED_BIT, ["checksum"]), (Fault.FALSE_ABSENT, [])], ids=["bad", "put meanwhile"]
)
def test_one_bad_read_is_repeated_and_removes_nothing(store: MemoryStore, fault: Fault, rejected: list[str]) -> None:
    injector = FaultInjector(store)
    checked, source, target = CheckedBackend(injector), Memory(b"payload"), Memory(7)
    checked.put([KEY], [source.value])
    injector.faults = [fault]
    assert checked.get([KEY], [target.value]) == [OK]
    assert target.content == b"payload"
    assert checked.rejected == Counter(rejected)
    assert "remove" not in injector.calls


@pytest.mark.parametrize("second", [Fault.FAILED, Fault.FALSE_ABSENT])
def test_an_object_is_not_removed_if_its_second_read_fails(store: MemoryStore, second: Fault) -> None:
    injector = FaultInjector(store)
    checked, source = CheckedBackend(injector), Memory(b"payload")
    checked.put([KEY], [source.value])
    injector.faults = [Fault.FLIPPED_BIT, second]
    assert checked.get([KEY], [source.value]) == [ABSENT]
    assert "remove" not in injector.calls


def test_no_read_is_repeated_if_all_blocks_are_correct(store: MemoryStore) -> None:
    injector = FaultInjector(store)
    checked, source = CheckedBackend(injector), Memory(b"payload")
    checked.put([KEY], [source.value])
    injector.calls.clear()
    assert checked.get([KEY], [source.value]) == [OK]
    assert injector.calls == ["get"]
    assert checked.get([OTHER_KEY], [source.value]) == [ABSENT]
    assert injector.calls == ["get", "get", "exists"]


class TestReadersWithoutAChecksum:
    """Readers that verify only headers, so that no block may be removed by force during their reads."""

    def test_a_block_that_is_removed_while_it_is_read_is_a_miss(self) -> None:
        class RemovedMeanwhile(MemoryStore):
            """A stand-in for Mooncake, where a read continues after a forced removal."""

            def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
                answers = super().get(keys, targets)
                self.remove(keys[:1], force=True)
                return answers

        unsummed, memory = CheckedBackend(RemovedMeanwhile(1 << 20), is_summed=False), Memory(b"unread")
        unsummed.put([KEY, OTHER_KEY], [memory.value] * 2)
        assert unsummed.get([KEY, OTHER_KEY], [memory.value] * 2) == [ABSENT, OK]

    @pytest.mark.parametrize("is_summed", [True, False])
    def test_blocks_without_a_checksum_are_never_removed_by_force(self, is_summed: bool) -> None:
        store, memory = WatchedStore(), Memory(b"unread")
        CheckedBackend(store, is_summed=False).put([KEY, OTHER_KEY], [memory.value] * 2)
        reader = CheckedBackend(store, is_summed=is_summed)
        if not is_summed:
            replace(store, KEY, stored_object(store, OTHER_KEY, 6))
            store.forced.clear()
        assert reader.get([KEY], [memory.value]) == [ABSENT]
        assert store.forced == [False]


def test_memory_for_headers_is_unregistered_at_the_close() -> None:
    store, memory = WatchedStore(), Memory(b"payload")
    checked = CheckedBackend(store)
    checked.put([KEY], [memory.value])
    checked.close()
    registered, unregistered = store.memory
    assert (registered[0], unregistered[0]) == ("register", "unregister")
    assert registered[1:3] == unregistered[1:3]


def test_a_header_in_headroom_is_one_piece_with_the_payload(
    checked: CheckedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []
    put = MemoryStore.put

    def put_and_count(store: MemoryStore, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        pieces.extend(map(len, values))
        return put(store, keys, values)

    monkeypatch.setattr(MemoryStore, "put", put_and_count)
    memory = Memory(2 * (HEADROOM_BYTES + 100))
    values = [[Span(memory.address + HEADROOM_BYTES + i * (HEADROOM_BYTES + 100), 100)] for i in range(2)]
    checked.register(memory.address, memory.nbytes, headroom=True)
    outside = Memory(100)
    assert checked.put([KEY, OTHER_KEY, "third"], [*values, outside.value]) == [OK, OK, OK]
    assert pieces == [1, 1, 2]
    checked.unregister(memory.address, memory.nbytes)
    assert checked.get([KEY, OTHER_KEY, "third"], [*values, outside.value]) == [OK, OK, OK]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(any), st.booleans())
def test_a_value_is_read_back_with_and_without_headroom(sizes: list[int], headroom: bool) -> None:
    checked = CheckedBackend(MemoryStore(1 << 20))
    content = secrets.token_bytes(sum(sizes))
    source = Memory(bytes(HEADROOM_BYTES) + content)
    starts = [source.address + HEADROOM_BYTES + sum(sizes[:i]) for i in range(len(sizes))]
    if headroom:
        checked.register(source.address, source.nbytes, headroom=True)
    target = Memory(len(content))
    assert checked.put([KEY], [[Span(*span) for span in zip(starts, sizes, strict=True)]]) == [OK]
    assert checked.get([KEY], [target.value]) == [OK]
    assert target.content == content
    assert source.content[HEADROOM_BYTES:] == content


def test_memory_for_headers_is_registered_and_reused(checked: CheckedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[int] = []
    monkeypatch.setattr(MemoryStore, "register", lambda self, address, nbytes, **_: registered.append(nbytes))
    memory = Memory(b"x")
    for i in range(10):
        checked.put([f"key {i}"], [memory.value])
    assert len(registered) == 1
    checked.put([f"many {i}" for i in range(1000)], [memory.value] * 1000)
    assert len(registered) == 2
    assert registered[1] >= 1000 * HEADER_BYTES


@pytest.mark.parametrize("headroom", [False, True])
def test_registrations_are_passed_to_the_store(headroom: bool) -> None:
    store, memory = WatchedStore(), Memory(1000)
    checked = CheckedBackend(store)
    checked.register(memory.address, 1000, headroom=headroom)
    checked.unregister(memory.address, 1000)
    assert store.memory == [("register", memory.address, 1000, headroom), ("unregister", memory.address, 1000, False)]


def test_only_an_invalid_object_is_removed_by_force() -> None:
    store, source = WatchedStore(), Memory(b"payload")
    checked = CheckedBackend(store)
    checked.put([KEY], [source.value])
    checked.remove([OTHER_KEY])
    checked.remove([OTHER_KEY], force=True)
    replace(store, KEY, bytes(HEADER_BYTES + 7))
    store.forced.clear()
    checked.remove([OTHER_KEY])
    assert checked.get([KEY], [source.value]) == [ABSENT]
    assert store.forced == [False, True]


@pytest.mark.parametrize(
    "start", [200, 700], ids=["at the beginning of memory with headroom", "right behind memory with headroom"]
)
def test_a_header_is_written_only_into_headroom(checked: CheckedBackend, start: int) -> None:
    memory = Memory(1000)
    checked.register(memory.address + 200, 500, headroom=True)
    assert checked.put([KEY], [[Span(memory.address + start, 100)]]) == [OK]
    assert memory.content == b"\xee" * 1000


@pytest.mark.parametrize("was_registered", [False, True])
def test_memory_without_registered_headroom_is_not_changed(checked: CheckedBackend, was_registered: bool) -> None:
    memory = Memory(1000)
    if was_registered:
        checked.register(memory.address, 1000, headroom=True)
        checked.unregister(memory.address, 1000)
    else:
        checked.register(memory.address, 1000)
    assert checked.put([KEY], [[Span(memory.address + 500, 100)]]) == [OK]
    assert memory.content == b"\xee" * 1000


def test_memory_for_headers_is_reused_if_it_is_just_large_enough() -> None:
    store, memory = WatchedStore(), Memory(b"x")
    checked = CheckedBackend(store)
    checked.put(["first"], [memory.value])
    (_, _, nbytes, _) = store.memory[0]
    count = nbytes // HEADER_BYTES
    checked.put([f"key {i}" for i in range(count)], [memory.value] * count)
    assert len(store.memory) == 1
    checked.put([f"more {i}" for i in range(count + 1)], [memory.value] * (count + 1))
    assert [call for call, *_ in store.memory] == ["register", "unregister", "register"]
    assert store.memory[1] == ("unregister", *store.memory[0][1:3], False)


def test_large_values_are_verified_separately(store: MemoryStore, checked: CheckedBackend) -> None:
    """Several threads hash them."""
    keys = [KEY, OTHER_KEY, "third"]
    contents = [secrets.token_bytes(600_000) for _ in keys]
    sources, targets = [Memory(content) for content in contents], [Memory(600_000) for _ in keys]
    assert checked.put(keys, [source.value for source in sources]) == [OK] * 3
    damaged = stored_object(store, OTHER_KEY, 600_000)
    replace(store, OTHER_KEY, damaged[:-1] + bytes([damaged[-1] ^ 1]))
    assert checked.get(keys, [target.value for target in targets]) == [OK, ABSENT, OK]
    assert [targets[0].content, targets[2].content] == [contents[0], contents[2]]


def test_blocks_without_a_checksum_are_verified_by_their_headers(store: MemoryStore) -> None:
    unsummed = CheckedBackend(store, is_summed=False)
    source, target = Memory(b"unread"), Memory(6)
    unsummed.put([KEY], [source.value])
    assert struct.unpack("<6xH8xQ", stored_object(store, KEY, 6)[:24]) == (0x7575, 0)
    assert unsummed.get([KEY], [target.value]) == [OK]
    assert target.content == b"unread"
    replace(store, OTHER_KEY, stored_object(store, KEY, 6))
    assert unsummed.get([OTHER_KEY], [target.value]) == [ABSENT], "the complete bytes of another block"
    assert unsummed.rejected == Counter(hash=1)


@pytest.mark.parametrize("is_summed", [True, False])
def test_blocks_with_and_without_a_checksum_are_misses_for_each_other(store: MemoryStore, is_summed: bool) -> None:
    writer, reader = CheckedBackend(store, is_summed=is_summed), CheckedBackend(store, is_summed=not is_summed)
    source, target = Memory(b"values"), Memory(6)
    writer.put([KEY], [source.value])
    assert reader.get([KEY], [target.value]) == [ABSENT]
    assert reader.rejected == Counter(reserved=1)
