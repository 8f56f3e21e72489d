"""The router's own errors have the form of the requested API, or of the FastDeploy router of its dialect."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import anthropic
import pytest

from router.http import ApiError, to_dialect
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import Received, Responder, answers
from tests.support.ports import free_port

MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"
WRONG_KEY = {"authorization": "Bearer wrong"}
QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def check_anthropic_error(body: Any, kind: str) -> None:
    assert body.keys() == {"type", "error"}
    assert body["error"].keys() == {"type", "message", "code"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert len(body["error"]["message"]) > 10


@pytest.fixture
def router(make_router: MakeRouter, tmp_path: Path) -> RouterUnderTest:
    """Start a router without an instance, for one client."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("alice: sk-1\n")
    keys.chmod(0o600)
    return make_router(api_keys_file=str(keys), max_body_bytes=5000)


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "kind"),
    [
        ("POST", MESSAGES, {"content": b"{"}, 400, "invalid_request_error"),
        ("POST", MESSAGES, {"content": b"[]"}, 400, "invalid_request_error"),
        ("POST", MESSAGES, {"json": {**QUESTION, "request_id": 5}}, 400, "invalid_request_error"),
        ("GET", MESSAGES, {}, 405, "invalid_request_error"),
        (
            "POST",
            MESSAGES,
            {"json": QUESTION, "headers": {"authorization": "Bearer wrong"}},
            401,
            "authentication_error",
        ),
        ("POST", MESSAGES, {"json": {**QUESTION, "system": "x" * 9000}}, 413, "request_too_large"),
        ("POST", MESSAGES, {"json": QUESTION}, 503, "api_error"),
        ("POST", f"{MESSAGES}/count_tokens", {"json": QUESTION}, 503, "api_error"),
        ("POST", f"{MESSAGES}/batches", {"json": QUESTION}, 404, "not_found_error"),
    ],
)
def test_an_error_at_anthropics_paths_has_anthropics_form(
    router: RouterUnderTest, method: str, path: str, options: dict[str, Any], status: int, kind: str
) -> None:
    headers = {"authorization": "Bearer sk-1", **options.pop("headers", {})}
    answer = router.client.request(method, path, headers=headers, **options)
    assert answer.status_code == status
    check_anthropic_error(answer.json(), kind)


def test_anthropics_client_reads_the_routers_errors(router: RouterUnderTest) -> None:
    client = anthropic.Anthropic(base_url=router.url, auth_token="sk-1", max_retries=0)
    with client, pytest.raises(anthropic.InternalServerError) as caught:
        client.messages.create(model="m", **QUESTION)
    check_anthropic_error(caught.value.body, "api_error")


def test_a_stream_that_breaks_off_ends_with_anthropics_event(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    event = b'event: message_start\ndata: {"type":"message_start"}\n\n'

    async def breaks(request: Received, respond: Responder) -> None:
        await respond.start_stream("text/event-stream")
        await respond.chunk(event)
        respond.cut()

    router = make_router(stand_in("mixed", breaks))
    answer = router.client.post(MESSAGES, json={**QUESTION, "stream": True})
    rest = answer.content.removeprefix(event)
    assert rest.startswith(b"event: error\ndata: {")
    assert rest.count(b"\n\n") == 1  # nothing follows, no [DONE]
    check_anthropic_error(json.loads(rest.partition(b"data: ")[2]), "api_error")


@pytest.mark.parametrize("path", [MESSAGES, CHAT])
def test_a_body_with_a_content_encoding_is_refused(router: RouterUnderTest, path: str) -> None:
    headers = {"authorization": "Bearer sk-1", "content-encoding": "gzip"}
    answer = router.client.post(path, content=gzip.compress(b"{}"), headers=headers)
    assert answer.status_code == 415
    assert (
        "the body has the content encoding gzip; this router accepts only bodies without one"
        in answer.json()["error"]["message"]
    )


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages_of_another_api", ""])
def test_errors_at_other_paths_have_openais_form(path: str) -> None:
    error = ApiError(400, "it is wrong", "invalid_body", "n")
    expected = {"message": "it is wrong", "type": "invalid_request_error", "param": "n", "code": "invalid_body"}
    assert json.loads(error.body(path)) == {"error": expected}
    assert error.sse(path) == b"data: %s\n\ndata: [DONE]\n\n" % error.body(path)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 408, 409, 411, 413, 414, 429, 431, 500, 502, 503, 504])
def test_every_status_has_a_type_of_anthropics(status: int) -> None:
    known = {
        *("invalid_request_error", "authentication_error", "permission_error", "not_found_error", "request_too_large"),
        *("rate_limit_error", "api_error", "timeout_error"),
    }
    body = json.loads(ApiError(status, "it is wrong", "code").body(MESSAGES))
    assert body["error"]["type"] in known
    assert (body["error"]["type"] in ("api_error", "timeout_error")) == (status >= 500 or status == 408)


