"""A prefill/decode pair, observed by the client and by the instances. Instances are stand-ins."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.fleet.breaker import FAILURES
from router.serving import attempt
from router.serving.attempt import PREAMBLE_BYTES, Attempt, Leg
from tests.router.conftest import MakeRouter, MakeStandIn
from tests.router.stand_in import Behaviour, Received, Responder, StandIn, answers, chat_answer, cuts, never_answers
from tests.support.waiting import wait_until


def list_aborted(instance: StandIn) -> list[str]:
    return [req_id for abort in instance.aborted for req_id in abort["req_ids"]]


def is_idle(instance: StandIn) -> bool:
    """Return whether all requests of an instance were aborted and their connections closed."""
    got = {f"chatcmpl-{request.json['request_id']}_0" for request in instance.received}
    return instance.running == 0 and got <= set(list_aborted(instance))


class Owner:
    """The owner of an attempt, which stores the first bytes."""

    first = b""

    def on_begun(self, attempt: Attempt, first: bytes, is_end: bool) -> None:
        self.first = first


def relay_preamble(event: bytes) -> bytes:
    """Feed an attempt with one event again and again, and return the first bytes that it sends."""
    exchange = SimpleNamespace(status=200, headers=[(b"content-type", b"text/event-stream")])
    instance = SimpleNamespace(breaker=SimpleNamespace(failures=0))
    leg = SimpleNamespace(instance=instance, exchange=exchange, end_prefill=lambda: None)
    new_attempt = Attempt(
        cast(Leg, leg),
        None,
        None,
        may_err_late=True,
        hold_bytes=0,
        aborter=cast(Any, None),
        on_trouble=cast(Any, None),
    )
    owner = new_attempt._owner = cast(Any, Owner())
    for _ in range(2 * PREAMBLE_BYTES // len(event)):
        new_attempt.on_data(event, False)
        if owner.first:
            break
    first: bytes = owner.first
    return first


@pytest.mark.parametrize("event", [b'data: {"type": "ping"}\n\n', b": comment\n", b'data: {"type": "ping", '])
def test_an_endless_preamble_is_sent_at_its_limit(event: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "PREAMBLE_BYTES", 4096)
    first = relay_preamble(event)
    assert first.startswith(event)
    assert len(first) <= 4096 + len(event)


def test_only_the_new_bytes_of_a_preamble_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    num_searched: list[int] = []
    find_token = attempt._find_token

    def note(data: bytes, start: int) -> bytes | None:
        num_searched.append(len(data) - start)
        return find_token(data, start)

    monkeypatch.setattr(attempt, "PREAMBLE_BYTES", 4096)
    monkeypatch.setattr(attempt, "_find_token", note)
    event = b'data: {"type": "ping"}\n\n'
    assert relay_preamble(event)
    assert max(num_searched) <= 2 * len(event)


def test_the_client_gets_the_response_of_decode_only(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill = stand_in("prefill", answers(body=b'{"from": "prefill"}'))
    decode = stand_in("decode", answers(body=b'{"from":  "decode"}'))
    router = make_router(prefill, decode, splitwise=True)
    assert router.chat().content == b'{"from":  "decode"}'
    assert (len(prefill.received), len(decode.received)) == (1, 1)


def test_both_legs_get_the_same_body(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    make_router(prefill, decode, splitwise=True).chat()
    assert prefill.received[0].body == decode.received[0].body


def test_a_request_without_an_id_gets_a_new_one_each_time(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    router = make_router(prefill, decode, splitwise=True)
    router.chat()
    router.chat()
    ids = [request.json["request_id"] for request in decode.received]
    assert len(set(ids)) == 2
    assert all(len(request_id) == 36 for request_id in ids)


def test_a_clients_own_request_id_is_not_changed(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    make_router(prefill, decode, splitwise=True).chat(request_id="mine")
    assert decode.received[0].json["request_id"] == "mine"


def test_disaggregate_info_has_fastdeploys_fields(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    router = make_router(splitwise=True)
    prefill.register(router.url, connector_port=8001)
    decode.register(router.url, connector_port="8002", rdma_ports=[7100, "7101"], device_ids=[0, 1])
    router.chat()
    assert decode.received[0].json["disaggregate_info"] == {
        "prefill_ip": "127.0.0.1",
        "decode_ip": "127.0.0.1",
        "prefill_connector_port": "8001",
        "decode_connector_port": "8002",
        "decode_device_ids": ["0", "1"],
        "decode_rdma_ports": ["7100", "7101"],
        "transfer_protocol": "ipc",
        "decode_tp_size": 1,
    }


def test_a_pair_with_incompatible_tp_sizes_is_answered_with_400(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    router = make_router(splitwise=True)
    prefill.register(router.url, tp_size=4)
    decode.register(router.url, tp_size=2)
    response = router.chat()
    assert response.status_code == 400
    assert "tp_size" in response.json()["error"]["message"]


def test_only_decode_instances_that_fit_the_prefill_are_chosen(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, fitting, other = stand_in("prefill"), stand_in("decode"), stand_in("decode")
    router = make_router(splitwise=True)
    prefill.register(router.url, tp_size=4)
    other.register(router.url, tp_size=2)
    fitting.register(router.url, tp_size=4)
    assert [router.chat().status_code for _ in range(4)] == [200] * 4
    assert (len(fitting.received), len(other.received)) == (4, 0)


def test_the_response_does_not_wait_for_the_end_of_prefill(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill", never_answers), stand_in("decode")
    router = make_router(prefill, decode, splitwise=True)
    assert router.chat().status_code == 200
    assert prefill.running == 1


def test_a_long_response_of_prefill_is_read_to_its_end(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    drained = []

    async def long_answer(request: Received, respond: Responder) -> None:
        await respond.start_stream()
        for _ in range(64):
            await respond.chunk(b"x" * 65536)
        await respond.end_stream()
        drained.append(respond.bytes_sent)

    async def answer_after_prefill_ends(request: Received, respond: Responder) -> None:
        while not drained:
            await asyncio.sleep(0.01)
        await respond.answer(200, chat_answer())

    prefill, decode = stand_in("prefill", long_answer), stand_in("decode", answer_after_prefill_ends)
    assert make_router(prefill, decode, splitwise=True).chat().status_code == 200
    assert drained[0] > 4_000_000


@pytest.mark.parametrize("status", [400, 404, 422, 429])
def test_decodes_own_4xx_reaches_the_client_unchanged(
    make_router: MakeRouter, stand_in: MakeStandIn, status: int
) -> None:
    body = b'{"error": {"message": "no", "n": 1.0}}'
    prefill, decode = stand_in("prefill"), stand_in("decode", answers(status, body, ("retry-after", "7")))
    response = make_router(prefill, decode, splitwise=True).chat()
    assert (response.status_code, response.content, response.headers["retry-after"]) == (status, body, "7")


@pytest.mark.parametrize("status", [400, 429])
def test_prefills_own_4xx_reaches_the_client_unchanged_and_decode_is_aborted(
    make_router: MakeRouter, stand_in: MakeStandIn, status: int
) -> None:
    prefill, decode = stand_in("prefill", answers(status, b'{"error": "prompt"}')), stand_in("decode", never_answers)
    response = make_router(prefill, decode, splitwise=True).chat(request_id="r")
    assert (response.status_code, response.content) == (status, b'{"error": "prompt"}')
    wait_until(lambda: is_idle(decode), "the end of decode's leg")


@pytest.mark.parametrize(
    "failing",
    [
        pytest.param(answers(500, b"boom"), id="answers 500"),
        pytest.param(answers(503, b"busy"), id="answers 503"),
        pytest.param(cuts(), id="closes before its headers"),
        pytest.param(cuts(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"), id="closes in the middle"),
        pytest.param(cuts(b"not HTTP at all\r\n\r\n"), id="answers garbage"),
        pytest.param(cuts(b"HTTP/1.1 777 Odd\r\ncontent-length: 0\r\n\r\n"), id="answers an impossible status"),
    ],
)
class TestAFailingLeg:
    """One leg fails before the first byte of the response."""

    def test_another_decode_instance_gets_a_retry_with_its_own_id(
        self, make_router: MakeRouter, stand_in: MakeStandIn, failing: Behaviour
    ) -> None:
        prefill, bad, good = stand_in("prefill"), stand_in("decode", failing), stand_in("decode")
        router = make_router(prefill, bad, good, splitwise=True)
        assert [router.chat(request_id=f"r{i}").status_code for i in range(2)] == [200] * 2
        retried = [r.json["request_id"] for r in good.received if r.json["request_id"].endswith("-retry1")]
        assert len(retried) == len(bad.received) >= 1
        assert {r.json["disaggregate_info"]["decode_connector_port"] for r in good.received} == {
            str(good.registration()["connector_port"])
        }


def test_a_prefill_that_refuses_connections_gives_502_then_503_that_names_the_role(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode", never_answers)
    router = make_router(prefill, decode, splitwise=True)
    prefill.stop()
    first, second = router.chat(), router.chat()
    assert (first.status_code, second.status_code) == (502, 503)
    assert f"no prefill instance can take the request ({prefill.key} is unhealthy" in second.json()["error"]["message"]


def test_a_client_that_leaves_closes_both_legs_and_aborts_both(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill", never_answers), stand_in("decode", never_answers)
    router = make_router(prefill, decode, splitwise=True)
    sock = _send_chat(router.port, {"messages": [], "request_id": "r"})
    wait_until(lambda: (prefill.running, decode.running) == (1, 1), "both legs")
    sock.close()
    wait_until(lambda: (prefill.running, decode.running) == (0, 0), "the end of both legs")
    wait_until(lambda: list_aborted(prefill) == list_aborted(decode) == ["chatcmpl-r_0"], "both aborts")


def test_a_client_that_leaves_in_the_middle_of_a_stream_aborts_decode(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    async def send_without_end(request: Received, respond: Responder) -> None:
        await respond.start_stream()
        while not respond.peer_left.is_set():
            await respond.event("{}")
            await asyncio.sleep(0.01)
        respond.keep_alive = False

    prefill, decode = stand_in("prefill"), stand_in("decode", send_without_end)
    router = make_router(prefill, decode, splitwise=True)
    sock = _send_chat(router.port, {"messages": [], "stream": True, "request_id": "r"})
    assert sock.recv(4096)
    sock.close()
    wait_until(lambda: decode.running == 0, "the end of decode's connection")
    wait_until(lambda: list_aborted(decode) == ["chatcmpl-r_0"], "the abort at decode")
    assert prefill.aborted == []


@pytest.mark.parametrize(
    ("path", "body", "ids"),
    [
        ("/v1/chat/completions", {"request_id": "r"}, ["chatcmpl-r_0"]),
        ("/v1/chat/completions", {"request_id": "chatcmpl-r"}, ["chatcmpl-r_0"]),
        ("/v1/chat/completions", {"request_id": "r", "n": 3}, ["chatcmpl-r_0", "chatcmpl-r_1", "chatcmpl-r_2"]),
        ("/v1/completions", {"request_id": "r", "prompt": "a"}, ["cmpl-r_0"]),
        ("/v1/completions", {"request_id": "r", "prompt": ["a", "b"], "n": 1}, ["cmpl-r_0", "cmpl-r_1"]),
        ("/v1/completions", {"request_id": "r", "prompt": [1, 2, 3]}, ["cmpl-r_0"]),
    ],
)
def test_aborts_name_the_engines_own_ids(
    make_router: MakeRouter, stand_in: MakeStandIn, path: str, body: dict[str, Any], ids: list[str]
) -> None:
    prefill = stand_in("prefill", never_answers)

    async def refuse_when_prefill_runs(request: Received, respond: Responder) -> None:
        while not prefill.running:
            await asyncio.sleep(0.01)
        await respond.answer(400, b"{}")

    decode = stand_in("decode", refuse_when_prefill_runs)
    make_router(prefill, decode, splitwise=True).client.post(path, json=body)
    wait_until(lambda: list_aborted(prefill) == ids, "the abort")


def test_a_failure_of_prefill_after_the_beginning_of_the_response_is_ignored(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    begun = asyncio.Event()

    async def fail_late(request: Received, respond: Responder) -> None:
        await begun.wait()
        respond.cut()

    async def answer_slowly(request: Received, respond: Responder) -> None:
        await respond.start_stream()
        await respond.event("1")
        await asyncio.sleep(0.05)
        begun.set()
        await asyncio.sleep(0.05)
        await respond.event("2")
        await respond.end_stream()

    prefill, decode = stand_in("prefill", fail_late), stand_in("decode", answer_slowly)
    with make_router(prefill, decode, splitwise=True).stream() as response:
        assert response.read() == b"data: 1\n\ndata: 2\n\n"


def _send_chat(port: int, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    return sock


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_successful_response_resets_the_count_of_failures(
    make_router: MakeRouter, stand_in: MakeStandIn, role: str
) -> None:
    router = make_router(stand_in("prefill"), stand_in("decode"), splitwise=True)
    (instance,) = [each for each in router.app.registry if each.role.value == role]
    instance.record_failure(0.0, "it answered with 500")
    assert router.chat().status_code == 200
    wait_until(lambda: instance.breaker.failures == 0, "the reset of the failures")


def test_a_decode_leg_that_is_silent_after_prefill_failed_is_ended(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.serving.attempt.SILENCE_SECONDS", 0.05)
    begun = asyncio.Event()

    async def send_role(request: Received, respond: Responder) -> None:
        await respond.start_stream()
        await respond.event('{"choices": [{"delta": {"role": "assistant"}}]}')
        begun.set()
        await respond.peer_left.wait()
        respond.keep_alive = False

    async def fail_after_role(request: Received, respond: Responder) -> None:
        await begun.wait()
        await asyncio.sleep(0.05)  # so that the client has got the role
        respond.cut()

    router = make_router(stand_in("prefill", fail_after_role), stand_in("decode", send_role), splitwise=True)
    with router.stream() as response:
        *_, error, done = response.read().decode().strip().split("\n\n")
    assert (json.loads(error.removeprefix("data: "))["error"]["code"], done) == ("decode_failed", "data: [DONE]")


def test_a_transfer_error_is_found_after_the_ids_of_a_long_prompt(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    async def fails(request: Received, respond: Responder) -> None:
        await respond.start_stream()
        await respond.event(json.dumps({"choices": [{"delta": {"prompt_token_ids": [12345] * 50_000}}]}))
        await respond.event('{"error": {"message": "PD Error: decode refused"}}')
        await respond.end_stream()

    router = make_router(stand_in("prefill", fails), stand_in("decode", never_answers), splitwise=True)
    response = router.chat(stream=True)
    assert (response.status_code, response.json()["error"]["code"]) == (502, "prefill_failed")


def test_a_text_about_a_transfer_error_is_no_error(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill = stand_in("prefill", answers(body=chat_answer('what does {"error": "PD Error"} mean?')))

    async def answer_after_prefill(_: Received, respond: Responder) -> None:
        while not prefill.answered:
            await asyncio.sleep(0.01)
        await respond.answer(200, chat_answer())

    decode = stand_in("decode", answer_after_prefill)
    assert make_router(prefill, decode, splitwise=True).chat().status_code == 200
    assert len(prefill.received) == 1


def test_the_pauses_between_attempts_at_the_only_pair_grow(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def record_pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr("router.serving.retry_loop.random.uniform", lambda low, high: 1.0)
    prefill = stand_in("prefill", answers(body=b'{"error": {"message": "PD Error"}}'))
    router = make_router(prefill, stand_in("decode", never_answers), splitwise=True)
    monkeypatch.setattr("router.serving.retry_loop.sleep", record_pause)
    assert router.chat().status_code == 502
    assert [pause for pause in pauses if pause] == [0.05, 0.1, 0.2, 0.4]


@pytest.mark.parametrize("role", ["mixed", "decode"])
@pytest.mark.parametrize(("seconds", "status"), [(0.0, 200), (1000.0, 502)])
def test_a_request_is_sent_again_to_its_instance_after_that_has_returned(
    make_router: MakeRouter,
    stand_in: MakeStandIn,
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    seconds: float,
    status: int,
) -> None:
    monkeypatch.setattr("router.serving.retry_loop.RETURN_SECONDS", seconds)
    failures = iter([cuts()])

    async def die_once(request: Received, respond: Responder) -> None:
        await next(failures, answers())(request, respond)

    instances = [stand_in(role, die_once) for _ in range(2)]
    others = [] if role == "mixed" else [stand_in("prefill")]
    router = make_router(*instances, *others, splitwise=role != "mixed")
    instances[1].stop()  # it refuses connections
    assert router.chat().status_code == status


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_in_the_routers_code_ends_the_request_with_one_500(
    make_router: MakeRouter,
    stand_in: MakeStandIn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
) -> None:
    instance = stand_in("mixed")
    router = make_router(instance)
    calls: list[str] = []

    def fails(*_: object) -> None:
        calls.append("choose")
        raise TypeError("a mistake")

    monkeypatch.setattr(router.app.proxy._services.selector, "choose", fails)
    answer = router.chat(stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "router_error")
    assert calls == ["choose"], "the failed call is repeated"
    assert sum(record.exc_info is not None for record in caplog.records) == 1
    (record,) = wait_until(lambda: router.app.audit.records, "the record")
    assert (record.status, record.error) == (500, "router_error")
    assert instance.received == []


@pytest.mark.parametrize("silence", [0.0, 1000.0])
def test_a_stream_is_ended_if_its_instance_is_silent_and_answers_no_probes(
    make_router: MakeRouter, stand_in: MakeStandIn, silence: float
) -> None:
    may_continue = asyncio.Event()

    async def stream_slowly(request: Received, respond: Responder) -> None:
        await respond.start_stream()
        await respond.event("first")
        await may_continue.wait()
        await respond.event("[DONE]")
        await respond.end_stream()

    router = make_router(stand_in("mixed", stream_slowly), stream_resume_count=0)
    (instance,) = router.app.registry
    with router.stream() as response:
        pieces = response.iter_raw()
        next(pieces)

        async def fail_probes() -> None:
            for serving in router.app.proxy._live:
                assert serving.attempt is not None
                serving.attempt.on_instance_failure(instance, silence)
            may_continue.set()

        router.thread.run(fail_probes())
        rest = b"".join(pieces)
    assert (b"stopped answering" in rest) is (silence == 0.0)


def test_a_client_that_leaves_before_another_attempt_ends_its_request_at_once(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = threading.Event()

    async def pause(seconds: float) -> None:
        paused.set()
        await asyncio.sleep(3600.0)

    monkeypatch.setattr("router.serving.retry_loop.sleep", pause)
    router = make_router(*(stand_in("mixed", answers(503, b"busy")) for _ in range(3)))
    sock = _send_chat(router.port, {"messages": []})
    assert paused.wait(10)
    sock.close()
    wait_until(lambda: router.app.proxy.num_requests == 0, "the end of the request")


TOO_LONG = {
    "error": {"message": "Input text is too long", "type": "invalid_request_error", "param": None, "code": None}
}
NO_MODEL = {"error": {"message": "Unsupported model: [x]", "type": "internal_error", "code": "model_not_support"}}
NO_LOGPROBS = {"error": {"message": "too many", "type": "invalid_request", "param": "logprobs", "code": "400"}}


@pytest.mark.parametrize("error", [TOO_LONG, NO_MODEL, NO_LOGPROBS])
@pytest.mark.parametrize("roles", [("mixed", "mixed"), ("prefill", "prefill", "decode", "decode")])
def test_a_refusal_of_fastdeploys_is_not_the_instances_fault_though_its_status_is_500(
    make_router: MakeRouter, stand_in: MakeStandIn, roles: tuple[str, ...], error: dict[str, Any]
) -> None:
    """FastDeploy's API server answers every request that it refuses with 500, a prompt that is too long, too."""
    body = json.dumps(error).encode()
    instances = [stand_in(role, answers(500, body)) for role in roles]
    router = make_router(*instances, splitwise="decode" in roles)
    for _ in range(2 * FAILURES):
        response = router.chat()
        assert (response.status_code, response.json()) == (500, error)
    assert {instance.breaker.failures for instance in router.app.registry} == {0}
    tries = sum(len(instance.received) for instance in instances if instance.role != "prefill")
    assert tries <= 2 * FAILURES


def test_another_instance_serves_a_request_if_the_weights_of_the_first_one_were_cleared(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    """FastDeploy reports this as an invalid request, but it is no fault of the request."""
    error = {"message": "Model weight cleared", "type": "invalid_request_error", "param": None, "code": "invalid_value"}
    cleared = stand_in("mixed", answers(500, json.dumps({"error": error}).encode()))
    router = make_router(cleared, stand_in("mixed"), policy="round_robin")
    assert [router.chat().status_code for _ in range(4)] == [200] * 4
    assert cleared.received
