"""The guard around a store that hangs and fails on demand; a call that hangs waits until ``go_on``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from kvstore_backend.backend import PoolUnavailable, Status, StorageBackend, Value
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers import guarded as module
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend, end_calls_at
from tests.faults.injector import Fault, FaultInjector
from tests.support.forking import in_forked_child
from tests.support.memory import Memory
from tests.support.waiting import wait_until

OK, ABSENT, FAILED = Status.OK, Status.ABSENT, Status.FAILED
DEADLINES = Deadlines(lookup_seconds=0.2, transfer_seconds=0.2)


@pytest.fixture(autouse=True)
def _brief_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(module, "_MAX_PAUSE_SECONDS", 0.01)


@pytest.fixture
def store() -> Iterator[FaultInjector]:
    injector = FaultInjector(MemoryStore(1 << 20))
    yield injector
    injector.go_on()


@pytest.fixture
def guard(store: FaultInjector) -> Iterator[GuardedBackend]:
    backend = GuardedBackend(lambda: store, DEADLINES)
    assert backend.wait_ready(30)
    yield backend
    store.go_on()
    backend.close()


class TestLateCalls:
    def test_a_call_that_hangs_fails_at_its_deadline_and_opens_the_breaker(
        self, guard: GuardedBackend, store: FaultInjector
    ) -> None:
        store.faults = [Fault.HANGS]
        assert guard.exists(["a", "b"]) == [FAILED, FAILED]
        assert not guard.is_ready
        assert guard.late_calls == guard.times_opened == 1
        assert "exists of 2 keys took more than 0.2 s" in guard.health().detail

    def test_a_deadline_is_extended_if_this_process_got_no_cpu_time(
        self, guard: GuardedBackend, store: FaultInjector, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The wait of 0.2 s ends 5 s late by the clock, as on an overloaded machine."""
        store.faults = [Fault.HANGS]
        real = time.monotonic

        def late_once_a_call_hangs() -> float:
            if not store.calls:
                return real()
            store.go_on()
            return real() + 5.0

        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=late_once_a_call_hangs))
        assert guard.exists(["a"]) == [OK]  # the injector's answer after go_on
        assert guard.is_ready
        assert guard.late_calls == 0

    def test_the_time_of_end_calls_at_is_never_extended(
        self, guard: GuardedBackend, store: FaultInjector, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        guard._pace.note_answer(5.0, time.monotonic())
        store.faults = [Fault.HANGS]
        real = time.monotonic

        def late_once_a_call_hangs() -> float:
            return real() + 5.0 * bool(store.calls)

        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=late_once_a_call_hangs))
        monkeypatch.setattr(guard, "deadlines", Deadlines(3600, 3600))
        go_on = threading.Timer(20, store.go_on)
        go_on.start()
        with end_calls_at(real() + 0.2):
            assert guard.exists(["a"]) == [FAILED]
        go_on.cancel()
        assert guard.late_calls == 1

    def test_end_calls_at_applies_only_to_calls_in_its_block(self, guard: GuardedBackend, store: FaultInjector) -> None:
        with end_calls_at(time.monotonic() + 3600):
            pass
        store.faults = [Fault.HANGS]
        assert guard.exists(["a"]) == [FAILED]

    def test_no_call_is_made_while_a_late_one_runs(self, guard: GuardedBackend, store: FaultInjector) -> None:
        store.faults = [Fault.HANGS]
        guard.exists(["a"])
        memory = Memory(8)
        for _ in range(10):
            assert guard.exists(["a"]) == guard.remove(["a"]) == [FAILED]
            assert guard.put(["a"], [memory.value]) == guard.get(["a"], [memory.value]) == [FAILED]
        assert store.calls == ["exists"]

    def test_the_breaker_closes_when_the_late_call_has_ended(self, guard: GuardedBackend, store: FaultInjector) -> None:
        store.faults = [Fault.HANGS]
        guard.exists(["a"])
        assert not guard.wait_ready(0)
        store.go_on()
        assert guard.wait_ready(30)
        assert guard.exists(["a"]) == [ABSENT]

    def test_a_late_read_may_write_to_its_target_until_it_has_ended(self) -> None:
        class Writes(MemoryStore):
            """A stand-in for a native client with a late read."""

            def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
                hanging.set()
                go.wait()
                return super().get(keys, targets)

        hanging, go = threading.Event(), threading.Event()
        slow = Writes(1 << 20)
        source, target = Memory(b"late"), Memory(4)
        slow.put(["a"], [source.value])
        guard = GuardedBackend(lambda: slow, DEADLINES)
        assert guard.wait_ready(30)
        assert guard.get(["a"], [target.value]) == [FAILED]
        assert not guard.wait_for_late_calls(0)
        assert target.content == b"\xee" * 4
        go.set()
        assert guard.wait_for_late_calls(30)
        assert target.content == b"late"
        guard.close()

    def test_a_successful_probe_does_not_close_the_breaker_while_a_call_is_late(self) -> None:
        class Held(MemoryStore):
            """A store in which reads and lookups wait for different events."""

            def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
                read_go.wait()
                return [OK] * len(keys)

            def exists(self, keys: Sequence[str]) -> list[Status]:
                if keys == ["a"]:
                    return [FAILED]
                probing.set()
                probe_go.wait()
                probed.set()
                return [ABSENT]

        read_go, probing, probe_go, probed = (threading.Event() for _ in range(4))
        guard = GuardedBackend(lambda: Held(1), Deadlines(lookup_seconds=60, transfer_seconds=0.2))
        assert guard.wait_ready(30)
        target = Memory(8)
        reader = threading.Thread(target=guard.get, args=(["b"], [target.value]))
        reader.start()
        for _ in range(3):
            guard.exists(["a"])
        assert probing.wait(30)
        reader.join()
        assert guard.late_calls == 1
        probe_go.set()
        assert probed.wait(30)
        assert not guard.wait_ready(0.2)
        read_go.set()
        assert guard.wait_ready(30)
        guard.close()

    def test_a_call_without_a_free_worker_is_not_made_and_does_not_open_the_breaker(
        self, store: FaultInjector, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_WORKERS", 1)
        guard = GuardedBackend(lambda: store, Deadlines(lookup_seconds=0.05, transfer_seconds=60))
        assert guard.wait_ready(30)
        store.faults = [Fault.HANGS]
        memory = Memory(8)
        transfer = threading.Thread(target=guard.put, args=(["a"], [memory.value]))
        transfer.start()
        assert store.hanging.acquire(timeout=30)
        assert guard.exists(["a"]) == [FAILED]
        assert guard.is_ready
        assert guard.wait_for_late_calls(0)
        store.go_on()
        transfer.join()
        assert guard.remove(["b"]) == [ABSENT]
        assert store.calls == ["put", "remove"]
        guard.close()

    def test_the_deadline_of_a_transfer_grows_with_its_bytes(self) -> None:
        deadlines = Deadlines(transfer_seconds=1, bytes_per_second=1000, keys_per_second=4)
        one, other = Memory(3000), Memory(500)
        assert deadlines.seconds_for([one.spans(1000, 2000), other.value]) == 1 + 2 / 4 + 3.5

    def test_the_deadline_of_a_lookup_grows_with_its_keys(self) -> None:
        """While a store hangs, a lookup of one key fails and a lookup of 1000 keys still waits."""
        deadlines = Deadlines(lookup_seconds=0.05, keys_per_second=10)
        store, answers = FaultInjector(MemoryStore(1), [Fault.HANGS, Fault.HANGS]), []
        patient, hasty = (GuardedBackend(lambda: store, deadlines) for _ in range(2))
        assert patient.wait_ready(30)
        assert hasty.wait_ready(30)
        caller = threading.Thread(target=lambda: answers.append(patient.exists([str(i) for i in range(1000)])))
        caller.start()
        assert store.hanging.acquire(timeout=30)
        assert hasty.exists(["a"]) == [FAILED]
        store.go_on()
        caller.join()
        assert answers == [[OK] * 1000]
        for guard in (patient, hasty):
            guard.close()

    def test_a_lookup_of_80000_keys_has_three_times_the_time_of_a_busy_machine(self) -> None:
        """FastDeploy's cache manager v1 has a key per layer of a block: 80 layers, 500 blocks, keys and values."""
        assert Deadlines().seconds_to_look_up(80_000) >= 3 * 1.2


class TestSlowStores:
    def test_the_deadline_is_longer_after_a_late_answer(
        self, store: FaultInjector, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_MARGIN", 1000.0)
        monkeypatch.setattr(module, "_MAX_STRETCH", 1000.0)
        guard = GuardedBackend(lambda: store, Deadlines(lookup_seconds=0.1))
        assert guard.wait_ready(30)
        store.faults = [Fault.HANGS]
        assert guard.exists(["a"]) == [FAILED]
        store.go_on()
        assert guard.wait_ready(30)
        guard._store = slow = FaultInjector(MemoryStore(1), [Fault.HANGS])
        threading.Timer(0.5, slow.go_on).start()
        assert guard.exists(["a"]) == [OK]
        assert guard.late_calls == 1
        guard.close()

    def test_slow_answers_stretch_deadlines_for_a_minute(self) -> None:
        pace = module._AdaptiveDeadline()
        assert pace.stretch(0) == 1
        pace.note_answer(0.1, 0)
        assert pace.stretch(0) == 1, "the answer was fast"
        pace.note_answer(0.5, 10)
        pace.note_answer(0.1, 20)
        assert (pace.stretch(20), pace.stretch(69), pace.stretch(71)) == (2, 2, 1), "the slowest answer counts"
        pace.note_answer(0.3, 80)
        pace.note_answer(0.3, 130)
        assert pace.stretch(180) == pytest.approx(1.2), "an equally slow answer counts for a further minute"

    def test_the_stretch_of_a_deadline_is_limited(self) -> None:
        pace = module._AdaptiveDeadline()
        pace.note_answer(4.0, 0)
        assert pace.stretch(0) == module._MAX_STRETCH

    def test_an_answer_after_a_hang_does_not_stretch_deadlines(self) -> None:
        pace = module._AdaptiveDeadline()
        pace.note_answer(30.0, 0)
        assert pace.stretch(0) == 1

    def test_the_time_of_a_failed_answer_is_not_recorded(self, guard: GuardedBackend, store: FaultInjector) -> None:
        store.faults = [Fault.FAILED]
        assert guard.exists(["a"]) == [FAILED]
        assert guard._pace._until == 0
        guard.exists(["a"])
        assert guard._pace._until > 0


class TestFailures:
    def test_successive_failed_lookups_open_the_breaker(self, guard: GuardedBackend, store: FaultInjector) -> None:
        store.faults = [Fault.FAILED] * 3
        for _ in range(3):
            assert guard.exists(["a"]) == [FAILED]
        assert guard.times_opened == 1

    def test_a_successful_lookup_between_failures_keeps_the_breaker_closed(
        self, guard: GuardedBackend, store: FaultInjector
    ) -> None:
        store.faults = [Fault.FAILED, Fault.FAILED, Fault.NOTHING, Fault.FAILED, Fault.FAILED]
        for _ in range(5):
            guard.exists(["a"])
        assert guard.times_opened == 0

    def test_failed_puts_and_removals_do_not_open_the_breaker(
        self, guard: GuardedBackend, store: FaultInjector
    ) -> None:
        store.faults = [Fault.FAILED] * 20
        memory = Memory(8)
        for _ in range(10):
            assert guard.put(["a"], [memory.value]) == guard.remove(["a"]) == [FAILED]
        assert guard.is_ready

    @pytest.mark.parametrize("fault", [Fault.RAISES, Fault.FEWER_ANSWERS])
    def test_a_store_that_violates_its_contract_counts_as_failed(
        self, guard: GuardedBackend, store: FaultInjector, fault: Fault, caplog: pytest.LogCaptureFixture
    ) -> None:
        store.faults = [fault, fault]
        assert guard.exists(["a", "b"]) == [FAILED, FAILED]
        assert guard.exists(["a", "b"]) == [FAILED, FAILED]
        assert guard.raised_calls == (2 if fault is Fault.RAISES else 0)
        assert caplog.text.count("which no store may do") == (1 if fault is Fault.RAISES else 0), "logged once"

    def test_a_probe_that_fails_keeps_the_breaker_open(self, guard: GuardedBackend, store: FaultInjector) -> None:
        store.faults = [Fault.FAILED] * 6
        for _ in range(3):
            guard.exists(["a"])
        assert guard.wait_ready(30)
        assert store.calls == ["exists"] * 7

    def test_health_reports_that_a_probe_hangs(self, guard: GuardedBackend, store: FaultInjector) -> None:
        store.faults = [*[Fault.FAILED] * 3, Fault.HANGS]
        for _ in range(3):
            guard.exists(["a"])
        wait_until(lambda: "probe" in guard.health().detail, "the reason")
        assert "a probe took more than 0.2 s" in guard.health().detail


class TestOpening:
    def test_all_calls_fail_until_the_store_can_be_opened(self) -> None:
        memory = Memory(8)
        tried = threading.Semaphore(0)

        def refuse() -> StorageBackend:
            tried.release()
            raise PoolUnavailable("no master answers")

        guard = GuardedBackend(refuse, DEADLINES)
        for _ in range(3):
            assert tried.acquire(timeout=30)
        assert guard.exists(["a"]) == guard.remove(["a"]) == [FAILED]
        assert guard.put(["a"], [memory.value]) == guard.get(["a"], [memory.value]) == [FAILED]
        wait_until(lambda: "no master answers" in guard.health().detail, "the reason")
        guard.close()

    @pytest.mark.parametrize("problem", [PoolUnavailable("no master"), RuntimeError("a broken library")])
    def test_a_store_that_cannot_be_opened_at_first_is_opened_later_and_logged_once(
        self, caplog: pytest.LogCaptureFixture, problem: Exception
    ) -> None:
        attempts = iter([problem] * 5)

        def open_store() -> StorageBackend:
            if (error := next(attempts, None)) is not None:
                raise error
            return MemoryStore(1 << 20)

        guard = GuardedBackend(open_store, DEADLINES)
        assert guard.wait_ready(30)
        assert len(caplog.messages) == 1
        assert str(problem) in caplog.text
        assert guard.exists(["a"]) == [ABSENT]
        guard.close()

    def test_a_store_is_not_opened_again_before_the_pause_that_it_requested(self) -> None:
        tried_at: list[float] = []

        def open_store() -> StorageBackend:
            tried_at.append(time.monotonic())
            raise PoolUnavailable("this stopped the process", pause_seconds=1.0)

        guard = GuardedBackend(open_store, DEADLINES)
        wait_until(lambda: len(tried_at) > 1, "another try")
        guard.close()
        assert tried_at[1] - tried_at[0] >= 1.0

    def test_memory_from_before_the_opening_is_registered_with_the_store(self) -> None:
        known: dict[int, tuple[int, bool]] = {}

        class Registering(MemoryStore):
            def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
                known[address] = (nbytes, headroom)

        go = threading.Event()
        guard = GuardedBackend(lambda: (go.wait(), Registering(1 << 20))[1], DEADLINES)
        guard.register(4096, 10, headroom=True)
        guard.register(8192, 20)
        guard.unregister(8192, 20)
        go.set()
        assert guard.wait_ready(30)
        assert known == {4096: (10, True)}
        guard.register(12288, 30)
        assert known[12288] == (30, False)
        guard.close()

    def test_memory_is_unregistered_with_the_store(self) -> None:
        known: set[int] = set()

        class Registering(MemoryStore):
            def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
                known.add(address)

            def unregister(self, address: int, nbytes: int) -> None:
                known.remove(address)

        guard = GuardedBackend(lambda: Registering(1 << 20), DEADLINES)
        assert guard.wait_ready(30)
        guard.register(4096, 10)
        guard.unregister(4096, 10)
        assert not known
        guard.close()


class RegisteringStore(MemoryStore):
    """Records the registered memory; the next calls of ``register`` raise, or wait."""

    def __init__(self, raises: int = 0) -> None:
        super().__init__(1 << 20)
        self.known: dict[int, tuple[int, bool]] = {}
        self.raises = raises
        self.is_closed = threading.Event()
        self.registering = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        self.registering.set()
        self.go.wait(60)
        if self.raises:
            self.raises -= 1
            raise RuntimeError("cannot pin this memory")
        for start, (size, _) in self.known.items():
            assert address + nbytes <= start or start + size <= address, "it overlaps other memory, which RDMA refuses"
        self.known[address] = (nbytes, headroom)

    def unregister(self, address: int, nbytes: int) -> None:
        assert self.known.pop(address)[0] == nbytes

    def close(self) -> None:
        self.is_closed.set()


class LostStore(RegisteringStore):
    """Closes itself in each read."""

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        raise PoolUnavailable("the client was closed")


class TestLostStores:
    def test_another_store_with_the_same_memory_is_opened_after_a_store_has_closed_itself(self) -> None:
        stores = [LostStore(), RegisteringStore()]
        guard, memory = GuardedBackend(iter(stores).__next__, DEADLINES), Memory(8)
        assert guard.wait_ready(30)
        guard.register(memory.address, memory.nbytes)
        assert guard.get(["a"], [memory.value]) == [FAILED]
        assert guard.wait_ready(30)
        assert guard.get(["a"], [memory.value]) == [ABSENT]
        assert stores[1].known == {memory.address: (8, False)}
        assert guard.raised_calls == 0
        guard.close()


class TestMemory:
    def test_a_failed_registration_during_the_opening_is_retried(self) -> None:
        store, opened, go = RegisteringStore(raises=3), [], threading.Event()

        def open_store() -> StorageBackend:
            go.wait()
            opened.append(store)
            return store

        guard = GuardedBackend(open_store, DEADLINES)
        guard.register(4096, 10)
        go.set()
        assert guard.wait_ready(30)
        assert store.known == {4096: (10, False)}
        assert len(opened) == 1, "the store was opened only once"
        guard.close()
        assert store.is_closed.is_set()

    def test_health_has_the_reason_while_memory_cannot_be_registered(self) -> None:
        store = RegisteringStore(raises=10**9)
        guard = GuardedBackend(lambda: store, DEADLINES)
        guard.register(4096, 10)
        wait_until(lambda: "cannot pin this memory" in guard.health().detail, "the reason")
        assert guard.exists(["a"]) == [FAILED]
        guard.close()
        assert store.is_closed.is_set()

    def test_a_registration_that_hangs_ends_at_its_deadline_and_delays_no_other(self) -> None:
        store = RegisteringStore()
        guard = GuardedBackend(lambda: store, Deadlines(register_seconds=0.2))
        assert guard.wait_ready(30)
        store.go.clear()
        guard.register(4096, 10)
        assert not guard.is_ready
        assert "registering 10 bytes took more than 0.2 s" in guard.health().detail
        guard.register(8192, 20, headroom=True)
        guard.unregister(4096, 10)
        guard.register(4096, 30)
        store.go.set()
        assert guard.wait_ready(30)
        assert store.known == {4096: (30, False), 8192: (20, True)}
        guard.close()

    def test_engine_threads_do_not_wait_while_all_memory_is_registered_with_a_new_store(self) -> None:
        store = RegisteringStore()
        store.go.clear()
        may_open = threading.Event()
        guard = GuardedBackend(lambda: (may_open.wait(), store)[1], Deadlines(register_seconds=60))
        guard.register(4096, 10)
        may_open.set()
        assert store.registering.wait(30)
        guard.register(8192, 20)
        guard.unregister(4096, 10)
        assert not guard.is_ready
        store.go.set()
        assert guard.wait_ready(30)
        assert store.known == {8192: (20, False)}
        guard.close()

    def test_memory_at_the_address_of_old_memory_is_registered_again(self) -> None:
        store = RegisteringStore()
        guard = GuardedBackend(lambda: store, Deadlines(lookup_seconds=0.2, register_seconds=0.2))
        assert guard.wait_ready(30)
        guard.register(4096, 10)
        store.go.clear()
        guard.register(8192, 10)  # hangs, so that the store gets no other call for now
        calls: list[str] = []
        store.unregister = lambda address, nbytes: calls.append(f"unregister {address}")  # type: ignore[method-assign]
        store.known.clear()
        guard.unregister(4096, 10)
        guard.register(4096, 10)
        store.go.set()
        assert guard.wait_ready(30)
        assert calls == ["unregister 4096"]
        assert store.known.keys() == {4096, 8192}
        guard.close()

    @pytest.mark.parametrize("address", [8156, 8257, 8258, 8259])
    def test_memory_that_overlaps_old_memory_is_registered_after_the_old_is_unregistered(self, address: int) -> None:
        store = RegisteringStore()
        guard = GuardedBackend(lambda: store, Deadlines(lookup_seconds=0.2, register_seconds=0.2))
        assert guard.wait_ready(30)
        guard.register(8192, 100)
        store.go.clear()
        guard.register(65536, 10)  # hangs, so that the store gets no other call for now
        guard.unregister(8192, 100)
        guard.register(address, 80)
        store.go.set()
        assert guard.wait_ready(5)
        assert store.known.keys() == {address, 65536}
        guard.close()

    def test_the_deadline_of_a_registration_grows_with_the_memory(self) -> None:
        assert Deadlines(register_seconds=2, register_bytes_per_second=100).seconds_to_register(300) == 5


class TestFork:
    def test_calls_in_a_forked_child_fail_at_once_with_the_reason(self) -> None:
        guard = GuardedBackend(lambda: MemoryStore(1 << 20), Deadlines(lookup_seconds=60))
        assert guard.wait_ready(30)
        with guard._changed:  # as another thread may hold it at the moment of the fork

            def report() -> str:
                guard.register(4096, 10)
                guard.close()
                return f"{guard.exists(['a'])} {guard.wait_for_late_calls(0)} {guard.health().detail}"

            answer = in_forked_child(report)
        assert answer.startswith("[<Status.FAILED: 'failed'>] True this process was forked from the one that opened")
        assert guard.exists(["a"]) == [ABSENT]
        guard.close()

    def test_a_late_call_of_the_parent_is_not_late_in_a_forked_child(
        self, guard: GuardedBackend, store: FaultInjector
    ) -> None:
        store.faults = [Fault.HANGS]
        guard.exists(["a"])
        assert not guard.wait_for_late_calls(0)
        assert in_forked_child(lambda: str(guard.wait_for_late_calls(0))) == "True"


class TestClosing:
    def test_a_close_in_time_is_not_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        guard = GuardedBackend(lambda: MemoryStore(1 << 20), DEADLINES)
        assert guard.wait_ready(30)
        guard.close()
        assert not caplog.messages

    def test_an_error_in_the_close_of_a_store_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        class Raises(MemoryStore):
            def close(self) -> None:
                raise OSError("the connection is gone")

        guard = GuardedBackend(lambda: Raises(1 << 20), DEADLINES)
        assert guard.wait_ready(30)
        guard.close()
        assert "the connection is gone" in caplog.text

    def test_a_close_during_the_opening_closes_the_store_afterwards(self) -> None:
        opening, go, closed = threading.Event(), threading.Event(), threading.Event()

        class Late(MemoryStore):
            def close(self) -> None:
                closed.set()

        def open_late() -> StorageBackend:
            opening.set()
            go.wait()
            return Late(1 << 20)

        guard = GuardedBackend(open_late, DEADLINES)
        assert opening.wait(30)
        guard.close()
        go.set()
        assert closed.wait(30)
        assert not guard.is_ready

    def test_closing_does_not_wait_for_a_call_that_hangs(
        self, guard: GuardedBackend, store: FaultInjector, caplog: pytest.LogCaptureFixture
    ) -> None:
        store.faults = [Fault.HANGS]
        guard.exists(["a"])
        guard.close()
        assert not guard.wait_for_late_calls(0)
        assert guard.exists(["a"]) == [FAILED]
        assert store.calls == ["exists"]
        assert "The pool hangs, so its client stays open" in caplog.text

    def test_a_store_is_not_closed_during_a_call_that_hangs(self) -> None:
        closed, go = threading.Event(), threading.Event()

        class Hangs(MemoryStore):
            def exists(self, keys: Sequence[str]) -> list[Status]:
                go.wait()
                return super().exists(keys)

            def close(self) -> None:
                closed.set()

        guard = GuardedBackend(lambda: Hangs(1 << 20), DEADLINES)
        assert guard.wait_ready(30)
        guard.exists(["a"])
        guard.close()
        assert not closed.is_set()
        go.set()

    def test_closing_ends_the_threads_that_call_the_store(self) -> None:
        before = set(threading.enumerate())
        guard = GuardedBackend(lambda: MemoryStore(1 << 20), DEADLINES)
        assert guard.wait_ready(30)
        workers = {each for each in threading.enumerate() if each.name.startswith("pool-call")} - before
        assert workers
        guard.close()
        wait_until(lambda: not any(worker.is_alive() for worker in workers), "the end of the threads")

    def test_closing_does_not_wait_for_a_store_that_does_not_close(self, monkeypatch: pytest.MonkeyPatch) -> None:
        go = threading.Event()

        class Stuck(MemoryStore):
            def close(self) -> None:
                go.wait()

        monkeypatch.setattr(module, "_LEAVE_SECONDS", 0.01)
        guard = GuardedBackend(lambda: Stuck(1 << 20), DEADLINES)
        assert guard.wait_ready(30)
        guard.close()
        go.set()


def test_repr_and_health_describe_the_state(guard: GuardedBackend, store: FaultInjector) -> None:
    assert guard.health().ok
    assert "breaker closed, 0 late" in repr(guard)
    store.faults = [Fault.HANGS]
    guard.exists(["a"])
    assert "1 late" in repr(guard)
    assert not guard.health().ok
