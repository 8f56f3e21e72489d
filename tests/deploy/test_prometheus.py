"""Prometheus scrapes a whole system: every panel and every alert finds its series, and alerts fire when things break.

One system for all of it, real in every part: a Mooncake master, Redis, a router of two processes, a prefill and a
decode instance. The rules are the ones that are shipped, but for their patience: minutes are seconds here.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kvstore_backend import Status
from kvstore_backend.pool import open_store
from tests.end_to_end.cluster import Instance, Router, instance, router
from tests.router.sharing.test_supervisor import children
from tests.support import plain_http
from tests.support.memory import Memory
from tests.support.mooncake import MooncakeMaster, mooncake_master
from tests.support.prometheus import Prometheus, needs_prometheus, prometheus, run_promtool
from tests.support.redis import RedisServer, needs_redis
from tests.support.waiting import wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}

WINDOW_SECONDS = 6
# Of the time to first token; while decode hangs, requests wait for longer than a window.
BUDGET_SECONDS = 5
# What instances give to the pool, together; and what somebody else then puts there.
SEGMENT_BYTES, FILL_BYTES, VALUE_BYTES = 16 << 20, 40 << 20, 512 << 10
QUESTION = "Tell me about the river and the old town behind the hill, and about the people who live there. " * 8

# Panels and alerts that may have no data in good times, by the metric that lacks.
QUIET = {
    "router_queued_requests_by_priority": "told only while somebody waits in line",
    "kvstore_write_queue_blocks": "only of instances that write asynchronously (async_write)",
    "kvstore_dropped_writes_total": "only of instances that write asynchronously (async_write)",
}
# Made to fire by series of their own (alerts_test.yml) and not here, as their causes would take long to make.
BY_SERIES_ONLY = {
    "InstanceBreakerOpen",
    "InstanceFlaps",
    "InstanceQueueDoesNotEmpty",
    "PromptsComputedTwice",
}

# Eight processes start for the first of these tests.
pytestmark = [needs_prometheus, needs_redis, pytest.mark.timeout(600)]


class System:
    """All that runs, and what asks it."""

    def __init__(
        self,
        master: MooncakeMaster,
        redis: RedisServer,
        router: Router,
        prefill: Instance,
        decode: Instance,
        access_log: int,
    ) -> None:
        self.master, self.redis, self.router, self.prefill, self.decode = master, redis, router, prefill, decode
        self.access_log = access_log
        """Whose reader this is; it is open, and that is all that it does."""
        self.prometheus: Prometheus
        self._num_asked = 0

    def ask(self, about: str = "", url: str = "") -> int:
        """Stream a short answer to a prompt that was not there before, or to one ``about`` the same; its status."""
        self._num_asked += 1
        content = f"{about or self._num_asked}: {QUESTION}"
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        path = f"{url or self.router.url}/v1/chat/completions"
        try:
            with plain_http.stream("POST", path, json=body, timeout=60) as answer:
                answer.read()
                return answer.status_code
        except httpx.TransportError:
            return 0

    @contextmanager
    def asking(self, *asks: Callable[[], object]) -> Iterator[None]:
        """Call these again and again, in turn, while the block runs."""
        is_over = threading.Event()

        def go_on() -> None:
            while not is_over.wait(0.25):
                for ask in asks:
                    ask()

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def wait_for_alerts(self, *names: str) -> None:
        """Wait until these fire, or have fired a moment ago."""
        for name in names:
            query = f'max_over_time(ALERTS{{alertname="{name}",alertstate="firing"}}[30s])'
            wait_until(lambda query=query: self.prometheus.ask(query), f"{name} to fire", 60, 0.5)  # type: ignore[misc]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, few_words: Path) -> Iterator[System]:
    """The system, with everything there that Prometheus is to find, and Prometheus."""
    folder = tmp_path_factory.mktemp("system")
    redis = RedisServer(folder)
    redis.start()
    flags = ["--shared-state", redis.url, "--workers", "2", "--max-concurrent-requests", "2"]
    flags += ["--max-queued-requests", "1", "--queue-timeout-secs", "60", "--access-log", str(folder / "access.log")]
    os.mkfifo(folder / "access.log")
    reader = os.open(folder / "access.log", os.O_RDONLY | os.O_NONBLOCK)
    with (
        mooncake_master(folder / "master.log", "--default_kv_lease_ttl=200") as master,
        router(folder, *flags) as running_router,
    ):
        towards = ("--router", f"127.0.0.1:{running_router.port}")
        pooled: dict[str, Any] = {"master": master, "segment": str(SEGMENT_BYTES)}
        with (
            instance(folder, few_words, "--splitwise-role", "prefill", *towards, **pooled) as prefill,
            instance(folder, few_words, "--splitwise-role", "decode", *towards, **pooled) as decode,
        ):
            running_router.wait_for(prefill=1, decode=1)
            running = System(master, redis, running_router, prefill, decode, reader)
            with prometheus(folder, write_config(folder, running)) as running.prometheus:
                wait_until(lambda: len(running.prometheus.ask("up == 1")) == 4, "the first figures of all")
                yield running
    with suppress(Exception):
        redis.kill()


def write_config(folder: Path, system: System) -> Path:
    """The configuration that is shipped, with this system's addresses, and seconds for minutes."""
    shipped = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    metrics_port = system.master.metrics_url.split(":")[2].split("/")[0]
    for old, new in (
        ("127.0.0.1:52700", f"127.0.0.1:{system.router.port}"),
        ("127.0.0.1:15003", f"127.0.0.1:{metrics_port}"),
        ("scrape_interval: 5s", "scrape_interval: 1s"),
        ("evaluation_interval: 15s", "evaluation_interval: 1s"),
        ("refresh_interval: 15s", "refresh_interval: 1s"),
    ):
        assert old in shipped, old
        shipped = shipped.replace(old, new)
    rules = yaml.safe_load(RULES.read_text())
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        rule.pop("for", None)
        rule["expr"] = re.sub(r"\[\d+m\]", f"[{WINDOW_SECONDS}s]", rule["expr"])
    ttft = next(rule for group in rules["groups"] for rule in group["rules"] if rule["alert"] == "TimeToFirstTokenHigh")
    ttft["expr"] = ttft["expr"].replace("> 10", f"> {BUDGET_SECONDS}")
    (folder / "alerts.yml").write_text(yaml.safe_dump(rules))
    (folder / "prometheus.yml").write_text(shipped)
    return folder / "prometheus.yml"


