"""The operator's orders about instances over HTTP. Instances are stand-ins."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from router.fleet.admin import ORDERS
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import Behaviour, Received, Responder, StandIn, answers, chat_answer, streams_until


def order(router: RouterUnderTest, name: str, instance: StandIn, **members: object) -> dict[str, object]:
    """Send an order about ``instance``, and return the answer."""
    response = router.client.post(f"/admin/{name}", json={"instance": instance.key, **members})
    assert response.status_code == 200, response.text
    answer: dict[str, object] = response.json()
    return answer


def test_a_paused_instance_ends_its_requests_and_gets_no_new_ones(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    paused = stand_in("mixed", streams_until(go_on := threading.Event()))
    router = make_router(paused)
    with router.stream() as response:
        pieces = response.iter_raw()
        next(pieces)
        assert order(router, "pause", paused) == {
            "instance": paused.key, "state": "paused", "running_requests": 1
        }  # fmt: skip
        assert paused.register(router.url).status_code == 200  # a heartbeat does not undo the pause
        assert router.chat().status_code == 503
        go_on.set()
        assert b"".join(pieces).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("name", ["pause", "drain"])
def test_resume_ends_a_pause_or_a_drain(make_router: MakeRouter, stand_in: MakeStandIn, name: str) -> None:
    instance = stand_in()
    router = make_router(instance)
    order(router, name, instance)
    assert router.chat().status_code == 503
    assert order(router, "resume", instance)["state"] == "healthy"
    assert router.chat().status_code == 200


def test_a_drain_of_a_hook_does_not_shorten_one_of_an_operator(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router()
    assert instance.register(router.url, start_id="1").status_code == 200
    order(router, "drain", instance)
    # The preStop hook of the instance sends this.
    assert order(router, "drain", instance, until_restart=True)["until_restart"] is False
    assert instance.register(router.url, start_id="2").status_code == 200
    assert router.chat().status_code == 503
    order(router, "drain", instance, undrain=True)
    assert order(router, "drain", instance, until_restart=True)["until_restart"] is True
    assert instance.register(router.url, start_id="3").status_code == 200
    assert router.chat().status_code == 200


@pytest.mark.parametrize("member", ["undrain", "until_restart"])
def test_the_members_of_a_drain_must_be_true_or_false(
    make_router: MakeRouter, stand_in: MakeStandIn, member: str
) -> None:
    instance = stand_in()
    answer = make_router(instance).client.post("/admin/drain", json={"instance": instance.key, member: 1})
    assert answer.json()["error"]["message"] == f"{member} is 1; it must be true or false"


def test_a_get_request_shows_a_drains_progress(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance)
    for draining, state in ((False, "healthy"), (True, "draining")):
        progress = router.client.get("/admin/drain", params={"instance": instance.key}).json()
        assert progress == {"instance": instance.key, "state": state, "running_requests": 0, "draining": draining}
        order(router, "drain", instance)
    assert router.client.get("/admin/drain", params={"instance": "h:1"}).status_code == 404


def test_an_instance_without_weight_gets_no_requests(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    none, whole = stand_in(), stand_in()
    router = make_router(none, whole, policy="round_robin")
    assert order(router, "weight", none, weight=0) == {
        "instance": none.key, "state": "healthy", "running_requests": 0, "weight": 0.0
    }  # fmt: skip
    assert none.register(router.url).status_code == 200
    assert [router.chat().status_code for _ in range(6)] == [200] * 6
    assert (len(none.received), len(whole.received)) == (0, 6)
    weights = {entry["port"]: entry["weight"] for entry in router.client.get("/registered").json()["mixed"]}
    assert weights == {str(none.port): 0.0, str(whole.port): 1.0}


def test_an_instance_without_weight_serves_if_there_is_no_other(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance)
    order(router, "weight", instance, weight=0)
    assert router.chat().status_code == 200


@pytest.mark.parametrize("name", ["pause", "resume", "weight"])
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "JSON"),
        (b"{}", 400, "instance is None; it must be 'host:port'"),
        (b'{"instance": "a:1", "weight": 1}', 404, "no instance 'a:1' is registered; known are: none"),
    ],
)
def test_the_error_for_a_wrong_order_is_one_sentence(
    make_router: MakeRouter, name: str, body: bytes, status: int, message: str
) -> None:
    answer = make_router().client.post(f"/admin/{name}", content=body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("weight", ["true", '"1"', "-0.1", "1.5", "null", "NaN", "[]"])
def test_a_weight_is_a_number_from_0_to_1(make_router: MakeRouter, stand_in: MakeStandIn, weight: str) -> None:
    instance = stand_in()
    body = f'{{"instance": "{instance.key}", "weight": {weight}}}'
    answer = make_router(instance).client.post("/admin/weight", content=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "weight")
    assert "it must be a number from 0 to 1" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [*ORDERS, "/admin/clear_prefix_cache"])
def test_orders_require_the_admin_token(make_router: MakeRouter, tmp_path: Path, path: str) -> None:
    (tmp_path / "token").write_text("secret\n")
    router = make_router(admin_token_file=str(tmp_path / "token"))
    assert router.client.post(path, json={"instance": "a:1", "weight": 1}).status_code == 401
    allowed = router.client.post(
        path, json={"instance": "a:1", "weight": 1}, headers={"Authorization": "Bearer secret"}
    )
    assert allowed.status_code in (200, 404)


def clears_at(*paths: str) -> Behaviour:
    """Answer these paths with success, and others with 404."""

    async def behave(request: Received, respond: Responder) -> None:
        if request.target in paths:
            await respond.answer(200, json.dumps({"status": "success"}).encode())
        else:
            await respond.answer(404, b"{}")

    return behave


def test_all_prefix_caches_are_cleared_and_the_answer_has_each_instances_result(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    ours, vllm = (
        stand_in("mixed", clears_at("/clear_prefix_cache")),
        stand_in("mixed", clears_at("/reset_prefix_cache")),
    )
    neither, failing, dead = stand_in("mixed", clears_at()), stand_in("mixed", answers(500)), stand_in()
    router = make_router(ours, vllm)
    answer = router.client.post("/admin/clear_prefix_cache")
    assert (answer.status_code, answer.json()) == (
        200,
        {"status": "success", "instances": {ours.key: "success", vllm.key: "success"}},
    )
    for instance in (neither, failing, dead):
        instance.register(router.url)
    dead.stop()
    answer = router.client.post("/admin/clear_prefix_cache")
    assert (answer.status_code, answer.json()["status"]) == (502, "error")
    outcomes = answer.json()["instances"]
    assert outcomes[ours.key] == outcomes[vllm.key] == "success"
    assert "has none of the paths /clear_prefix_cache, " in outcomes[neither.key]
    assert "answered POST /clear_prefix_cache with 500" in outcomes[failing.key]
    assert "Connection refused" in outcomes[dead.key]


def test_the_router_expects_no_hits_in_a_cleared_cache(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    async def behave(request: Received, respond: Responder) -> None:
        await respond.answer(200, b"{}" if request.target == "/clear_prefix_cache" else chat_answer())

    router = make_router(stand_in("mixed", behave), policy="cache_aware")
    messages = [{"role": "user", "content": "word " * 2000}]
    expected = []
    for clears in (False, False, True):
        if clears:
            assert router.client.post("/admin/clear_prefix_cache").status_code == 200
        decision = router.chat(messages=messages).headers["x-router-decision"]
        expected.append(int(decision.rpartition("=")[2]) > 0)
    assert expected == [False, True, False]
