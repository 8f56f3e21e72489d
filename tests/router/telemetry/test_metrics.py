"""The router's metrics, as Prometheus reads them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from router.access import Admission
from router.fleet import Registration, Registry
from router.policies import Decision
from router.settings import RouterSettings
from router.telemetry import metrics
from router.telemetry.audit import Audit
from router.telemetry.merge import dump_families, merge_families
from router.telemetry.metrics import RouterMetrics
from router.telemetry.records import AttemptRecord, RequestRecord

CHAT = {"method": "POST", "endpoint": "/v1/chat/completions"}


class Counts:
    """A router's metrics without the router."""

    def __init__(self, *, num_replaced: int = 0, **settings: Any) -> None:
        router_settings = RouterSettings(access_log="off", **settings)
        self.registry = Registry(router_settings.splitwise)
        self.gate = Admission(router_settings)
        self.audit = Audit(router_settings)
        self.metrics = RouterMetrics(self.registry, self.gate, self.audit, num_replaced)
        self._ended: list[RequestRecord] = []

    def register(self, role: str, key: str) -> None:
        host, _, port = key.partition(":")
        self.registry.register(Registration.from_fields({"role": role, "host_ip": host, "port": port}), now=0.0)

    def record(self, path: str = "/v1/chat/completions", **changes: Any) -> None:
        self._ended.append(RequestRecord("POST", path, 0.0, **{"status": 200, **changes}))

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        asyncio.run(self._add_records())
        families = text_string_to_metric_families(asyncio.run(self.metrics.render_text(self.metrics.dump())).decode())
        return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}

    def families(self) -> list[Metric]:
        asyncio.run(self._add_records())
        self.audit.flush_records()
        return list(self.metrics.collect())

    def value(self, name: str, **labels: str) -> float:
        return self.samples()[name, frozenset(labels.items())]

    async def _add_records(self) -> None:
        """Add the records in an event loop that ends at once, before the audit's timer fires."""
        for record in self._ended:
            self.audit.add_record(record)
        self._ended.clear()


def test_responses_are_counted_and_timed_by_endpoint() -> None:
    counts = Counts()
    for status, total_ms in ((200, 100.0), (200, 300.0), (429, 200.0)):
        counts.record(status=status, total_ms=total_ms)
    assert counts.value("http_requests_total", **CHAT, status_code="200") == 2
    assert counts.value("http_requests_total", **CHAT, status_code="429") == 1
    assert counts.value("http_request_duration_seconds_count", **CHAT) == 3
    assert counts.value("http_request_duration_seconds_sum", **CHAT) == pytest.approx(0.6)


def test_each_scrape_counts_every_ended_request_once() -> None:
    counts = Counts()
    for number in range(1, 4):
        counts.record()
        assert counts.value("http_requests_total", **CHAT, status_code="200") == number
    assert counts.value("http_requests_total", **CHAT, status_code="200") == 3


def test_durations_have_the_go_routers_quantiles() -> None:
    counts = Counts()
    for milliseconds in range(101):
        counts.record(total_ms=float(milliseconds))
    assert counts.value("http_request_duration_seconds", **CHAT, quantile="0.95") == pytest.approx(0.095)
    assert counts.value("http_request_duration_seconds", **CHAT, quantile="0.99") == pytest.approx(0.099)


def test_only_completions_are_counted_by_the_instances_that_served_them() -> None:
    counts = Counts(splitwise=True)
    counts.register("prefill", "p:1")
    counts.register("decode", "d:1")
    counts.record(prefill="p:1", decode="d:1")
    counts.record("/v1/embeddings", prefill="p:1")
    workers = {"mixed_worker": "", "prefill_worker": "p:1", "decode_worker": "d:1"}
    assert counts.value("inference_requests_total", **workers, status_code="200") == 1
    assert sum(name == "inference_requests_total" for name, _ in counts.samples()) == 1


def test_the_time_to_first_token_is_measured_for_streams_only() -> None:
    counts = Counts()
    counts.record(streamed=True, first_byte_ms=30.0, total_ms=30.0)
    counts.record(streamed=False, first_byte_ms=900.0, total_ms=900.0)
    name = "router_time_to_first_token_seconds"
    assert (counts.value(f"{name}_bucket", le="0.025"), counts.value(f"{name}_bucket", le="0.05")) == (0, 1)
    assert counts.value(f"{name}_sum") == pytest.approx(0.03)


def test_the_queue_time_is_a_histogram_over_admitted_and_timed_out_requests() -> None:
    counts = Counts()
    answered = [AttemptRecord((), "answered")]
    counts.record(attempts=answered)
    counts.record(attempts=answered, queued_ms=300.0)
    counts.record(status=429, queued_ms=2000.0)
    counts.record(status=401)
    name = "router_queue_time_seconds"
    assert [counts.value(f"{name}_bucket", le=le) for le in ("0.001", "0.25", "0.5", "+Inf")] == [1, 1, 2, 3]
    assert counts.value(f"{name}_sum") == pytest.approx(2.3)


