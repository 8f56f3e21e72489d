"""Aborts: the requests that an abort names, its cost, and that a client can abort only its own requests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http import BadBody
from router.serving.aborts import MAX_IDS, AbortScope, list_unknown_ids, read_asked_ids
from router.serving.reading import parsed_request
from router.serving.reading.api import GENERATING, EngineIds
from tests.router.calls import list_router_calls
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import Received, Responder, answers, stalls
from tests.support.waiting import wait_until

Ask = Callable[..., "Future[httpx.Response]"]

ALICE, BOB, ADMIN = ({"authorization": f"Bearer {key}"} for key in ("sk-1", "sk-2", "s3cret"))
ABORT = "/v1/abort_requests"


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Return the setting of a file with the keys of alice and bob."""
    (tmp_path / "keys").write_text("alice: sk-1\nbob: sk-2\n")
    return {"api_keys_file": str(tmp_path / "keys")}


@pytest.fixture
def admin(tmp_path: Path) -> dict[str, str]:
    """Return the setting of a file with the admin token."""
    (tmp_path / "token").write_text("s3cret")
    return {"admin_token_file": str(tmp_path / "token")}


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Return a function that sends a chat from a separate thread."""
    with ThreadPoolExecutor(8) as threads:

        def send(router: RouterUnderTest, headers: dict[str, str], **body: Any) -> Future[httpx.Response]:
            members = {"messages": [], **body}
            return threads.submit(router.client.post, "/v1/chat/completions", json=members, headers=headers)

        yield send


def abort(router: RouterUnderTest, who: dict[str, str], **body: object) -> httpx.Response:
    return router.client.post(ABORT, json=body, headers=who)


async def answer_with_id(request: Received, respond: Responder) -> None:
    """Answer like FastDeploy with the id of the body, whole or in a stream."""
    body = request.json
    answer = {"id": f"chatcmpl-{body['request_id']}", "choices": [], "object": "chat.completion"}
    if body.get("stream"):
        await respond.start_stream()
        await respond.event(json.dumps(answer))
        await respond.event("[DONE]")
        await respond.end_stream()
    else:
        await respond.answer(200, json.dumps(answer).encode(), ("content-type", "application/json"))


@pytest.mark.parametrize("stream", [False, True])
def test_equal_ids_of_two_clients_differ_at_the_engine_but_not_for_the_clients(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str], stream: bool
) -> None:
    instance = stand_in("mixed", answer_with_id)
    router = make_router(instance, **keys)
    for who in (ALICE, BOB):
        body = {"messages": [], "request_id": "job-1", "stream": stream}
        answer = router.client.post("/v1/chat/completions", json=body, headers=who)
        assert '"id": "chatcmpl-job-1"' in answer.text
        assert (answer.headers["x-request-id"], answer.headers["x-router-request-id"]) == ("job-1", "job-1")
    first, second = (received.json["request_id"] for received in instance.received)
    assert first != second
    assert re.fullmatch("job-1-k[0-9a-f]{12}", first)
    assert re.fullmatch("job-1-k[0-9a-f]{12}", second)


def test_without_api_keys_an_id_reaches_the_engine_unchanged(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    make_router(instance).chat(request_id="job-1")
    assert instance.received[0].json["request_id"] == "job-1"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/chat/completions"])
@pytest.mark.parametrize("engine", ["vllm", "openai", "sglang"])
def test_ids_of_two_clients_differ_in_headers_and_at_other_engines(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: dict[str, str], path: str, engine: str
) -> None:
    instance = stand_in()
    instance.extra_fields = {"engine": engine}
    router = make_router(instance, **keys)
    for who in (ALICE, BOB):
        headers = {"X-Request-Id": "job-1", **who}
        body = {"messages": [], "request_id": "job-1"}
        assert router.client.post(path, json=body, headers=headers).status_code == 200
    first, second = ({**dict(each.headers), **each.json} for each in instance.received)
    names = ["x-request-id", "request_id", "rid"] if path != "/v1/embeddings" else ["x-request-id"]
    found = [name for name in names if name in first]
    assert found
    for name in found:
        assert first[name] != second[name], name
        assert first[name].startswith("job-1-k"), name


@pytest.mark.parametrize("form", ["job-1", "chatcmpl-job-1", "chatcmpl-job-1_0"])
def test_a_client_aborts_its_own_running_request_and_no_other(
    make_router: MakeRouter, stand_in: MakeStandIn, ask: Ask, keys: dict[str, str], form: str
) -> None:
    instance = stand_in("mixed", stalls())
    router = make_router(instance, **keys)
    running = ask(router, ALICE, request_id="job-1")
    wait_until(lambda: instance.received, "the request")
    engine_id = f"chatcmpl-{instance.received[0].json['request_id']}_0"
    assert abort(router, BOB, req_ids=[form]).json()["result"]["not_found"] == [form]
    assert not any(engine_id in each["req_ids"] for each in instance.aborted)
    instance.abort_answer = {
        "result": {"aborted": [{"request_id": engine_id, "output_token_count": 3}], "not_found": []}
    }
    answer = abort(router, ALICE, req_ids=[form, "nobody"]).json()["result"]
    assert answer == {"aborted": [{"request_id": "chatcmpl-job-1_0", "output_token_count": 3}], "not_found": ["nobody"]}
    assert engine_id in instance.aborted[-1]["req_ids"]
    instance.cut_idle()
    assert running.result().status_code == 409


def test_the_admin_aborts_any_clients_request(
    make_router: MakeRouter, stand_in: MakeStandIn, ask: Ask, keys: dict[str, str], admin: dict[str, str]
) -> None:
    instance = stand_in("mixed", stalls())
    router = make_router(**keys, **admin)
    router.client.post("/register", json=instance.registration(), headers=ADMIN).raise_for_status()
    running = ask(router, ALICE, request_id="job-1")
    wait_until(lambda: instance.received, "the request")
    engine_id = f"chatcmpl-{instance.received[0].json['request_id']}_0"
    assert abort(router, ADMIN, req_ids=[engine_id, "job-1"]).json()["result"]["not_found"] == []
    assert engine_id in instance.aborted[0]["req_ids"]
    instance.cut_idle()
    assert running.result().status_code == 409


@pytest.mark.parametrize("body", [{"req_ids": ["job-1"]}, {"abort_all": True}])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_aborts_its_own_waiting_request_and_no_other(
    make_router: MakeRouter,
    stand_in: MakeStandIn,
    ask: Ask,
    keys: dict[str, str],
    body: dict[str, object],
    workers: int,
) -> None:
    instance = stand_in("mixed", stalls())
    router = make_router(instance, max_concurrent_requests=1, workers=workers, **keys)
    running = ask(router, BOB, request_id="runs")
    wait_until(lambda: instance.received, "the first request")
    of_alice, of_bob = ask(router, ALICE, request_id="job-1"), ask(router, BOB, request_id="job-1")
    wait_until(lambda: router.app.admission.waiting == 2, "two in the queue")
    abort(router.workers[-1], ALICE, **body)
    assert of_alice.result().status_code == 409
    assert router.app.admission.waiting == 1
    assert not any(each.get("abort_all") for each in instance.aborted)
    abort(router, BOB, abort_all=True)
    assert of_bob.result().status_code == 409
    instance.cut_idle()
    running.result()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"req_ids": [%s]}' % b",".join([b'"a"'] * (MAX_IDS + 1)), "req_ids has 1001 ids; at most 1000 are allowed"),
        (b'{"req_ids": ["\\ud800"]}', "sent on, because it cannot be encoded as JSON again: str is not valid UTF-8"),
        (b'{"req_ids": [["a"]]}', "req_ids has a list or an object in it"),
        (b'{"req_ids": ["a"], "more": %s}' % (b"[" * 400 + b"]" * 400), "encoded as JSON again: Recursion"),
        (b'{"req_ids": ["a"], "more": [NaN, %d]}' % 2**70, "encoded as JSON again: Integer exceeds 64-bit"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_an_invalid_abort_is_answered_with_400_and_one_sentence(
    make_router: MakeRouter, stand_in: MakeStandIn, body: bytes, message: str, workers: int
) -> None:
    instance = stand_in()
    refused = make_router(instance, workers=workers).client.post(ABORT, content=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_body")
    assert message in refused.json()["error"]["message"]
    assert instance.aborted == []


def test_an_abort_may_have_the_maximum_number_of_ids() -> None:
    asked = [f"r{number}" for number in range(MAX_IDS)]
    assert read_asked_ids({"req_ids": asked}) == asked
    with pytest.raises(BadBody):
        read_asked_ids({"req_ids": [*asked, "r"]})
    assert read_asked_ids({"req_ids": asked, "abort_all": True}) is None


def test_the_cost_of_an_abort_at_another_request_does_not_grow_with_its_ids() -> None:
    ids = EngineIds("chatcmpl-", "mine", 3)

    def count(number: int) -> list[str]:
        scope = AbortScope("", [f"chatcmpl-r{each}_0" for each in range(number)])
        return list_router_calls(lambda: scope.matching_ids(ids, ""))

    assert count(1) == count(MAX_IDS) == ["matching_ids"]


def test_the_body_of_a_waiting_request_is_parsed_on_arrival_and_not_by_an_abort(
    make_router: MakeRouter, stand_in: MakeStandIn, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = stand_in("mixed", stalls())
    router = make_router(instance, max_concurrent_requests=1)
    waiting = [ask(router, {}, request_id=f"r{number}") for number in range(4)]
    wait_until(lambda: router.app.admission.waiting == 3 and instance.received, "three in the queue")
    monkeypatch.setattr(parsed_request, "parse_inference", None)
    first = instance.received[0].json["request_id"]
    asked = [f"r{number}" for number in range(4) if f"r{number}" != first]
    assert abort(router, {}, req_ids=asked).json()["result"]["not_found"] == []
    monkeypatch.undo()
    instance.cut_idle()
    assert sorted(each.result().status_code for each in waiting)[:3] == [409, 409, 409]


@given(
    prefix=st.sampled_from([api.id_prefix for api in GENERATING.values()]),
    request_id=st.text("ab_-0159", min_size=1, max_size=8),
    other=st.text("ab_-0159", min_size=1, max_size=8),
    sequences=st.integers(1, 3),
    tag=st.sampled_from(["", "-k0123456789ab"]),
)
def test_an_abort_finds_a_request_by_each_of_its_ids_and_by_no_other_id(
    prefix: str, request_id: str, other: str, sequences: int, tag: str
) -> None:
    ids = EngineIds(prefix, request_id, sequences)
    names = {request_id, ids.whole, *ids.list_ids()}
    tagged = ids._replace(request_id=request_id + tag)
    names |= {tagged.request_id, tagged.whole, *tagged.list_ids()}
    for name in names:
        assert set(AbortScope(tag, [name, "x"]).matching_ids(ids, tag)) == {name}
    asked = [other, prefix + other, f"{prefix}{other}_0", f"{other}_{sequences}"]
    assert set(AbortScope(tag, asked).matching_ids(ids, tag)) == names & set(asked)


@given(request_id=st.text("ab_-0159", min_size=1, max_size=8), number=st.integers(0, 3))
def test_an_abort_sent_to_engines_names_only_the_clients_request(request_id: str, number: int) -> None:
    tag = "-k0123456789ab"
    at_engine = EngineIds("chatcmpl-", request_id + tag, number + 1).list_ids()[number]
    for name in (f"chatcmpl-{request_id}_{number}", at_engine):
        members = AbortScope(tag, [name]).make_members({"req_ids": [name], "abort_all": False}, ["found"])
        assert at_engine in members["req_ids"]
        assert all(tag in each for each in members["req_ids"][:-1])
        assert members.keys() == {"req_ids"}


def test_a_scope_is_the_same_in_another_process() -> None:
    for asked in (None, ["a", 5, "b"]):
        scope = AbortScope.load(json.loads(json.dumps(AbortScope("-k1", asked).dump())))
        assert (scope.tag, scope.asked) == ("-k1", asked and ["a", "b"])
        assert (scope.reaches("-k1"), scope.reaches("-k2"), scope.reaches("")) == (True, False, False)
    assert AbortScope("", ["a"]).reaches("-k2")


def test_the_result_of_an_abort_has_the_clients_ids() -> None:
    tagged = ["chatcmpl-a-k1_0", {"request_id": "b-k1_0", "n": 1}, {"request_id": 7}, 5]
    untagged = AbortScope("-k1", ["a"]).remove_tag(tagged)
    assert untagged == ["chatcmpl-a_0", {"request_id": "b_0", "n": 1}, {"request_id": 7}, 5]
    assert AbortScope("", ["a"]).remove_tag(tagged) == tagged
    assert list_unknown_ids(["a", "b", "c"], untagged) == ["c"]


def test_an_instance_of_sglang_gets_one_abort_for_each_id_and_few_at_once(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    most = 0

    async def note(_: Received, respond: Responder) -> None:
        nonlocal most
        most = max(most, instance.running)
        await respond.answer(200, b"{}")

    instance = stand_in("mixed", note)
    instance.extra_fields = {"engine": "sglang"}
    router = make_router(instance)
    asked = [f"r{number:02}" for number in range(40)]
    assert abort(router, {}, req_ids=asked).status_code == 200
    assert sorted(each.json["rid"] for each in instance.received) == asked
    assert most <= 16
    instance.received.clear()
    instance.behave = answers(500)
    assert abort(router, {}, req_ids=asked).json()["status"] == "error"
    assert len(instance.received) <= 16  # otherwise an instance that hangs would delay the response for each id
