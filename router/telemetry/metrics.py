"""RouterMetrics: metrics for Prometheus. Metrics that FastDeploy's Go router has, too, have its names.

``Audit`` passes ended requests on in batches, and they are counted in plain integers. Metric families are created from
these integers when Prometheus scrapes. The counters of prometheus_client are not used, because each increment of them
needs a lock.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    Sample,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from router.fleet import STATES
from router.telemetry.merge import dump_families, merge_families

if TYPE_CHECKING:
    from router.access import Limits
    from router.fleet import Discovery, Instance, Registry
    from router.telemetry.audit import Audit
    from router.telemetry.need import InstancesNeeded
    from router.telemetry.records import RequestRecord

__all__ = ["CONTENT_TYPE", "RouterMetrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings", "/v1/responses"})
_COMPLETIONS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})

# Series of removed instances are deleted at each scrape. If nobody scrapes, they are deleted when there are more series
# than this.
MAX_WORKER_SERIES = 10_000

# The quantiles of the Go router. They are computed over the last _QUANTILE_WINDOW responses of each endpoint.
_QUANTILES = (0.95, 0.99)
_QUANTILE_WINDOW = 1024

# Buckets for whole requests, and for single tokens. Our engine has the same buckets (engine/telemetry/metrics.py).
_REQUEST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0),
)
_OUTPUT_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)

# Error codes whose series exist with 0 from the start. If a series began with 1, Prometheus would see no increase.
_USUAL_FAILURES = ("instance_error", "no_instance", "request_timeout", "stream_stalled")

_INFERENCE, _WORKERS = "inference_requests", ("mixed_worker", "prefill_worker", "decode_worker")
# Labels with an instance as value.
_NAMING = frozenset({"instance", *_WORKERS})

_OPENNESS = {"closed": 0.0, "half_open": 0.5, "open": 1.0}
_CACHE_EXACT = "router_instance_cache_exact"
# The metrics of each instance: name, description, and a function that reads the value; None: the instance has no value.
_OF_INSTANCE: Sequence[tuple[str, str, Callable[[Instance], float | None]]] = (
    ("router_instance_requests", "Requests at the instance that have not ended", lambda each: each.load.requests),
    (
        "router_instance_tokens",
        "Estimated prompt tokens of requests whose prefill is not complete",
        lambda each: each.load.tokens,
    ),
    (
        "router_instance_queued_tokens",
        "Tokens that the instance must still compute for requests without a first token",
        lambda each: each.load.queued,
    ),
    (
        "router_instance_reported_running",
        "Running requests reported by the instance",
        lambda each: each.load.running,
    ),
    (
        "router_instance_reported_waiting",
        "Waiting requests reported by the instance",
        lambda each: each.load.waiting,
    ),
    (
        "router_instance_breaker_open",
        "0: closed; 0.5: one request is being tried; 1: open",
        lambda each: _OPENNESS[each.breaker.state],
    ),
    (
        _CACHE_EXACT,
        "1: the instance's cache is known exactly; 0: KV events are missing",
        lambda each: None if each.cache_known is None else float(each.cache_known == "exact"),
    ),
)

# Number of the last requests over which the metrics of policies are means.
_DECISION_WINDOW = 500


# The records of a batch are counted with C functions, because a Python call for each record would be too slow.
_outcome_of = attrgetter("method", "path", "status", "error")
_workers_of = attrgetter("mixed", "prefill", "decode", "status")
_TOKENS_OF = {
    "prompt": attrgetter("prompt_tokens"),
    "completion": attrgetter("completion_tokens"),
    "cached": attrgetter("cached_tokens"),
    "decode_cached": attrgetter("decode_cached_tokens"),
}


class RouterMetrics:
    """The metrics of the router: its counters, and values that are read from other objects when Prometheus scrapes."""

    def __init__(
        self, registry: Registry, admission: Limits, audit: Audit, num_replaced: int = 0, dialect: str = "python"
    ) -> None:
        """
        Args:
            registry: the instances.
            admission: the running and queued requests.
            audit: the source of the records.
            num_replaced: number of the router's processes that had died and been replaced when this process started.
            dialect: with ``go``, ``inference_requests_total`` has the instances' URLs and counts only responses of
                instances, as in FastDeploy's Go router.
        """
        self._registry = registry
        self._admission = admission
        self._audit = audit
        self._num_replaced = num_replaced
        self._dialect = dialect
        self._is_shared_state_up: Callable[[], bool] | None = None
        self._discovery: Discovery | None = None
        self._rendering = asyncio.Lock()
        self._need: InstancesNeeded | None = None
        self._responses: dict[tuple[str, str, int], int] = {}
        self._durations: dict[tuple[str, str], _Durations] = {}
        self._inference: dict[tuple[str, str, str, int], int] = {}
        self._max_series = MAX_WORKER_SERIES
        roles_failed = (f"{role.value}_failed" for role in registry.roles)
        self._failed: dict[str, int] = dict.fromkeys((*roles_failed, *_USUAL_FAILURES), 0)
        self._first_token = _Histogram(_REQUEST_SECONDS)
        self._output_token = _Histogram(_OUTPUT_TOKEN_SECONDS)
        self._queue_time = _Histogram(_REQUEST_SECONDS)
        self._request_time = _Histogram(_REQUEST_SECONDS)
        self._retries: dict[str, int] = {}
        self._aborts: dict[str, int] = {}
        self._preemptions: dict[str, int] = {}
        self._computed_twice: dict[str, int] = {}
        self._resumptions: dict[str, int] = {}
        self._tokens = {"prompt": 0, "completion": 0, "cached": 0, "decode_cached": 0}
        self._placed_by_prefix = 0
        self._placed_on_a_hit = 0
        self._predicted = 0
        self._actual = 0
        self._missed_by = 0
        audit.subscribe_to_batches(self.count_requests)

    def count_requests(self, records: Sequence[RequestRecord]) -> None:
        """Count a batch of ended requests."""
        self._count_responses(records)
        completions = [record for record in records if record.path in _COMPLETIONS]
        self._count_workers(completions)
        for kind, tokens_of in _TOKENS_OF.items():
            self._tokens[kind] += sum(filter(None, map(tokens_of, completions)))
        self._count_predictions(completions)
        self._time_completions(completions)

    def count_retry(self, instance: str) -> None:
        """Count an attempt that failed because of ``instance``."""
        self._count_instance(self._retries, instance)

    def count_abort(self, instance: str) -> None:
        """Count a request that was aborted at ``instance``."""
        self._count_instance(self._aborts, instance)

    def count_preemption(self, instance: str) -> None:
        """Count a request that ``instance`` preempted, and that another instance continues."""
        self._count_instance(self._preemptions, instance)

    def count_computed_twice(self, decode: str) -> int:
        """Count a prompt that ``decode`` computed although prefill had done so. Return the number so far."""
        self._count_instance(self._computed_twice, decode)
        return self._computed_twice[decode]

    def count_resumption(self, instance: str) -> None:
        """Count a stream that another instance continues, because ``instance`` died, ended it early, or hung."""
        self._count_instance(self._resumptions, instance)

    def _count_instance(self, counts: dict[str, int], instance: str) -> None:
        if instance not in counts and len(counts) >= self._max_series:
            self._forget_gone_instances()
        counts[instance] = counts.get(instance, 0) + 1

    def _count_responses(self, records: Sequence[RequestRecord]) -> None:
        """Count responses by endpoint and status. The status is 499 if the client disconnected before the end."""
        for (method, path, status, error), count in Counter(map(_outcome_of, records)).items():
            key = (method, path if path in _ENDPOINTS else "other", status)
            self._responses[key] = self._responses.get(key, 0) + count
            if status >= 500 or (error and status < 400):
                code = error or "instance_error"
                self._failed[code] = self._failed.get(code, 0) + count
        times: dict[tuple[str, str], list[float]] = {}
        for record in records:
            times.setdefault((record.method, record.path), []).append(record.total_ms / 1e3)
        for (method, path), seconds in times.items():
            kind = (method, path if path in _ENDPOINTS else "other")
            durations = self._durations.get(kind)
            if durations is None:
                durations = self._durations[kind] = _Durations()
            durations.count += len(seconds)
            durations.sum += sum(seconds)
            durations.last.extend(seconds)

    def _count_workers(self, completions: Sequence[RequestRecord]) -> None:
        """Count completions by the instances of the last attempt; ``""`` stands for a role that was not used."""
        for workers, added in Counter(map(_workers_of, completions)).items():
            count = self._inference.get(workers, 0)
            if not count and len(self._inference) >= self._max_series:
                self._forget_gone_instances()
            self._inference[workers] = count + added

    def _count_predictions(self, completions: Sequence[RequestRecord]) -> None:
        for record in completions:
            predicted, cached = record.predicted_cached_tokens, record.cached_tokens
            if predicted is not None:
                self._placed_by_prefix += 1
                self._placed_on_a_hit += predicted > 0
                if cached is not None:
                    self._predicted += predicted
                    self._actual += cached
                    self._missed_by += abs(predicted - cached)

    def _time_completions(self, completions: Sequence[RequestRecord]) -> None:
        self._queue_time.observe_all([each.queued_ms / 1e3 for each in completions if each.queued_ms or each.attempts])
        good = [record for record in completions if record.status == 200 and not record.error]
        self._request_time.observe_all([record.total_ms / 1e3 for record in good])
        streams = [record for record in completions if record.streamed and record.first_byte_ms]
        self._first_token.observe_all([record.first_byte_ms / 1e3 for record in streams])
        token_seconds = []
        for record in streams:
            # If the engine does not report the number of tokens, each received piece counts as one token.
            later = (record.completion_tokens or record.chunks) - 1
            if later > 0:
                token_seconds.append((record.total_ms - record.first_byte_ms) / 1e3 / later)
        self._output_token.observe_all(token_seconds)

    def dump(self) -> list[Any]:
        """Return all metrics of this process as plain values, for ``render_text`` in another process."""
        self._audit.flush_records()
        return dump_families(self.collect())

    async def render_text(self, *dumps: Sequence[Any]) -> bytes:
        """Return all metrics in Prometheus's text format. A thread does most of the work, so that requests continue.

        Args:
            dumps: the metrics of all processes of this router, including ended ones.
        """
        async with self._rendering:
            families = await asyncio.to_thread(self._merge_known, dumps)
            if self._need is not None:
                families.append(_build_need(self._need, families))
            return await asyncio.to_thread(generate_latest, _Families(families))

    def _merge_known(self, dumps: Sequence[Sequence[Any]]) -> list[Metric]:
        """Return the merged metrics of all processes, without the series of removed instances."""
        families = merge_families((), dumps)
        urls = {instance.key: instance.address.url for instance in self._registry}
        known = {"", *urls}
        for family in families:
            family.samples = [sample for sample in family.samples if _names_only(known, sample.labels)]
            if self._dialect == "go" and family.name == _INFERENCE:
                family.samples = list(_name_by_url(family.samples, urls))
        return families

    def watch_shared_state(self, is_up: Callable[[], bool]) -> None:
        """Add a metric that says whether other routers can be reached: the value of ``is_up`` at each scrape."""
        self._is_shared_state_up = is_up

    def watch_need(self, need: InstancesNeeded) -> None:
        """Add a metric with the number of instances that the traffic needs."""
        self._need = need

    def watch_discovery(self, discovery: Discovery) -> None:
        """Add metrics about the pods that service discovery has found."""
        self._discovery = discovery

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of this process."""
        self._forget_gone_instances()
        yield from self._collect_requests()
        yield from self._collect_tokens()
        yield from self._collect_attempts()
        yield from self._collect_decisions()
        yield from self._collect_admission()
        yield from self._collect_instances()
        if self._is_shared_state_up is not None:
            text = "1: other routers are reachable over Redis; 0: this router works alone"
            yield GaugeMetricFamily("router_shared_state_up", text, float(self._is_shared_state_up()))
        if self._discovery is not None:
            text = "1: the cluster's API server reports the pods; 0: it does not, and the last known pods are used"
            yield GaugeMetricFamily("router_discovery_up", text, float(self._discovery.is_current))
            text = "Pods that match the selector, by state"
            yield _gauge("router_discovered_pods", text, ("state",), self._discovery.count_pods())
        yield CounterMetricFamily(
            "router_access_log_lost_lines", "Lines that could not be written to the access log",
            self._audit.lost_lines,
        )  # fmt: skip
        yield GaugeMetricFamily("router_workers", "Processes of this router that serve requests", 1.0)
        text = "Processes of this router that died and were replaced"
        yield CounterMetricFamily("router_worker_restarts", text, self._num_replaced)

    def _forget_gone_instances(self) -> None:
        """Delete the counters of removed instances and of their pairs. A restart does not remove an instance."""
        known = {"", *(instance.key for instance in self._registry)}
        self._inference = {who: count for who, count in self._inference.items() if known.issuperset(who[:3])}
        for counts in (self._retries, self._aborts, self._preemptions, self._resumptions, self._computed_twice):
            for instance in counts.keys() - known:
                del counts[instance]
        self._max_series = max(MAX_WORKER_SERIES, 2 * len(self._inference))

    def _collect_requests(self) -> Iterator[Metric]:
        text = "Total number of HTTP requests of the data plane"
        yield _count("http_requests", text, ("method", "endpoint", "status_code"), self._responses)
        name = "http_request_duration_seconds"
        durations = SummaryMetricFamily(
            name,
            f"Time from a request's arrival to the end of its response; quantiles of the last {_QUANTILE_WINDOW}",
            labels=["method", "endpoint"],
        )
        for (method, endpoint), observed in self._durations.items():
            for quantile, seconds in observed.compute_quantiles():
                labels = {"method": method, "endpoint": endpoint, "quantile": str(quantile)}
                durations.add_sample(name, labels, seconds)
            durations.add_metric([method, endpoint], observed.count, observed.sum)
        yield durations
        text = "Total number of inference requests (completions) by the instances that served them"
        yield _count(_INFERENCE, text, (*_WORKERS, "status_code"), self._inference)
        text = "Requests that ended with status 5xx or with an incomplete response, by error code"
        yield _count("router_failed_requests", text, ("code",), self._failed)

    def _collect_tokens(self) -> Iterator[Metric]:
        yield self._queue_time.build_family(
            "router_queue_time_seconds", "Time that completion requests were queued; 0 if they were not queued"
        )
        yield self._request_time.build_family(
            "router_request_duration_seconds",
            "Time from a completion request's arrival to the end of its successful response",
        )
        yield self._first_token.build_family(
            "router_time_to_first_token_seconds",
            "Time from a streaming request's arrival to the first byte of its response",
        )
        yield self._output_token.build_family(
            "router_time_per_output_token_seconds",
            "Mean time between tokens of a streaming request; between pieces if the engine does not count tokens",
        )
        yield _count("router_tokens", "Tokens as engines counted them", ("kind",), self._tokens)
        for name, text, value in (
            ("router_cache_request", "Completion requests whose instance was chosen by prefix", self._placed_by_prefix),
            ("router_cache_hit", "Completion requests for which cached tokens were expected", self._placed_on_a_hit),
            ("router_predicted_cached_tokens", "Cached tokens that policies predicted", self._predicted),
            ("router_actual_cached_tokens", "Cached tokens that engines reported for these requests", self._actual),
            (
                "router_mispredicted_cached_tokens",
                "Sum over requests of the difference between predicted and reported cached tokens",
                self._missed_by,
            ),
        ):
            yield CounterMetricFamily(name, text, value)

    def _collect_attempts(self) -> Iterator[Metric]:
        for name, text, counts in (
            ("router_retries", "Attempts that failed before the first byte, by instance", self._retries),
            ("router_aborts", "Requests aborted at an instance, because no client waits", self._aborts),
            ("router_reschedules", "Requests preempted and resumed, by instance", self._preemptions),
            ("router_prompts_computed_twice", "Prompts that both prefill and decode computed", self._computed_twice),
            ("router_resumptions", "Streams resumed after a failure, by instance", self._resumptions),
        ):
            yield _count(name, text, ("instance",), {instance.key: 0 for instance in self._registry} | counts)

    def _collect_decisions(self) -> Iterator[Metric]:
        """Yield the mean of each number in the policies' reasons, over the last requests."""
        sums: dict[tuple[str, str], list[float]] = {}
        last = (
            record.attempts[-1] for record in islice(reversed(self._audit.records), _DECISION_WINDOW) if record.attempts
        )
        for attempt in last:
            roles = ("prefill", "decode") if len(attempt.decisions) == 2 else (self._registry.roles[0].value,)
            for role, decision in zip(roles, attempt.decisions, strict=False):
                for name, value in decision.reasons.items():
                    if not isinstance(value, str):
                        sums.setdefault((role, name), []).append(value)
        text = f"Means of the values that policies used, over the last {_DECISION_WINDOW} requests"
        means = {labels: sum(values) / len(values) for labels, values in sums.items()}
        yield _gauge("router_policy_figure", text, ("role", "figure"), means)

    def _collect_admission(self) -> Iterator[Metric]:
        gate = self._admission
        yield GaugeMetricFamily("router_running_requests", "Requests being served", gate.running)
        yield GaugeMetricFamily("router_queued_requests", "Queued requests", gate.waiting)
        text = "Queued requests by priority"
        yield _gauge("router_queued_requests_by_priority", text, ("priority",), gate.waiting_by_priority)
        yield _count("router_refused_requests", "Requests answered with 429", ("reason",), gate.refused)

    def _collect_instances(self) -> Iterator[Metric]:
        counts = {(role.value, state): 0 for role in self._registry.roles for state in STATES}
        families = [GaugeMetricFamily(name, text, labels=["role", "instance"]) for name, text, _ in _OF_INSTANCE]
        for instance in self._registry:
            counts[instance.role.value, instance.state] += 1
            named = {"role": instance.role.value, "instance": instance.key}
            for family, (name, _, read) in zip(families, _OF_INSTANCE, strict=True):
                value = read(instance)
                if value is not None:  # add_metric would take three times as long, for thousands of instances
                    family.samples.append(Sample(name, named, value))
        yield _gauge("router_instances", "Instances by role and state", ("role", "state"), counts)
        yield from (family for family in families if family.samples or family.name != _CACHE_EXACT)


