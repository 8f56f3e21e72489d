from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_backend.backend import Status
from kvstore_backend.stores.file import FileStore
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend
from kvstore_backend.wrappers.tiered import TieredBackend
from kvstore_backend.wrappers.wrapper import Wrapper
from tests.faults.injector import Fault, FaultInjector
from tests.kvstore_backend.wrappers.test_write_behind import put, read
from tests.support.memory import Memory
from tests.support.waiting import wait_until
from tests.support.watched_store import WatchedStore

OK, ABSENT, FAILED = Status.OK, Status.ABSENT, Status.FAILED
NBYTES = 10


@pytest.fixture
def fast() -> FaultInjector:
    return FaultInjector(MemoryStore(3 * NBYTES))


@pytest.fixture
def large() -> FaultInjector:
    return FaultInjector(MemoryStore(1 << 20))


@pytest.fixture
def through(fast: FaultInjector, large: FaultInjector) -> TieredBackend:
    return TieredBackend(fast, large)


@pytest.fixture
def back(fast: FaultInjector, large: FaultInjector) -> Iterator[TieredBackend]:
    backend = TieredBackend(fast, large, "back")
    yield backend
    backend.close()


def test_writing_through_puts_a_value_into_both_tiers(
    through: TieredBackend, fast: FaultInjector, large: FaultInjector
) -> None:
    assert put(through, "a", nbytes=NBYTES) == [OK]
    assert fast.exists(["a"]) == large.exists(["a"]) == [OK]
    assert through.flush_writes(0)


def test_writing_through_fails_if_the_large_tier_fails(
    through: TieredBackend, fast: FaultInjector, large: FaultInjector
) -> None:
    large.faults = [Fault.FAILED]
    assert put(through, "a", nbytes=NBYTES) == [FAILED]
    assert fast.exists(["a"]) == [ABSENT]


def test_a_failure_of_the_fast_tier_does_not_prevent_a_write(through: TieredBackend, fast: FaultInjector) -> None:
    fast.faults = [Fault.FAILED]
    assert put(through, "a", nbytes=NBYTES) == [OK]
    assert read(through, "a", NBYTES) == b"a" * NBYTES


def test_writing_back_answers_before_the_large_tier_has_the_value(
    back: TieredBackend, fast: FaultInjector, large: FaultInjector
) -> None:
    large.faults = [Fault.NOTHING, Fault.HANGS]
    put(back, "first", nbytes=NBYTES)
    assert large.hanging.acquire(timeout=30)
    assert put(back, "a", nbytes=NBYTES) == [OK]
    assert read(back, "a", NBYTES) == b"a" * NBYTES
    assert not back.flush_writes(0)
    large.go_on()
    assert back.flush_writes(30)
    assert large.exists(["a"]) == [OK]


def test_an_evicted_value_is_copied_back_to_the_fast_tier_when_it_is_read(
    through: TieredBackend, fast: FaultInjector
) -> None:
    put(through, *"abcd", nbytes=NBYTES)
    assert fast.exists(["a"]) == [ABSENT]
    assert read(through, "a", NBYTES) == b"a" * NBYTES
    assert fast.exists(["a"]) == [OK]


@pytest.mark.parametrize("policy", ["through", "back"])
def test_values_are_read_from_the_folder_after_an_eviction_and_after_a_restart(
    tmp_path: Path, policy: Literal["through", "back"]
) -> None:
    names = "abcdefgh"
    for is_first in (True, False):
        memory, folder = MemoryStore(3 * NBYTES), FileStore(tmp_path, 1 << 20)
        tiers = TieredBackend(memory, folder, policy)
        if is_first:
            assert [put(tiers, name, nbytes=NBYTES) for name in names] == [[OK]] * len(names)
            assert tiers.flush_writes(30)
        assert memory.exists(list(names)).count(OK) == (3 if is_first else 0)
        assert [read(tiers, name, nbytes=NBYTES) for name in names] == [name.encode() * NBYTES for name in names]
        tiers.close()


def test_the_large_tier_gets_no_call_for_a_value_in_the_fast_tier(through: TieredBackend, large: FaultInjector) -> None:
    put(through, "a", nbytes=NBYTES)
    large.calls.clear()
    assert through.exists(["a"]) == [OK]
    assert read(through, "a", NBYTES) == b"a" * NBYTES
    assert large.calls == []


