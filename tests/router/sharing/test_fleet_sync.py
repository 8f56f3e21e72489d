"""Two processes of one router exchange their instances, commands, metrics and prefixes."""

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
    """Two processes of a router, and one instance that has registered at the first."""
    return make_router(stand_in(), workers=2).workers


def list_registered(worker: RouterUnderTest) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = worker.client.get("/registered").json()["mixed"]
    return listed


def test_an_instance_that_has_registered_at_one_process_is_known_to_the_other(
    workers: list[RouterUnderTest], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = workers
    assert "the error response could not be sent" not in caplog.text
    assert [one["url"] for one in list_registered(second)] == [one["url"] for one in list_registered(first)]
    assert second.chat().status_code == 200


def test_the_engine_of_a_registration_at_one_process_is_known_to_the_other(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    first, second = make_router(workers=2).workers
    stand_in().register(first.url, engine="vllm", kv_connector="mooncake")
    assert [(one["engine"], one["kv_connector"]) for one in list_registered(second)] == [("vllm", "mooncake")]


@pytest.mark.parametrize(
    ("order", "field", "value"),
    [
        ({"path": "drain"}, "state", "draining"),
        ({"path": "pause"}, "state", "paused"),
        ({"path": "weight", "weight": 0.25}, "weight", 0.25),
    ],
)
def test_a_command_at_one_process_applies_to_both(
    workers: list[RouterUnderTest], order: dict[str, Any], field: str, value: object
) -> None:
    first, second = workers
    key = list_registered(first)[0]["url"].removeprefix("http://")
    path = order.pop("path")
    assert second.client.post(f"/admin/{path}", json={"instance": key, **order}).status_code == 200
    assert list_registered(first)[0][field] == list_registered(second)[0][field] == value


def test_records_are_renewed_periodically(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.sharing.fleet_sync.RENEWAL_SECONDS", 0.02)
    instance = stand_in()
    _, second = make_router(instance, workers=2).workers
    received: list[dict[str, Any]] = []
    second.app.link.subscribe_to_records(lambda key, record: received.append(record))
    wait_until(lambda: len(received) >= 2, "two renewals")
    assert received[1]["version"] == received[0]["version"]


def test_an_earlier_record_that_arrives_late_does_not_undo_a_command(
    workers: list[RouterUnderTest],
) -> None:
    first, second = workers
    late = make_record(second)
    key = list_registered(first)[0]["url"].removeprefix("http://")
    assert first.client.post("/admin/drain", json={"instance": key}).status_code == 200
    deliver(first, late)
    assert list_registered(first)[0]["state"] == "draining"


def test_an_instance_with_a_role_that_this_router_lacks_is_not_added(
    workers: list[RouterUnderTest], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = workers
    record = make_record(first)
    deliver(second, {**record, "fields": {**record["fields"], "role": "prefill", "port": 1}}, "127.0.0.1:1")
    assert len(list_registered(second)) == 1
    assert not second.client.get("/registered").json()["prefill"]
    assert "which another process reported, cannot be added to this router" in caplog.text


def test_a_heartbeat_at_one_process_counts_at_both(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
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
    wait_until(lambda: not list_registered(first) and not list_registered(second), "the removal of the silent instance")


def test_an_instance_outlives_the_process_of_its_registration(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    probes = {"health_check_interval_secs": 0.05, "heartbeat_expiry_secs": 0.5, "health_failure_threshold": 1}
    first, second = make_router(instance, workers=2, **probes).workers
    instance.register(first.url)
    known = second.app.registry.get(f"127.0.0.1:{instance.port}")
    assert known is not None
    assert known.has_heartbeat
    first.thread.run(cut_link(first))
    wait_until(lambda: time.monotonic() - known.last_registered > 1.0, "a late heartbeat")
    assert second.chat().status_code == 200
    instance.stop()
    wait_until(lambda: not list_registered(second), "the removal of the dead instance")


def test_if_one_process_finds_a_dead_instance_the_other_probes_it_at_once(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    dying, living = stand_in(), stand_in()
    first, second = make_router(dying, living, workers=2, health_failure_threshold=1).workers
    dying.stop()
    for _ in range(4):
        assert first.chat().status_code == 200
    wait_until(
        lambda: sorted(one["state"] for one in list_registered(second)) == ["healthy", "unhealthy"], "the other's probe"
    )


def test_an_instance_is_unhealthy_at_a_process_until_it_answers_its_probe(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    first, second = make_router(instance, workers=2).workers
    known = second.app.registry.get(f"127.0.0.1:{instance.port}")
    assert known is not None
    instance.answers_probes = False
    known.mark_unhealthy("it cannot be reached from here")
    deliver(second, make_record(first))
    wait_until(lambda: not second.app.health._suspects, "a failed probe")
    assert not known.healthy
    instance.answers_probes = True
    deliver(second, make_record(first))
    wait_until(lambda: known.healthy, "a passed probe")


def test_a_lost_cache_is_known_to_both(workers: list[RouterUnderTest], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = workers
    lost: list[str] = []
    second.app.registry.events.lost_caches.subscribe(lost.append)
    key = list_registered(first)[0]["url"].removeprefix("http://")
    first.app.fleet_sync.announce_lost_cache(key)
    wait_until(lambda: lost == [key], "the other's event")


def test_a_request_is_explained_by_each_process(workers: list[RouterUnderTest]) -> None:
    first, second = workers
    first.chat(request_id="r1")
    explained = second.client.get("/admin/explain/r1")
    assert explained.json() == first.client.get("/admin/explain/r1").json()
    assert second.client.get("/admin/explain/r2").status_code == 404
    assert [each["request_id"] for each in second.client.get("/admin/requests").json()["requests"]] == ["r1"]


def test_a_request_can_be_aborted_at_the_other_process(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    async def behave(request: Received, respond: Responder) -> None:
        if request.target != "/v1/abort_requests":
            await respond.start_stream()
            await respond.event(json.dumps({"choices": [{"delta": {"content": "a"}}]}))
            await respond.peer_left.wait()

    first, second = make_router(stand_in(behave=behave), workers=2).workers
    with first.stream(request_id="r1"):
        answer = second.client.post("/v1/abort_requests", json={"req_ids": ["r1", "r2"]}).json()
    assert answer["result"]["not_found"] == ["r2"]


def test_metrics_are_sums_over_all_processes(workers: list[RouterUnderTest]) -> None:
    first, second = workers
    for _ in range(3):
        first.chat()
    second.chat()
    for worker in workers:
        text = worker.client.get("/metrics").text
        assert 'http_requests_total{endpoint="/v1/chat/completions",method="POST",status_code="200"} 4.0' in text
        assert 'router_instances{role="mixed",state="healthy"} 1.0' in text
        assert text.count("# TYPE router_instances gauge") == 1


def test_metrics_without_those_of_the_other_processes_are_an_error(
    workers: list[RouterUnderTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prometheus would take the smaller counters for a restart, and then count all requests again."""
    monkeypatch.setattr("router.sharing.link.ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(workers[0].app.link, "send_message", lambda *_: None)
    response = workers[0].client.get("/metrics")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "metrics_incomplete")


def test_the_other_process_knows_the_choice_for_a_prompt(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instances = [stand_in(), stand_in()]
    first, second = make_router(*instances, workers=2).workers
    prompt = {"messages": [{"role": "user", "content": "a long prompt " * 400}]}
    chosen = first.chat(**prompt).headers["x-router-mixed"]
    wait_until(lambda: len(second.app.selector.policies[second.app.registry.roles[0]]._index) > 0, "the prompt")  # type: ignore[attr-defined]
    assert {second.chat(**prompt).headers["x-router-mixed"] for _ in range(4)} == {chosen}


def drain_until_restart(worker: RouterUnderTest, instance: StandIn) -> None:
    order = {"instance": instance.key, "until_restart": True}
    assert worker.client.post("/admin/drain", json=order).json()["state"] == "draining"


def list_states(*workers: RouterUnderTest) -> list[str]:
    return [list_registered(worker)[0]["state"] for worker in workers]


def test_a_drain_ends_at_both_when_a_restarted_instance_registers_at_one(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    first, second = make_router(workers=2).workers
    instance.register(first.url, start_id="a")
    drain_until_restart(first, instance)
    for worker in (first, second):
        instance.register(worker.url, start_id="a")
    assert list_states(first, second) == ["draining"] * 2
    instance.register(second.url, start_id="b")
    assert list_states(first, second) == ["healthy"] * 2


def test_a_drain_that_has_ended_is_not_repeated_by_a_heartbeat_at_the_other_process(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    first, second = make_router(instance, workers=2).workers
    drain_until_restart(first, instance)
    late = make_record(second)
    known = first.app.registry.get(instance.key)
    assert known is not None

    async def restart() -> None:
        known.record_failed_probe("connection refused", 3, may_finish=True)
        known.record_passed_probe(time.monotonic(), 1)

    first.thread.run(restart())
    deliver(first, {**late, "version": [1000, "later"]})
    wait_until(lambda: list_states(first, second) == ["healthy"] * 2, "the end at both")


def test_a_missed_command_arrives_with_the_next_renewal(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    first, second = make_router(instance, workers=2).workers
    known = first.app.registry.get(instance.key)
    assert known is not None

    async def drain_and_renew() -> dict[str, Any]:
        known.set_draining(True)
        return first.app.fleet_sync._make_record(known, is_news=False)

    deliver(second, first.thread.run(drain_and_renew()))
    assert list_states(second) == ["draining"]


def test_a_removal_at_one_process_applies_to_both(workers: list[RouterUnderTest]) -> None:
    first, second = workers
    (instance,) = first.app.registry

    async def remove() -> None:
        first.app.registry.remove(instance)
        first.app.fleet_sync.announce_removal(instance)

    first.thread.run(remove())
    wait_until(lambda: not list_registered(second), "the other's removal")


def get_key(worker: RouterUnderTest) -> str:
    return str(list_registered(worker)[0]["url"].removeprefix("http://"))


def forget(worker: RouterUnderTest, key: str) -> None:
    """Let only ``worker`` remove an instance, as if it were silent there."""

    async def remove() -> None:
        instance = worker.app.registry.get(key)
        assert instance is not None
        worker.app.registry.remove(instance)

    worker.thread.run(remove())


@pytest.mark.parametrize("has_heartbeat", [True, False])
def test_a_forgotten_instance_returns_with_a_heartbeat_or_if_it_has_none_with_a_renewal(
    workers: list[RouterUnderTest], has_heartbeat: bool
) -> None:
    first, second = workers
    renewal = {**make_renewal(first), "has_heartbeat": has_heartbeat}
    forget(second, get_key(first))
    deliver(second, renewal)
    assert bool(list_registered(second)) is not has_heartbeat
    deliver(second, {**renewal, "version": [100, "later"]})
    assert list_registered(second)


def test_a_command_from_before_the_loss_of_an_instance_is_void_when_it_returns(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    first, second = make_router(instance, workers=2).workers
    order = {"instance": instance.key}
    assert second.client.post("/admin/drain", json=order).status_code == 200
    forget(first, instance.key)
    instance.register(first.url)
    assert list_states(first, second) == ["healthy"] * 2


def test_a_router_that_loses_an_instance_without_redis_does_not_end_its_commands(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    first, second = make_router(instance, workers=2).workers
    assert second.client.post("/admin/drain", json={"instance": instance.key}).status_code == 200
    first.app.link.trouble = "Redis is gone"
    forget(first, instance.key)
    first.app.link.trouble = ""
    instance.register(first.url)
    assert list_states(first, second) == ["draining"] * 2
    assert first.client.post("/admin/drain", json={"instance": instance.key, "undrain": True}).status_code == 200
    instance.register(first.url)
    assert list_states(first, second) == ["healthy"] * 2


def test_a_router_that_loses_an_instance_without_redis_ends_only_a_drain_until_restart(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    first, second = make_router(instance, workers=2).workers
    for path, order in (("weight", {"weight": 0.5}), ("drain", {"until_restart": True})):
        assert second.client.post(f"/admin/{path}", json={"instance": instance.key, **order}).status_code == 200
    first.app.link.trouble = "Redis is gone"
    forget(first, instance.key)
    first.app.link.trouble = ""
    instance.register(first.url)
    assert [list_registered(worker)[0]["weight"] for worker in (first, second)] == [0.5] * 2
    assert list_states(first, second) == ["healthy"] * 2


@pytest.mark.parametrize("has_lost_it", [False, True])
def test_a_removal_ends_the_commands_in_all_processes_even_without_redis(
    make_router: MakeRouter, stand_in: MakeStandIn, has_lost_it: bool
) -> None:
    instance = stand_in()
    first, second = make_router(instance, workers=2).workers
    assert first.client.post("/admin/drain", json={"instance": instance.key}).status_code == 200
    first.app.link.trouble = second.app.link.trouble = "Redis is gone"
    (removed,) = first.app.registry
    forget(first, instance.key)
    if has_lost_it:
        forget(second, instance.key)
    first.app.fleet_sync.announce_removal(removed)  # as service discovery does
    version = first.app.fleet_sync._known[instance.key].version
    wait_until(lambda: second.app.fleet_sync._known[instance.key].version == version, "the removal")
    assert list_registered(second) == []
    instance.register(second.url)
    assert list_states(first, second) == ["healthy"] * 2


@pytest.mark.parametrize(
    ("teller", "has_heartbeat", "is_added"),
    [("another", False, False), ("another", True, True), ("", False, True)],
)
def test_an_instance_in_another_routers_register_file_is_added_if_it_registers(
    workers: list[RouterUnderTest], teller: str, has_heartbeat: bool, is_added: bool
) -> None:
    first, second = workers
    record = {**make_renewal(first), "permanent": True, "has_heartbeat": has_heartbeat}
    forget(second, get_key(first))
    deliver(second, {**record, "version": [100, "later"], "teller": teller or second.app.link.name})
    assert [instance.permanent for instance in second.app.registry] == [not teller] * is_added


def test_a_forgotten_instance_returns_with_the_commands_of_the_other_process(
    workers: list[RouterUnderTest],
) -> None:
    first, second = workers
    key = get_key(first)
    assert first.client.post("/admin/drain", json={"instance": key}).status_code == 200
    record = make_renewal(first)
    forget(second, key)
    deliver(second, {**record, "version": [100, "later"]})
    assert list_states(second) == ["draining"]


@pytest.mark.parametrize(("ordered", "state"), [([100, "x"], "draining"), ([0, "x"], "draining"), ([0, ""], "healthy")])
def test_the_commands_of_the_later_version_apply(
    workers: list[RouterUnderTest], ordered: list[Any], state: str
) -> None:
    first, second = workers
    record = make_renewal(first)
    deliver(second, {**record, "orders": {**record["orders"], "version": ordered, "draining": True}})
    assert list_states(second) == [state]


def test_an_instance_that_is_healthy_at_another_process_is_not_silent(workers: list[RouterUnderTest]) -> None:
    first, second = workers
    (known,) = second.app.registry
    known.last_healthy = known.last_registered = 0.0
    deliver(second, {**make_renewal(first), "healthy": False})
    assert known.is_silent(time.monotonic(), expiry=30.0)
    deliver(second, make_renewal(first))
    assert not known.is_silent(time.monotonic(), expiry=30.0)


def test_the_data_of_an_instance_is_deleted_long_after_its_loss(workers: list[RouterUnderTest]) -> None:
    first, _ = workers
    sync, key = first.app.fleet_sync, get_key(first)

    async def list_known_after(seconds: float) -> set[str]:
        sync._forget_old(time.monotonic() + seconds)
        return set(sync._known)

    assert first.thread.run(list_known_after(2 * STALE_SECONDS)) == {key}
    forget(first, key)
    assert first.thread.run(list_known_after(STALE_SECONDS)) == {key}
    assert first.thread.run(list_known_after(4 * STALE_SECONDS)) == set()


def test_old_data_is_deleted_at_a_renewal(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.sharing.fleet_sync.RENEWAL_SECONDS", 0.02)
    sync = make_router(stand_in(), workers=2).app.fleet_sync
    sync._known["10.0.0.1:80"] = fleet_sync._Known()  # older than all limits
    wait_until(lambda: "10.0.0.1:80" not in sync._known, "the deletion")


def test_only_a_record_with_a_later_version_counts_as_a_heartbeat(workers: list[RouterUnderTest]) -> None:
    first, second = workers
    (known,) = second.app.registry
    before = known.last_registered
    renewal = {**make_renewal(first), "has_heartbeat": True}
    deliver(second, renewal)
    assert (known.last_registered, known.has_heartbeat) == (before, False)
    deliver(second, {**renewal, "version": [100, "later"]})
    assert known.last_registered > before
    assert known.has_heartbeat


@pytest.mark.parametrize(
    ("version", "has_heartbeat", "is_removed"),
    [([100, "later"], False, True), ([100, "later"], True, False), ([0, ""], False, False)],
)
def test_a_removal_applies_if_it_is_later_and_the_instance_has_no_heartbeat(
    workers: list[RouterUnderTest], version: list[Any], has_heartbeat: bool, is_removed: bool
) -> None:
    first, second = workers
    (known,) = second.app.registry
    known.has_heartbeat = has_heartbeat
    deliver(second, {**make_renewal(first), "version": version, "is_removed": True})
    assert bool(list_registered(second)) is not is_removed
    forgotten = {**make_renewal(first), "version": [200, "later"], "is_removed": True}
    deliver(second, forgotten)  # possibly of an unknown instance: nothing is added
    assert bool(list_registered(second)) is has_heartbeat


def test_the_models_of_the_latest_query_are_stored(workers: list[RouterUnderTest]) -> None:
    first, second = workers
    (known,) = second.app.registry
    deliver(second, {**make_renewal(first), "models": ["new"], "models_age": -1.0})
    assert known.models == frozenset({"new"})
    deliver(second, {**make_renewal(first), "models": ["old"], "models_age": 1e6})
    assert known.models == frozenset({"new"})


def test_a_router_with_one_process_stores_no_data_for_others(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(instance := stand_in())
    router.client.post("/admin/drain", json={"instance": instance.key})
    assert router.app.fleet_sync._known == {}


def has_logged(instance: Instance, change: str) -> bool:
    return instance.logged_changes.get("health") == change


def test_each_change_is_logged_once_although_each_process_detects_it(
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
        (known,) = second.app.registry
        wait_until(partial(has_logged, known, change), "the change at the second")
        second.thread.run(second.app.health.check_all())
    changes = [
        *("registered", "serves ", "drains", "takes requests again", "is paused", "has weight 0.5"),
        *("is unhealthy", "is healthy again"),
    ]
    counts = {change: sum(f"{instance.key} {change}" in line for line in caplog.messages) for change in changes}
    assert counts == dict.fromkeys(changes, 1) | {"is unhealthy": 2}


def test_many_prompts_are_sent_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[int]:
        link, policy = Link(), CacheAware()
        sizes: list[int] = []
        link.is_alone = False
        monkeypatch.setattr(link, "publish_event", lambda topic, chains: sizes.append(len(chains)))
        PrefixSync(link, {Role.MIXED: policy})
        for start in range(0, 100 * 64, 64):
            policy._add_chain(range(start, start + 64), "10.0.0.1:1")
        await until(lambda: sum(sizes) == 100)
        return sizes

    assert asyncio.run(run()) == [26, 26, 26, 22]


async def cut_link(worker: RouterUnderTest) -> None:
    """Disconnect a process's link, as its death does."""
    link = worker.app.link
    assert isinstance(link, Link)
    link.disconnect()


def restart_from_snapshot(worker: RouterUnderTest, snapshot: Snapshot) -> None:
    async def restore() -> None:
        snapshot.restore(time.monotonic())

    worker.thread.run(restore())


def test_a_snapshot_does_not_undo_a_later_command_of_another_router(
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
    deliver(second, make_renewal(first))
    assert list_registered(first)[0]["state"] == list_registered(second)[0]["state"] == "draining"


def test_a_restored_command_has_its_original_version(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path
) -> None:
    instance, path = stand_in(), str(tmp_path / "snapshot")
    before = make_router(instance, workers=2, snapshot_path=path)
    key = list_registered(before)[0]["url"].removeprefix("http://")
    assert before.client.post("/admin/drain", json={"instance": key}).status_code == 200
    snapshot = before.app.snapshot
    assert snapshot is not None
    snapshot.save()
    original = make_renewal(before)["orders"]
    for worker in before.workers:
        worker.stop()
    after = make_router(workers=2, snapshot_path=path)
    assert make_renewal(after)["orders"] == original


def deliver(worker: RouterUnderTest, record: dict[str, Any], key: str = "") -> None:
    """Pass a record to ``worker`` as from another process."""

    async def receive() -> None:
        fields = record["fields"]
        worker.app.fleet_sync._on_record(key or f"{fields['host_ip']}:{fields['port']}", record)

    worker.thread.run(receive())


def make_record(worker: RouterUnderTest) -> dict[str, Any]:
    """Return the record of a new registration of ``worker``'s only instance."""
    (instance,) = worker.app.registry
    return worker.app.fleet_sync._make_record(instance, is_news=True)


def make_renewal(worker: RouterUnderTest) -> dict[str, Any]:
    """Return the record of a renewal of ``worker``'s only instance."""
    (instance,) = worker.app.registry
    return worker.app.fleet_sync._make_record(instance, is_news=False)
