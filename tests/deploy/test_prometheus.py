"""Prometheus scrapes a whole system: each panel and each alert has its series, and the files of the alerts are valid.

``test_alerts.py`` tests that alerts fire after their causes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.deploy.monitored import ALERTS, DEPLOY, RULES, WINDOW_SECONDS, System, monitored_system, shorten_windows
from tests.support import plain_http
from tests.support.prometheus import needs_prometheus, run_promtool
from tests.support.redis import needs_redis
from tests.support.waiting import wait_until

DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))

# Panels and alerts that have no data without failures, by the missing metric.
QUIET = {
    "router_queued_requests_by_priority": "told only while somebody waits in line",
    "kvstore_write_queue_blocks": "only of instances that write asynchronously (async_write)",
    "kvstore_dropped_writes_total": "only of instances that write asynchronously (async_write)",
}
# The first of these tests starts eight processes.
pytestmark = [needs_prometheus, needs_redis, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, few_words: Path) -> Iterator[System]:
    """Run the whole system and Prometheus."""
    with monitored_system(tmp_path_factory.mktemp("system"), few_words) as running:
        yield running


def list_panel_queries() -> dict[str, str]:
    """Return the queries of all panels without selected variables, by their positions."""
    queries = {}
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                query = re.sub(r"\$(router|role|instance)\b", ".*", target["expr"])
                query = query.replace("$__rate_interval", f"{WINDOW_SECONDS}s")
                assert "$" not in query, query
                queries[f"{path.name}: {panel['title']}: {target['refId']}"] = query
    return queries


def list_alert_inputs() -> dict[str, str]:
    """Return the expressions that alerts compare with thresholds."""
    return {name: re.sub(r"\s(==|<|>)\s[\d.]+", "", shorten_windows(rule["expr"])) for name, rule in ALERTS.items()}


def test_each_panel_and_each_alert_has_its_series(system: System) -> None:
    pending = list_panel_queries() | list_alert_inputs()
    assert len(pending) > 100

    def ask_pending() -> bool:
        for name, query in list(pending.items()):
            if any(not math.isnan(sample.value) for sample in system.prometheus.ask(query)):
                del pending[name]
        return all(any(metric in query for metric in QUIET) for query in pending.values())

    def ask_on() -> None:
        system.ask()
        for _ in range(
            2
        ):  # the first response uses the pool, because prefill has lost its cache; the second one uses the cache
            system.ask("the same")
        plain_http.post(f"{system.prefill.url}/clear_prefix_cache")

    with system.asking(ask_on), suppress(AssertionError):
        wait_until(ask_pending, "all queries to have data", 40, 0.5)
    loud = [f"{name}: {query}" for name, query in pending.items() if not any(metric in query for metric in QUIET)]
    assert not loud, "\n".join(["no data for", *loud])


def test_no_alert_fires_without_failures_and_each_target_has_its_labels(system: System) -> None:
    firing = {alert["labels"]["alertname"] for alert in system.prometheus.list_alerts()}
    assert not firing - {"TimeToFirstTokenHigh"}  # a busy machine may cause this alert
    labels = [each["labels"] for each in system.prometheus.list_targets()]
    by_job = {(each["job"], each.get("role", "")): each["instance"] for each in labels}
    assert by_job.keys() == {("router", ""), ("instance", "prefill"), ("instance", "decode"), ("mooncake_master", "")}
    assert by_job["instance", "prefill"] == f"127.0.0.1:{system.prefill.port}"
    # Metrics of the router about an instance have the same labels as the metrics of the instance.
    both = system.prometheus.ask("router_instance_requests + on (role, instance) fastdeploy:num_requests_running")
    assert {sample.labels["role"] for sample in both} == {"prefill", "decode"}


def test_the_files_are_valid() -> None:
    folder = DEPLOY / "prometheus"
    assert f"{len(ALERTS)} rules found" in run_promtool("check", "rules", RULES)
    assert "is valid" in run_promtool("check", "config", folder / "prometheus.yml")


def test_each_alert_fires_only_with_the_series_of_its_cause() -> None:
    run_promtool("test", "rules", DEPLOY / "prometheus" / "alerts_test.yml")
    expected = re.findall(r'alertname="(\w+)"', (DEPLOY / "prometheus" / "alerts_test.yml").read_text())
    assert sorted(expected) == sorted(ALERTS)