def test_a_failure_of_the_fast_tier_hides_no_value(through: TieredBackend, fast: FaultInjector) -> None:
    put(through, "a", nbytes=NBYTES)
    fast.faults = [Fault.FAILED, Fault.FAILED]
    assert through.exists(["a", "b"]) == [OK, FAILED]
    assert read(through, "a", NBYTES) == b"a" * NBYTES


def test_a_failure_of_the_large_tier_is_not_a_miss(through: TieredBackend, large: FaultInjector) -> None:
    large.faults = [Fault.FAILED, Fault.FAILED]
    assert through.exists(["a"]) == [FAILED]
    assert read(through, "a", NBYTES) is FAILED


def test_a_late_read_of_the_fast_tier_is_not_repeated_into_the_same_memory(
    fast: FaultInjector, large: FaultInjector
) -> None:
    class StillReading(Wrapper):
        """A backend in which each call is late and never ends."""

        num_late = 0

        def count_late_calls(self) -> int:
            self.num_late += 1
            return self.num_late

        def wait_for_late_calls(self, seconds: float) -> bool:
            return False

    tiers = TieredBackend(StillReading(fast), large)
    put(tiers, "a", nbytes=NBYTES)
    fast.faults = [Fault.FAILED_HALF_WAY]
    large.calls.clear()
    assert read(tiers, "a", NBYTES) is FAILED
    assert large.calls == []


@pytest.mark.parametrize(
    ("fault_fast", "fault_large", "answer"),
    [
        (Fault.NOTHING, Fault.NOTHING, OK),
        (Fault.FALSE_ABSENT, Fault.NOTHING, OK),
        (Fault.FALSE_ABSENT, Fault.FALSE_ABSENT, ABSENT),
        (Fault.FAILED, Fault.NOTHING, FAILED),
        (Fault.NOTHING, Fault.FAILED, FAILED),
    ],
)
def test_a_value_is_removed_if_neither_tier_still_has_it(
    through: TieredBackend,
    fast: FaultInjector,
    large: FaultInjector,
    fault_fast: Fault,
    fault_large: Fault,
    answer: Status,
) -> None:
    put(through, "a", nbytes=NBYTES)
    fast.faults, large.faults = [fault_fast], [fault_large]
    assert through.remove(["a"]) == [answer]


@given(st.lists(st.tuples(st.sampled_from(["put", "get", "remove"]), st.sampled_from("abcdef")), max_size=40))
def test_two_tiers_answer_like_one_large_store(steps: Sequence[tuple[str, str]]) -> None:
    tiers, one = TieredBackend(MemoryStore(2 * NBYTES), MemoryStore(1 << 20)), MemoryStore(1 << 20)
    for step, key in steps:
        if step == "put":
            assert put(tiers, key, nbytes=NBYTES) == put(one, key, nbytes=NBYTES)
        elif step == "get":
            assert read(tiers, key, NBYTES) == read(one, key, NBYTES)
            assert tiers.exists([key]) == one.exists([key])
        else:
            assert tiers.remove([key]) == one.remove([key])


@pytest.mark.parametrize("policy", ["through", "back"])
def test_a_put_fails_if_the_fast_tier_is_late_and_later_puts_skip_that_tier(
    fast: FaultInjector, large: FaultInjector, policy: Literal["through", "back"]
) -> None:
    hasty = GuardedBackend(lambda: fast, Deadlines(0.2, 0.05, 1e9))
    wait_until(lambda: hasty.is_ready, "the fast tier")
    with contextlib.closing(TieredBackend(hasty, large, policy)) as tiers:
        fast.faults = [Fault.HANGS]
        assert put(tiers, "a", nbytes=NBYTES) == [FAILED]
        assert not tiers.wait_for_late_calls(0)
        assert put(tiers, "b", nbytes=NBYTES) == [OK]
        assert tiers.flush_writes(10)
        assert read(tiers, "b", NBYTES) == read(large, "b", NBYTES)
        fast.go_on()
        assert tiers.wait_for_late_calls(10)


@pytest.mark.parametrize("policy", ["through", "back"])
def test_exists_for_all_answers_from_the_large_tier_only(
    fast: FaultInjector, large: FaultInjector, policy: Literal["through", "back"]
) -> None:
    with contextlib.closing(TieredBackend(fast, large, policy)) as tiers:
        put(tiers, "a", nbytes=NBYTES)
        assert tiers.flush_writes(10)
        large.remove(["a"])
        assert (tiers.exists(["a"]), tiers.exists_for_all(["a"])) == ([OK], [ABSENT])


