"""Shows the connector's counts in vLLM's log and metrics. vLLM gets the two classes from ``KVStoreConnector``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvstore_backend.integrations.vllm.counts import OUTCOMES, add_counts
from kvstore_backend.load_or_compute import DECISIONS

__all__ = ["KVStoreMetrics", "KVStoreStats"]


@dataclass
class KVStoreStats(KVConnectorStats):  # type: ignore[misc]
    """Numbers of blocks, bytes and seconds since the last step: ``{namespace: {"load ok": 3, "load bytes": ...}}``."""

    data: dict[str, dict[str, float]] = field(default_factory=dict)

    def reset(self) -> None:
        """Drop all counts of blocks, bytes and seconds."""
        self.data = {}

    def is_empty(self) -> bool:
        """Return whether there are no counts."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVStoreStats:
        """Return the sums of the counts in this object and in ``other``."""
        return KVStoreStats(add_counts(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for a line in vLLM's log, each with the first 8 digits of the namespace's digest."""
        return {
            f"{namespace[:8]} {name}": round(number, 3)
            for namespace, numbers in self.data.items()
            for name, number in sorted(numbers.items())
        }


class KVStoreMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus metrics ``vllm:kvstore_*``, which vLLM exports with its own metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def counter(name: str, documentation: str, *labels: str) -> Any:
            return metric_types[Counter](
                name=f"vllm:kvstore_{name}", documentation=documentation, labelnames=[*labelnames, "namespace", *labels]
            )

        self._blocks = counter(
            "blocks",
            "Blocks looked up, loaded, gathered from another sharding, and saved, by outcome",
            "operation",
            "outcome",
        )
        self._missing = counter(
            "group_blocks_missing",
            "Blocks missing in one group of layers, so that a hit was shorter than the blocks of full attention",
            "group",
        )
        self._bytes = counter("bytes", "Bytes loaded", "operation")
        self._seconds = counter("seconds", "Seconds of calls to the pool", "operation")
        self._decisions = counter(
            "load_or_compute", "Requests with blocks in the pool, by the faster way to get them", "decision"
        )

    def observe(self, transfer_stats_data: dict[str, dict[str, float]], engine_idx: int = 0) -> None:
        """Add the counts in the ``data`` of a ``KVStoreStats`` to the metrics."""
        for namespace, numbers in transfer_stats_data.items():
            labels = (*self.per_engine_labelvalues[engine_idx], namespace)
            for name, number in numbers.items():
                operation, figure = name.split()
                if figure in DECISIONS:
                    self._decisions.labels(*labels, figure).inc(number)
                elif figure == "missing":
                    self._missing.labels(*labels, operation).inc(number)
                elif figure in OUTCOMES:
                    self._blocks.labels(*labels, operation, figure).inc(number)
                else:
                    (self._bytes if figure == "bytes" else self._seconds).labels(*labels, operation).inc(number)
