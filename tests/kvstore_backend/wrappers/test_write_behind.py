"""Asynchronous writes to a store that refuses, fails and hangs on demand."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_backend.backend import HEADROOM_BYTES, Status, StorageBackend, Value
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers import write_behind as module
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend
from kvstore_backend.wrappers.wrapper import Wrapper
from kvstore_backend.wrappers.write_behind import WriteBehindBackend
from tests.faults.injector import Fault, FaultInjector
from tests.support.forking import in_forked_child
from tests.support.memory import Memory
from tests.support.waiting import wait_until
from tests.support.watched_store import WatchedStore

OK, ABSENT, FAILED = Status.OK, Status.ABSENT, Status.FAILED
SLOT = 1024
"""Bytes in the arena for a block of up to 896."""


@pytest.fixture
def sound() -> MemoryStore:
    return MemoryStore(1 << 20)


@pytest.fixture
def store(sound: MemoryStore) -> Iterator[FaultInjector]:
    injector = FaultInjector(sound)
    yield injector
    injector.go_on()


@pytest.fixture
def behind(store: FaultInjector) -> Iterator[WriteBehindBackend]:
    backend = WriteBehindBackend(store, arena_bytes=4 * SLOT, retry_seconds=0.3, flush_seconds=0.1)
    yield backend
    store.go_on()
    backend.close()


def put(backend: StorageBackend, *keys: str, nbytes: int = SLOT - HEADROOM_BYTES) -> list[Status]:
    sources = [Memory(content_of(key, nbytes)) for key in keys]
    return backend.put(keys, [source.value for source in sources])


def content_of(key: str, nbytes: int = SLOT - HEADROOM_BYTES) -> bytes:
    return (key.encode() * nbytes)[:nbytes]


def read(backend: StorageBackend, key: str, nbytes: int = SLOT - HEADROOM_BYTES) -> bytes | Status:
    target = Memory(nbytes)
    (status,) = backend.get([key], [target.value])
    return target.content if status else status


def hang(store: FaultInjector, behind: WriteBehindBackend) -> None:
    """Make the sender hang in its put of a first block."""
    store.faults = [Fault.NOTHING, Fault.HANGS]
    assert put(behind, "first") == [OK]
    assert store.hanging.acquire(timeout=30)


class TestWriting:
    def test_accepted_blocks_are_written_to_the_store(self, behind: WriteBehindBackend, sound: MemoryStore) -> None:
        assert put(behind, "a", "b") == [OK, OK]
        assert behind.flush_writes(30)
        assert read(sound, "a") == content_of("a")
        assert behind.queued_blocks == behind.queued_bytes == 0
        assert behind.dropped == Counter()

    def test_the_caller_may_reuse_its_memory_at_once(
        self, behind: WriteBehindBackend, store: FaultInjector, sound: MemoryStore
    ) -> None:
        hang(store, behind)
        source = Memory(b"before")
        behind.put(["a"], [source.value])
        source.fill(b"after!")
        store.go_on()
        assert behind.flush_writes(30)
        assert read(sound, "a", 6) == b"before"

    def test_this_client_finds_and_reads_a_queued_block(self, behind: WriteBehindBackend, store: FaultInjector) -> None:
        hang(store, behind)
        put(behind, "a")
        assert behind.exists(["a", "first", "b"]) == [OK, OK, ABSENT]
        assert read(behind, "a") == content_of("a")
        assert read(behind, "a", 5) is ABSENT

    def test_blocks_are_written_in_batches_of_limited_size(
        self, store: FaultInjector, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes: list[int] = []
        put_batch = MemoryStore.put

        def put_and_count(self: MemoryStore, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
            sizes.append(len(keys))
            return put_batch(self, keys, values)

        monkeypatch.setattr(MemoryStore, "put", put_and_count)
        behind = WriteBehindBackend(store, arena_bytes=20 * SLOT, batch_bytes=300)
        hang(store, behind)
        put(behind, *"abcdefg", nbytes=100)
        store.go_on()
        assert behind.flush_writes(30)
        assert sizes == [3, 3, 1]
        behind.close()

    @given(st.lists(st.integers(1, 2000), max_size=60), st.integers(1000, 5000))
    def test_every_block_is_written_completely_or_counted_as_dropped(self, sizes: list[int], arena_bytes: int) -> None:
        sound = MemoryStore(1 << 20)
        behind = WriteBehindBackend(sound, arena_bytes=arena_bytes, batch_bytes=1500)
        contents = {f"key {i}": secrets.token_bytes(size) for i, size in enumerate(sizes)}
        sources = {key: Memory(content) for key, content in contents.items()}
        accepted = [key for key, source in sources.items() if behind.put([key], [source.value]) == [OK]]
        assert behind.flush_writes(30)
        for key, content in contents.items():
            assert read(sound, key, len(content)) == (content if key in accepted else ABSENT)
        assert behind.dropped["arena full"] == len(sizes) - len(accepted)
        behind.close()


class Gate(MemoryStore):
    """A store that executes one put for each permit."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.permits = threading.Semaphore(0)

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        self.permits.acquire()
        return super().put(keys, values)


