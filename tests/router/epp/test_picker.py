"""Requests to a real Envoy, for which the picker chooses instances."""

from __future__ import annotations

import gc
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.epp.conftest import Gateway
from tests.router.stand_in import (
    Behaviour,
    Received,
    Responder,
    answers,
    chat_answer,
    never_answers,
    stalls,
    streams,
    streams_until,
)
from tests.support.waiting import wait_until

MakeGateway = Callable[..., Gateway]

pytest.importorskip("grpc", reason="the extra epp is not installed")

NUM_TURNS = 24
DUPLEX: dict[str, Any] = {}
BUFFERED: dict[str, Any] = {"processing_mode": {"request_body_mode": "BUFFERED"}}


def list_loads(router: RouterUnderTest) -> list[tuple[int, float]]:
    return [(instance.load.requests, instance.load.queued) for instance in router.app.registry]


def is_idle(router: RouterUnderTest) -> bool:
    return not router.app.proxy.num_requests and not any(requests for requests, _ in list_loads(router))


def test_a_request_gets_the_instances_response_and_a_record(make_gateway: MakeGateway, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    gateway = make_gateway(instance)
    answer = gateway.chat(user="u")
    assert (answer.status_code, answer.content) == (200, chat_answer())
    assert answer.headers["x-router-mixed"] == instance.key
    assert instance.received[0].json["user"] == "u"
    assert instance.received[0].header("x-gateway-destination-endpoint") == instance.key
    (record,) = gateway.router.client.get("/admin/requests").json()["requests"]
    assert (record["mixed"], record["prompt_tokens"], record["status"]) == (instance.key, 1, 200)
    assert is_idle(gateway.router)


def test_a_stream_arrives_piece_by_piece(make_gateway: MakeGateway, stand_in: MakeStandIn) -> None:
    instance = stand_in("mixed", stalls("1", "2"))
    gateway = make_gateway(instance)
    with gateway.stream() as response:
        lines = response.iter_lines()
        assert [next(lines), next(lines), next(lines)] == ["data: 1", "", "data: 2"]
        assert list_loads(gateway.router)[0][0] == 1
    wait_until(lambda: is_idle(gateway.router), "the release of a request whose client left")
    wait_until(lambda: instance.left == 1, "the end of the request at the instance")


def test_large_bodies_arrive_unchanged(make_gateway: MakeGateway, stand_in: MakeStandIn) -> None:
    text = "many words " * 60_000
    instance = stand_in("mixed", answers(200, chat_answer(text)))
    gateway = make_gateway(instance)
    answer = gateway.chat(messages=[{"role": "user", "content": text}])
    assert answer.json()["choices"][0]["message"]["content"] == text
    assert instance.received[0].json["messages"][0]["content"] == text


def test_no_instance_is_503(make_gateway: MakeGateway) -> None:
    answer = make_gateway().chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_instance")


def test_a_request_beyond_the_limits_is_429(make_gateway: MakeGateway, stand_in: MakeStandIn) -> None:
    instance = stand_in("mixed", stalls("1"))
    gateway = make_gateway(instance, max_concurrent_requests=1, max_queued_requests=0)
    with gateway.stream() as first:
        lines = first.iter_lines()
        assert next(lines) == "data: 1"
        answer = gateway.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1


def test_the_gateways_own_refusals_reach_the_client(make_gateway: MakeGateway, stand_in: MakeStandIn) -> None:
    gateway = make_gateway(stand_in(), change_listener=limit_rate)
    assert gateway.chat().status_code == 200
    for method in ("POST", "HEAD"):
        answer = gateway.client.request(method, "/v1/chat/completions")
        assert (answer.status_code, answer.text) == (429, "local_rate_limited" if method == "POST" else "")
    assert len(list_statuses(gateway)) == 1
    assert is_idle(gateway.router)


@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED], ids=["duplex", "buffered"])
@pytest.mark.parametrize("has_picker_limit", [True, False], ids=["picker", "gateway"])
def test_an_upload_that_stops_is_408(
    make_gateway: MakeGateway,
    stand_in: MakeStandIn,
    monkeypatch: pytest.MonkeyPatch,
    mode: dict[str, Any],
    has_picker_limit: bool,
) -> None:
    change = None
    if has_picker_limit:
        monkeypatch.setattr("router.epp.picker.READ_SECONDS", 0.3)
    else:
        change = limit_upload
    gateway = make_gateway(stand_in(), ext_proc=mode, change_listener=change, request_timeout_secs=1)
    with socket.create_connection(("127.0.0.1", gateway.envoy.port), 10) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 50\r\n\r\n{")
        assert client.recv(1000).startswith(b"HTTP/1.1 408 ")
    assert list_statuses(gateway) == ([408] if has_picker_limit else [])
    assert is_idle(gateway.router)


def test_a_body_that_the_gateway_cannot_buffer_is_413(make_gateway: MakeGateway, stand_in: MakeStandIn) -> None:
    gateway = make_gateway(stand_in(), ext_proc=BUFFERED, change_listener=limit_buffer)
    assert gateway.chat(user="u" * 300_000).status_code == 413
    assert list_statuses(gateway) == []
    assert is_idle(gateway.router)


def test_the_gateway_does_not_repeat_a_refusal_of_the_picker(make_gateway: MakeGateway, stand_in: MakeStandIn) -> None:
    busy = stand_in("mixed", stalls("1"))
    gateway = make_gateway(busy, change_listener=retry_all, max_concurrent_requests=1, max_queued_requests=0)
    with gateway.stream() as first:
        lines = first.iter_lines()
        assert next(lines) == "data: 1"
        answer = gateway.chat()
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert list_statuses(gateway) == [429]
    no_instance = make_gateway(change_listener=retry_all)
    assert no_instance.chat().status_code == 503
    assert list_statuses(no_instance) == [503]


@pytest.mark.parametrize("status", [429, 503])
def test_the_response_of_full_instances_is_that_of_the_router(
    make_gateway: MakeGateway, make_router: MakeRouter, stand_in: MakeStandIn, status: int
) -> None:
    full = [stand_in("mixed", refuses(status)) for _ in range(2)]
    routed, picked = make_router(*full).chat(), make_gateway(*full).chat()
    assert (picked.status_code, picked.content) == (routed.status_code, routed.content) == (status, b"{}")
    assert picked.headers.get("retry-after") == routed.headers.get("retry-after") == "7"


def refuses(status: int) -> Behaviour:
    async def behave(_: Received, respond: Responder) -> None:
        await respond.answer(status, b"{}", ("retry-after", "7"))

    return behave


def list_statuses(gateway: Gateway) -> list[int]:
    return [record["status"] for record in gateway.router.client.get("/admin/requests").json()["requests"]]


def find_manager(listener: Any) -> Any:
    return listener["filter_chains"][0]["filters"][0]["typed_config"]


def limit_rate(listener: Any) -> None:
    everything = {"default_value": {"numerator": 100}}
    config = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit",
        "stat_prefix": "limit",
        "token_bucket": {"max_tokens": 1, "fill_interval": "3600s"},
        "filter_enabled": everything,
        "filter_enforced": everything,
    }
    find_manager(listener)["http_filters"].insert(0, {"name": "limit", "typed_config": config})