def _build_need(need: InstancesNeeded, families: Sequence[Metric]) -> Metric:
    """Return the metric with the number of instances that the traffic needs; ``families`` are all other metrics."""
    waiting = [each.samples[0].value for each in families if each.name == "router_queued_requests"]
    text = "Instances that the present traffic needs, for the whole fleet"
    needed = {role.value: count for role, count in need.compute(sum(waiting)).items()}
    return _gauge("router_instances_needed", text, ("role",), needed)


def _count(name: str, text: str, labels: Sequence[str], counts: Mapping[Any, float]) -> Metric:
    """Return a metric family of counters: one sample for each entry of ``counts``, whose key has the label values."""
    return _fill(CounterMetricFamily(name, text, labels=labels), counts)


def _gauge(name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]) -> Metric:
    """Return a metric family of gauges: one sample for each entry of ``values``, whose key has the label values."""
    return _fill(GaugeMetricFamily(name, text, labels=labels), values)


def _fill(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[Any, float]) -> Metric:
    for key, value in values.items():
        family.add_metric([str(label) for label in (key if isinstance(key, tuple) else (key,))], value)
    return family


def _names_only(known: Container[str], labels: Mapping[str, str]) -> bool:
    """Return whether all instances that these labels name are ``known``."""
    return all(name not in _NAMING or value in known for name, value in labels.items())


def _name_by_url(samples: Sequence[Sample], urls: Mapping[str, str]) -> Iterator[Sample]:
    """Yield the samples that name instances, with the instances' URLs instead of their keys."""
    for sample in samples:
        named = {name: urls.get(sample.labels[name], "") for name in _WORKERS}
        if any(named.values()):
            yield sample._replace(labels={**sample.labels, **named})


class _Families(Collector):
    """A collector for prometheus_client that returns metric families which were computed before."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        """Return the families. prometheus_client calls this."""
        return self._families


class _Durations:
    __slots__ = ("count", "last", "sum")

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.last: deque[float] = deque(maxlen=_QUANTILE_WINDOW)

    def compute_quantiles(self) -> list[tuple[float, float]]:
        ordered = sorted(self.last)
        return [(quantile, ordered[int(quantile * (len(ordered) - 1))]) for quantile in _QUANTILES]


class _Histogram:
    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe_all(self, values: Sequence[float]) -> None:
        for place, count in Counter(map(partial(bisect_left, self._bounds), values)).items():
            self._counts[place] += count
        self._sum += sum(values)

    def build_family(self, name: str, text: str) -> Metric:
        names = [*(str(bound) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum)