def test_the_go_router_without_a_pair_answers_503_with_the_requests_id(make_router: MakeRouter) -> None:
    answer = make_router(splitwise=True, dialect="go").chat(request_id="r1")
    body = answer.json()
    assert (answer.status_code, body["error"]) == (503, "No available prefill/decode workers")
    assert (body["request_id"], body["code"]) == ("r1", "no_instance")
    assert "no prefill instance is registered; start one with" in body["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_go_router_without_a_mixed_instance_answers_502(make_router: MakeRouter, stream: bool) -> None:
    answer = make_router(dialect="go").chat(stream=stream)
    body = answer.json()
    assert (answer.status_code, body["error"]) == (502, "Failed to select worker: no healthy workers available")
    assert "request_id" not in body


def test_the_go_router_answers_400_to_a_body_that_is_no_json(make_router: MakeRouter) -> None:
    answer = make_router(dialect="go").client.post(CHAT, content=b"invalid json")
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("Invalid JSON format: ")


def test_the_go_router_answers_502_if_an_instance_cannot_be_reached(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    router = make_router(instance, dialect="go")
    instance.stop()
    answer = router.chat()
    assert answer.status_code == 502
    assert answer.json()["error"].startswith("Failed to connect to backend service: mixed instance failed: ")


def test_an_instances_own_error_reaches_the_client_unchanged(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    refuses = answers(400, b'{"error": {"message": "too long"}}')
    answer = make_router(stand_in("mixed", refuses), dialect="go").chat()
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": "too long"}})


def test_the_python_router_reports_different_tp_sizes_as_detail(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    router = make_router(splitwise=True)
    prefill.register(router.url, tp_size=4)
    decode.register(router.url, tp_size=2)
    answer = router.chat()
    body = answer.json()
    assert answer.status_code == 400
    assert body["detail"].startswith("prefill and decode must have the same tp_size, or decode tp_size 1")
    assert body["error"]["code"] == "tp_size_mismatch"


def test_an_error_unknown_to_the_python_router_has_openais_form(make_router: MakeRouter) -> None:
    answer = make_router().chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_instance")


@pytest.mark.parametrize("code", ["rate_limit_exceeded", "model_not_found", "aborted", "no_pair"])
@pytest.mark.parametrize("dialect", ["python", "go"])
def test_errors_unknown_to_fastdeploys_routers_have_openais_form(dialect: str, code: str) -> None:
    error = ApiError(429, "why", code)
    assert json.loads(to_dialect(dialect, error, "r", splitwise=True).body())["error"]["message"] == "why"


class TestRegistrationAtTheGoRouter:
    """Responses to ``POST /register`` in the dialect of FastDeploy's Go router."""

    def test_a_registration_succeeds(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        answer = stand_in().register(make_router(dialect="go").url)
        assert (answer.status_code, answer.json()) == (200, {"code": 200, "msg": "Register success"})

    def test_an_instance_that_does_not_answer_its_probe_is_refused(self, make_router: MakeRouter) -> None:
        port = free_port()
        fields = {"role": "mixed", "host_ip": "127.0.0.1", "port": port}
        answer = make_router(dialect="go").client.post("/register", json=fields)
        assert (answer.status_code, answer.json()["code"]) == (503, 503)
        assert answer.json()["msg"].startswith(f"http://127.0.0.1:{port} service is not healthy: ")

    @pytest.mark.parametrize(
        ("splitwise", "role", "message"),
        [
            (True, "mixed", "splitwise mode only supports PREFILL/DECODE instances"),
            (False, "decode", "only MIXED instances are allowed"),
        ],
    )
    def test_a_role_that_the_mode_does_not_accept_is_refused(
        self, make_router: MakeRouter, stand_in: MakeStandIn, splitwise: bool, role: str, message: str
    ) -> None:
        answer = stand_in(role).register(make_router(splitwise=splitwise, dialect="go").url)
        assert (answer.status_code, answer.json()["code"]) == (400, 400)
        assert message in answer.json()["msg"]

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (b"invalid json", "Invalid InstanceInfo JSON format: "),
            (b"", "Invalid InstanceInfo JSON format: "),
            (b'{"role": "mixed"}', "invalid InstanceInfo format: host_ip is None"),
        ],
    )
    def test_a_body_that_is_no_instance_is_refused(self, make_router: MakeRouter, body: bytes, message: str) -> None:
        answer = make_router(dialect="go").client.post("/register", content=body)
        assert answer.status_code == 400
        assert answer.json()["msg"].startswith(message)