def limit_upload(listener: Any) -> None:
    find_manager(listener)["request_timeout"] = "0.3s"


def limit_buffer(listener: Any) -> None:
    listener["per_connection_buffer_limit_bytes"] = 20_000


def retry_all(listener: Any) -> None:
    (route,) = find_manager(listener)["route_config"]["virtual_hosts"][0]["routes"]
    route["route"]["retry_policy"] = {
        "retry_on": "5xx,gateway-error,retriable-status-codes",
        "retriable_status_codes": [429, 503],
        "num_retries": 5,
    }


@pytest.mark.parametrize("broken", [answers(500, b"{}"), answers(503, b"{}"), answers(429, b"{}")])
def test_another_instance_responds_if_the_first_one_fails(
    make_gateway: MakeGateway, stand_in: MakeStandIn, broken: Behaviour
) -> None:
    failing, other = stand_in("mixed", broken), stand_in()
    gateway = make_gateway(failing, other)
    bodies = [gateway.chat(user=str(turn)) for turn in range(4)]
    assert [answer.status_code for answer in bodies] == [200] * 4
    assert failing.received
    assert is_idle(gateway.router)


def test_a_stream_begins_at_another_instance_if_one_has_died(make_gateway: MakeGateway, stand_in: MakeStandIn) -> None:
    instances = [stand_in("mixed", streams("a", "b")) for _ in range(2)]
    gateway = make_gateway(*instances)
    instances[0].stop()

    def finish_stream() -> bool:
        with gateway.stream() as response:
            assert response.status_code == 200
            assert response.read().endswith(b"data: [DONE]\n\n")
        return any(not instance.healthy for instance in gateway.router.app.registry)

    wait_until(finish_stream, "the probes of the dead instance")
    assert is_idle(gateway.router)