def _has_left(behind: WriteBehindBackend, waiting: int) -> bool:
    return behind.queued_blocks == waiting - 1


@given(st.lists(st.one_of(st.integers(1, 1500), st.none()), max_size=40))
def test_no_block_overwrites_another_queued_block(steps: list[int | None]) -> None:
    """Each step is the size of a block to put, or None to let the store write one block."""
    gate = Gate()
    behind = WriteBehindBackend(gate, arena_bytes=5000, batch_bytes=1)
    accepted: dict[str, Memory] = {}
    for number, nbytes in enumerate(steps):
        if nbytes is not None:
            source = Memory(secrets.token_bytes(nbytes))
            if behind.put([f"key {number}"], [source.value]) == [OK]:
                accepted[f"key {number}"] = source
        elif waiting := behind.queued_blocks:
            gate.permits.release()
            wait_until(partial(_has_left, behind, waiting), "a block to leave the queue", pause_s=0.001)
    gate.permits.release(len(steps) + 1)
    assert behind.flush_writes(30)
    for key, source in accepted.items():
        assert read(gate, key, source.nbytes) == source.content
    behind.close()


class TestSingleFlight:
    def test_a_queued_block_is_not_queued_again(self, behind: WriteBehindBackend, store: FaultInjector) -> None:
        hang(store, behind)
        assert put(behind, "a", "a") == put(behind, "a", "first") == [OK, OK]
        assert behind.queued_blocks == 2
        store.go_on()
        assert behind.flush_writes(30)

    def test_a_block_that_is_in_the_pool_is_not_sent(
        self, behind: WriteBehindBackend, store: FaultInjector, sound: MemoryStore
    ) -> None:
        put(sound, "a")
        put(behind, "a")
        assert behind.flush_writes(30)
        assert store.calls == ["exists"]

    def test_the_next_block_after_one_that_is_in_the_pool_is_sent(
        self, behind: WriteBehindBackend, sound: MemoryStore
    ) -> None:
        put(sound, "a")
        for key in "ab":
            put(behind, key)
            assert behind.flush_writes(30)
        assert read(sound, "b") == content_of("b")