def test_the_request_duration_is_a_histogram_over_successful_completions() -> None:
    counts = Counts()
    counts.record(total_ms=40.0)
    counts.record(total_ms=60_000.0, status=504, error="request_timeout")
    counts.record("/v1/embeddings", total_ms=1.0)
    name = "router_request_duration_seconds"
    assert (counts.value(f"{name}_count"), counts.value(f"{name}_bucket", le="0.05")) == (1, 1)


def test_failures_of_the_service_are_counted_but_not_those_of_clients() -> None:
    counts = Counts(splitwise=True)
    for status, error in (
        *((200, ""), (200, "decode_failed"), (502, "decode_failed"), (503, ""), (503, "no_instance")),
        *((400, "invalid_body"), (429, "queue_full"), (499, "client_left")),
    ):
        counts.record(status=status, error=error)
    failed = {
        dict(labels)["code"]: count
        for (name, labels), count in counts.samples().items()
        if name == "router_failed_requests_total"
    }
    assert {code: count for code, count in failed.items() if count} == {
        "decode_failed": 2,
        "instance_error": 1,
        "no_instance": 1,
    }
    assert failed["prefill_failed"] == 0  # from the beginning on, or Prometheus would see no increase


@pytest.mark.parametrize("known", [{"completion_tokens": 11, "chunks": 4}, {"chunks": 11}])
def test_time_per_output_token_counts_chunks_if_the_engine_reports_no_tokens(known: dict[str, Any]) -> None:
    counts = Counts()
    counts.record(streamed=True, first_byte_ms=100.0, total_ms=600.0, **known)
    assert counts.value("router_time_per_output_token_seconds_sum") == pytest.approx(0.05)
    assert counts.value("router_time_per_output_token_seconds_count") == 1


def test_a_response_of_one_token_has_no_time_per_output_token() -> None:
    counts = Counts()
    counts.record(streamed=True, first_byte_ms=1.0, total_ms=2.0, completion_tokens=1, chunks=3)
    assert counts.value("router_time_per_output_token_seconds_count") == 0


def test_predicted_hits_are_compared_with_the_hits_that_the_engine_reports() -> None:
    counts = Counts()
    counts.record(predicted_cached_tokens=64, cached_tokens=128, prompt_tokens=200)
    counts.record(predicted_cached_tokens=64, cached_tokens=0, prompt_tokens=200)
    counts.record(predicted_cached_tokens=0)
    assert counts.value("router_predicted_cached_tokens_total") == 128
    assert counts.value("router_actual_cached_tokens_total") == 128
    assert counts.value("router_mispredicted_cached_tokens_total") == 128
    assert (counts.value("router_cache_request_total"), counts.value("router_cache_hit_total")) == (3, 2)
    assert counts.value("router_tokens_total", kind="prompt") == 400


def test_retries_aborts_reschedules_and_resumptions_are_counted_by_instance() -> None:
    counts = Counts(splitwise=True)
    counts.register("decode", "d:1")
    figures = counts.metrics
    for count in (figures.count_retry, figures.count_abort, figures.count_preemption, figures.count_resumption):
        count("d:1")
    names = ("router_retries_total", "router_aborts_total", "router_reschedules_total", "router_resumptions_total")
    for name in names:
        assert counts.value(name, instance="d:1") == 1


def test_figures_of_policies_are_means_by_role() -> None:
    counts = Counts(splitwise=True)
    for cost in (10.0, 30.0):
        decisions = (Decision("p:1", {"cost": cost, "because": "cheapest"}, 0.0), Decision("d:1", {"cost": 1.0}, 0.0))
        counts.record(attempts=[AttemptRecord(decisions, "answered")])
    assert counts.value("router_policy_figure", role="prefill", figure="cost") == 20
    assert counts.value("router_policy_figure", role="decode", figure="cost") == 1
    assert not any(("figure", "because") in labels for _, labels in counts.samples())


def test_running_queued_and_refused_requests_are_shown() -> None:
    counts = Counts(max_concurrent_requests=1)
    counts.gate.try_enter("")
    assert (counts.value("router_running_requests"), counts.value("router_queued_requests")) == (1, 0)
    assert counts.value("router_refused_requests_total", reason="queue_full") == 0


def test_an_instances_load_breaker_and_reported_queue_are_shown_if_known() -> None:
    counts = Counts()
    fields = {"role": "mixed", "host_ip": "127.0.0.1", "port": 1}
    instance = counts.registry.register(Registration.from_fields(fields), now=0.0)
    instance.load.requests = 2
    labels = {"role": "mixed", "instance": instance.key}
    assert counts.value("router_instance_requests", **labels) == 2
    assert counts.value("router_instance_breaker_open", **labels) == 0
    assert not any(name == "router_instance_reported_waiting" for name, _ in counts.samples())
    instance.load.waiting = 5
    assert counts.value("router_instance_reported_waiting", **labels) == 5


def test_unknown_paths_add_no_series() -> None:
    counts = Counts()
    for number in range(3):
        counts.record(f"/v1/unknown/{number}")
    assert counts.value("http_requests_total", method="POST", endpoint="other", status_code="200") == 3


