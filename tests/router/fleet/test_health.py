"""Probes and connections show the router that instances end and return. Instances are stand-ins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from router.fleet import AwakeClock, HealthMonitor, Instance, Registry, Tasks, health
from router.fleet.breaker import FAILURES
from router.http import (
    Address,
    ConnectFailed,
    ConnectRefused,
    NameUnresolved,
    NoRoom,
    Response,
    TimedOut,
    UpstreamError,
)
from router.settings import RouterSettings
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.fleet.registrations import registration
from tests.router.stand_in import Received, Responder, chat_answer
from tests.support.waiting import wait_until

FREQUENT_PROBES = {"health_check_interval_secs": 0.05, "health_check_timeout_secs": 0.5}


def states(router: RouterUnderTest) -> list[str]:
    return [instance.state for instance in router.app.registry]


def test_probes_detect_that_an_instance_becomes_unhealthy_and_healthy_again(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    router = make_router(instance, **FREQUENT_PROBES)
    instance.health = 500
    wait_until(lambda: states(router) == ["unhealthy"], "the failed probes")
    instance.health = 200
    wait_until(lambda: states(router) == ["healthy"], "the passed probe")


def test_a_hanging_instance_does_not_delay_the_probes_of_others(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    hanging, other = stand_in(), stand_in()
    router = make_router(hanging, other, health_check_interval_secs=0.05, health_check_timeout_secs=1000.0)
    hanging.stop()

    async def accept_and_hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def listen() -> asyncio.AbstractServer:
        return await asyncio.start_server(accept_and_hang, "127.0.0.1", hanging.port)

    server = router.thread.run(listen())
    before = other.probes
    wait_until(lambda: other.probes > before, "a probe of the other instance")
    router.thread.loop.call_soon_threadsafe(server.close)


def test_an_instance_that_refused_a_connection_is_used_again_after_a_probe(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    router = make_router(instance, **FREQUENT_PROBES)
    instance.stop()
    router.chat()
    instance.start()
    wait_until(lambda: router.chat().status_code == 200, "an answer")


def test_a_registration_makes_an_instance_healthy_at_once(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance)
    instance.stop()
    assert router.chat().status_code == 502
    instance.start()
    assert instance.register(router.url).status_code == 200
    assert router.chat().status_code == 200


def test_an_unhealthy_instance_is_probed_before_its_heartbeat_is_accepted(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    router = make_router(instance)
    instance.stop()
    router.chat()
    assert instance.register(router.url).status_code == 400
    assert states(router) == ["unhealthy"]


def test_a_broken_connection_makes_the_router_probe_the_instance(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    async def cut(request: Received, respond: Responder) -> None:
        respond.cut()

    instance = stand_in("mixed", cut)
    router = make_router(instance, health_failure_threshold=1)
    instance.health = 500
    router.chat()
    wait_until(lambda: states(router) == ["unhealthy"], "the probe")


def test_a_dead_instance_is_removed(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance, heartbeat_expiry_secs=0.3, **FREQUENT_PROBES)
    instance.stop()
    wait_until(lambda: states(router) == [], "its removal")


def test_probes_do_not_close_a_breaker_that_requests_opened(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance)
    (registered,) = router.app.registry
    for _ in range(FAILURES):
        registered.record_failure(0.0, "it answered with 500")
    router.thread.run(router.app.health.check_all())
    assert (registered.state, registered.breaker.state) == ("healthy", "open")


def test_requests_at_an_instance_that_accepts_no_connections_can_finish(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    may_finish = asyncio.Event()

    async def finish_late(request: Received, respond: Responder) -> None:
        await may_finish.wait()
        await respond.answer(200, chat_answer("late"))

    instance = stand_in("mixed", finish_late)
    router = make_router(instance, health_failure_threshold=1)
    with ThreadPoolExecutor(1) as client:
        running = client.submit(router.chat)
        wait_until(lambda: instance.running == 1, "the request")
        router.thread.run(instance.accept_no_more())
        router.thread.run(router.app.health.check_all())
        assert router.chat().status_code == 503
        router.thread.loop.call_soon_threadsafe(may_finish.set)
        assert running.result(10).json()["choices"][0]["message"]["content"] == "late"


def test_a_heartbeat_does_not_reset_failed_probes(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance, health_failure_threshold=3)
    instance.health = 500
    for _ in range(3):
        instance.register(router.url)
        router.thread.run(router.app.health.check_all())
    assert states(router) == ["unhealthy"]


def test_requests_for_health_generate_do_not_count_as_probes(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance, health_failure_threshold=2)
    instance.health = 500
    for _ in range(3):
        assert router.client.get("/health_generate").status_code == 503
    assert states(router) == ["healthy"]


def fail_with(router: RouterUnderTest, error: Exception) -> Instance:
    """Report a failed connection of a request to the only instance."""
    (instance,) = router.app.registry

    async def fail() -> None:
        router.app.health.on_trouble(instance, error)

    router.thread.run(fail())
    return instance


@pytest.mark.parametrize("error", [ConnectFailed("not in time"), NameUnresolved("try again"), TimedOut("late")])
def test_a_connection_that_fails_for_another_reason_causes_only_a_probe(
    make_router: MakeRouter, stand_in: MakeStandIn, error: UpstreamError
) -> None:
    instance = stand_in()
    router = make_router(instance, health_failure_threshold=3)
    before = instance.probes
    known = fail_with(router, error)
    assert known.healthy
    wait_until(lambda: instance.probes > before, "a probe")
    assert known.healthy


def test_a_refused_connection_makes_an_instance_unhealthy(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    known = fail_with(make_router(stand_in()), ConnectRefused("nobody listens"))
    assert not known.healthy


class Upstream:
    """Connections on which probes fail with ``error``, or pass."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.on_fetch: Callable[[], None] = lambda: None
        self.probed: list[str] = []

    async def fetch(self, address: Address, method: str, target: str, *, timeout: float) -> Response:
        self.probed.append(str(address))
        self.on_fetch()
        if self.error is not None:
            raise self.error
        return Response(200, [], b"")


