"""Metrics of the engine with vLLM's names, for programs that choose instances by them, such as endpoint pickers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.telemetry.metrics import EngineMetrics

__all__ = ["VllmNames"]

# vLLM's sources of prompt tokens (vllm/v1/metrics/stats.py), each with labels of ``kvstore_prompt_tokens``.
_SOURCES = {
    "local_compute": ("computed",),
    "local_cache_hit": ("own_cache",),
    "external_kv_transfer": ("pool", "handed_over"),
}


class VllmNames(Collector):
    """Copies values of the engine's metrics to vLLM's metrics at each scrape.

    Names, labels and meanings are those in vllm/v1/metrics/loggers.py of vLLM 0.32. ``model_name`` is a label of each
    metric, as in vLLM; ``cache_config`` has the labels of ``vllm:cache_config_info``.
    """

    def __init__(self, metrics: EngineMetrics, model_name: str, cache_config: Mapping[str, object]) -> None:
        self._metrics = metrics
        self._labels = {"model_name": model_name, "engine": "0"}
        self._cache_config = {name: str(value) for name, value in cache_config.items()} | {"engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """Yield vLLM's metrics with their current values."""
        yield self._copy_gauge("vllm:num_requests_running", self._metrics.running)
        yield self._copy_gauge("vllm:num_requests_waiting", self._metrics.waiting)
        yield self._copy_gauge("vllm:kv_cache_usage_perc", self._metrics.cache_usage)
        yield self._sum_prompt_tokens()
        info = GaugeMetricFamily("vllm:cache_config_info", "Settings of the KV cache", labels=list(self._cache_config))
        info.add_metric(list(self._cache_config.values()), 1)
        yield info

    def _copy_gauge(self, name: str, own: Collector) -> Metric:
        (metric,) = own.collect()
        gauge = GaugeMetricFamily(name, metric.documentation, labels=list(self._labels))
        gauge.add_metric(list(self._labels.values()), metric.samples[0].value)
        return gauge

    def _sum_prompt_tokens(self) -> Metric:
        (metric,) = self._metrics.prompt_origins.collect()
        counts = {each.labels["origin"]: each.value for each in metric.samples if each.name.endswith("_total")}
        counter = CounterMetricFamily(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their KV came from",
            labels=[*self._labels, "source"],
        )
        for source, origins in _SOURCES.items():
            counter.add_metric([*self._labels.values(), source], sum(counts[origin] for origin in origins))
        return counter
