"""Routers and workers agree although machines' clocks differ and are set back. Processes and Redis are real."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.router.conftest import MakeStandIn
from tests.router.stand_in import StandIn
from tests.support import plain_http
from tests.support.clocks import SkewedClock
from tests.support.processes import Child, child
from tests.support.redis import RedisServer, needs_redis
from tests.support.waiting import wait_until

DAY = 86400.0
# Workers renew their records every 10 s. An error with clocks shows after that.
RENEWED_SECONDS = 11.0
# This number of connections reaches both workers.
CONNECTIONS = 6


class Router(NamedTuple):
    process: Child
    url: str
    clock: SkewedClock

    def list_states(self) -> set[str]:
        """Return the instances' states at all workers. The connections are open together, so that they reach all."""
        with contextlib.ExitStack() as opened:
            host, port = self.url.removeprefix("http://").split(":")
            connections = [http.client.HTTPConnection(host, int(port), timeout=10) for _ in range(CONNECTIONS)]
            for connection in connections:
                opened.callback(connection.close)
                connection.connect()
            return {state for connection in connections for state in _read_states(connection)}

    def drain(self, instance: StandIn, **members: Any) -> None:
        order = {"instance": instance.key, **members}
        assert plain_http.post(f"{self.url}/admin/drain", json=order, timeout=10).status_code == 200


def _read_states(connection: http.client.HTTPConnection) -> list[str]:
    connection.request("GET", "/registered")
    listed: list[dict[str, Any]] = json.loads(connection.getresponse().read())["mixed"]
    return [each["state"] for each in listed] or ["unknown"]


StartRouter = Callable[..., Router]


@pytest.fixture
def start_router(tmp_path: Path) -> Iterator[StartRouter]:
    """A function that starts a router of two workers: ``start_router("a", 20.0)`` has a clock that is 20 s ahead."""
    with contextlib.ExitStack() as started:

        def start(name: str, ahead: float = 0.0, *flags: str) -> Router:
            clock = SkewedClock(tmp_path / name, ahead)
            argv = [sys.executable, "-m", "router.launch", "--host", "127.0.0.1", "--port", "0", "--workers", "2"]
            argv += ["--heartbeat-expiry-secs", "8", "--health-check-interval-secs", "0.5", *flags]
            process = started.enter_context(child(argv, tmp_path / f"{name}.log", clock.env))
            process.wait_for(lambda: "router listens at" in process.output, "its start")
            return Router(process, re.findall(r"router listens at (http://[\w.:]+)", process.output)[0], clock)

        yield start


def send_heartbeats(instance: StandIn, *routers: Router) -> None:
    """Register the instance repeatedly at these routers, for longer than a renewal and a late heartbeat take."""
    end = time.monotonic() + RENEWED_SECONDS

    def register() -> bool:
        for router in routers:
            assert instance.register(router.url).status_code == 200
            assert "unknown" not in router.list_states()
        return time.monotonic() > end

    wait_until(register, "the end of the heartbeats", pause_s=0.5)


def wait_for_state(state: str, *routers: Router) -> None:
    wait_until(lambda: all(router.list_states() == {state} for router in routers), f"{state} at workers", deadline_s=5)


def test_the_clock_of_a_child_is_as_far_ahead_as_it_is_set(tmp_path: Path) -> None:
    clock = SkewedClock(tmp_path / "clock", DAY)
    code = "import time; print(time.time(), time.time_ns())"
    for ahead in (DAY, -45.0):
        clock.set_ahead(ahead)
        ended = subprocess.run([sys.executable, "-c", code], env=clock.env, capture_output=True, text=True, check=True)
        seconds, nanoseconds = map(float, ended.stdout.split())
        assert seconds == pytest.approx(time.time() + ahead, abs=20)
        assert nanoseconds == pytest.approx(seconds * 1e9, abs=20e9)


@needs_redis
def test_drains_apply_everywhere_and_instances_remain_although_the_routers_clocks_differ(
    redis: RedisServer, start_router: StartRouter, stand_in: MakeStandIn
) -> None:
    shared = ("--shared-state", redis.url)
    future = start_router("tomorrow", DAY, *shared)
    first, second = start_router("first", 0.0, *shared), start_router("ahead", 20.0, *shared)
    instance = stand_in()
    for router in (future, first, second):
        instance.register(router.url)
    wait_for_state("healthy", first, second, future)
    send_heartbeats(instance, first)
    future.process.kill()
    first.drain(instance)
    wait_for_state("draining", first, second)
    second.clock.set_ahead(-25.0)
    second.drain(instance, undrain=True)
    wait_for_state("healthy", first, second)
    first.drain(instance)
    second.drain(instance, undrain=True)
    second.drain(instance)
    wait_for_state("draining", first, second)
    third = start_router("third", -DAY, *shared)
    wait_for_state("draining", first, second, third)
    for router in (first, second, third):
        assert f"{instance.key} is gone" not in router.process.output