def list_panel_queries() -> dict[str, str]:
    """The queries of all panels, as Grafana asks them where nothing is chosen, by where they stand."""
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
    """What each alert compares with its threshold."""
    return {
        name: re.sub(r"\s(==|<|>)\s[\d.]+", "", re.sub(r"\[\d+m\]", f"[{WINDOW_SECONDS}s]", rule["expr"]))
        for name, rule in ALERTS.items()
    }


def test_every_panel_and_every_alert_finds_its_series(system: System) -> None:
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
        ):  # the second time from prefill's own cache; the first time, as it has lost that, from the pool
            system.ask("the same")
        plain_http.post(f"{system.prefill.url}/clear_prefix_cache")

    with system.asking(ask_on), suppress(AssertionError):
        wait_until(ask_pending, "all queries to have data", 40, 0.5)
    loud = [f"{name}: {query}" for name, query in pending.items() if not any(metric in query for metric in QUIET)]
    assert not loud, "\n".join(["no data for", *loud])


def test_nothing_fires_in_good_times_and_each_target_has_its_labels(system: System) -> None:
    firing = {alert["labels"]["alertname"] for alert in system.prometheus.list_alerts()}
    assert not firing - {"TimeToFirstTokenHigh"}  # which a machine that has other work may be guilty of
    labels = [each["labels"] for each in system.prometheus.list_targets()]
    by_job = {(each["job"], each.get("role", "")): each["instance"] for each in labels}
    assert by_job.keys() == {("router", ""), ("instance", "prefill"), ("instance", "decode"), ("mooncake_master", "")}
    assert by_job["instance", "prefill"] == f"127.0.0.1:{system.prefill.port}"
    # What the router says of an instance stands beside what the instance says of itself.
    both = system.prometheus.ask("router_instance_requests + on (role, instance) fastdeploy:num_requests_running")
    assert {sample.labels["role"] for sample in both} == {"prefill", "decode"}


