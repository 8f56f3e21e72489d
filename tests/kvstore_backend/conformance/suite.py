"""The contracts of ``StorageBackend`` as tests.

A class for a backend derives from ``StorageBackendContract`` and has a fixture ``backend``, which opens the backend.
A class for a configuration derives from ``StackContract`` and has a fixture ``config``; ``open_backend`` opens it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry

from kvstore_backend.backend import HEADROOM_BYTES, Health, Span, Status, StorageBackend
from kvstore_backend.config import PoolConfig
from kvstore_backend.pool import open_backend, open_store
from kvstore_backend.wrappers.guarded import Deadlines
from tests.faults.held import Held
from tests.support.memory import Memory
from tests.support.waiting import wait_until

OK, ABSENT, FAILED = Status.OK, Status.ABSENT, Status.FAILED
# No call misses these deadlines, even on a busy machine.
PATIENT = Deadlines(lookup_seconds=60, transfer_seconds=60)
HASTY = Deadlines(lookup_seconds=60, transfer_seconds=0.2)


def new_key(name: str = "key") -> str:
    """Return a new key, because tests may share a store."""
    return f"{name}-{secrets.token_hex(8)}"


def put(backend: StorageBackend, *pairs: tuple[str, bytes]) -> list[Status]:
    """Put values, each from its own memory."""
    sources = [Memory(content) for _, content in pairs]
    return backend.put([key for key, _ in pairs], [source.value for source in sources])


def read_value(backend: StorageBackend, key: str, nbytes: int) -> bytes | Status:
    """Return the value of ``key``, or its status if it cannot be read."""
    target = Memory(nbytes)
    (status,) = backend.get([key], [target.value])
    return target.content if status else status


class StorageBackendContract:
    """Subclass it as ``Test...`` and define the fixture ``backend``."""

    def test_a_value_is_read_back(self, backend: StorageBackend) -> None:
        pairs = [(new_key(), secrets.token_bytes(size)) for size in (1, 100, 65536, 1_000_003)]
        assert put(backend, *pairs) == [OK] * 4
        assert [read_value(backend, key, len(content)) for key, content in pairs] == [content for _, content in pairs]

    def test_answers_have_the_order_of_the_keys(self, backend: StorageBackend) -> None:
        present, absent = new_key(), new_key()
        put(backend, (present, b"here"))
        targets = [Memory(4) for _ in range(3)]
        assert backend.exists([absent, present, absent]) == [ABSENT, OK, ABSENT]
        assert backend.get([absent, present, absent], [target.value for target in targets]) == [ABSENT, OK, ABSENT]
        assert targets[1].content == b"here"

    def test_an_empty_batch_returns_an_empty_list(self, backend: StorageBackend) -> None:
        assert backend.put([], []) == backend.get([], []) == backend.exists([]) == backend.remove([]) == []

    def test_an_unknown_key_is_absent(self, backend: StorageBackend) -> None:
        key = new_key()
        assert backend.exists([key]) == backend.remove([key]) == [ABSENT]
        assert read_value(backend, key, 10) is ABSENT

    @pytest.mark.parametrize(
        ("gathered", "scattered"), [((10, 0, 60, 30), (1, 98, 0, 1)), ([1] * 3000, [1] * 3000)], ids=["few", "many"]
    )
    def test_a_value_may_be_gathered_and_scattered_in_pieces(
        self, backend: StorageBackend, gathered: Sequence[int], scattered: Sequence[int]
    ) -> None:
        nbytes = sum(gathered)
        key, source, target = new_key(), Memory(secrets.token_bytes(nbytes)), Memory(nbytes)
        assert backend.put([key], [source.spans(*gathered)]) == [OK]
        assert backend.get([key], [target.spans(*scattered)]) == [OK]
        assert target.content == source.content

    def test_the_pieces_of_a_value_may_have_any_order_in_memory(self, backend: StorageBackend) -> None:
        key, source, target = new_key(), Memory(b"worldhello "), Memory(14)
        assert backend.put([key], [[Span(source.address + 5, 6), Span(source.address, 5)]]) == [OK]
        assert backend.get([key], [[Span(target.address + 8, 6), Span(target.address + 1, 5)]]) == [OK]
        assert target.content == b"\xeeworld\xee\xeehello "

    def test_a_second_put_is_ok_and_changes_nothing(self, backend: StorageBackend) -> None:
        key = new_key()
        assert put(backend, (key, b"first")) == [OK]
        assert put(backend, (key, b"other")) == put(backend, (key, b"of another size")) == [OK]
        assert read_value(backend, key, 5) == b"first"

    def test_a_put_with_a_key_twice_stores_the_first_value(self, backend: StorageBackend) -> None:
        key = new_key()
        assert put(backend, (key, b"first"), (key, b"other")) == [OK, OK]
        assert read_value(backend, key, 5) == b"first"

    def test_keep_stores_absent_values_and_does_not_change_present_ones(self, backend: StorageBackend) -> None:
        there, absent, memory = new_key(), new_key(), Memory(secrets.token_bytes(100))
        assert backend.put([there], [memory.value]) == [OK]
        for seconds in (60.0, 0.0):
            assert backend.keep([there, absent], [memory.value, memory.spans(10, 0, 90)], seconds) == [OK, OK]
        assert read_value(backend, there, 100) == read_value(backend, absent, 100) == memory.content
        assert backend.keep([], [], 1.0) == []

    def test_a_value_of_another_size_than_the_target_is_absent(self, backend: StorageBackend) -> None:
        key = new_key()
        put(backend, (key, bytes(100)))
        assert [read_value(backend, key, wanted) for wanted in (1, 99, 101, 4096)] == [ABSENT] * 4

    def test_a_target_with_pieces_of_another_total_size_is_absent(self, backend: StorageBackend) -> None:
        key = new_key()
        put(backend, (key, bytes(100)))
        target = Memory(200)
        assert backend.get([key, key], [target.spans(50, 49), target.spans(50, 51)]) == [ABSENT, ABSENT]

    def test_a_get_does_not_change_memory_around_its_target(self, backend: StorageBackend) -> None:
        key, target = new_key(), Memory(300)
        put(backend, (key, bytes(100)))
        backend.get([key], [[Span(target.address + 100, 100)]])
        assert target.content == b"\xee" * 100 + bytes(100) + b"\xee" * 100

    def test_a_removed_key_is_absent_and_can_be_put_again(self, backend: StorageBackend) -> None:
        key = new_key()
        put(backend, (key, b"one"))
        self.remove(backend, key)
        assert backend.exists([key]) == [ABSENT]
        assert put(backend, (key, b"two")) == [OK]
        assert read_value(backend, key, 3) == b"two"

    def test_a_clear_removes_only_the_keys_with_its_prefix(self, backend: StorageBackend) -> None:
        prefix, other = new_key("kv1"), new_key("kv1")
        assert put(backend, (f"{prefix}-a", b"a"), (f"{prefix}-b", b"b"), (other, b"c")) == [OK] * 3
        assert read_value(backend, f"{prefix}-a", 1) == b"a"  # a lease does not protect a key from a clear
        wait_until(lambda: backend.clear(prefix) is OK, "the clear")
        assert backend.exists([f"{prefix}-a", f"{prefix}-b", other]) == [ABSENT, ABSENT, OK]

    def test_any_text_may_be_a_key(self, backend: StorageBackend) -> None:
        names = ("a/b", "..", "../../up", "köy ключ 鍵", "-rf", "a" * 400, "%2F", "new\nline")
        keys = [key for name in names for key in (new_key(name), f"{new_key()}{name}")]
        pairs = [(key, f"{number:2}".encode()) for number, key in enumerate(keys)]
        assert put(backend, *pairs) == [OK] * len(pairs)
        assert [read_value(backend, key, 2) for key in keys] == [content for _, content in pairs]

    def test_memory_can_be_registered_used_and_unregistered(self, backend: StorageBackend) -> None:
        key, memory = new_key(), Memory(secrets.token_bytes(8192))
        backend.register(memory.address, memory.nbytes)
        assert backend.put([key], [memory.value]) == backend.get([key], [memory.value]) == [OK]
        backend.unregister(memory.address, memory.nbytes)

    def test_only_headroom_around_a_value_may_be_overwritten(self, backend: StorageBackend) -> None:
        nbytes, stride = 1000, 2048
        memory, keys = Memory(3 * stride), [new_key(str(i)) for i in range(2)]
        contents = [secrets.token_bytes(nbytes) for _ in keys]
        backend.register(memory.address, memory.nbytes, headroom=True)
        starts = [HEADROOM_BYTES, stride + HEADROOM_BYTES]
        values = [[Span(memory.address + start, nbytes)] for start in starts]
        for start, content in zip(starts, contents, strict=True):
            memory.fill(content, start)
        assert backend.put(keys, values) == [OK, OK]
        for start in starts:
            memory.fill(b"\xee" * (stride - HEADROOM_BYTES), start)
        assert backend.get(keys, values) == [OK, OK]
        for start, content in zip(starts, contents, strict=True):
            assert memory.content[start : start + nbytes] == content
            beyond = start + nbytes
            assert set(memory.content[beyond : beyond + stride - HEADROOM_BYTES - nbytes]) == {0xEE}
        assert set(memory.content[2 * stride :]) == {0xEE}
        assert [read_value(backend, key, nbytes) for key in keys] == contents, "memory without headroom"
        backend.unregister(memory.address, memory.nbytes)

    def test_threads_may_call_at_the_same_time(self, backend: StorageBackend) -> None:
        keys = [new_key(str(i)) for i in range(8)]
        contents = [secrets.token_bytes(50_000) for _ in keys]

        def write_all_then_read_all(shift: int) -> bool:
            order = [(shift + i) % len(keys) for i in range(len(keys))]
            stored = put(backend, *[(keys[i], contents[i]) for i in order])
            for i in order:
                self.read_back(backend, keys[i], contents[i])
            return all(stored)

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(write_all_then_read_all, range(8)))

    def test_health_is_ok_with_a_sentence(self, backend: StorageBackend) -> None:
        health = backend.health()
        assert isinstance(health, Health)
        assert health.ok
        assert health.detail

    def test_after_close_every_answer_is_failed(self, backend: StorageBackend) -> None:
        key = new_key()
        put(backend, (key, b"x"))
        backend.close()
        assert put(backend, (key, b"x"), (new_key(), b"x")) == [FAILED, FAILED]
        assert read_value(backend, key, 1) is FAILED
        assert backend.exists([key]) == backend.remove([key]) == [FAILED]
        assert not backend.health().ok
        memory = Memory(8)
        backend.register(memory.address, 8)
        backend.unregister(memory.address, 8)

    def test_a_second_close_does_nothing(self, backend: StorageBackend) -> None:
        backend.close()
        backend.close()

    def test_close_is_allowed_during_calls_of_other_threads(self, backend: StorageBackend) -> None:
        source, key, started = Memory(1 << 18), new_key(), threading.Event()

        def call_until_closed() -> list[Status]:
            target = Memory(1 << 18)
            for i in range(100_000):
                answers = backend.put([f"{key}-{i}"], [source.value])
                answers += backend.get([f"{key}-{i}"], [target.value])
                started.set()
                if answers == [FAILED, FAILED]:
                    return answers
            raise AssertionError("calls went on after close")

        with ThreadPoolExecutor(3) as threads:
            running = [threads.submit(call_until_closed) for _ in range(3)]
            assert started.wait(30)
            backend.close()
            assert [thread.result(60) for thread in running] == [[FAILED, FAILED]] * 3

    def test_repr_names_the_store_and_whether_it_is_closed(self, backend: StorageBackend) -> None:
        assert type(backend).__name__ in repr(backend)
        backend.close()
        assert "closed" in repr(backend)

    def read_back(self, backend: StorageBackend, key: str, content: bytes) -> None:
        """Assert that a value can be read at once after a put was ``OK``, perhaps the put of another thread."""
        assert read_value(backend, key, len(content)) == content

    def remove(self, backend: StorageBackend, key: str) -> None:
        """Remove a present key; a store may answer ``FAILED`` while readers have a lease on it."""
        wait_until(lambda: backend.remove([key]) == [OK], f"the removal of {key}")


class StackContract(StorageBackendContract):
    """The contract of the stack of a configuration; define the fixture ``config``."""

    @pytest.fixture
    def backend(self, config: PoolConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[StorageBackend]:
        monkeypatch.setattr("kvstore_backend.wrappers.guarded.Deadlines", lambda: PATIENT)
        stack = open_backend(config, CollectorRegistry(), background=False)
        yield stack
        stack.close()

    @pytest.fixture
    def held_stack(
        self, config: PoolConfig, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[tuple[StorageBackend, list[Held]]]:
        """A stack with short deadlines, and its stores, of which a test can hold the transfers."""
        stores: list[Held] = []

        def open_with_hold(settings: PoolConfig) -> Held:
            stores.append(Held(open_store(settings)))
            return stores[-1]

        monkeypatch.setattr("kvstore_backend.wrappers.guarded.Deadlines", lambda: HASTY)
        monkeypatch.setattr("kvstore_backend.pool.open_store", open_with_hold)
        stack = open_backend(config, CollectorRegistry(), background=False)
        yield stack, stores
        for store in stores:
            store.let_go()
        stack.close()

    def test_a_stack_is_ready_until_its_close(self, backend: StorageBackend) -> None:
        assert backend.is_ready
        backend.close()
        assert not backend.is_ready

    def test_no_call_is_late_if_all_have_ended(self, backend: StorageBackend) -> None:
        key = new_key()
        put(backend, (key, b"one"))
        assert read_value(backend, key, 3) == b"one"
        assert read_value(backend, key, 4) is ABSENT
        assert backend.wait_for_late_calls(0)

    def test_a_client_replaces_a_value_of_another_size_after_a_miss(self, backend: StorageBackend) -> None:
        for theirs, ours in ((b"theirs", b"our"), (b"their", b"our own")):
            key = new_key()
            assert put(backend, (key, theirs)) == [OK]
            assert backend.flush_writes(60)
            assert [read_value(backend, key, len(ours)) for _ in range(4)] == [ABSENT] * 4
            assert backend.is_ready, "a value of another size is not a failure of the pool"
            assert put(backend, (key, ours)) == [OK]
            assert read_value(backend, key, len(ours)) == ours

    def test_a_call_is_late_until_it_has_ended(self, held_stack: tuple[StorageBackend, list[Held]]) -> None:
        stack, stores = held_stack
        key, target = new_key(), Memory(3)
        assert put(stack, (key, b"one")) == [OK]
        assert stack.flush_writes(60)
        for store in stores:
            store.hold()
        assert stack.get([key], [target.value]) == [FAILED]
        assert not stack.wait_for_late_calls(0.05)
        for store in stores:
            store.let_go()
        assert stack.wait_for_late_calls(60)
        target.fill(b"new")
        wait_until(lambda: read_value(stack, key, 3) == b"one", "the stack to be used again")
        assert target.content == b"new", "no late call writes to the target"

    def test_a_late_put_stores_its_original_bytes(self, held_stack: tuple[StorageBackend, list[Held]]) -> None:
        stack, stores = held_stack
        key, source = new_key(), Memory(b"one")
        for store in stores:
            store.hold()
        answer = stack.put([key], [source.value])
        for store in stores:
            store.let_go()
        assert stack.wait_for_late_calls(60)
        source.fill(b"new")
        assert stack.flush_writes(60)
        assert answer in ([FAILED], [OK])  # a stack with asynchronous writes accepts it at once
        wait_until(lambda: stack.exists([key]) in ([OK], [ABSENT]), "the stack to be used again")
        assert read_value(stack, key, 3) in (b"one", ABSENT)

    def test_flushed_writes_exist_for_all(self, backend: StorageBackend) -> None:
        present, absent = new_key(), new_key()
        assert put(backend, (present, b"here")) == [OK]
        assert backend.flush_writes(60)
        assert backend.exists_for_all([absent, present, absent]) == [ABSENT, OK, ABSENT]

    def test_exists_for_all_accepts_an_empty_batch_and_fails_after_close(self, backend: StorageBackend) -> None:
        assert backend.exists_for_all([]) == []
        backend.close()
        assert backend.exists_for_all([new_key()]) == [FAILED]

    def test_there_is_nothing_to_flush_after_close(self, backend: StorageBackend) -> None:
        put(backend, (new_key(), b"x"))
        backend.close()
        assert backend.flush_writes(0)