def test_series_of_removed_instances_are_dropped_and_the_others_continue() -> None:
    counts = Counts(splitwise=True)
    for role, key in (("prefill", "p:1"), ("decode", "d:1"), ("decode", "d:2")):
        counts.register(role, key)
    for count in (counts.metrics.count_retry, counts.metrics.count_abort, counts.metrics.count_preemption):
        count("d:1")
        count("d:2")
    for decode in ("d:1", "d:2"):
        counts.record(prefill="p:1", decode=decode)
    retries = {
        dict(labels)["instance"]: count
        for (name, labels), count in counts.samples().items()
        if name == "router_retries_total"
    }
    assert retries == {"p:1": 0, "d:1": 1, "d:2": 1}
    counts.registry.register(_registration("d:2"), now=0.0)  # it has a heartbeat
    counts.registry.register(_registration("d:2"), now=100.0)
    counts.registry.forget_silent(100.0, 30.0)
    counts.register("prefill", "p:1")
    restarted = counts.registry.register(_registration("d:2"), now=101.0)
    counts.registry.events.lost_caches.emit(restarted.key)
    counts.record(prefill="p:1", decode="d:2")
    named = [
        value for _, labels in counts.samples() for name, value in labels if "instance" in name or "worker" in name
    ]
    assert "d:1" not in named
    for name in ("router_retries_total", "router_aborts_total", "router_reschedules_total"):
        assert counts.value(name, instance="d:2") == 1
    workers = {"mixed_worker": "", "prefill_worker": "p:1", "decode_worker": "d:2"}
    assert counts.value("inference_requests_total", **workers, status_code="200") == 2


def _registration(key: str) -> Registration:
    host, _, port = key.partition(":")
    return Registration.from_fields({"role": "decode", "host_ip": host, "port": port})


@pytest.mark.parametrize("member", ["_inference", "_retries"])
def test_series_of_removed_instances_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch, member: str) -> None:
    monkeypatch.setattr(metrics, "MAX_WORKER_SERIES", 100)
    counts = Counts()
    counts.register("mixed", "h:1")
    for number in range(1000):
        for key in ("h:1", f"gone:{number}"):
            counts.record(mixed=key)
            counts.metrics.count_retry(key)
    asyncio.run(counts._add_records())
    counts.audit.flush_records()
    assert len(getattr(counts.metrics, member)) <= 100
    workers = {"mixed_worker": "h:1", "prefill_worker": "", "decode_worker": ""}
    assert counts.value("inference_requests_total", **workers, status_code="200") == 1000
    assert counts.value("router_retries_total", instance="h:1") == 1000
    assert sum(name == "inference_requests_total" for name, _ in counts.samples()) <= 100


def test_a_merged_histogram_equals_that_of_one_process() -> None:
    whole, parts = Counts(), [Counts(num_replaced=replaced) for replaced in (0, 2)]
    for number in range(40):
        times: dict[str, Any] = {
            "first_byte_ms": 7.0 * number + 1,
            "total_ms": 11.0 * number + 2,
            "queued_ms": 3.0 * number,
        }
        for counts in (whole, parts[number % 2]):
            counts.record(streamed=True, attempts=[AttemptRecord((), "answered")], chunks=5, **times)
    first, second = (counts.families() for counts in parts)
    merged = {family.name: family for family in merge_families(first, [dump_families(second)])}
    histograms = [family for family in whole.families() if family.type == "histogram"]
    assert len(histograms) == 4
    for family in histograms:
        added = merged[family.name]
        assert added.type == "histogram"
        values = {(sample.name, *sample.labels.items()): sample.value for sample in added.samples}
        assert values == pytest.approx({(s.name, *s.labels.items()): s.value for s in family.samples})
        buckets = [sample.value for sample in added.samples if sample.name.endswith("_bucket")]
        assert buckets == sorted(buckets)
    assert [sample.value for sample in merged["router_workers"].samples] == [2]
    assert [sample.value for sample in merged["router_worker_restarts"].samples] == [2]


def test_merged_counts_are_sums_and_merged_quantiles_are_maxima() -> None:
    def families(count: int, seconds: float, running: int, healthy: int) -> list[Metric]:
        requests = CounterMetricFamily("http_requests", "Requests", labels=["method"])
        requests.add_metric(["POST"], count)
        durations = SummaryMetricFamily("seconds", "Durations")
        durations.add_sample("seconds", {"quantile": "0.95"}, seconds)
        durations.add_metric([], count, count * seconds)
        return [
            requests,
            durations,
            GaugeMetricFamily("router_running_requests", "Running", running),
            GaugeMetricFamily("router_instances", "Known to all", healthy),
        ]

    others = [dump_families(families(2, 0.5, 3, 4)), dump_families(families(3, 0.25, 1, 4))]
    merged = merge_families(families(1, 0.125, 2, 4), others)
    values = {(s.name, *s.labels.values()): s.value for family in merged for s in family.samples}
    assert values == {
        ("http_requests_total", "POST"): 6,
        ("seconds", "0.95"): 0.5,
        ("seconds_count",): 6,
        ("seconds_sum",): 0.125 + 1.0 + 0.75,
        ("router_running_requests",): 6,
        ("router_instances",): 4,
    }
