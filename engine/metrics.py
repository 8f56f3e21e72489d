"""The metrics of an instance, for Prometheus; FastDeploy's names where it has them, ``kvstore_`` before our own."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.pool_use import Reason
from kvstore_backend.load_or_compute import DECISIONS

__all__ = ["EngineMetrics"]

# Of whole requests, and of a single token; the router has the same (router/telemetry/metrics.py).
_REQUEST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0),
)
_OUTPUT_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)


class EngineMetrics:
    """The metrics of one engine, in a registry of their own so that several engines fit in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._add_states()
        self._add_prompt_counts()
        self._add_pool_counts()
        self._add_request_figures()

    def _add_states(self) -> None:
        """Requests, blocks and the pool as they are now."""
        self.running = self._add_gauge("fastdeploy:num_requests_running", "Requests in the running batch")
        self.waiting = self._add_gauge("fastdeploy:num_requests_waiting", "Requests waiting for blocks or the pool")
        self.cache_usage = self._add_gauge("fastdeploy:gpu_cache_usage_perc", "Share of KV blocks held, 0 to 1")
        self.available_blocks = self._add_gauge("fastdeploy:available_gpu_block_num", "KV blocks nobody holds")
        self.reserved_blocks = self._add_gauge(
            "kvstore_reserved_blocks",
            "KV blocks kept for hand-overs that run, or that were given up and may still write",
        )
        self.pending_saves = self._add_gauge("kvstore_pending_save_blocks", "Blocks on their way to the pool")
        self.pool_open = self._add_gauge("kvstore_pool_open", "1 when the pool has been joined")

    def _add_prompt_counts(self) -> None:
        """Tokens, and where the KV of prompts came from."""
        self.prompt_tokens = self._add_counter("fastdeploy:prompt_tokens", "Prompt tokens of finished requests")
        self.generated_tokens = self._add_counter("fastdeploy:generation_tokens", "Tokens generated")
        self.prompt_origins = self._add_counters(
            "kvstore_prompt_tokens",
            "Prompt tokens by where their KV came from: own_cache, pool, handed_over (by a prefill instance), computed",
            "origin",
            ("own_cache", "pool", "handed_over", "computed"),
        )
        self.own_cached_tokens = self._add_counter(
            "fastdeploy:prefix_gpu_cache_token_num", "Prompt tokens found in this instance's own cache"
        )
        self.pool_cached_tokens = self._add_counter(
            "kvstore_pool_cached_tokens", "Prompt tokens read from the pool instead of computed"
        )
        self.handed_over = self._add_counters(
            "kvstore_handed_over",
            "Prompts that another instance was to prefill, by where their KV came from: direct, pool, computed",
            "way",
            ("direct", "pool", "computed"),
        )
        self.handed_over_bytes = self._add_counter(
            "kvstore_handed_over_bytes", "Bytes of KV blocks written to, or verified from, another instance directly"
        )

    def _add_pool_counts(self) -> None:
        """Blocks on their way from and to the pool, and why some were not."""
        self.pool_unused = self._add_counters(
            "kvstore_pool_unused_requests",
            "Requests of whose prompt nothing came from the pool, by the reason, which their line in the log tells",
            "reason",
            [reason.value for reason in Reason if reason is not Reason.HIT],
        )
        self.load_or_compute = self._add_counters(
            "kvstore_load_or_compute",
            "Requests of whose prompt the pool had blocks, by what was expected to be quicker: load, compute",
            "decision",
            DECISIONS,
        )
        self.saved_blocks = self._add_counter("kvstore_saved_blocks", "Blocks known to be in the pool after a save")
        self.refilled_blocks = self._add_counter(
            "kvstore_refilled_blocks", "Blocks of this instance's cache that the pool has again after it had lost some"
        )
        self.unsaved_blocks = self._add_counter("kvstore_unsaved_blocks", "Blocks whose save failed or was dropped")

    def _add_request_figures(self) -> None:
        """Ends of requests, and their times."""
        self.finished = Counter(
            "kvstore_requests_finished",
            "Requests ended, by finish reason",
            ["reason"],
            registry=self.registry,
        )
        self.preemptions = self._add_counter("kvstore_preemptions", "Sequences whose blocks were taken to go on")
        self.first_token = self._add_histogram("fastdeploy:time_to_first_token_seconds", "Arrival to first token")
        self.output_token = self._add_histogram(
            "fastdeploy:time_per_output_token_seconds",
            "Mean time between a request's later tokens",
            _OUTPUT_TOKEN_SECONDS,
        )
        self.latency = self._add_histogram("fastdeploy:e2e_request_latency_seconds", "Arrival to last token")
        self.queue_time = self._add_histogram(
            "fastdeploy:request_queue_time_seconds", "Arrival to the first step, without the time of reading the pool"
        )
        self.prefill_time = self._add_histogram(
            "fastdeploy:request_prefill_time_seconds", "First step to first token, where this instance chose it"
        )

    def _add_gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def _add_counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def _add_counters(self, name: str, text: str, label: str, values: Sequence[str]) -> Counter:
        counter = Counter(name, text, [label], registry=self.registry)
        for value in values:
            counter.labels(value)  # so that one that has not been counted yet reads 0
        return counter

    def _add_histogram(self, name: str, text: str, bounds: Sequence[float] = _REQUEST_SECONDS) -> Histogram:
        return Histogram(name, text, buckets=bounds, registry=self.registry)