def test_health_describes_both_tiers(through: TieredBackend) -> None:
    memory = Memory(NBYTES)
    through.put(["a"], [memory.value])
    assert through.health().detail.count("1 keys") == 2


def test_registrations_are_passed_to_both_tiers() -> None:
    fast, large = WatchedStore(), WatchedStore()
    tiers = TieredBackend(fast, large)
    tiers.register(4096, 100)
    tiers.register(8192, 100, headroom=True)
    tiers.unregister(4096, 100)
    calls = [("register", 4096, 100, False), ("register", 8192, 100, True), ("unregister", 4096, 100, False)]
    assert fast.memory == large.memory == calls


def test_a_forced_removal_is_passed_to_both_tiers() -> None:
    fast, large = WatchedStore(), WatchedStore()
    tiers = TieredBackend(fast, large)
    tiers.remove(["a"])
    tiers.remove(["a"], force=True)
    assert fast.forced == large.forced == [False, True]


def test_a_clear_clears_both_tiers_and_fails_if_either_fails() -> None:
    fast, slow = MemoryStore(1 << 20), MemoryStore(1 << 20)
    tiers = TieredBackend(fast, slow)
    put(tiers, "a", nbytes=NBYTES)
    assert tiers.clear("a") is OK
    assert fast.exists(["a"]) == slow.exists(["a"]) == [ABSENT]
    fast.close()
    assert tiers.clear("a") is FAILED
    slow.close()
    assert TieredBackend(MemoryStore(1), slow).clear("a") is FAILED


def test_drop_own_copies_clears_only_the_fast_tier() -> None:
    fast, large = MemoryStore(1 << 20), MemoryStore(1 << 20)
    tiers = TieredBackend(fast, large)
    put(tiers, "a", "b", nbytes=NBYTES)
    assert tiers.drop_own_copies("a")
    assert fast.exists(["a", "b"]) == [ABSENT, OK]
    assert large.exists(["a", "b"]) == [OK, OK]
    fast.close()
    assert not tiers.drop_own_copies("a")


def test_get_for_all_neither_reads_nor_fills_the_fast_tier() -> None:
    fast, large = MemoryStore(1 << 20), MemoryStore(1 << 20)
    tiers = TieredBackend(fast, large)
    put(fast, "a", nbytes=NBYTES)
    put(large, "b", nbytes=NBYTES)
    target = Memory(NBYTES)
    assert tiers.get_for_all(["a"], [target.value]) == [ABSENT]
    assert tiers.get_for_all(["b"], [target.value]) == [OK]
    assert fast.exists(["b"]) == [ABSENT]


def test_closing_closes_both_tiers() -> None:
    fast, large = MemoryStore(1), MemoryStore(1)
    TieredBackend(fast, large).close()
    assert not fast.health().ok
    assert not large.health().ok


def test_health_is_ok_only_if_both_tiers_are_ok() -> None:
    broken = MemoryStore(1)
    broken.close()
    assert TieredBackend(MemoryStore(1), MemoryStore(1)).health().ok
    assert not TieredBackend(broken, MemoryStore(1)).health().ok
    assert not TieredBackend(MemoryStore(1), broken).health().ok


def test_writing_back_succeeds_if_only_the_fast_tier_fails(
    back: TieredBackend, fast: FaultInjector, large: FaultInjector
) -> None:
    fast.faults = [Fault.FAILED]
    assert put(back, "a", nbytes=NBYTES) == [OK]
    assert back.flush_writes(30)
    assert (fast.exists(["a"]), large.exists(["a"])) == ([ABSENT], [OK])


def test_tiers_are_ready_as_soon_as_one_of_them_is() -> None:
    opening = threading.Event()

    def opened_late() -> MemoryStore:
        opening.wait(30)
        return MemoryStore(1 << 20)

    with contextlib.ExitStack() as open_tiers:
        open_tiers.callback(opening.set)
        one, other = (open_tiers.enter_context(contextlib.closing(GuardedBackend(opened_late))) for _ in range(2))
        assert not TieredBackend(one, other).is_ready
        assert TieredBackend(MemoryStore(1), one).is_ready
        assert TieredBackend(one, MemoryStore(1)).is_ready
        opening.set()
        wait_until(lambda: TieredBackend(one, other).is_ready, "a tier that is opened late")
