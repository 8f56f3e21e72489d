"""How the router notices that instances die and come back. Instances are stand-ins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from router.fleet.breaker import FAILURES
from tests.router.conftest import RouterUnderTest
from tests.router.stand_in import Received, Responder, StandIn, chat_answer
from tests.support.waiting import wait_until

MakeRouter = Callable[..., RouterUnderTest]
MakeStandIn = Callable[..., StandIn]

SOON = {"health_check_interval_secs": 0.05, "health_check_timeout_secs": 0.5}


def states(router: RouterUnderTest) -> list[str]:
    return [instance.state for instance in router.app.registry]


def test_probes_notice_an_instance_that_turns_unhealthy_and_recovers(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    router = make_router(instance, **SOON)
    instance.health = 500
    wait_until(lambda: states(router) == ["unhealthy"], "the failed probes")
    instance.health = 200
    wait_until(lambda: states(router) == ["healthy"], "the good probe")


def test_one_hanging_instance_does_not_hold_up_the_probes_of_others(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
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


def test_a_refused_connection_makes_an_instance_unhealthy_at_once(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    router = make_router(instance)
    instance.stop()
    assert router.chat().status_code == 502
    assert states(router) == ["unhealthy"]


def test_probes_bring_an_instance_back_that_refused_a_connection(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    router = make_router(instance, **SOON)
    instance.stop()
    router.chat()
    instance.start()
    wait_until(lambda: router.chat().status_code == 200, "an answer")


def test_registering_again_brings_an_instance_back_at_once(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance)
    instance.stop()
    assert router.chat().status_code == 502
    instance.start()
    assert instance.register(router.url).status_code == 200
    assert router.chat().status_code == 200


def test_an_unhealthy_instance_is_probed_before_its_heartbeat_counts(
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


def test_a_dead_instance_is_forgotten(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance, heartbeat_expiry_secs=0.3, **SOON)
    instance.stop()
    wait_until(lambda: states(router) == [], "the router to forget it")


def test_an_instance_whose_heartbeat_stopped_is_forgotten(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance, heartbeat_expiry_secs=0.3, **SOON)
    instance.register(router.url)
    wait_until(lambda: states(router) == [], "the router to forget it")
    assert instance.register(router.url).status_code == 200
    assert router.chat().status_code == 200


def test_probes_say_nothing_of_a_circuit_that_live_requests_broke(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    router = make_router(instance)
    (registered,) = router.app.registry
    for _ in range(FAILURES):
        registered.record_failure(0.0, "it answered with 500")
    router.thread.run(router.app.health.check_all())
    assert (registered.state, registered.breaker.state) == ("healthy", "open")


def test_what_runs_at_an_instance_that_accepts_nothing_new_is_left_to_finish(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    may_finish = asyncio.Event()

    async def finishes_late(request: Received, respond: Responder) -> None:
        await may_finish.wait()
        await respond.answer(200, chat_answer("late"))

    instance = stand_in("mixed", finishes_late)
    router = make_router(instance, health_failure_threshold=1)
    with ThreadPoolExecutor(1) as client:
        running = client.submit(router.chat)
        wait_until(lambda: instance.running == 1, "the request")
        router.thread.run(instance.accept_no_more())
        router.thread.run(router.app.health.check_all())
        assert router.chat().status_code == 503
        router.thread.loop.call_soon_threadsafe(may_finish.set)
        assert running.result(10).json()["choices"][0]["message"]["content"] == "late"


def test_a_heartbeat_does_not_make_up_for_failed_probes(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance, health_failure_threshold=3)
    instance.health = 500
    for _ in range(3):
        instance.register(router.url)
        router.thread.run(router.app.health.check_all())
    assert states(router) == ["unhealthy"]


def test_who_asks_for_health_does_not_hasten_the_verdict(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance, health_failure_threshold=2)
    instance.health = 500
    for _ in range(3):
        assert router.client.get("/health_generate").status_code == 503
    assert states(router) == ["healthy"]
