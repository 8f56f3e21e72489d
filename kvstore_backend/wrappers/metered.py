"""Counts, for Prometheus, the calls to a pool, their blocks by answer, and bytes and seconds of each operation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore_backend.backend import Status, StorageBackend, Value
from kvstore_backend.wrappers.checked import REASONS
from kvstore_backend.wrappers.guarded import GuardedBackend
from kvstore_backend.wrappers.wrapper import Wrapper
from kvstore_backend.wrappers.write_behind import WriteBehindBackend

__all__ = ["MeteredBackend", "StateCollector"]

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
# The outcome of a call is the first of these statuses that is among its answers; otherwise ``ABSENT``.
_DECIDING = (Status.FAILED, Status.OK)
_TRANSFERS = ("put", "keep", "get")
_OPERATIONS = (*_TRANSFERS, "exists", "exists_for_all", "remove")


class MeteredBackend(Wrapper):
    """Wrapper that counts the calls to ``store`` in Prometheus metrics, and their seconds, blocks and bytes.

    Args:
        store: any backend.
        registry: registry for the metrics. One registry can have the metrics of one pool only.
    """

    def __init__(self, store: StorageBackend, registry: CollectorRegistry) -> None:
        super().__init__(store)
        calls = Counter("kvstore_calls", "Batch calls to the pool", ["operation"], registry=registry)
        blocks = Counter("kvstore_blocks", "Blocks, by answer", ["operation", "status"], registry=registry)
        nbytes = Counter("kvstore_bytes", "Payload bytes stored or read", ["operation"], registry=registry)
        self._seconds = Histogram(
            "kvstore_call_seconds",
            "Seconds of a batch call, by outcome: failed (a block failed), ok (a block was found or stored), absent",
            ["operation", "outcome"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._calls = {operation: calls.labels(operation) for operation in _OPERATIONS}
        self._bytes = {operation: nbytes.labels(operation) for operation in _TRANSFERS}
        self._blocks = {
            operation: [(status, blocks.labels(operation, status.value)) for status in Status]
            for operation in _OPERATIONS
        }

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        return self._count_transfer("put", values, lambda: self._store.put(keys, values))

    def keep(self, keys: Sequence[str], values: Sequence[Value], seconds: float) -> list[Status]:
        return self._count_transfer("keep", values, lambda: self._store.keep(keys, values, seconds))

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        return self._count_transfer("get", targets, lambda: self._store.get(keys, targets))

    def exists(self, keys: Sequence[str]) -> list[Status]:
        return self._count_call("exists", lambda: self._store.exists(keys))

    def get_for_all(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        return self._store.get_for_all(keys, targets)

    def exists_for_all(self, keys: Sequence[str]) -> list[Status]:
        # Counted separately from ``exists``, because the success rate of the readers' look-ups is the hit rate.
        return self._count_call("exists_for_all", lambda: self._store.exists_for_all(keys))

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        return self._count_call("remove", lambda: self._store.remove(keys, force=force))

    def _count_transfer(
        self, operation: str, values: Sequence[Value], call: Callable[[], list[Status]]
    ) -> list[Status]:
        statuses = self._count_call(operation, call)
        moved = [
            nbytes for value, status in zip(values, statuses, strict=True) if status is Status.OK for _, nbytes in value
        ]
        self._bytes[operation].inc(sum(moved))
        return statuses

    def _count_call(self, operation: str, call: Callable[[], list[Status]]) -> list[Status]:
        start = time.perf_counter()
        statuses = call()
        seconds = time.perf_counter() - start
        outcome = next((status for status in _DECIDING if status in statuses), Status.ABSENT)
        self._seconds.labels(operation, outcome.value).observe(seconds)
        self._calls[operation].inc()
        left = len(statuses)
        for status, counter in self._blocks[operation]:
            if left == 0:
                break
            if count := statuses.count(status):
                counter.inc(count)
                left -= count
        return statuses


class StateCollector(Collector):
    """Collector that reads the state of a pool's wrappers when Prometheus collects the metrics.

    Args:
        guarded: the wrapper with the breaker.
        rejected: number of blocks that failed the check, by reason (``CheckedBackend.rejected``).
        write_behind: the wrapper that writes in the background, or None if the pool has none.
    """

    def __init__(
        self, guarded: GuardedBackend, rejected: Mapping[str, int], write_behind: WriteBehindBackend | None = None
    ) -> None:
        self._guarded = guarded
        self._rejected = rejected
        self._write_behind = write_behind

    def collect(self) -> Iterator[Metric]:
        guarded = self._guarded
        yield GaugeMetricFamily("kvstore_breaker_open", "1 while the pool is not used", float(not guarded.is_ready))
        yield CounterMetricFamily("kvstore_breaker_opened", "Times the use of the pool stopped", guarded.times_opened)
        yield CounterMetricFamily("kvstore_late_calls", "Calls that missed their deadline", guarded.late_calls)
        # Every reason has a series from the beginning: Prometheus sees no increase in a series that begins with 1.
        rejected = dict.fromkeys(REASONS, 0) | dict(self._rejected)
        yield _count_by_reason("kvstore_rejected_blocks", "Blocks that failed the check after a read", rejected)
        if (queue := self._write_behind) is not None:
            yield GaugeMetricFamily("kvstore_write_queue_blocks", "Blocks waiting to be written", queue.queued_blocks)
            yield GaugeMetricFamily("kvstore_write_queue_bytes", "Bytes waiting to be written", queue.queued_bytes)
            yield _count_by_reason("kvstore_dropped_writes", "Blocks that were not written", queue.dropped)


def _count_by_reason(name: str, documentation: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, documentation, labels=["reason"])
    for reason, count in dict(counts).items():
        family.add_metric([reason], count)
    return family
