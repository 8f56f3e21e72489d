"""The Prometheus metrics of an instance. They have FastDeploy's names where it has them; others begin ``kvstore_``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.scheduling.pool_use import Reason
from kvstore_backend.load_or_compute import DECISIONS

__all__ = ["EngineMetrics"]

# Buckets for the times of requests. The router has the same ones (router/telemetry/metrics.py).
_REQUEST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0),
)
# FastDeploy's buckets, because dashboards of its users have these metrics.
_FASTDEPLOY_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(digit * 10**power for power in range(5) for digit in (1, 2, 5) if digit * 10**power <= 33792)
_TOKENS_PER_SECOND = tuple(range(0, 201, 5))
_OUTPUT_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)


class EngineMetrics:
    """The metrics of one engine. Each engine has its own registry, so that a process can have several engines."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._hit_requests = self._tokens = self._own_hits = self._pool_hits = 0
        self._add_states()
        self._add_prompt_counts()
        self._add_pool_counts()
        self._add_request_figures()
        self._add_blocks_and_places()
        self._add_cache_figures()
        self._add_request_sizes()

    def _add_states(self) -> None:
        """Add the gauges of the current number of requests and blocks, and of the state of the pool."""
        self.running = self._add_gauge("fastdeploy:num_requests_running", "Requests in the running batch")
        self.waiting = self._add_gauge("fastdeploy:num_requests_waiting", "Requests waiting for blocks or the pool")
        self.cache_usage = self._add_gauge("fastdeploy:gpu_cache_usage_perc", "Share of KV blocks in use, 0 to 1")
        self.available_blocks = self._add_gauge("fastdeploy:available_gpu_block_num", "KV blocks without references")
        self.reserved_blocks = self._add_gauge(
            "kvstore_reserved_blocks",
            "KV blocks reserved for direct transfers that run, or that were cancelled and may still write",
        )
        self.pending_saves = self._add_gauge("kvstore_pending_save_blocks", "Blocks that are being saved to the pool")
        self.pool_open = self._add_gauge("kvstore_pool_open", "1 when the pool has been joined")

    def _add_prompt_counts(self) -> None:
        """Add the counters of prompt and generated tokens, and of where the KV of prompt tokens came from."""
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
        """Add the counters of loads from the pool and saves to it, with the reasons for requests without a load."""
        self.pool_unused = self._add_counters(
            "kvstore_pool_unused_requests",
            "Requests without prompt tokens from the pool, by reason (as in their log line)",
            "reason",
            [reason.value for reason in Reason if reason is not Reason.HIT],
        )
        self.load_or_compute = self._add_counters(
            "kvstore_load_or_compute",
            "Requests with prompt blocks in the pool, by what was expected to be faster: load, compute",
            "decision",
            DECISIONS,
        )
        self.saved_blocks = self._add_counter("kvstore_saved_blocks", "Blocks known to be in the pool after a save")
        self.refilled_blocks = self._add_counter(
            "kvstore_refilled_blocks", "Blocks of this instance's cache stored again after the pool had lost them"
        )
        self.unsaved_blocks = self._add_counter("kvstore_unsaved_blocks", "Blocks whose save failed or was dropped")

    def _add_request_figures(self) -> None:
        """Add the counters of ended requests, and histograms of their times."""
        self.finished = Counter(
            "kvstore_requests_finished",
            "Requests ended, by finish reason",
            ["reason"],
            registry=self.registry,
        )
        self.preemptions = self._add_counter("kvstore_preemptions", "Sequences that were preempted")
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

    def _add_blocks_and_places(self) -> None:
        """Add FastDeploy's gauges of blocks, and of the number of requests that run and that may run at once."""
        self.batch_size = self._add_gauge("fastdeploy:batch_size", "Requests in the running batch")
        self.max_batch_size = self._add_gauge("fastdeploy:max_batch_size", "Requests that may run at once")
        self.available_batch_size = self._add_gauge(
            "fastdeploy:available_batch_size", "Requests that could be added to the running batch"
        )
        self.max_blocks = self._add_gauge("fastdeploy:max_gpu_block_num", "All KV blocks")
        self.free_blocks = self._add_gauge(
            "fastdeploy:free_gpu_block_num", "KV blocks without references and without contents"
        )
        self.available_share = self._add_gauge(
            "fastdeploy:available_gpu_resource", "Share of KV blocks without references, 0 to 1"
        )
        self.preempted_now = self._add_gauge(
            "fastdeploy:num_requests_preempted", "Preempted requests that wait for blocks"
        )
        self.failed_sends = self._add_counter(
            "fastdeploy:send_cache_failed_num", "Prompts whose KV could not be written to the decode instance directly"
        )

    def _add_cache_figures(self) -> None:
        """Add FastDeploy's metrics of cached tokens."""
        self.cached_tokens = self._add_counter(
            "fastdeploy:prefix_cache_token_num", "Prompt tokens found in this instance's own cache, or in the pool"
        )
        self._add_counter("fastdeploy:prefix_cpu_cache_token_num", "0: this engine has no second cache in CPU memory")
        self.storage_cached_tokens = self._add_counter(
            "fastdeploy:prefix_storage_cache_token_num", "Prompt tokens read from the pool instead of computed"
        )
        self.hit_request_share = self._add_gauge(
            "fastdeploy:hit_req_rate", "Share of requests with a part of the prompt cached, since the start, 0 to 1"
        )
        self.hit_token_share = self._add_gauge(
            "fastdeploy:hit_token_rate", "Share of prompt tokens that were cached, since the start, 0 to 1"
        )
        self.own_hit_token_share = self._add_gauge(
            "fastdeploy:gpu_hit_token_rate", "Share of prompt tokens in this instance's own cache, since the start"
        )
        self._add_gauge("fastdeploy:cpu_hit_token_rate", "0: this engine has no second cache in CPU memory")

    def _add_request_sizes(self) -> None:
        """Add FastDeploy's metrics of the number, the sizes and the times of requests."""
        self.requests = self._add_counter("fastdeploy:requests_number", "Requests that the engine got")
        self.succeeded = self._add_counter("fastdeploy:request_success", "Requests that ended with stop or length")
        self.preempted = self._add_counter("fastdeploy:request_preempted", "Preemptions of requests")
        self.inference_time = self._add_histogram(
            "fastdeploy:request_inference_time_seconds", "First step to last token", _FASTDEPLOY_SECONDS
        )
        self.decode_time = self._add_histogram(
            "fastdeploy:request_decode_time_seconds", "First token to last token", _FASTDEPLOY_SECONDS
        )
        self.prompt_sizes = self._add_histogram("fastdeploy:request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self.answer_sizes = self._add_histogram("fastdeploy:request_generation_tokens", "Tokens of an answer", _TOKENS)
        self.limits = self._add_histogram("fastdeploy:request_params_max_tokens", "max_tokens of a request", _TOKENS)
        self.token_rates = self._add_histogram(
            "fastdeploy:request_token_ratio",
            "Tokens per second of an answer, from its first step on",
            _TOKENS_PER_SECOND,
        )

    def describe_cache(self, settings: Mapping[str, object]) -> None:
        """Add a metric with the settings of the KV cache as labels. Call this once."""
        info = Gauge("fastdeploy:cache_config_info", "Settings of the KV cache", list(settings), registry=self.registry)
        info.labels(*map(str, settings.values())).set(1)

    def count_hits(self, num_tokens: int, own: int, pool: int) -> None:
        """Count a prompt in the metrics of cached tokens.

        Args:
            num_tokens: number of tokens of the prompt.
            own: number of these tokens that were in the own cache.
            pool: number of these tokens that came from the pool.
        """
        self.cached_tokens.inc(own + pool)
        self.storage_cached_tokens.inc(pool)
        self._requests += 1
        self._hit_requests += own + pool > 0
        self._tokens += num_tokens
        self._own_hits += own
        self._pool_hits += pool
        self.hit_request_share.set(self._hit_requests / self._requests)
        self.hit_token_share.set((self._own_hits + self._pool_hits) / self._tokens)
        self.own_hit_token_share.set(self._own_hits / self._tokens)

    def _add_gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def _add_counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def _add_counters(self, name: str, text: str, label: str, values: Sequence[str]) -> Counter:
        counter = Counter(name, text, [label], registry=self.registry)
        for value in values:
            counter.labels(value)  # so that the metric has a 0 for each value from the start
        return counter

    def _add_histogram(self, name: str, text: str, bounds: Sequence[float] = _REQUEST_SECONDS) -> Histogram:
        return Histogram(name, text, buckets=bounds, registry=self.registry)