def test_a_response_counts_for_the_instance_that_envoy_has_used(
    make_gateway: MakeGateway, stand_in: MakeStandIn
) -> None:
    used, unknown_to_envoy = stand_in(), stand_in()
    gateway = make_gateway(used)
    assert unknown_to_envoy.register(gateway.router.url).status_code == 200
    assert {gateway.chat(user=str(turn)).headers["x-router-mixed"] for turn in range(4)} == {used.key}
    assert len(used.received) == 4


def test_a_refusal_of_an_instance_is_passed_on(make_gateway: MakeGateway, stand_in: MakeStandIn) -> None:
    gateway = make_gateway(stand_in("mixed", answers(422, b'{"error": {"message": "no"}}')))
    answer = gateway.chat()
    assert (answer.status_code, answer.json()) == (422, {"error": {"message": "no"}})


def test_the_router_answers_paths_that_need_no_choice(make_gateway: MakeGateway, stand_in: MakeStandIn) -> None:
    gateway = make_gateway(stand_in())
    assert gateway.client.get("/v1/models").json()["data"][0]["id"] == "m"
    assert gateway.client.get("/admin/requests").status_code == 404
    assert gateway.client.post("/tokenize", json={"prompt": "a"}).status_code == 200


def test_the_picker_makes_the_same_choices_as_the_router(
    make_gateway: MakeGateway, make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instances = [stand_in() for _ in range(3)]
    routed = choose_for_conversations(make_router(*instances).chat)
    picked = choose_for_conversations(make_gateway(*instances).chat)
    assert picked == routed
    assert len({choice.split()[0] for choice in routed}) == 3


def choose_for_conversations(chat: Callable[..., object]) -> list[str]:
    """Send the turns of several growing conversations; return the instance and the decision of each turn."""
    chosen = []
    for turn in range(NUM_TURNS):
        text = f"conversation {turn % 5} " * 100 * (1 + turn // 5)
        answer = chat(messages=[{"role": "user", "content": text}])
        chosen.append(f"{answer.headers['x-router-mixed']} {answer.headers['x-router-decision']}")  # type: ignore[attr-defined]
    return chosen


def test_requests_leave_no_reference_cycles(make_gateway: MakeGateway, stand_in: MakeStandIn) -> None:
    gateway = make_gateway(stand_in(), stand_in("mixed", answers(500, b"{}")))
    gateway.chat()
    wait_until(lambda: not list_requests(), "the end of the first request")
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            assert gateway.chat().status_code == 200
        wait_until(lambda: not list_requests(), "the end of all requests, without the garbage collector")
    finally:
        gc.enable()


def list_requests() -> list[object]:
    return [each for each in gc.get_objects() if type(each).__name__ in ("GatewayRequest", "GatewayExchange")]


def test_a_buffered_request_has_its_id_and_length_at_the_instance(
    make_gateway: MakeGateway, stand_in: MakeStandIn
) -> None:
    instance = stand_in("mixed", streams("a"))
    gateway = make_gateway(instance, ext_proc=BUFFERED)
    text = "many words " * 10_000
    with gateway.stream(messages=[{"role": "user", "content": text}]) as response:
        assert response.read().endswith(b"data: [DONE]\n\n")
    (received,) = instance.received
    assert received.json["request_id"] == response.headers["x-request-id"]
    assert received.header("content-length") == str(len(received.body))


def test_the_error_for_a_gateway_without_bodies_names_the_setting(make_gateway: MakeGateway) -> None:
    answer = make_gateway(ext_proc={"processing_mode": {"request_body_mode": "NONE"}}).chat()
    assert answer.status_code == 500
    assert "request_body_mode FULL_DUPLEX_STREAMED" in answer.json()["error"]["message"]


def test_a_request_that_times_out_has_the_routers_error(make_gateway: MakeGateway, stand_in: MakeStandIn) -> None:
    instance = stand_in("mixed", never_answers)
    answer = make_gateway(instance, request_timeout_secs=0.5).chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
    wait_until(lambda: instance.left == 1, "the end of the request at the instance")


def test_a_stream_moves_to_another_instance_if_its_own_hangs(make_gateway: MakeGateway, stand_in: MakeStandIn) -> None:
    hung, other = stand_in("mixed", never_answers), stand_in("mixed", streams("a", "b"))
    settings = {"health_check_interval_secs": 0.2, "health_check_timeout_secs": 0.2, "health_failure_threshold": 1}
    gateway = make_gateway(hung, other, **settings)
    hung.answers_probes = False
    with gateway.stream() as response:
        assert response.status_code == 200
        assert response.read().endswith(b"data: [DONE]\n\n")
    assert len(other.received) == 1
    assert is_idle(gateway.router)


def test_the_requests_of_a_gateway_that_has_died_end(
    make_gateway: MakeGateway, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.epp.picker.PING_SECONDS", 2.0)
    gateway = make_gateway(stand_in("mixed", never_answers))
    with ThreadPoolExecutor() as clients:
        answer = clients.submit(gateway.chat)
        wait_until(lambda: list_loads(gateway.router)[0][0] == 1, "the request")
        gateway.envoy.process.signal(signal.SIGSTOP)
        try:
            wait_until(lambda: is_idle(gateway.router), "the end of the request")
        finally:
            gateway.envoy.process.signal(signal.SIGCONT)
        assert answer.result(20).status_code >= 500


def test_requests_wait_for_their_turn(make_gateway: MakeGateway, stand_in: MakeStandIn) -> None:
    may_end = threading.Event()
    instance = stand_in("mixed", streams_until(may_end))
    gateway = make_gateway(instance, max_concurrent_requests=1)
    with gateway.stream() as first, ThreadPoolExecutor() as others:
        lines = first.iter_lines()
        assert next(lines) == "data: 1"
        second = others.submit(gateway.chat, stream=True)
        wait_until(lambda: gateway.router.app.admission.waiting == 1, "the wait of the second request")
        may_end.set()
        assert second.result(20).text.endswith("data: [DONE]\n\n")
    assert len(instance.received) == 2


@pytest.mark.parametrize("engine", ["fastdeploy", "sglang", "other"])
def test_a_pair_serves_a_request_together(make_gateway: MakeGateway, stand_in: MakeStandIn, engine: str) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode", streams("a", "b"))
    for instance in (prefill, decode):
        instance.extra_fields = {"engine": engine} if engine != "other" else {"engine": "openai"}
    gateway = make_gateway(prefill, decode, splitwise=True)
    with gateway.stream() as response:
        assert response.read().endswith(b"data: [DONE]\n\n")
    assert response.headers["x-router-prefill"] == prefill.key
    (at_prefill,), (at_decode,) = prefill.received, decode.received
    assert at_decode.header("x-gateway-destination-endpoint") == decode.key
    assert at_prefill.header("x-gateway-destination-endpoint") is None
    if engine == "fastdeploy":
        assert at_prefill.json["disaggregate_info"] == at_decode.json["disaggregate_info"]
    if engine == "sglang":
        assert at_prefill.json["bootstrap_room"] == at_decode.json["bootstrap_room"]
    wait_until(lambda: is_idle(gateway.router), "the end of both legs")
