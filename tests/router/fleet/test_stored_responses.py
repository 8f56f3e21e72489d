"""A stored response of /v1/responses is continued, read and deleted at its instance. Instances are stand-ins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.fleet import StoredResponses
from router.fleet.stored_responses import MAX_ID, MAX_RESPONSES
from tests.router.conftest import MakeRouter, MakeStandIn
from tests.router.stand_in import Behaviour, Received, Responder
from tests.support.waiting import wait_until


def stores_response(response_id: str) -> Behaviour:
    """Answer with a response with this id, streamed if the request asks for it."""

    async def behave(request: Received, respond: Responder) -> None:
        response = {"id": response_id, "object": "response"}
        if request.method == "POST" and request.json.get("stream"):
            await respond.start_stream()
            await respond.event(json.dumps({"type": "response.created", "response": response}))
            await respond.event(json.dumps({"type": "response.completed", "response": response}))
            await respond.end_stream()
        else:
            await respond.answer(200, json.dumps(response).encode(), ("content-type", "application/json"))

    return behave


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_continuation_goes_to_the_instance_with_the_stored_response(
    make_router: MakeRouter, stand_in: MakeStandIn, stream: bool, workers: int
) -> None:
    first, second = stand_in(behave=stores_response("resp_a")), stand_in(behave=stores_response("resp_b"))
    router = make_router(first, second, workers=workers, policy="round_robin")
    for _ in range(2):
        assert router.client.post("/v1/responses", json={"input": "hi", "stream": stream}).status_code == 200
    last = router.workers[-1]
    owners = {"resp_a": first, "resp_b": second}
    for response_id, owner in owners.items():
        stored = last.app.proxy._services.stored_responses
        wait_until(lambda stored=stored, name=response_id: stored.find_instance(name), "the message")  # type: ignore[misc]
        before = len(owner.received)
        asked = {"input": "go on", "previous_response_id": response_id}
        for _ in range(3):
            assert last.client.post("/v1/responses", json=asked).json()["id"] == response_id
        assert last.client.get(f"/v1/responses/{response_id}").json()["id"] == response_id
        assert len(owner.received) == before + 4


def test_in_a_pair_only_decode_continues_a_stored_response(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode", stores_response("resp_a"))
    router = make_router(prefill, decode, splitwise=True)
    assert router.client.post("/v1/responses", json={"input": "hi"}).json()["id"] == "resp_a"
    wait_until(lambda: len(prefill.received) == 1, "prefill's leg")
    asked = {"input": "go on", "previous_response_id": "resp_a"}
    assert router.client.post("/v1/responses", json=asked).json()["id"] == "resp_a"
    assert (len(prefill.received), len(decode.received)) == (1, 2)


def test_a_stored_response_of_a_removed_instance_is_not_found(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    first = stand_in(behave=stores_response("resp_a"))
    router = make_router(first, stand_in(behave=stores_response("resp_b")))
    router.app.proxy._services.stored_responses.add_response("resp_c", "127.0.0.1:1")
    response = router.client.post("/v1/responses", json={"input": "go on", "previous_response_id": "resp_c"})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "127.0.0.1:1 stores the response, but is gone"


@pytest.mark.parametrize("workers", [1, 2])
def test_with_api_keys_only_its_client_can_use_a_stored_response(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path, workers: int
) -> None:
    (tmp_path / "keys").write_text("alice: sk-1\nbob: sk-2\n")
    instance = stand_in(behave=stores_response("resp_a"))
    router = make_router(instance, workers=workers, api_keys_file=str(tmp_path / "keys"))
    alice, bob = ({"authorization": f"Bearer {key}"} for key in ("sk-1", "sk-2"))
    assert router.client.post("/v1/responses", json={"input": "hi"}, headers=alice).status_code == 200
    last = router.workers[-1]
    stored = last.app.proxy._services.stored_responses
    wait_until(lambda: stored.find_instance("resp_a"), "the message of the other worker")
    go_on = {"input": "go on", "previous_response_id": "resp_a"}
    asks: list[tuple[str, str, object]] = [
        ("POST", "/v1/responses", go_on),
        ("GET", "/v1/responses/resp_a", None),
        ("DELETE", "/v1/responses/resp_a", None),
        ("POST", "/v1/responses/resp_a/cancel", {}),
        ("GET", "/v1/responses/resp_a/input_items", None),
    ]
    before = len(instance.received)
    for method, path, body in asks:
        refused = last.client.request(method, path, json=body, headers=bob)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "response_not_found"), path
    unknown = last.client.get("/v1/responses/resp_b", headers=alice)
    assert unknown.json()["error"]["message"] == "this client has no stored response 'resp_b' at this router"
    assert len(instance.received) == before
    for method, path, body in asks:
        assert last.client.request(method, path, json=body, headers=alice).status_code == 200, path


@pytest.mark.parametrize("keys", ["", "alice: sk-1\nbob: sk-2\n"])
def test_a_stored_response_is_found_by_an_id_that_the_client_has_chosen(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path, keys: str
) -> None:
    async def behave(request: Received, respond: Responder) -> None:
        response = {"id": request.json["request_id"] if request.method == "POST" else "", "object": "response"}
        await respond.answer(200, json.dumps(response).encode(), ("content-type", "application/json"))

    (tmp_path / "keys").write_text(keys)
    instances = stand_in(behave=behave), stand_in(behave=behave)
    router = make_router(policy="round_robin", api_keys_file=str(tmp_path / "keys") if keys else "")
    for instance in instances:
        assert instance.register(router.url, engine="vllm").status_code == 200
    alice, bob = ({"authorization": f"Bearer {key}"} for key in ("sk-1", "sk-2"))
    ids = [
        router.client.post("/v1/responses", json={"input": "hi", "request_id": chosen}, headers=alice).json()["id"]
        for chosen in ("mine", "cmpl.2:a")
    ]
    assert [len(instance.received) for instance in instances] == [1, 1]
    for response_id, owner in zip(ids, instances, strict=True):
        for _ in range(3):
            assert router.client.get(f"/v1/responses/{response_id}", headers=alice).status_code == 200
        assert len(owner.received) == 4
        if keys:
            assert router.client.get(f"/v1/responses/{response_id}", headers=bob).status_code == 404


def test_a_process_that_does_not_know_a_response_asks_the_others(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("alice: sk-1\nbob: sk-2\n")
    instances = stand_in(behave=stores_response("resp_a")), stand_in(behave=stores_response("resp_b"))
    router = make_router(*instances, workers=2, policy="round_robin", api_keys_file=str(tmp_path / "keys"))
    alice, bob = ({"authorization": f"Bearer {key}"} for key in ("sk-1", "sk-2"))
    for _ in instances:
        assert router.client.post("/v1/responses", json={"input": "hi"}, headers=alice).status_code == 200
    last = router.workers[-1]
    stored = last.app.proxy._services.stored_responses
    wait_until(lambda: len(stored._instances) == 2, "the message of the other worker")
    for response_id in ("resp_a", "resp_b"):
        for headers, status in ((bob, 404), (alice, 200)):
            stored._instances.clear()  # as if this worker had replaced another
            go_on = {"input": "go on", "previous_response_id": response_id}
            assert last.client.post("/v1/responses", json=go_on, headers=headers).status_code == status
        assert last.client.get(f"/v1/responses/{response_id}", headers=alice).json()["id"] == response_id
    assert last.client.get(f"/v1/responses/{'a' * (MAX_ID + 1)}", headers=alice).status_code == 404


async def no_others(_id: str) -> list[list[str]]:
    return []


def test_only_the_last_responses_are_known() -> None:
    stored = StoredResponses(lambda _id, _instance, _owner: None, no_others)
    for number in range(MAX_RESPONSES + 1):
        stored.add_response(f"resp_{number}", "a:1")
    assert stored.find_instance("resp_0") is None
    assert stored.find_instance(f"resp_{MAX_RESPONSES}") == "a:1"


def test_a_client_cannot_claim_the_response_of_another_client() -> None:
    published: list[tuple[str, str, str]] = []
    stored = StoredResponses(lambda *response: published.append(response), no_others)
    stored.record_response(b'{"id": "resp_a", "metadata": null}', "a:1", "-kalice")
    # vLLM repeats the metadata of the request.
    stored.record_response(b'{"id":"x-kbob","metadata":{"id":"resp_a"}}', "a:1", "-kbob")
    stored.record_response(b'{"id":"x-kbob","metadata":{"id":"resp_b"}}', "a:1", "-kbob")
    stored.record_response(b'{"id":"resp_a"}', "b:1", "-kbob")
    assert stored.find_instance("resp_a") == "a:1"
    assert stored.is_open_to("resp_a", "-kalice")
    assert not stored.is_open_to("resp_a", "-kbob")
    assert not stored.is_open_to("resp_b", "-kbob")
    assert published == [("resp_a", "a:1", "-kalice"), *2 * [("x-kbob", "a:1", "-kbob")]]
