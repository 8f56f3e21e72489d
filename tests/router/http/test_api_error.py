"""Errors in the form of FastDeploy's routers: the members and statuses that scripts written for these look at."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from router.http import ApiError, to_dialect
from tests.router.conftest import RouterUnderTest
from tests.router.stand_in import StandIn, answers
from tests.support.ports import free_port

MakeRouter = Callable[..., RouterUnderTest]
MakeStandIn = Callable[..., StandIn]

CHAT = "/v1/chat/completions"


def test_the_go_router_without_a_pair_answers_503_with_the_requests_id(make_router: MakeRouter) -> None:
    answer = make_router(splitwise=True, dialect="go").chat(request_id="r1")
    told = answer.json()
    assert (answer.status_code, told["error"]) == (503, "No available prefill/decode workers")
    assert (told["request_id"], told["code"]) == ("r1", "no_instance")
    assert "no prefill instance is registered; start one with" in told["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_go_router_without_a_mixed_instance_answers_502(make_router: MakeRouter, stream: bool) -> None:
    answer = make_router(dialect="go").chat(stream=stream)
    told = answer.json()
    assert (answer.status_code, told["error"]) == (502, "Failed to select worker: no healthy workers available")
    assert "request_id" not in told


def test_the_go_router_answers_400_to_what_is_no_json(make_router: MakeRouter) -> None:
    answer = make_router(dialect="go").client.post(CHAT, content=b"invalid json")
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("Invalid JSON format: ")


def test_the_go_router_answers_502_where_an_instance_cannot_be_reached(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    router = make_router(instance, dialect="go")
    instance.stop()
    answer = router.chat()
    assert answer.status_code == 502
    assert answer.json()["error"].startswith("Failed to connect to backend service: mixed instance failed: ")


def test_an_instances_own_error_reaches_the_client_as_it_is(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    refuses = answers(400, b'{"error": {"message": "too long"}}')
    answer = make_router(stand_in("mixed", refuses), dialect="go").chat()
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": "too long"}})


def test_the_python_router_tells_a_misfit_of_tp_sizes_as_detail(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    router = make_router(splitwise=True)
    prefill.register(router.url, tp_size=4)
    decode.register(router.url, tp_size=2)
    answer = router.chat()
    told = answer.json()
    assert answer.status_code == 400
    assert told["detail"].startswith("the tp_size of prefill and decode must be equal, or that of decode 1")
    assert told["error"]["code"] == "tp_size_mismatch"


def test_in_the_python_routers_dialect_an_error_that_it_has_not_is_openais(make_router: MakeRouter) -> None:
    answer = make_router().chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_instance")


@pytest.mark.parametrize("code", ["rate_limit_exceeded", "model_not_found", "aborted", "no_pair"])
@pytest.mark.parametrize("dialect", ["python", "go"])
def test_an_error_that_fastdeploys_routers_have_not_has_openais_shape(dialect: str, code: str) -> None:
    error = ApiError(429, "why", code)
    assert json.loads(to_dialect(dialect, error, "r", splitwise=True).body())["error"]["message"] == "why"


class TestRegistrationAtTheGoRouter:
    """``POST /register`` as FastDeploy's Go router answers it."""

    def test_success(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        answer = stand_in().register(make_router(dialect="go").url)
        assert (answer.status_code, answer.json()) == (200, {"code": 200, "msg": "Register success"})

    def test_an_instance_that_does_not_answer_its_probe(self, make_router: MakeRouter) -> None:
        port = free_port()
        fields = {"role": "mixed", "host_ip": "127.0.0.1", "port": port}
        answer = make_router(dialect="go").client.post("/register", json=fields)
        assert (answer.status_code, answer.json()["code"]) == (503, 503)
        assert answer.json()["msg"].startswith(f"http://127.0.0.1:{port} service is not healthy: ")

    @pytest.mark.parametrize(
        ("splitwise", "role", "said"),
        [
            (True, "mixed", "splitwise mode only supports PREFILL/DECODE instances"),
            (False, "decode", "only MIXED instances are allowed"),
        ],
    )
    def test_a_role_that_the_mode_does_not_take(
        self, make_router: MakeRouter, stand_in: MakeStandIn, splitwise: bool, role: str, said: str
    ) -> None:
        answer = stand_in(role).register(make_router(splitwise=splitwise, dialect="go").url)
        assert (answer.status_code, answer.json()["code"]) == (400, 400)
        assert said in answer.json()["msg"]

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            (b"invalid json", "Invalid InstanceInfo JSON format: "),
            (b"", "Invalid InstanceInfo JSON format: "),
            (b'{"role": "mixed"}', "invalid InstanceInfo format: host_ip is None"),
        ],
    )
    def test_a_body_that_is_no_instance(self, make_router: MakeRouter, body: bytes, said: str) -> None:
        answer = make_router(dialect="go").client.post("/register", content=body)
        assert answer.status_code == 400
        assert answer.json()["msg"].startswith(said)
