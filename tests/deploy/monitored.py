"""A whole system with Prometheus, for tests of panels and alerts.

All parts are real: a Mooncake master, Redis, a router with two workers, a prefill and a decode instance. The alerts are
those in deploy/, with seconds in place of minutes.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.end_to_end.cluster import Instance, Router, instance, router
from tests.support import plain_http
from tests.support.beside import working_beside
from tests.support.mooncake import MooncakeMaster, mooncake_master
from tests.support.prometheus import Prometheus, prometheus
from tests.support.redis import RedisServer
from tests.support.waiting import wait_until

__all__ = ["ALERTS", "DEPLOY", "RULES", "WINDOW_SECONDS", "System", "monitored_system", "shorten_windows"]

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
"""The rules in deploy/, by the names of their alerts."""

WINDOW_SECONDS = 6
# Limit of the time to first token. While decode hangs, requests wait for longer than a window.
BUDGET_SECONDS = 5
# Window of rules that count slow changes, such as an instance that starts and stops three times.
WINDOWS: Mapping[str, int] = {"InstanceFlaps": 120}
# Deadline for an alert, also on a busy machine.
PATIENCE_SECONDS = 120.0
# Memory of all instances for the pool.
SEGMENT_BYTES = 16 << 20
QUESTION = "Tell me about the river and the old town behind the hill, and about the people who live there. " * 8


class System:
    """The running processes, and a client."""

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
        """The read end of the access log's pipe. Nothing reads it."""
        self.prometheus: Prometheus
        self.fired: set[str] = set()
        """The expected alerts that have fired."""
        self._num_asked = 0

    def ask(self, about: str = "", url: str = "") -> int:
        """Stream a short response to a new prompt, or to that of ``about``; return the status."""
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
        """Call these functions repeatedly during the block. At its end, raise the first exception of them."""

        def go_on(is_over: threading.Event) -> None:
            while not is_over.wait(0.25):
                for ask in asks:
                    ask()

        with working_beside(go_on):
            yield

    def expect_alerts(self, *names: str) -> None:
        """Wait until each of these alerts has fired, in any order."""
        pending = set(names)

        def have_fired() -> bool:
            query = f'max_over_time(ALERTS{{alertname=~"{"|".join(names)}",alertstate="firing"}}[10s])'
            pending.difference_update(sample.labels["alertname"] for sample in self.prometheus.ask(query))
            return not pending

        try:
            wait_until(have_fired, "alerts", PATIENCE_SECONDS, 0.5)
        except AssertionError:
            raise AssertionError(f"{sorted(pending)} did not fire within {PATIENCE_SECONDS:g} s") from None
        self.fired.update(names)


@contextmanager
def monitored_system(
    folder: Path, model: Path, *, router_flags: Sequence[str] = (), prefill_flags: Sequence[str] = ()
) -> Iterator[System]:
    """Run the system and Prometheus, after all series exist."""
    redis = RedisServer(folder)
    redis.start()
    flags = ["--shared-state", redis.url, "--workers", "2", "--max-concurrent-requests", "2", *router_flags]
    flags += ["--max-queued-requests", "1", "--queue-timeout-secs", "60", "--access-log", str(folder / "access.log")]
    os.mkfifo(folder / "access.log")
    reader = os.open(folder / "access.log", os.O_RDONLY | os.O_NONBLOCK)
    with (
        mooncake_master(folder / "master.log", "--default_kv_lease_ttl=200") as master,
        router(folder, *flags) as running_router,
    ):
        towards = ("--router", f"127.0.0.1:{running_router.port}")
        pooled: dict[str, Any] = {"master": master, "segment": str(SEGMENT_BYTES)}
        as_prefill = ("--splitwise-role", "prefill", *towards, *prefill_flags)
        with (
            instance(folder, model, *as_prefill, **pooled) as prefill,
            instance(folder, model, "--splitwise-role", "decode", *towards, **pooled) as decode,
        ):
            running_router.wait_for(prefill=1, decode=1)
            running = System(master, redis, running_router, prefill, decode, reader)
            with prometheus(folder, _write_config(folder, running)) as running.prometheus:
                wait_until(lambda: len(running.prometheus.ask("up == 1")) == 4, "the first figures of all")
                yield running
    with suppress(Exception):
        redis.kill()


def shorten_windows(expression: str, seconds: int = WINDOW_SECONDS) -> str:
    """Return the expression of a rule with seconds in place of minutes."""
    return re.sub(r"\[\d+m\]", f"[{seconds}s]", expression)


def _write_config(folder: Path, system: System) -> Path:
    """Write the configuration of deploy/ with this system's addresses, and with seconds in place of minutes."""
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
        rule["expr"] = shorten_windows(rule["expr"], WINDOWS.get(rule["alert"], WINDOW_SECONDS))
    ttft = next(rule for group in rules["groups"] for rule in group["rules"] if rule["alert"] == "TimeToFirstTokenHigh")
    ttft["expr"] = ttft["expr"].replace("> 10", f"> {BUDGET_SECONDS}")
    (folder / "alerts.yml").write_text(yaml.safe_dump(rules))
    (folder / "prometheus.yml").write_text(shipped)
    return folder / "prometheus.yml"
