"""Each alert fires after its cause, in a whole system with Prometheus.

The tests take minutes, so they run only with ``LIVE_ALERTS=1 pytest tests/deploy/test_alerts.py``. They depend on their
order, because the later ones damage the system permanently.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore_backend import Status
from kvstore_backend.pool import open_store
from tests.deploy.monitored import ALERTS, System, monitored_system
from tests.router.sharing.test_supervisor import list_children
from tests.router.stand_in import LoopThread, Received, Responder, StandIn, answers
from tests.support import plain_http
from tests.support.memory import Memory
from tests.support.mooncake import MooncakeMaster
from tests.support.prometheus import needs_prometheus
from tests.support.redis import needs_redis
from tests.support.waiting import wait_until

# A number of bytes that is larger than the pool, and the size of the values with which a client fills the pool.
FILL_BYTES, VALUE_BYTES = 40 << 20, 512 << 10
# A stopped process still accepts connections, so probes wait for it. The end of a process is detected in a second.
PROBES = ("--health-check-interval-secs", "0.5", "--health-check-timeout-secs", "60", "--health-failure-threshold", "1")

pytestmark = [
    needs_prometheus,
    needs_redis,
    pytest.mark.timeout(600),
    pytest.mark.skipif("LIVE_ALERTS" not in os.environ, reason="takes some minutes: LIVE_ALERTS=1 runs it"),
]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, few_words: Path) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("system")
    with monitored_system(folder, few_words, router_flags=PROBES, prefill_flags=("--max-num-seqs", "1")) as running:
        yield running


@pytest.fixture(scope="module")
def thread() -> Iterator[LoopThread]:
    made = LoopThread()
    yield made
    made.close()


def test_a_decode_instance_hangs(system: System) -> None:
    """Two requests run, one waits, one is refused. Then decode continues."""
    system.decode.process.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(4) as threads:
        try:
            answered = [threads.submit(system.ask, "held up") for _ in range(4)]
            system.expect_alerts("RequestsRefused", "QueueDoesNotEmpty")
        finally:
            system.decode.process.signal(signal.SIGCONT)
        statuses = sorted(answer.result() for answer in answered)
    assert statuses == [200, 200, 200, 429]
    system.expect_alerts("TimeToFirstTokenHigh")
    waited = system.prometheus.ask("router_queue_time_seconds_sum / router_queue_time_seconds_count > 0")
    assert len(waited) == 1


def test_an_instance_has_more_requests_than_it_can_run(system: System) -> None:
    """It runs one request at a time, and four clients send requests without a pause."""
    is_over = threading.Event()

    def keep_asking() -> None:
        while not is_over.is_set():
            system.ask(url=system.prefill.url)

    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(keep_asking)
        try:
            system.expect_alerts("InstanceQueueDoesNotEmpty")
        finally:
            is_over.set()


def test_requests_fail_at_an_instance_whose_probes_pass(system: System, thread: LoopThread) -> None:
    with running_stand_in(system, thread, StandIn("decode", thread, answers(500, b"{}"))) as failing:
        with system.asking(system.ask):
            system.expect_alerts("InstanceBreakerOpen")
        (alert,) = find_alerts(system, "InstanceBreakerOpen")
        assert alert["labels"]["instance"] == failing.key


def test_a_pair_transfers_no_kv_and_then_an_instance_restarts_repeatedly(system: System, thread: LoopThread) -> None:
    """Two vLLM instances have no connector, and one of them then restarts repeatedly."""
    vllm: dict[str, Any] = {"behave": answer_without_connector, "extra_fields": {"engine": "vllm"}}
    with (
        running_stand_in(system, thread, StandIn("prefill", thread, **vllm)) as prefill,
        running_stand_in(system, thread, StandIn("decode", thread, **vllm)),
    ):
        with system.asking(system.ask):
            system.expect_alerts("PromptsComputedTwice")
        for _ in range(3):
            prefill.stop()
            wait_for_healthy(system, "prefill", 1)
            prefill.start()
            prefill.register(system.router.url)
            wait_for_healthy(system, "prefill", 2)
        system.expect_alerts("InstanceFlaps")


def test_another_client_overwrites_blocks_and_fills_the_pool(system: System) -> None:
    def ask_again() -> None:
        plain_http.post(f"{system.prefill.url}/clear_prefix_cache")
        system.ask("the same")
        system.ask()

    with closing(Stranger(system.master)) as stranger:
        with system.asking(stranger.spoil_blocks, ask_again):
            system.expect_alerts("WrongBytesCaught")
        with system.asking(stranger.fill_pool, ask_again):
            system.expect_alerts("PoolThrashes", "PoolFindsNoRoom", "HitRateDropped")


def test_a_worker_is_killed_the_logs_reader_leaves_and_decode_is_killed(system: System) -> None:
    (nursery,) = (pid for pid in list_children(system.router.process.pid) if len(list_children(pid)) == 2)
    os.kill(list_children(nursery)[0], signal.SIGKILL)
    system.expect_alerts("RouterWorkerRestarts")
    os.close(system.access_log)
    system.decode.process.kill()
    with system.asking(system.ask):
        system.expect_alerts("InstanceUnhealthy", "NoHealthyInstance", "RequestsFail", "AccessLogLosesLines")


def test_redis_the_master_and_the_router_are_killed(system: System) -> None:
    system.redis.kill()
    system.master.kill()
    with system.asking(lambda: system.ask(url=system.prefill.url)):
        system.expect_alerts("SharedStateDown", "MasterDown", "NoMasterServes")
        system.expect_alerts("PoolAway", "PoolDegraded", "PoolDropsWrites")
    check_annotations(system.prometheus.list_alerts())
    # The counts of the dead worker must remain: Prometheus would count a sum that falls a second time.
    for counted in ("http_requests_total", "router_time_to_first_token_seconds_bucket"):
        (resets,) = system.prometheus.ask(f"sum(resets({counted}[10m]))")
        assert resets.value == 0, counted
    system.router.process.kill()
    system.expect_alerts("RouterDown")
    assert system.fired == ALERTS.keys()


@contextmanager
def running_stand_in(system: System, thread: LoopThread, made: StandIn) -> Iterator[StandIn]:
    """Register a simulated instance that serves any model. At the end, stop it, and remove it from the router."""
    made.models_status = 404
    made.start()
    try:
        made.register(system.router.url).raise_for_status()
        yield made
    finally:
        made.stop()


async def answer_without_connector(request: Received, respond: Responder) -> None:
    """Respond as a vLLM instance without a connector does: without parameters for a hand-over."""
    usage = {"prompt_tokens": 4000, "completion_tokens": 1, "total_tokens": 4001}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    if request.target == "/metrics":
        await respond.answer(200, b"vllm:num_requests_running 0\n", ("content-type", "text/plain"))
    elif request.json.get("stream"):
        await respond.start_stream()
        await respond.event(json.dumps({"id": "1", "choices": [{**choice, "delta": {"content": "yes"}}]}))
        await respond.event(json.dumps({"id": "1", "choices": [], "usage": usage}))
        await respond.event("[DONE]")
        await respond.end_stream()
    else:
        message = {"role": "assistant", "content": "y"}
        body = {"id": "1", "choices": [{**choice, "message": message}], "usage": usage}
        await respond.answer(200, json.dumps(body).encode(), ("content-type", "application/json"))


def wait_for_healthy(system: System, role: str, number: int) -> None:
    """Wait until Prometheus has this number of healthy instances of the role."""
    query = f'router_instances{{state="healthy",role="{role}"}} == {number}'
    wait_until(lambda: system.prometheus.ask(query), f"{number} healthy {role} instances", 60, 0.5)


def find_alerts(system: System, name: str) -> list[dict[str, Any]]:
    return [alert for alert in system.prometheus.list_alerts() if alert["labels"]["alertname"] == name]


class Stranger:
    """A client of the pool that gives no memory, and damages the pool."""

    def __init__(self, master: MooncakeMaster) -> None:
        self._store: Any = open_store(master.config(global_segment_size="0"))
        self._keys_url = master.metrics_url.replace("/metrics", "/get_all_keys")
        self._value = Memory(bytes(VALUE_BYTES))
        self._store.register(self._value.address, VALUE_BYTES)
        self._numbers = itertools.count()

    def fill_pool(self) -> None:
        """Put more values than the pool can hold, each until it fits, so that all earlier blocks are evicted."""
        for _ in range(FILL_BYTES // VALUE_BYTES):
            key = f"fill {next(self._numbers)}"
            wait_until(lambda key=key: self._store.put([key], [self._value.value]) == [Status.OK], "room")  # type: ignore[misc]

    def spoil_blocks(self) -> None:
        """Overwrite each block with zeros."""
        for key in plain_http.get(self._keys_url).text.split():
            size = self._store._native.get_size(key)
            if self._store.remove([key], force=True) == [Status.OK]:
                self._store.put([key], [self._value.spans(size)])

    def close(self) -> None:
        """Leave the pool."""
        self._store.close()


def check_annotations(alerts: list[dict[str, Any]]) -> None:
    """Assert that the annotations contain no placeholder."""
    for alert in alerts:
        for text in alert["annotations"].values():
            assert text
            assert not re.search(r"no value|error (calling|expanding)|\{\{|NaN", text), alert
