"""Two processes of one router, asked in turn: each knows what the other was told."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from router.fleet import Instance, Role, Snapshot
from router.policies.cache_aware import CacheAware
from router.sharing import Link, PrefixSync, fleet_sync
from router.sharing.records import STALE_SECONDS
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.sharing.links import until
from tests.router.stand_in import Received, Responder, StandIn
from tests.support.waiting import wait_until


@pytest.fixture
def workers(make_router: MakeRouter, stand_in: MakeStandIn) -> list[RouterUnderTest]:
    """Two processes, and one instance that registered at the first."""
    return make_router(stand_in(), workers=2).workers


def registered(worker: RouterUnderTest) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = worker.client.get("/registered").json()["mixed"]
    return listed


def test_an_instance_that_registered_at_one_is_known_to_the_other_when_it_has_its_answer(
    workers: list[RouterUnderTest], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = workers
    assert "the error response could not be sent" not in caplog.text
    assert [one["url"] for one in registered(second)] == [one["url"] for one in registered(first)]
    assert second.chat().status_code == 200


def test_the_engine_that_an_instance_registered_with_one_is_known_to_the_other(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    first, second = make_router(workers=2).workers
    stand_in().register(first.url, engine="vllm", kv_connector="mooncake")
    assert [(one["engine"], one["kv_connector"]) for one in registered(second)] == [("vllm", "mooncake")]


@pytest.mark.parametrize(
    ("order", "field", "value"),
    [
        ({"path": "drain"}, "state", "draining"),
        ({"path": "pause"}, "state", "paused"),
        ({"path": "weight", "weight": 0.25}, "weight", 0.25),
    ],
)
def test_an_order_that_one_carried_out_holds_for_both(
    workers: list[RouterUnderTest], order: dict[str, Any], field: str, value: object
) -> None:
    first, second = workers
    key = registered(first)[0]["url"].removeprefix("http://")
    path = order.pop("path")
    assert second.client.post(f"/admin/{path}", json={"instance": key, **order}).status_code == 200
    assert registered(first)[0][field] == registered(second)[0][field] == value


def test_records_are_renewed_for_those_that_come_later(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.sharing.fleet_sync.RENEWAL_SECONDS", 0.02)
    instance = stand_in()
    _, second = make_router(instance, workers=2).workers
    heard: list[dict[str, Any]] = []
    second.app.link.subscribe_to_records(lambda key, record: heard.append(record))
    wait_until(lambda: len(heard) >= 2, "two renewals")
    assert heard[1]["version"] == heard[0]["version"]


def test_an_order_is_not_undone_by_a_record_that_was_made_before_it_and_comes_late(
    workers: list[RouterUnderTest],
) -> None:
    first, second = workers
    late = _record_of(second)
    key = registered(first)[0]["url"].removeprefix("http://")
    assert first.client.post("/admin/drain", json={"instance": key}).status_code == 200
    tell(first, late)
    assert registered(first)[0]["state"] == "draining"


def test_an_instance_of_a_role_that_this_router_has_not_is_not_taken(
    workers: list[RouterUnderTest], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = workers
    record = _record_of(first)
    tell(second, {**record, "fields": {**record["fields"], "role": "prefill", "port": 1}}, "127.0.0.1:1")
    assert len(registered(second)) == 1
    assert not second.client.get("/registered").json()["prefill"]
    assert "which another process reported, is not added" in caplog.text


def test_a_heartbeat_at_one_keeps_the_instance_alive_at_both(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance, workers=2, health_check_interval_secs=0.05, heartbeat_expiry_secs=1.0)
    first, second = router.workers
    for _ in range(2):
        instance.register(first.url)
    instance.answers_probes = False  # healthy or not, only its heartbeat counts
    known = second.app.registry.get(f"127.0.0.1:{instance.port}")
    assert known is not None
    assert known.has_heartbeat
    before = known.last_registered
    instance.answers_probes = True
    instance.register(first.url)
    assert known.last_registered > before
    wait_until(lambda: not registered(first) and not registered(second), "the silent instance to be forgotten")


def test_an_instance_outlives_the_process_that_it_registered_at(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    probes = {"health_check_interval_secs": 0.05, "heartbeat_expiry_secs": 0.5, "health_failure_threshold": 1}
    first, second = make_router(instance, workers=2, **probes).workers
    instance.register(first.url)
    known = second.app.registry.get(f"127.0.0.1:{instance.port}")
    assert known is not None
    assert known.has_heartbeat
    first.thread.run(leave(first))
    wait_until(lambda: time.monotonic() - known.last_registered > 1.0, "its heartbeat to be late")
    assert second.chat().status_code == 200
    instance.stop()
    wait_until(lambda: not registered(second), "the dead instance to be forgotten")


def test_where_one_finds_an_instance_dead_the_other_looks_at_once(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    dying, living = stand_in(), stand_in()
    first, second = make_router(dying, living, workers=2, health_failure_threshold=1).workers
    dying.stop()
    for _ in range(4):
        assert first.chat().status_code == 200
    wait_until(
        lambda: sorted(one["state"] for one in registered(second)) == ["healthy", "unhealthy"], "the other to know"
    )


def test_one_that_is_unhealthy_here_stays_so_until_it_answers_here(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    first, second = make_router(instance, workers=2).workers
    known = second.app.registry.get(f"127.0.0.1:{instance.port}")
    assert known is not None
    instance.answers_probes = False
    known.mark_unhealthy("it cannot be reached from here")
    tell(second, _record_of(first))
    wait_until(lambda: not second.app.health._suspects, "its probe to fail")
    assert not known.healthy
    instance.answers_probes = True
    tell(second, _record_of(first))
    wait_until(lambda: known.healthy, "a probe")


def test_an_emptied_cache_is_empty_for_both(workers: list[RouterUnderTest], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = workers
    lost: list[str] = []
    second.app.registry.events.lost_caches.subscribe(lost.append)
    key = registered(first)[0]["url"].removeprefix("http://")
    first.app.fleet_sync.announce_lost_cache(key)
    wait_until(lambda: lost == [key], "the other to know")


def test_a_request_is_explained_by_whichever_is_asked(workers: list[RouterUnderTest]) -> None:
    first, second = workers
    first.chat(request_id="r1")
    explained = second.client.get("/admin/explain/r1")
    assert explained.json() == first.client.get("/admin/explain/r1").json()
    assert second.client.get("/admin/explain/r2").status_code == 404
    assert [each["request_id"] for each in second.client.get("/admin/requests").json()["requests"]] == ["r1"]


def test_a_request_is_aborted_by_whichever_is_asked(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    async def behave(request: Received, respond: Responder) -> None:
        if request.target != "/v1/abort_requests":
            await respond.start_stream()
            await respond.event(json.dumps({"choices": [{"delta": {"content": "a"}}]}))
            await respond.peer_left.wait()

    first, second = make_router(stand_in(behave=behave), workers=2).workers
    with first.stream(request_id="r1"):
        answer = second.client.post("/v1/abort_requests", json={"req_ids": ["r1", "r2"]}).json()
    assert answer["result"]["not_found"] == ["r2"]


def test_figures_are_of_all_processes(workers: list[RouterUnderTest]) -> None:
    first, second = workers
    for _ in range(3):
        first.chat()
    second.chat()
    for worker in workers:
        text = worker.client.get("/metrics").text
        assert 'http_requests_total{endpoint="/v1/chat/completions",method="POST",status_code="200"} 4.0' in text
        assert 'router_instances{role="mixed",state="healthy"} 1.0' in text
        assert text.count("# TYPE router_instances gauge") == 1


def test_a_prompt_that_one_placed_is_known_to_the_other(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instances = [stand_in(), stand_in()]
    first, second = make_router(*instances, workers=2).workers
    prompt = {"messages": [{"role": "user", "content": "a long prompt " * 400}]}
    placed = first.chat(**prompt).headers["x-router-mixed"]
    wait_until(lambda: len(second.app.selector.policies[second.app.registry.roles[0]]._index) > 0, "the prompt")  # type: ignore[attr-defined]
    assert {second.chat(**prompt).headers["x-router-mixed"] for _ in range(4)} == {placed}


def drain_until_restart(worker: RouterUnderTest, instance: StandIn) -> None:
    order = {"instance": instance.key, "until_restart": True}
    assert worker.client.post("/admin/drain", json=order).json()["state"] == "draining"


def states(*workers: RouterUnderTest) -> list[str]:
    return [registered(worker)[0]["state"] for worker in workers]


def test_a_drain_ends_for_both_when_a_new_process_registers_at_one(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    first, second = make_router(workers=2).workers
    instance.register(first.url, start_id="a")
    drain_until_restart(first, instance)
    for worker in (first, second):
        instance.register(worker.url, start_id="a")
    assert states(first, second) == ["draining"] * 2
    instance.register(second.url, start_id="b")
    assert states(first, second) == ["healthy"] * 2


def test_a_drain_that_ended_at_one_is_not_begun_again_by_a_heartbeat_at_the_other(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    first, second = make_router(instance, workers=2).workers
    drain_until_restart(first, instance)
    late = _record_of(second)
    known = first.app.registry.get(instance.key)
    assert known is not None

    async def restart() -> None:
        known.record_failed_probe("connection refused", 3, may_finish=True)
        known.record_passed_probe(time.monotonic(), 1)

    first.thread.run(restart())
    tell(first, {**late, "version": [1000, "later"]})
    wait_until(lambda: states(first, second) == ["healthy"] * 2, "both to know")


def test_an_order_that_one_missed_reaches_it_with_the_next_renewal(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    first, second = make_router(instance, workers=2).workers
    known = first.app.registry.get(instance.key)
    assert known is not None

    async def make_renewal() -> dict[str, Any]:
        known.set_draining(True)
        return first.app.fleet_sync._make_record(known, is_news=False)

    tell(second, first.thread.run(make_renewal()))
    assert states(second) == ["draining"]


def test_one_that_was_removed_at_one_is_removed_at_both(workers: list[RouterUnderTest]) -> None:
    first, second = workers
    (instance,) = first.app.registry

    async def remove() -> None:
        first.app.registry.remove(instance)
        first.app.fleet_sync.announce_removal(instance)

    first.thread.run(remove())
    wait_until(lambda: not registered(second), "the other to know")


def key_of(worker: RouterUnderTest) -> str:
    return str(registered(worker)[0]["url"].removeprefix("http://"))


def forget(worker: RouterUnderTest, key: str) -> None:
    """Let ``worker`` forget an instance that is silent, as another process need not."""

    async def remove() -> None:
        instance = worker.app.registry.get(key)
        assert instance is not None
        worker.app.registry.remove(instance)

    worker.thread.run(remove())


@pytest.mark.parametrize("has_heartbeat", [True, False])
def test_one_that_was_forgotten_comes_back_with_its_next_heartbeat_or_where_it_has_none_with_a_renewal(
    workers: list[RouterUnderTest], has_heartbeat: bool
) -> None:
    first, second = workers
    renewal = {**renewal_of(first), "has_heartbeat": has_heartbeat}
    forget(second, key_of(first))
    tell(second, renewal)
    assert bool(registered(second)) is not has_heartbeat
    tell(second, {**renewal, "version": [100, "later"]})
    assert registered(second)


def test_an_order_from_before_an_instance_was_gone_is_void_for_all_when_it_registers_again(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    first, second = make_router(instance, workers=2).workers
    order = {"instance": instance.key}
    assert second.client.post("/admin/drain", json=order).status_code == 200
    forget(first, instance.key)
    instance.register(first.url)
    assert states(first, second) == ["healthy"] * 2


def test_a_router_that_alone_has_lost_an_instance_does_not_end_its_orders(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    first, second = make_router(instance, workers=2).workers
    assert second.client.post("/admin/drain", json={"instance": instance.key}).status_code == 200
    first.app.link.trouble = "Redis is gone"
    forget(first, instance.key)
    first.app.link.trouble = ""
    instance.register(first.url)
    assert states(first, second) == ["draining"] * 2
    assert first.client.post("/admin/drain", json={"instance": instance.key, "undrain": True}).status_code == 200
    instance.register(first.url)
    assert states(first, second) == ["healthy"] * 2


@pytest.mark.parametrize(
    ("teller", "has_heartbeat", "is_added"),
    [("another", False, False), ("another", True, True), ("", False, True)],
)
def test_one_in_the_register_file_of_another_router_is_added_if_it_registers(
    workers: list[RouterUnderTest], teller: str, has_heartbeat: bool, is_added: bool
) -> None:
    first, second = workers
    record = {**renewal_of(first), "permanent": True, "has_heartbeat": has_heartbeat}
    forget(second, key_of(first))
    tell(second, {**record, "version": [100, "later"], "teller": teller or second.app.link.name})
    assert bool(registered(second)) is is_added


def test_an_order_that_holds_elsewhere_holds_here_when_a_forgotten_instance_is_told_of_again(
    workers: list[RouterUnderTest],
) -> None:
    first, second = workers
    key = key_of(first)
    assert first.client.post("/admin/drain", json={"instance": key}).status_code == 200
    record = renewal_of(first)
    forget(second, key)
    tell(second, {**record, "version": [100, "later"]})
    assert states(second) == ["draining"]


@pytest.mark.parametrize(("ordered", "state"), [([100, "x"], "draining"), ([0, "x"], "draining"), ([0, ""], "healthy")])
def test_of_two_orders_the_one_of_the_later_version_counts(
    workers: list[RouterUnderTest], ordered: list[Any], state: str
) -> None:
    first, second = workers
    record = renewal_of(first)
    tell(second, {**record, "orders": {**record["orders"], "version": ordered, "draining": True}})
    assert states(second) == [state]


def test_an_instance_that_another_process_finds_healthy_is_not_gone(workers: list[RouterUnderTest]) -> None:
    first, second = workers
    (known,) = second.app.registry
    known.last_healthy = known.last_registered = 0.0
    tell(second, {**renewal_of(first), "healthy": False})
    assert known.is_silent(time.monotonic(), expiry=30.0)
    tell(second, renewal_of(first))
    assert not known.is_silent(time.monotonic(), expiry=30.0)


def test_what_is_known_of_instances_that_are_long_gone_is_forgotten(workers: list[RouterUnderTest]) -> None:
    first, _ = workers
    sync, key = first.app.fleet_sync, key_of(first)

    async def grow_old(seconds: float) -> set[str]:
        sync._forget_old(time.monotonic() + seconds)
        return set(sync._known)

    assert first.thread.run(grow_old(2 * STALE_SECONDS)) == {key}
    forget(first, key)
    assert first.thread.run(grow_old(STALE_SECONDS)) == {key}
    assert first.thread.run(grow_old(4 * STALE_SECONDS)) == set()


def test_renewing_forgets_what_is_long_gone(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.sharing.fleet_sync.RENEWAL_SECONDS", 0.02)
    sync = make_router(stand_in(), workers=2).app.fleet_sync
    sync._known["10.0.0.1:80"] = fleet_sync._Known()  # last heard of before all time
    wait_until(lambda: "10.0.0.1:80" not in sync._known, "it to be forgotten")


def test_a_renewal_is_no_heartbeat_and_a_later_record_of_a_heartbeat_is(workers: list[RouterUnderTest]) -> None:
    first, second = workers
    (known,) = second.app.registry
    before = known.last_registered
    renewal = {**renewal_of(first), "has_heartbeat": True}
    tell(second, renewal)
    assert (known.last_registered, known.has_heartbeat) == (before, False)
    tell(second, {**renewal, "version": [100, "later"]})
    assert known.last_registered > before
    assert known.has_heartbeat


@pytest.mark.parametrize(
    ("version", "has_heartbeat", "is_removed"),
    [([100, "later"], False, True), ([100, "later"], True, False), ([0, ""], False, False)],
)
def test_a_removal_counts_if_it_is_replacementr_and_the_instance_has_no_heartbeat(
    workers: list[RouterUnderTest], version: list[Any], has_heartbeat: bool, is_removed: bool
) -> None:
    first, second = workers
    (known,) = second.app.registry
    known.has_heartbeat = has_heartbeat
    tell(second, {**renewal_of(first), "version": version, "is_removed": True})
    assert bool(registered(second)) is not is_removed
    forgotten = {**renewal_of(first), "version": [200, "later"], "is_removed": True}
    tell(second, forgotten)  # of one that may not be known: nothing is added
    assert bool(registered(second)) is has_heartbeat


def test_models_that_one_was_told_later_are_known_to_the_other(workers: list[RouterUnderTest]) -> None:
    first, second = workers
    (known,) = second.app.registry
    tell(second, {**renewal_of(first), "models": ["new"], "models_age": -1.0})
    assert known.models == frozenset({"new"})
    tell(second, {**renewal_of(first), "models": ["old"], "models_age": 1e6})
    assert known.models == frozenset({"new"})


def test_a_router_that_is_one_process_remembers_nothing_to_tell(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(instance := stand_in())
    router.client.post("/admin/drain", json={"instance": instance.key})
    assert router.app.fleet_sync._known == {}


def said_is(instance: Instance, change: str) -> bool:
    return instance.logged_changes.get("health") == change


def test_the_log_has_each_change_once_though_each_process_sees_it(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Link, "is_of_same_router", lambda link, name: True)
    caplog.set_level("INFO", "router.fleet")
    instance = stand_in()
    first, second = make_router(instance, workers=2, health_failure_threshold=1, health_success_threshold=1).workers
    order = {"instance": instance.key}
    for path, more in (("drain", {}), ("drain", {"undrain": True}), ("pause", {}), ("weight", {"weight": 0.5})):
        assert second.client.post(f"/admin/{path}", json={**order, **more}).status_code == 200
    for is_up in (False, True, False):
        instance.health = 200 if is_up else 500
        first.thread.run(first.app.health.check_all())
        change = "is healthy again" if is_up else "is unhealthy"
        (elsewhere,) = second.app.registry
        wait_until(partial(said_is, elsewhere, change), "the second to know what the first has logged")
        second.thread.run(second.app.health.check_all())
    told = [
        *("registered", "serves ", "drains", "takes requests again", "is paused", "has weight 0.5"),
        *("is unhealthy", "is healthy again"),
    ]
    counts = {change: sum(f"{instance.key} {change}" in line for line in caplog.messages) for change in told}
    assert counts == dict.fromkeys(told, 1) | {"is unhealthy": 2}


def test_many_placed_prompts_are_sent_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[int]:
        link, policy = Link(), CacheAware()
        sizes: list[int] = []
        link.is_alone = False
        monkeypatch.setattr(link, "publish_event", lambda topic, placed: sizes.append(len(placed)))
        PrefixSync(link, {Role.MIXED: policy})
        for start in range(0, 100 * 64, 64):
            policy._add_chain(range(start, start + 64), "10.0.0.1:1")
        await until(lambda: sum(sizes) == 100)
        return sizes

    assert asyncio.run(run()) == [26, 26, 26, 22]


async def leave(worker: RouterUnderTest) -> None:
    """Cut a process's link, as its death does."""
    link = worker.app.link
    assert isinstance(link, Link)
    link.disconnect()