class MonitoredInstances:
    """Instances and their health monitor."""

    def __init__(self, count: int = 1, **settings: Any) -> None:
        self.upstream = Upstream()
        self.registry = Registry(splitwise=False)
        self.lost: list[str] = []
        self.registry.events.lost_caches.subscribe(self.lost.append)
        self.instances = [
            self.registry.register(registration(role="mixed", port=number + 1, models=["m"]), time.monotonic())
            for number in range(count)
        ]
        self.tasks = Tasks()
        self.monitor = HealthMonitor(RouterSettings(**settings), self.registry, self.upstream, self.tasks)  # type: ignore[arg-type]
        self.now = 100.0
        self.monitor.awake = AwakeClock(lambda: self.now)

    def check(self, times: int = 1) -> None:
        for _ in range(times):
            asyncio.run(self.monitor.check_all())


def test_without_a_name_server_instances_keep_their_state_and_one_line_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitored = MonitoredInstances()
    monitored.upstream.error = NameUnresolved("cannot connect: Temporary failure in name resolution")
    monitored.check(5)
    assert monitored.instances[0].healthy
    assert caplog.text.count("so its state is unchanged") == 1
    monitored.upstream.error = None
    monitored.check()
    monitored.upstream.error = NoRoom("Too many open files")
    monitored.check(2)
    assert caplog.text.count("so its state is unchanged") == 2


@pytest.mark.parametrize(
    ("errors", "is_lost"),
    [
        ([ConnectFailed("no connection in time")] * 3, False),
        ([ConnectFailed("no connection in time"), ConnectFailed("TLS"), ConnectRefused("nobody listens")], True),
        ([ConnectRefused("nobody listens")] + [ConnectFailed("no connection in time")] * 2, True),
        ([TimedOut("no answer")] * 3, True),
    ],
)
def test_the_cache_of_an_instance_that_was_only_unreachable_is_not_lost(errors: list[Exception], is_lost: bool) -> None:
    monitored = MonitoredInstances()
    (instance,) = monitored.instances
    for error in errors:
        monitored.upstream.error = error
        monitored.check()
    assert instance.state == "unhealthy"
    monitored.upstream.error = None
    monitored.check(2)
    assert instance.state == "healthy"
    assert bool(monitored.lost) is is_lost
    assert (instance.weight(time.monotonic()) < 1.0) is is_lost


@pytest.mark.parametrize("error", [TimedOut("no answer in time"), ConnectFailed("no connection in time")])
def test_a_probe_that_times_out_while_this_process_does_not_run_does_not_count(error: Exception) -> None:
    monitored = MonitoredInstances()
    monitored.upstream.error = error

    def stall() -> None:
        monitored.now += 8.0

    monitored.upstream.on_fetch = stall
    monitored.check(5)
    assert monitored.instances[0].healthy
    monitored.upstream.on_fetch = lambda: None
    monitored.check(3)
    assert [each.healthy for each in monitored.instances] == [False]


def test_seconds_in_which_this_process_does_not_run_are_no_missed_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monitored = MonitoredInstances(heartbeat_expiry_secs=30.0)
    (instance,) = monitored.instances
    instance.has_heartbeat = True
    began = instance.last_registered
    now = began + 100.0
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: now))

    async def nothing() -> None:
        pass

    monitored.now += 90.25
    asyncio.run(monitored.monitor._run_round(nothing))
    assert list(monitored.registry) == [instance]
    asyncio.run(monitored.monitor._run_round(nothing))
    assert list(monitored.registry) == [instance]
    now += 21.0
    asyncio.run(monitored.monitor._run_round(nothing))
    assert list(monitored.registry) == []


def test_probes_are_spread_over_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monitored = MonitoredInstances(count=10, health_check_interval_secs=5.0)
    probed: list[int] = []
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        probed.append(len(monitored.upstream.probed))
        pauses.append(seconds)
        await sleep(0)

    sleep = asyncio.sleep
    monkeypatch.setattr(health, "asyncio", SimpleNamespace(sleep=pause))
    asyncio.run(monitored.monitor._probe_one_by_one())
    assert pauses[:10] == [0.5] * 10
    assert probed[:10] == list(range(10))
    assert len(pauses) == 11
    assert 4.0 < pauses[10] <= 5.0  # the rest of the interval, because these pauses take no time


def test_an_instance_that_is_removed_meanwhile_is_not_probed() -> None:
    monitored = MonitoredInstances(count=2, health_check_interval_secs=0.02)
    monitored.upstream.on_fetch = lambda: (
        monitored.registry.remove(monitored.instances[1]) if len(list(monitored.registry)) > 1 else None
    )
    asyncio.run(monitored.monitor._probe_one_by_one())
    assert monitored.upstream.probed == [monitored.instances[0].key]


def test_a_first_registration_is_probed_and_a_second_keeps_the_instance_without_a_probe() -> None:
    monitored = MonitoredInstances(count=0)
    given = registration(role="mixed", models=["m"])
    first = asyncio.run(monitored.monitor.probe_and_register(given))
    again = asyncio.run(monitored.monitor.probe_and_register(given))
    assert list(monitored.registry) == [first]
    assert again is first
    assert monitored.upstream.probed == [first.key]
    assert (first.healthy, first.models) == (True, frozenset({"m"}))
