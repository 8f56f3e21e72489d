"""Figures for Prometheus, under FastDeploy's Go router's names where it has them.

A request is counted in plain numbers, by the one thread that serves requests; families and labels are made of them
when Prometheus asks. prometheus_client's own counters take a lock for each increment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from router.access.admission import Admission
from router.fleet.registry import STATES, Registry
from router.telemetry.audit import Audit, RequestRecord

__all__ = ["CONTENT_TYPE", "RouterMetrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"})
_COMPLETIONS = frozenset({"/v1/chat/completions", "/v1/completions"})

# More pairs than this are only kept of instances that are still there.
WORKER_SERIES = 10_000

# Those that the Go router computes, here over the last answers of each endpoint.
_QUANTILES = (0.95, 0.99)
_QUANTILE_WINDOW = 1024

_FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_OUTPUT_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)

_OPENNESS = {"closed": 0.0, "half_open": 0.5, "open": 1.0}

# Policies' figures are means over so many of the last requests.
_DECISION_WINDOW = 500


class RouterMetrics(Collector):
    """Everything the router counts; figures that others keep are read from them when Prometheus asks."""

    def __init__(self, registry: Registry, admission: Admission, audit: Audit) -> None:
        self._registry = registry
        self._admission = admission
        self._audit = audit
        self._answers: dict[tuple[str, str, int], int] = {}
        self._durations: dict[tuple[str, str], _Durations] = {}
        self._inference: dict[tuple[str, str, str, int], int] = {}
        self._room = WORKER_SERIES
        self._first_token = _Histogram(_FIRST_TOKEN_SECONDS)
        self._output_token = _Histogram(_OUTPUT_TOKEN_SECONDS)
        self._retries: dict[str, int] = {}
        self._aborts: dict[str, int] = {}
        self._reschedules: dict[str, int] = {}
        self._tokens = {"prompt": 0, "completion": 0, "cached": 0}
        self._placed_by_prefix = 0
        self._placed_on_a_hit = 0
        self._predicted = 0
        self._actual = 0
        self._missed_by = 0
        self._collector = CollectorRegistry()
        self._collector.register(self)

    def record(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self._answered(record.method, record.path, record.status, record.total_ms / 1e3)
        if record.path in _COMPLETIONS:
            self._served(record.mixed, record.prefill, record.decode, record.status)
            self._count_tokens(record)
            if record.streamed and record.first_byte_ms:
                self._time_tokens(record)

    def _answered(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count one answer; ``status`` is 499 where the client left before it."""
        endpoint = path if path in _ENDPOINTS else "other"
        key = (method, endpoint, status)
        self._answers[key] = self._answers.get(key, 0) + 1
        durations = self._durations.get(key[:2])
        if durations is None:
            durations = self._durations[key[:2]] = _Durations()
        durations.count += 1
        durations.sum += seconds
        durations.last.append(seconds)

    def _served(self, mixed: str, prefill: str, decode: str, status: int) -> None:
        """Count one completion request by the instances it went to last; ``""`` for a role it did not use."""
        workers = (mixed, prefill, decode, status)
        count = self._inference.get(workers, 0)
        if not count and len(self._inference) >= self._room:
            self._forget_gone()
        self._inference[workers] = count + 1

    def retried(self, instance: str) -> None:
        """Count one attempt that failed because of ``instance``."""
        self._retries[instance] = self._retries.get(instance, 0) + 1

    def aborted(self, instance: str) -> None:
        """Count one request aborted at ``instance``."""
        self._aborts[instance] = self._aborts.get(instance, 0) + 1

    def rescheduled(self, instance: str) -> None:
        """Count one request that ``instance`` put down half-way, and that was taken up again elsewhere."""
        self._reschedules[instance] = self._reschedules.get(instance, 0) + 1

    def text(self) -> bytes:
        """All figures in Prometheus's text format."""
        return generate_latest(self._collector)

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        yield from self._of_requests()
        yield from self._of_tokens()
        yield from self._of_attempts()
        yield from self._of_decisions()
        yield from self._of_admission()
        yield from self._of_instances()
        yield CounterMetricFamily(
            "router_access_log_lost_lines", "Lines of the access log that its reader did not take",
            self._audit.lost_lines,
        )  # fmt: skip

    def _forget_gone(self) -> None:
        """Drop what was counted of pairs with an instance that is gone, so that comings and goings fill no memory."""
        known = {"", *(instance.key for instance in self._registry)}
        self._inference = {who: count for who, count in self._inference.items() if known.issuperset(who[:3])}
        self._room = max(WORKER_SERIES, 2 * len(self._inference))

    def _time_tokens(self, record: RequestRecord) -> None:
        self._first_token.observe(record.first_byte_ms / 1e3)
        # Where the engine does not say how many tokens it made, each piece it sent stands for one.
        later = (record.completion_tokens or record.chunks) - 1
        if later > 0:
            self._output_token.observe((record.total_ms - record.first_byte_ms) / 1e3 / later)

    def _count_tokens(self, record: RequestRecord) -> None:
        tokens, cached, predicted = self._tokens, record.cached_tokens, record.predicted_cached_tokens
        if record.prompt_tokens is not None:
            tokens["prompt"] += record.prompt_tokens
        if record.completion_tokens is not None:
            tokens["completion"] += record.completion_tokens
        if cached is not None:
            tokens["cached"] += cached
        if predicted is not None:
            self._placed_by_prefix += 1
            self._placed_on_a_hit += predicted > 0
            if cached is not None:
                self._predicted += predicted
                self._actual += cached
                self._missed_by += abs(predicted - cached)

    def _of_requests(self) -> Iterator[Metric]:
        answers = CounterMetricFamily(
            "http_requests", "Requests answered by the data plane", labels=["method", "endpoint", "status_code"]
        )
        for (method, endpoint, status), count in self._answers.items():
            answers.add_metric([method, endpoint, str(status)], count)
        name = "http_request_duration_seconds"
        durations = SummaryMetricFamily(
            name,
            f"From a request's arrival to the end of its answer; quantiles of the last {_QUANTILE_WINDOW} answers",
            labels=["method", "endpoint"],
        )
        for (method, endpoint), observed in self._durations.items():
            for quantile, seconds in observed.quantiles():
                labels = {"method": method, "endpoint": endpoint, "quantile": str(quantile)}
                durations.add_sample(name, labels, seconds)
            durations.add_metric([method, endpoint], observed.count, observed.sum)
        inference = CounterMetricFamily(
            "inference_requests",
            "Completion requests by the instances that served them",
            labels=["mixed_worker", "prefill_worker", "decode_worker", "status_code"],
        )
        for (mixed, prefill, decode, status), count in self._inference.items():
            inference.add_metric([mixed, prefill, decode, str(status)], count)
        yield from (answers, durations, inference)

    def _of_tokens(self) -> Iterator[Metric]:
        yield self._first_token.family(
            "router_time_to_first_token_seconds", "From a streaming request's arrival to the first byte of its answer"
        )
        yield self._output_token.family(
            "router_time_per_output_token_seconds",
            "Mean time between a streaming request's later tokens, or pieces where the engine does not count tokens",
        )
        tokens = CounterMetricFamily("router_tokens", "Tokens as engines counted them", labels=["kind"])
        for kind, count in self._tokens.items():
            tokens.add_metric([kind], count)
        yield tokens
        for name, text, value in (
            ("router_cache_request", "Completion requests placed by their prefix", self._placed_by_prefix),
            ("router_cache_hit", "Those placed where a part of it was expected in a cache", self._placed_on_a_hit),
            ("router_predicted_cached_tokens", "Cached tokens predicted, where the engine said after", self._predicted),
            ("router_actual_cached_tokens", "What the engine said, of the same requests", self._actual),
            ("router_mispredicted_cached_tokens", "Sum of the differences between both", self._missed_by),
        ):
            yield CounterMetricFamily(name, text, value)

    def _of_attempts(self) -> Iterator[Metric]:
        for name, text, counts in (
            ("router_retries", "Attempts failed before the first byte of an answer, by who failed", self._retries),
            ("router_aborts", "Requests aborted at an instance because nobody will read their answer", self._aborts),
            ("router_reschedules", "Requests put down half-way, by who did, and taken up again", self._reschedules),
        ):
            family = CounterMetricFamily(name, text, labels=["instance"])
            for instance, count in counts.items():
                family.add_metric([instance], count)
            yield family

    def _of_decisions(self) -> Iterator[Metric]:
        """The numbers among the last decisions' reasons, so that nothing is added up on a request's path."""
        sums: dict[tuple[str, str], list[float]] = {}
        for record in islice(reversed(self._audit.records), _DECISION_WINDOW):
            for attempt in record.attempts[-1:]:
                roles = ("prefill", "decode") if len(attempt.decisions) == 2 else (self._registry.roles[0].value,)
                for role, decision in zip(roles, attempt.decisions, strict=False):
                    for name, value in decision.reasons.items():
                        if not isinstance(value, str):
                            sums.setdefault((role, name), []).append(value)
        family = GaugeMetricFamily(
            "router_policy_figure",
            f"What policies decided by: means over the last {_DECISION_WINDOW} requests",
            labels=["role", "figure"],
        )
        for labels, values in sums.items():
            family.add_metric(labels, sum(values) / len(values))
        yield family

    def _of_admission(self) -> Iterator[Metric]:
        gate = self._admission
        yield GaugeMetricFamily("router_running_requests", "Requests being served", gate.running)
        yield GaugeMetricFamily("router_queued_requests", "Requests waiting in line to be served", gate.waiting)
        refused = CounterMetricFamily("router_refused_requests", "Requests answered with 429", labels=["reason"])
        for reason, count in gate.refused.items():
            refused.add_metric([reason], count)
        yield refused

    def _of_instances(self) -> Iterator[Metric]:
        states = GaugeMetricFamily("router_instances", "Instances by role and state", labels=["role", "state"])
        counts: dict[tuple[str, str], int] = {
            (role.value, state): 0 for role in self._registry.roles for state in STATES
        }
        labels = ["role", "instance"]
        requests = GaugeMetricFamily("router_instance_requests", "Requests running", labels=labels)
        tokens = GaugeMetricFamily(
            "router_instance_tokens", "Prompt tokens of the requests running, estimated", labels=labels
        )
        queued = GaugeMetricFamily(
            "router_instance_queued_tokens", "Tokens still to be computed of those without a first token", labels=labels
        )
        running = GaugeMetricFamily(
            "router_instance_reported_running", "Requests running by its account", labels=labels
        )
        waiting = GaugeMetricFamily(
            "router_instance_reported_waiting", "Requests waiting by its account", labels=labels
        )
        breakers = GaugeMetricFamily(
            "router_instance_breaker_open", "0: closed; 0.5: one request is being tried; 1: open", labels=labels
        )
        for instance in self._registry:
            role, state, load = instance.role.value, instance.state, instance.candidate
            counts[role, state] += 1
            for family, value in (
                (requests, load.requests),
                (tokens, load.tokens),
                (queued, load.queued),
                (running, load.running),
                (waiting, load.waiting),
                (breakers, _OPENNESS[instance.breaker.state]),
            ):
                if value is not None:
                    family.add_metric([role, instance.key], value)
        for labels_of_count, count in counts.items():
            states.add_metric(labels_of_count, count)
        yield from (states, requests, tokens, queued, running, waiting, breakers)


class _Durations:
    __slots__ = ("count", "last", "sum")

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.last: deque[float] = deque(maxlen=_QUANTILE_WINDOW)

    def quantiles(self) -> list[tuple[float, float]]:
        ordered = sorted(self.last)
        return [(quantile, ordered[int(quantile * (len(ordered) - 1))]) for quantile in _QUANTILES]


class _Histogram:
    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str) -> Metric:
        names = [*(str(bound) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum)