def restart_from_snapshot(worker: RouterUnderTest, snapshot: Snapshot) -> None:
    async def restore() -> None:
        snapshot.restore(time.monotonic())

    worker.thread.run(restore())


def test_a_snapshot_does_not_undo_an_order_that_another_router_took_later(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path
) -> None:
    first, second = make_router(stand_in(), workers=2, snapshot_path=str(tmp_path / "snapshot")).workers
    (instance,) = first.app.registry
    instance.permanent = True  # as of a register file
    snapshot = first.app.snapshot
    assert snapshot is not None
    snapshot.save()
    assert second.client.post("/admin/drain", json={"instance": instance.key}).status_code == 200
    restart_from_snapshot(first, snapshot)
    tell(second, renewal_of(first))
    assert registered(first)[0]["state"] == registered(second)[0]["state"] == "draining"


def test_a_restored_order_has_the_version_that_it_was_given_with(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path
) -> None:
    instance, path = stand_in(), str(tmp_path / "snapshot")
    before = make_router(instance, workers=2, snapshot_path=path)
    key = registered(before)[0]["url"].removeprefix("http://")
    assert before.client.post("/admin/drain", json={"instance": key}).status_code == 200
    snapshot = before.app.snapshot
    assert snapshot is not None
    snapshot.save()
    given = renewal_of(before)["orders"]
    for worker in before.workers:
        worker.stop()
    after = make_router(workers=2, snapshot_path=path)
    assert renewal_of(after)["orders"] == given


def tell(worker: RouterUnderTest, record: dict[str, Any], key: str = "") -> None:
    """Let ``worker`` hear of a record as from another process."""

    async def hear() -> None:
        fields = record["fields"]
        worker.app.fleet_sync._on_record(key or f"{fields['host_ip']}:{fields['port']}", record)

    worker.thread.run(hear())


def _record_of(worker: RouterUnderTest) -> dict[str, Any]:
    """The record by which ``worker`` tells of its only instance."""
    (instance,) = worker.app.registry
    return worker.app.fleet_sync._make_record(instance, is_news=True)


def renewal_of(worker: RouterUnderTest) -> dict[str, Any]:
    """The record by which ``worker`` tells again what it has told of its only instance."""
    (instance,) = worker.app.registry
    return worker.app.fleet_sync._make_record(instance, is_news=False)
