"""The metrics of an instance, for Prometheus: FastDeploy's names if it has them, ``kvstore_`` before our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.scheduling.pool_use import Reason
from kvstore_backend.load_or_compute import DECISIONS

__all__ = ["EngineMetrics"]

# Buckets for whole requests, and for a single token; the router has the same (router/telemetry/metrics.py).
_REQUEST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0),
)
# FastDeploy's buckets, for the metrics in dashboards of its users.
_FASTDEPLOY_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(digit * 10**power for power in range(5) for digit in (1, 2, 5) if digit * 10**power <= 33792)
_TOKENS_PER_SECOND = tuple(range(0, 201, 5))
_OUTPUT_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)


class EngineMetrics:
    """The metrics of one engine, in a registry of their own so that several engines fit in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._add_states()
        self._add_prompt_counts()
        self._add_pool_counts()
        self._add_request_figures()
        self._add_blocks_and_places()
        self._add_cache_figures()
        self._add_request_sizes()

    def _add_states(self) -> None:
        """Add requests, blocks and the pool in their current state."""
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
        """Add tokens, and where the KV of prompts came from."""
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
        """Add blocks transferred from and to the pool, and why some were not."""
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
        """Add ends of requests, and their times."""
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

    def _add_blocks_and_places(self) -> None:
        """Add blocks, and slots in the batch, under FastDeploy's names."""
        self.batch_size = self._add_gauge("fastdeploy:batch_size", "Requests in the running batch")
        self.max_batch_size = self._add_gauge("fastdeploy:max_batch_size", "Requests that may run at once")
        self.available_batch_size = self._add_gauge(
            "fastdeploy:available_batch_size", "Requests that could be added to the running batch"
        )
        self.max_blocks = self._add_gauge("fastdeploy:max_gpu_block_num", "All KV blocks")
        self.free_blocks = self._add_gauge(
            "fastdeploy:free_gpu_block_num", "KV blocks that nobody holds and that have no contents"
        )
        self.available_share = self._add_gauge(
            "fastdeploy:available_gpu_resource", "Share of KV blocks that nobody holds, 0 to 1"
        )
        self.preempted_now = self._add_gauge(
            "fastdeploy:num_requests_preempted", "Requests that wait for the blocks that were taken from them"
        )
        self.failed_sends = self._add_counter(
            "fastdeploy:send_cache_failed_num", "Prompts whose KV could not be written to the decode instance directly"
        )

    def _add_cache_figures(self) -> None:
        """Add tokens found in caches, under FastDeploy's names."""
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
        self._requests = self._hit_requests = self._tokens = self._own_hits = self._pool_hits = 0

    def _add_request_sizes(self) -> None:
        """Add numbers, sizes and times of requests, under FastDeploy's names."""
        self.requests = self._add_counter("fastdeploy:requests_number", "Requests that the engine got")
        self.succeeded = self._add_counter("fastdeploy:request_success", "Requests that ended with stop or length")
        self.preempted = self._add_counter(
            "fastdeploy:request_preempted", "Times that a request's blocks were taken for others"
        )
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
        """Publish the settings of the KV cache, as labels; call it once."""
        info = Gauge("fastdeploy:cache_config_info", "Settings of the KV cache", list(settings), registry=self.registry)
        info.labels(*map(str, settings.values())).set(1)

    def count_hits(self, num_tokens: int, own: int, pool: int) -> None:
        """Count a prompt of ``num_tokens``: ``own`` were in the own cache, ``pool`` came from the pool."""
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
            counter.labels(value)  # so that a reason without a count reads 0
        return counter

    def _add_histogram(self, name: str, text: str, bounds: Sequence[float] = _REQUEST_SECONDS) -> Histogram:
        return Histogram(name, text, buckets=bounds, registry=self.registry)