class TestDropping:
    def test_blocks_that_do_not_fit_into_the_arena_are_dropped_and_counted(
        self, behind: WriteBehindBackend, store: FaultInjector
    ) -> None:
        hang(store, behind)
        assert put(behind, "a", "b", "c", "d", "e") == [OK, OK, OK, FAILED, FAILED]
        assert behind.dropped == Counter({"arena full": 2})

    def test_a_block_larger_than_the_arena_is_dropped(self, behind: WriteBehindBackend) -> None:
        assert put(behind, "a", nbytes=5 * SLOT) == [FAILED]

    def test_a_write_to_a_full_pool_is_retried(
        self, behind: WriteBehindBackend, store: FaultInjector, sound: MemoryStore
    ) -> None:
        store.faults = [Fault.NOTHING, Fault.FAILED, Fault.NOTHING, Fault.FAILED]
        put(behind, "a")
        assert behind.flush_writes(30)
        assert read(sound, "a") == content_of("a")
        assert behind.dropped == Counter()

    def test_a_block_is_dropped_if_the_pool_stays_full_for_too_long(
        self, behind: WriteBehindBackend, store: FaultInjector
    ) -> None:
        store.faults = [Fault.NOTHING, Fault.FAILED] * 100
        put(behind, "a")
        assert behind.flush_writes(30)
        assert behind.dropped == Counter({"refused": 1})
        assert behind.exists(["b"])

    def test_a_block_is_dropped_at_once_if_the_pool_does_not_answer(
        self, behind: WriteBehindBackend, store: FaultInjector
    ) -> None:
        store.faults = [Fault.FAILED]
        put(behind, "a")
        assert behind.flush_writes(30)
        assert behind.dropped == Counter({"pool away": 1})
        assert store.calls == ["exists"]

    def test_no_block_is_accepted_while_the_pool_is_not_ready(self, store: FaultInjector) -> None:
        class Away(Wrapper):
            """A stack that is not ready."""

            @property
            def is_ready(self) -> bool:
                return False

        with contextlib.closing(WriteBehindBackend(Away(store))) as behind:
            assert put(behind, "a") == [FAILED]
            assert behind.dropped == Counter({"pool away": 1})

    def test_memory_of_a_late_write_is_not_reused(self, store: FaultInjector, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_LATE_CALL_WAIT_SECONDS", 0.01)
        guard = GuardedBackend(lambda: store, Deadlines(lookup_seconds=30, transfer_seconds=0.05))
        assert guard.wait_ready(30)
        behind = WriteBehindBackend(guard, arena_bytes=SLOT, flush_seconds=0.1)
        store.faults = [Fault.NOTHING, Fault.HANGS]
        put(behind, "a")
        assert store.hanging.acquire(timeout=30)
        wait_until(lambda: not guard.is_ready, "the deadline of the write")
        assert not behind.flush_writes(0.5)  # much longer than the wait for a late call
        assert put(behind, "b") == [FAILED]
        store.go_on()
        assert behind.flush_writes(30)
        behind.close()


class TestRemoving:
    def test_a_queued_block_is_removed_from_the_queue(
        self, behind: WriteBehindBackend, store: FaultInjector, sound: MemoryStore
    ) -> None:
        hang(store, behind)
        put(behind, "a")
        assert behind.remove(["a", "b"]) == [OK, ABSENT]
        store.go_on()
        assert behind.flush_writes(30)
        assert sound.exists(["a"]) == [ABSENT]

    def test_drop_own_copies_empties_the_queue_and_does_not_change_the_pool(
        self, behind: WriteBehindBackend, store: FaultInjector, sound: MemoryStore
    ) -> None:
        assert put(sound, "a in the pool") == [OK]
        hang(store, behind)
        put(behind, "a")
        put(behind, "b")
        assert behind.drop_own_copies("a")
        store.go_on()
        assert behind.flush_writes(30)
        assert sound.exists(["a", "b", "a in the pool"]) == [ABSENT, OK, OK]

    def test_a_block_that_is_being_written_is_not_removed(
        self, behind: WriteBehindBackend, store: FaultInjector
    ) -> None:
        hang(store, behind)
        assert behind.remove(["first"]) == [FAILED]


class TestClosing:
    def test_close_writes_accepted_blocks(self, sound: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(MemoryStore, "close", lambda _: None)
        behind = WriteBehindBackend(sound, batch_bytes=1)
        put(behind, *"abcdef")
        behind.close()
        assert all(sound.exists(list("abcdef")))

    def test_close_drops_the_queue_of_a_store_that_hangs(
        self, behind: WriteBehindBackend, store: FaultInjector
    ) -> None:
        hang(store, behind)
        put(behind, "a")
        behind.close()
        assert behind.dropped == Counter({"closed": 2})
        assert put(behind, "a") == behind.exists(["a"]) == behind.remove(["a"]) == [FAILED]

    def test_close_does_not_wait_for_the_end_of_a_pause_between_tries(
        self, store: FaultInjector, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_FIRST_PAUSE_SECONDS", 60.0)
        before = set(threading.enumerate())
        behind = WriteBehindBackend(store, arena_bytes=SLOT, retry_seconds=1000, flush_seconds=0.1)
        (sender,) = {each for each in threading.enumerate() if each.name == "pool-write-behind"} - before
        store.faults = [Fault.NOTHING, Fault.FAILED] * 100
        put(behind, "a")
        wait_until(lambda: "put" in store.calls, "a first try")
        behind.close()
        wait_until(lambda: not sender.is_alive(), "the end of the sender")
        assert store.calls == ["exists", "put"]
        assert behind.dropped == Counter({"closed": 1})

    def test_the_arena_is_registered_with_headroom_until_close(self) -> None:
        known: dict[int, tuple[int, bool]] = {}

        class Registering(MemoryStore):
            def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
                known[address] = (nbytes, headroom)

            def unregister(self, address: int, nbytes: int) -> None:
                assert known.pop(address) == (nbytes, True)

        behind = WriteBehindBackend(Registering(1 << 20), arena_bytes=SLOT)
        assert list(known.values()) == [(SLOT, True)]
        behind.close()
        assert not known

    def test_a_flush_that_takes_too_long_returns_false(self, behind: WriteBehindBackend, store: FaultInjector) -> None:
        hang(store, behind)
        assert not behind.flush_writes(0.01)


class TestStoresThatRaise:
    """A store must not raise; one that does loses blocks, and nothing else."""

    def test_a_write_that_raises_once_is_retried(
        self, behind: WriteBehindBackend, store: FaultInjector, sound: MemoryStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        store.faults = [Fault.RAISES, Fault.NOTHING, Fault.RAISES]
        assert put(behind, "a") == [OK]
        assert behind.flush_writes(30)
        assert read(sound, "a") == content_of("a")
        assert not behind.dropped
        assert caplog.text.count("A store raised an exception in a write of 1 blocks") == 1, "logged once"

    def test_a_write_that_raises_in_its_last_try_is_dropped(self, store: FaultInjector, sound: MemoryStore) -> None:
        behind = WriteBehindBackend(store, arena_bytes=4 * SLOT, retry_seconds=0.0)
        store.faults = [Fault.RAISES]
        assert put(behind, "a") == [OK]
        assert behind.flush_writes(30)
        assert behind.dropped == Counter(refused=1)
        assert (behind.queued_blocks, behind.queued_bytes) == (0, 0)
        assert put(behind, "b") == [OK]
        assert behind.flush_writes(30)
        assert read(sound, "b") == content_of("b")
        behind.close()

    def test_the_store_is_closed_even_if_unregistering_raises(self) -> None:
        class Raises(Wrapper):
            is_closed = False

            def unregister(self, address: int, nbytes: int) -> None:
                raise OSError("not pinned")

            def close(self) -> None:
                self.is_closed = True

        store = Raises(MemoryStore(1 << 20))
        behind = WriteBehindBackend(store, arena_bytes=SLOT)
        with pytest.raises(OSError, match="not pinned"):
            behind.close()
        assert store.is_closed

    def test_the_arena_is_unregistered_if_no_thread_can_be_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        store = WatchedStore()
        monkeypatch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            WriteBehindBackend(store, arena_bytes=SLOT)
        assert [call for call, *_ in store.memory] == ["register", "unregister"]


def test_a_forked_child_has_a_closed_backend_without_queued_blocks(
    behind: WriteBehindBackend, store: FaultInjector, sound: MemoryStore
) -> None:
    hang(store, behind)
    with behind._changed:  # as the sender may hold it at the moment of the fork

        def report() -> str:
            behind.close()
            return f"{put(behind, 'a')} {behind.queued_blocks} {behind.flush_writes(0)}"

        assert in_forked_child(report) == "[<Status.FAILED: 'failed'>] 0 True"
    store.go_on()
    assert behind.flush_writes(30)


def test_a_second_value_of_a_queued_key_is_not_queued(behind: WriteBehindBackend, store: FaultInjector) -> None:
    hang(store, behind)
    assert put(behind, "a") == put(behind, "a", nbytes=5) == [OK], "a value is immutable"
    assert read(behind, "a") == content_of("a")
    assert behind.queued_blocks == 2
