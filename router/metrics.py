"""Figures for Prometheus, under FastDeploy's Go router's names where it has them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Summary, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.instances import Registry

__all__ = ["CONTENT_TYPE", "RouterMetrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"})


class RouterMetrics:
    """The router's counters, and gauges read from the registry when they are asked for."""

    def __init__(self, registry: Registry) -> None:
        self._collector = CollectorRegistry()
        self._requests = Counter(
            "http_requests_total",
            "Requests answered by the data plane",
            ["method", "endpoint", "status_code"],
            registry=self._collector,
        )
        self._duration = Summary(
            "http_request_duration_seconds",
            "Seconds from a request's arrival to the end of its answer",
            ["method", "endpoint"],
            registry=self._collector,
        )
        self._inference = Counter(
            "inference_requests_total",
            "Completion requests by the instances that served them",
            ["mixed_worker", "prefill_worker", "decode_worker", "status_code"],
            registry=self._collector,
        )
        self._retries = Counter(
            "router_retries_total",
            "Attempts that failed before the first byte of the answer, by the instance that failed",
            ["instance"],
            registry=self._collector,
        )
        self._collector.register(_InstanceGauges(registry))
        # Looking a labelled child up costs more than counting on it.
        self._requests_of = lru_cache(1024)(self._requests.labels)
        self._duration_of = lru_cache(1024)(self._duration.labels)
        self._inference_of = lru_cache(1024)(self._inference.labels)

    def answered(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count one answer; ``status`` is 499 where the client left before it."""
        endpoint = path if path in _ENDPOINTS else "other"
        self._requests_of(method, endpoint, status).inc()
        self._duration_of(method, endpoint).observe(seconds)

    def served(self, mixed: str, prefill: str, decode: str, status: int) -> None:
        """Count one completion request by the instances it went to last; ``""`` for a role it did not use."""
        self._inference_of(mixed, prefill, decode, status).inc()

    def retried(self, instance: str) -> None:
        """Count one attempt that failed because of ``instance``."""
        self._retries.labels(instance).inc()

    def text(self) -> bytes:
        """All figures in Prometheus's text format."""
        return generate_latest(self._collector)


class _InstanceGauges(Collector):
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        states = GaugeMetricFamily("router_instances", "Instances by role and state", labels=["role", "state"])
        counts: dict[tuple[str, str], int] = {
            (role.value, state): 0 for role in self._registry.roles for state in ("healthy", "paused", "unhealthy")
        }
        requests = GaugeMetricFamily("router_instance_requests", "Requests running", labels=["role", "instance"])
        tokens = GaugeMetricFamily(
            "router_instance_tokens", "Prompt tokens of the requests running, estimated", labels=["role", "instance"]
        )
        for instance in self._registry:
            counts[instance.role.value, instance.state] += 1
            labels = [instance.role.value, instance.key]
            requests.add_metric(labels, instance.candidate.requests)
            tokens.add_metric(labels, instance.candidate.tokens)
        for labels_of_count, count in counts.items():
            states.add_metric(labels_of_count, count)
        yield from (states, requests, tokens)
