from __future__ import annotations

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry

from kvstore_backend.backend import Status
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend
from kvstore_backend.wrappers.metered import MeteredBackend, StateCollector
from kvstore_backend.wrappers.write_behind import WriteBehindBackend
from tests.faults.injector import Fault, FaultInjector
from tests.support.memory import Memory
from tests.support.watched_store import WatchedStore


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_calls_blocks_and_bytes_are_counted_by_operation_and_answer(registry: CollectorRegistry) -> None:
    injector = FaultInjector(MemoryStore(1 << 20))
    metered = MeteredBackend(injector, registry)
    one, other = Memory(b"12345"), Memory(b"123")
    metered.put(["a", "b"], [one.value, other.value])
    metered.exists(["a", "b", "c"])
    metered.get(["a", "c"], [one.value, other.value])
    injector.faults = [Fault.FAILED]
    metered.remove(["a"])
    assert value(registry, "kvstore_calls_total", operation="put") == 1
    assert value(registry, "kvstore_bytes_total", operation="put") == 8
    assert value(registry, "kvstore_bytes_total", operation="get") == 5
    assert value(registry, "kvstore_blocks_total", operation="exists", status="ok") == 2
    assert value(registry, "kvstore_blocks_total", operation="exists", status="absent") == 1
    assert value(registry, "kvstore_blocks_total", operation="remove", status="failed") == 1
    assert value(registry, "kvstore_call_seconds_count", operation="get", outcome="ok") == 1
    seconds = value(registry, "kvstore_call_seconds_sum", operation="get", outcome="ok")
    assert seconds is not None
    assert 0 < seconds < 60


def test_the_time_of_a_call_is_labelled_with_its_outcome(registry: CollectorRegistry) -> None:
    injector = FaultInjector(MemoryStore(1 << 20))
    metered = MeteredBackend(injector, registry)
    metered.put(["a"], [Memory(b"1").value])
    metered.exists(["a", "b"])
    metered.exists(["b", "c"])
    injector.faults = [Fault.FAILED]
    metered.exists(["a", "b"])
    counts = {
        outcome: value(registry, "kvstore_call_seconds_count", operation="exists", outcome=outcome)
        for outcome in ("ok", "absent", "failed")
    }
    assert counts == {"ok": 1, "absent": 1, "failed": 1}


def test_every_series_exists_from_the_beginning(registry: CollectorRegistry) -> None:
    MeteredBackend(MemoryStore(1), registry)
    assert value(registry, "kvstore_blocks_total", operation="get", status="failed") == 0


def test_the_state_of_the_wrappers_is_collected(registry: CollectorRegistry) -> None:
    injector = FaultInjector(MemoryStore(1 << 20))
    guarded = GuardedBackend(lambda: injector, Deadlines(lookup_seconds=0.05))
    behind = WriteBehindBackend(guarded)
    rejected: Counter[str] = Counter()
    registry.register(StateCollector(guarded, rejected, behind))
    assert guarded.wait_ready(30)
    assert value(registry, "kvstore_breaker_open") == 0
    injector.faults = [Fault.HANGS]
    guarded.exists(["a"])
    rejected["checksum"] += 2
    behind.dropped["arena full"] += 3
    assert value(registry, "kvstore_breaker_open") == 1
    assert value(registry, "kvstore_breaker_opened_total") == 1
    assert value(registry, "kvstore_late_calls_total") == 1
    assert value(registry, "kvstore_rejected_blocks_total", reason="checksum") == 2
    assert value(registry, "kvstore_dropped_writes_total", reason="arena full") == 3
    assert value(registry, "kvstore_write_queue_blocks") == value(registry, "kvstore_write_queue_bytes") == 0
    injector.go_on()
    behind.close()


def test_exists_for_all_is_counted_separately(registry: CollectorRegistry) -> None:
    metered, memory = MeteredBackend(MemoryStore(1 << 20), registry), Memory(b"x")
    metered.put(["a"], [memory.value])
    assert metered.exists_for_all(["a", "b"]) == [Status.OK, Status.ABSENT]
    assert value(registry, "kvstore_blocks_total", operation="exists_for_all", status="ok") == 1
    assert value(registry, "kvstore_blocks_total", operation="exists", status="ok") == 0


def test_a_forced_removal_is_passed_to_the_store(registry: CollectorRegistry) -> None:
    store = WatchedStore()
    metered = MeteredBackend(store, registry)
    metered.remove(["a"])
    metered.remove(["a"], force=True)
    assert store.forced == [False, True]