@pytest.mark.skipif("LIVE_ALERTS" not in os.environ, reason="takes two minutes: LIVE_ALERTS=1 runs it")
def test_alerts_fire_when_what_they_are_for_happens(system: System) -> None:
    fired: set[str] = set()

    def expect(*names: str) -> None:
        system.wait_for_alerts(*names)
        fired.update(names)

    # Decode hangs: two requests run, one waits, one is refused; then all go on.
    system.decode.process.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(4) as threads:
        try:
            answers = [threads.submit(system.ask, "held up") for _ in range(4)]
            expect("RequestsRefused", "QueueDoesNotEmpty")
        finally:
            system.decode.process.signal(signal.SIGCONT)
        statuses = sorted(answer.result() for answer in answers)
    assert statuses == [200, 200, 200, 429]
    expect("TimeToFirstTokenHigh")
    waited = system.prometheus.ask("router_queue_time_seconds_sum / router_queue_time_seconds_count > 0")
    assert len(waited) == 1

    # Somebody writes under our keys; and fills the pool, so that it has lost what is asked for again.
    with closing(Stranger(system.master)) as stranger:

        def ask_again() -> None:
            plain_http.post(f"{system.prefill.url}/clear_prefix_cache")
            system.ask("the same")
            system.ask()

        with system.asking(stranger.spoil_blocks, ask_again):
            expect("WrongBytesCaught")
        with system.asking(stranger.fill_pool, ask_again):
            expect("PoolThrashes", "PoolFindsNoRoom", "HitRateDropped")

    # A worker of the router is killed, the reader of the access log leaves, decode is killed.
    (nursery,) = (pid for pid in children(system.router.process.pid) if len(children(pid)) == 2)
    os.kill(children(nursery)[0], signal.SIGKILL)
    expect("RouterWorkerRestarts")
    os.close(system.access_log)
    system.decode.process.kill()
    with system.asking(system.ask):
        expect("InstanceUnhealthy", "NoHealthyInstance", "RequestsFail", "AccessLogLosesLines")

    # Redis, the master, and at last the router.
    system.redis.kill()
    system.master.kill()
    with system.asking(lambda: system.ask(url=system.prefill.url)):
        expect("SharedStateDown", "MasterDown", "NoMasterServes", "PoolAway", "PoolDegraded", "PoolDropsWrites")
    check_annotations(system.prometheus.list_alerts())
    # Nothing that the worker had counted went with it: a sum that falls would be added up once more.
    for counted in ("http_requests_total", "router_time_to_first_token_seconds_bucket"):
        (resets,) = system.prometheus.ask(f"sum(resets({counted}[10m]))")
        assert resets.value == 0, counted
    system.router.process.kill()
    expect("RouterDown")
    assert fired == ALERTS.keys() - BY_SERIES_ONLY


class Stranger:
    """A client of the pool that gives no memory, and does what it should not."""

    def __init__(self, master: MooncakeMaster) -> None:
        self._store: Any = open_store(master.config(global_segment_size="0"))
        self._keys_url = master.metrics_url.replace("/metrics", "/get_all_keys")
        self._value = Memory(bytes(VALUE_BYTES))
        self._store.register(self._value.address, VALUE_BYTES)
        self._numbers = itertools.count()

    def fill_pool(self) -> None:
        """Put more than the pool holds."""
        for _ in range(FILL_BYTES // VALUE_BYTES):
            self._store.put([f"fill {next(self._numbers)}"], [self._value.value])

    def spoil_blocks(self) -> None:
        """Put zeros in the place of every block."""
        for key in plain_http.get(self._keys_url).text.split():
            size = self._store._native.get_size(key)
            if self._store.remove([key], force=True) == [Status.OK]:
                self._store.put([key], [self._value.spans(size)])

    def close(self) -> None:
        """Leave the pool."""
        self._store.close()


def check_annotations(alerts: list[dict[str, Any]]) -> None:
    """Nothing in what a person is told is left open."""
    for alert in alerts:
        for text in alert["annotations"].values():
            assert text
            assert not re.search(r"no value|error (calling|expanding)|\{\{|NaN", text), alert


def test_the_files_are_well_formed() -> None:
    folder = DEPLOY / "prometheus"
    assert f"{len(ALERTS)} rules found" in run_promtool("check", "rules", RULES)
    assert "is valid" in run_promtool("check", "config", folder / "prometheus.yml")


def test_each_alert_fires_by_series_that_its_cause_makes_and_no_other_does() -> None:
    run_promtool("test", "rules", DEPLOY / "prometheus" / "alerts_test.yml")
    expected = re.findall(r'alertname="(\w+)"', (DEPLOY / "prometheus" / "alerts_test.yml").read_text())
    assert sorted(expected) == sorted(ALERTS)
