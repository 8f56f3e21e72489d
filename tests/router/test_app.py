"""Registration, lists, aborts, health and metrics, as FastDeploy's instances and operators use them."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router import app
from router.fleet.breaker import FAILURES
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import LoopThread, Received, Responder, StandIn, answers, chat_answer, stalls, streams_until
from tests.support.ports import free_port
from tests.support.waiting import wait_until


def test_a_registration_succeeds(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    response = stand_in("prefill").register(make_router(splitwise=True).url)
    assert (response.status_code, response.json()) == (200, {"status": "success"})


@pytest.mark.parametrize(
    ("splitwise", "role", "message"),
    [
        (
            True,
            "mixed",
            "this router runs with --splitwise and takes prefill and decode instances",
        ),
        (False, "decode", "this router runs without --splitwise and takes mixed instances"),
    ],
)
def test_a_role_that_the_mode_does_not_accept_is_a_400(
    make_router: MakeRouter, stand_in: MakeStandIn, splitwise: bool, role: str, message: str
) -> None:
    response = stand_in(role).register(make_router(splitwise=splitwise).url)
    assert (response.status_code, response.json()) == (400, {"detail": f"role is '{role}', but {message}"})


def test_an_instance_with_a_failed_probe_is_a_400(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    instance.health = 503
    response = instance.register(make_router().url)
    assert response.status_code == 400
    assert f"instance {instance.key} is not healthy" in response.json()["detail"]


def test_an_unreachable_instance_is_a_400(make_router: MakeRouter, thread: LoopThread) -> None:
    response = StandIn("mixed", thread, port=free_port()).register(make_router().url)
    assert response.status_code == 400
    assert "Connection refused" in response.json()["detail"]


@pytest.mark.parametrize("body", [b"", b"[]", b"not json"])
def test_a_registration_that_is_not_an_object_is_a_400(make_router: MakeRouter, body: bytes) -> None:
    response = make_router().client.post("/register", content=body)
    assert response.status_code == 400
    assert isinstance(response.json()["detail"], str)


def test_a_heartbeat_of_a_healthy_instance_causes_no_probe(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router, instance = make_router(), stand_in()
    for _ in range(3):
        instance.register(router.url)
    assert instance.probes == 1


def test_registered_lists_instances_by_role_with_all_fields(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router, prefill = make_router(splitwise=True), stand_in("prefill")
    prefill.register(router.url, gpu="H800")
    listed = router.client.get("/registered").json()
    assert (listed["code"], listed["msg"], listed["decode"], listed["mixed"]) == (200, "success", [], [])
    (entry,) = listed["prefill"]
    assert (entry["url"], entry["worker_type"], entry["role"], entry["gpu"]) == (
        prefill.url,
        "prefill",
        "prefill",
        "H800",
    )
    assert (entry["state"], entry["running_requests"]) == ("healthy", 0)


def test_registered_has_all_fields_of_the_go_router_in_its_form(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router, decode = make_router(splitwise=True), stand_in("decode")
    decode.register(router.url, connector_port=8002, engine_worker_queue_port=[8003], device_ids="0,1")
    (entry,) = router.client.get("/registered").json()["decode"]
    assert {
        "url": decode.url,
        "worker_type": "decode",
        "connector_port": "8002",
        "engine_worker_queue_port": "8003",
        "transfer_protocol": ["ipc", "rdma"],
        "rdma_ports": ["7100"],
        "device_ids": ["0", "1"],
        "metrics_port": str(decode.port),
    }.items() <= entry.items()


def test_registered_shows_the_engine_of_each_instance(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    ours, other = stand_in(), stand_in()
    router = make_router(ours)
    other.register(router.url, engine="sglang", bootstrap_port="9001")
    entries = router.client.get("/registered").json()["mixed"]
    shown = [(entry["engine"], entry["bootstrap_port"], entry["kv_connector"]) for entry in entries]
    assert shown == [("fastdeploy", 8998, "nixl"), ("sglang", 9001, "nixl")]


def test_an_unknown_engine_is_refused_with_one_sentence(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    refused = stand_in().register(make_router().url, engine="tgi")
    message = "engine is 'tgi'; it must be one of 'fastdeploy', 'vllm', 'sglang', 'openai'"
    assert (refused.status_code, refused.json()) == (400, {"detail": message})


def test_registered_shows_the_breaker_and_the_weight(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance)
    (registered,) = router.app.registry
    for _ in range(FAILURES):
        registered.record_failure(0.0, "it answered with 500")
    (entry,) = router.client.get("/registered").json()["mixed"]
    assert (entry["breaker"], entry["failed_requests_in_a_row"], entry["weight"]) == ("open", FAILURES, 1.0)


class TestDecodeInstances:
    """``GET /decode_instances``, with which FastDeploy's prefill instances find the decode instances to connect to."""

    def test_it_lists_healthy_decode_instances_in_fastdeploys_form(
        self, make_router: MakeRouter, stand_in: MakeStandIn
    ) -> None:
        prefill, decode, dead = stand_in("prefill"), stand_in("decode"), stand_in("decode")
        router = make_router(prefill, decode, dead, splitwise=True)
        for instance in router.app.registry:
            if instance.key == dead.key:
                instance.mark_unhealthy("it refused a connection")
        (entry,) = router.client.get("/decode_instances").json()
        assert (entry["role"], entry["host_ip"], entry["port"]) == ("DECODE", "127.0.0.1", str(decode.port))
        assert (entry["rdma_ports"], entry["device_ids"], entry["tp_size"]) == (["7100"], ["0"], 1)
        assert "rdma" in entry["transfer_protocol"]

    @pytest.mark.parametrize(("query", "listed"), [("", 3), ("?version=a", 1), ("?version=c", 0)])
    def test_it_lists_only_the_version_in_the_query(
        self, make_router: MakeRouter, stand_in: MakeStandIn, query: str, listed: int
    ) -> None:
        router = make_router(splitwise=True)
        for version in ("a", "b", None):
            stand_in("decode").register(router.url, version=version)
        assert len(router.client.get(f"/decode_instances{query}").json()) == listed

    def test_it_lists_no_instances_of_other_engines(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        router = make_router(splitwise=True)
        stand_in("decode").register(router.url, engine="vllm")
        assert router.client.get("/decode_instances").json() == []

    def test_its_entries_are_valid_connected_decodes(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        prefill, connected, other = stand_in("prefill"), stand_in("decode"), stand_in("decode")
        router = make_router(connected, splitwise=True)
        listed = router.client.get("/decode_instances").json()
        other.register(router.url)
        assert prefill.register(router.url, connected_decodes=listed).status_code == 200
        assert [router.chat().status_code for _ in range(4)] == [200] * 4
        assert (len(connected.received), len(other.received)) == (4, 0)


class TestDraining:
    """``POST /admin/drain``."""

    def test_running_requests_end_and_no_new_ones_arrive(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        draining, other = stand_in("mixed", streams_until(go_on := threading.Event())), stand_in()
        router = make_router(draining)
        with router.stream() as response:
            pieces = response.iter_raw()
            next(pieces)
            answer = router.client.post("/admin/drain", json={"instance": draining.key})
            assert answer.json() == {
                "instance": draining.key,
                "state": "draining",
                "until_restart": False,
                "running_requests": 1,
            }
            assert draining.register(router.url).status_code == 200
            assert router.chat().status_code == 503
            other.register(router.url)
            assert router.chat().status_code == 200
            go_on.set()
            assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
        assert [entry["state"] for entry in router.client.get("/registered").json()["mixed"]] == ["draining", "healthy"]
        assert len(draining.received) == 1

    def test_a_drain_can_be_undone(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        instance = stand_in()
        router = make_router(instance)
        for undrain, state, status in ((False, "draining", 503), (True, "healthy", 200)):
            answer = router.client.post("/admin/drain", json={"instance": instance.key, "undrain": undrain})
            assert (answer.json()["state"], router.chat().status_code) == (state, status)

    @pytest.mark.parametrize(
        ("body", "status", "message"),
        [
            (b"", 400, "JSON"),
            (b"{}", 400, "instance is None; it must be 'host:port'"),
            (b'{"instance": "a:1", "undrain": 1}', 400, "undrain is 1; it must be true or false"),
            (b'{"instance": "a:1"}', 404, "no instance 'a:1' is registered; known are: none"),
        ],
    )
    def test_an_error_is_one_sentence(self, make_router: MakeRouter, body: bytes, status: int, message: str) -> None:
        answer = make_router().client.post("/admin/drain", content=body)
        assert answer.status_code == status
        assert message in answer.json()["error"]["message"]


def test_a_query_for_a_drain_without_an_instance_is_one_sentence(make_router: MakeRouter) -> None:
    answer = make_router().client.get("/admin/drain")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_instance")


def test_prometheus_targets_lists_the_metrics_port_and_the_role_of_each_instance(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    router, prefill, decode = make_router(splitwise=True), stand_in("prefill"), stand_in("decode")
    assert router.client.get("/prometheus_targets").json() == []
    prefill.register(router.url, metrics_port=9101)
    decode.register(router.url)
    answer = router.client.get("/prometheus_targets")
    assert answer.headers["content-type"] == "application/json"  # else Prometheus refuses the response
    of_prefill, of_decode = answer.json()
    assert of_prefill == {
        "targets": ["127.0.0.1:9101"],
        "labels": {"__scheme__": "http", "instance": prefill.key, "role": "prefill", "engine": "fastdeploy"},
    }
    assert of_decode["labels"]["role"] == "decode"


def test_registered_number_counts_healthy_instances_by_role(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, dead, decode = stand_in("prefill"), stand_in("prefill"), stand_in("decode")
    router = make_router(prefill, dead, decode, splitwise=True)
    dead.stop()

    def number() -> object:
        router.chat()
        return router.client.get("/registered_number").json()

    wait_until(lambda: number() == {"mixed": 0, "prefill": 1, "decode": 1}, "the decrease")


def test_health_answers_200_without_instances(make_router: MakeRouter) -> None:
    assert make_router().client.get("/health").status_code == 200


def test_health_generate_is_200_only_if_every_instance_is_healthy(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    router = make_router(prefill, decode, splitwise=True)
    assert router.client.get("/health_generate").status_code == 200
    decode.health = 500
    response = router.client.get("/health_generate")
    assert response.status_code == 503
    assert list(response.json()["unhealthy"]) == [decode.key]


def test_concurrent_requests_for_health_generate_share_one_probe(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    router = make_router(instance)
    instance.answers_probes, before = False, instance.probes
    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(router.client.get, "/health_generate") for _ in range(8)]
        wait_until(lambda: instance.probes > before, "the probe")
        assert instance.probes == before + 1
        instance.cut_idle()
        assert {client.result().status_code for client in asked} == {503}
    instance.answers_probes = True
    assert router.client.get("/health_generate").status_code == 200


def test_models_lists_each_model_of_all_instances_once(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    first, second, dead = stand_in(), stand_in(), stand_in()
    first.models, second.models = ("a", "b"), ("b", "c")
    router = make_router(first, second, dead)
    dead.stop()
    listed = router.client.get("/v1/models").json()
    assert (listed["object"], [model["id"] for model in listed["data"]]) == ("list", ["a", "b", "c"])


def test_a_router_that_is_its_own_instance_does_not_request_its_models_endlessly(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    router = make_router(instance)
    for host in ("127.0.0.1", "localhost"):
        fields = {"role": "mixed", "host_ip": host, "port": router.port, "engine": "openai", "models": ["m"]}
        assert router.client.post("/register", json=fields).status_code == 200
    before = instance.models_asked
    assert router.client.get("/v1/models").json()["data"]
    assert instance.models_asked - before == 1


def test_the_number_of_routers_that_a_request_passes_is_limited(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    client = make_router(stand_in()).client
    for hops, status in ((",a,b,c", 200), (",a" * app.MAX_HOPS, 508)):
        assert client.get("/v1/models", headers={"X-Router-Hops": hops}).status_code == status


def test_without_instances_the_list_of_models_is_empty_and_not_an_error(make_router: MakeRouter) -> None:
    """Clients such as Open WebUI request the list first. If it fails, they report a wrong address."""
    client = make_router().client
    listed = client.get("/v1/models")
    assert (listed.status_code, listed.json()) == (200, {"object": "list", "data": []})
    assert client.get("/v1/models/m").json()["error"]["message"] == "no instance serves a model 'm'; served are: none"
    assert client.get("/health_generate").status_code == 503  # an operator sees it here


@pytest.mark.parametrize("name", ["a", "Qwen/Qwen3-0.6B", "a/", "/models/a", "%2Fmodels%2Fa"])
def test_a_model_is_found_by_its_id(make_router: MakeRouter, stand_in: MakeStandIn, name: str) -> None:
    instance = stand_in()
    instance.models = ("a", "Qwen/Qwen3-0.6B", "/models/a")
    router = make_router(instance)
    response = router.client.get(f"/v1/models/{name}")
    expected = name.rstrip("/").replace("%2F", "/")
    assert (response.status_code, response.json()) == (200, {"id": expected, "object": "model"})
    assert not instance.received


def test_an_unknown_model_is_a_404_that_lists_the_served_models(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    response = make_router(stand_in()).client.get("/v1/models/other")
    assert (response.status_code, read_error(response)) == (404, ("invalid_request_error", "model_not_found"))
    assert "'other'; served are: m" in response.json()["error"]["message"]


def read_error(response: httpx.Response) -> tuple[str, str]:
    """Return type and code of an error in OpenAI's form."""
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error["type"], error["code"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/m", 405, "method_not_allowed"),
        ("GET", "/v1/abort_requests", 405, "method_not_allowed"),
        ("GET", "/v1/models//m", 404, "model_not_found"),
        ("GET", "/v1/models//a//m", 404, "unknown_path"),
        ("GET", "/v1", 404, "unknown_path"),
        ("GET", "/nothing", 404, "unknown_path"),
        ("PUT", "/health", 405, "method_not_allowed"),
    ],
)
def test_every_error_of_the_control_plane_has_openais_form(
    make_router: MakeRouter, method: str, path: str, status: int, code: str
) -> None:
    response = make_router().client.request(method, path)
    assert (response.status_code, read_error(response)) == (status, ("invalid_request_error", code))
    assert ("allow" in response.headers) == (status == 405)


def test_an_exception_in_the_router_is_an_error_in_openais_form(
    make_router: MakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = make_router()
    monkeypatch.delattr(router.app, "registry")
    response = router.client.get("/v1/models")
    assert (response.status_code, read_error(response)) == (500, ("internal_error", "router_error"))


def test_head_has_the_response_of_get_without_a_body(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(stand_in())
    for path in ("/health", "/v1/models", "/v1/models/m", "/metrics", "/registered", "/registered_number", "/nothing"):
        head, get = router.client.head(path), router.client.get(path)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        assert head.headers["content-type"] == get.headers["content-type"] if get.content else True
    assert router.client.head("/v1/abort_requests").status_code == 405


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_the_docs_need_no_internet(make_router: MakeRouter, path: str) -> None:
    client = make_router().client
    response = client.get(path)
    assert response.status_code == 200
    assert "http" not in response.text
    assert "/openapi.json" in response.text
    assert "/admin/drain" in client.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize("splitwise", [True, False])
@pytest.mark.parametrize("body", [{"req_ids": ["chatcmpl-1_0"]}, {"abort_all": True}])
def test_an_abort_reaches_every_instance(
    make_router: MakeRouter, stand_in: MakeStandIn, splitwise: bool, body: dict[str, object]
) -> None:
    roles = ("prefill", "decode") if splitwise else ("mixed", "mixed")
    instances = [stand_in(role) for role in roles]
    response = make_router(*instances, splitwise=splitwise).client.post("/v1/abort_requests", json=body)
    assert response.status_code == 200
    assert [instance.aborted for instance in instances] == [[body], [body]]


def test_an_abort_lists_the_aborted_requests_and_the_failed_instances(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    nested, plain, dead, failing = stand_in(), stand_in(), stand_in(), stand_in()
    failing.abort_status = 500
    nested.abort_answer = {"result": {"aborted": [{"request_id": "a", "output_token_count": 3}], "not_found": ["b"]}}
    plain.abort_answer = {"code": 0, "aborted": ["c"]}
    router = make_router(nested, plain, dead, failing)
    dead.stop()
    response = router.client.post("/v1/abort_requests", json={"req_ids": ["a", "b", "c"]})
    assert response.status_code == 200
    answer = response.json()
    assert answer["result"] == {
        "aborted": [{"request_id": "a", "output_token_count": 3}, "c"],
        "not_found": ["b"],
    }
    assert answer["status"] == "error"
    assert all(each.key in " ".join(answer["errors"]) for each in (dead, failing))


def test_an_abort_lists_the_ids_that_no_instance_knows(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    without_ids, with_ids = stand_in(), stand_in()
    without_ids.abort_answer = {"code": 0, "aborted": ["chatcmpl-a_0", {"request_id": "cmpl-b_5_1"}, 7]}
    with_ids.abort_answer = {"result": {"aborted": [], "not_found": ["a", "b_5", "c"]}}
    router = make_router(without_ids, with_ids)
    asked = ["a", "chatcmpl-a", "b_5", "b", "c", "chatcmpl-c_0", 5]
    answer = router.client.post("/v1/abort_requests", json={"req_ids": asked}).json()
    assert answer["result"]["not_found"] == ["b", "c", "chatcmpl-c_0", 5]


def test_without_instances_every_id_is_unknown(make_router: MakeRouter) -> None:
    answer = make_router().client.post("/v1/abort_requests", json={"req_ids": ["a"]}).json()
    assert answer["result"] == {"aborted": [], "not_found": ["a"]}


@pytest.mark.parametrize("body", [b"{}", b'{"req_ids": []}', b'{"req_ids": "a"}', b"[]", b"x"])
def test_an_abort_without_ids_is_a_400(make_router: MakeRouter, stand_in: MakeStandIn, body: bytes) -> None:
    instance = stand_in()
    response = make_router(instance).client.post("/v1/abort_requests", content=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_body")
    assert instance.aborted == []


def metric(router: RouterUnderTest, name: str, **labels: str) -> float:
    """Return the value of one sample in ``/metrics``."""
    families = text_string_to_metric_families(router.client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    (value,) = [sample.value for sample in samples if (sample.name, sample.labels) == (name, labels)]
    return value


def test_metrics_count_requests_under_the_go_routers_names(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    router = make_router(prefill, decode, splitwise=True)
    router.chat()
    decode.behave = answers(400, b"{}")
    router.chat()
    chat = {"method": "POST", "endpoint": "/v1/chat/completions"}
    workers = {"mixed_worker": "", "prefill_worker": prefill.key, "decode_worker": decode.key}
    assert metric(router, "http_requests_total", **chat, status_code="200") == 1
    assert metric(router, "http_requests_total", **chat, status_code="400") == 1
    assert metric(router, "http_request_duration_seconds_count", **chat) == 2
    assert metric(router, "inference_requests_total", **workers, status_code="200") == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_in_the_go_routers_dialect_the_labels_are_urls(
    make_router: MakeRouter, stand_in: MakeStandIn, workers: int
) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    router = make_router(prefill, decode, splitwise=True, dialect="go", workers=workers)
    router.chat()
    labels = {"mixed_worker": "", "prefill_worker": prefill.url, "decode_worker": decode.url}
    assert metric(router, "inference_requests_total", **labels, status_code="200") == 1


def test_in_the_go_routers_dialect_an_error_of_the_router_counts_for_no_instance(make_router: MakeRouter) -> None:
    router = make_router(dialect="go")
    assert router.chat().status_code == 502
    assert "inference_requests_total{" not in router.client.get("/metrics").text


def test_a_stream_that_the_client_leaves_counts_as_499(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path
) -> None:
    log = tmp_path / "access.log"
    router = make_router(stand_in("mixed", stalls("1")), access_log=str(log))
    with router.stream() as response:
        assert next(response.iter_raw()) == b"data: 1\n\n"
    wait_until(lambda: log.read_text(), "the line of the access log")
    line = json.loads(log.read_text())
    assert (line["status"], line["error"]) == (499, "client_left")
    chat = {"method": "POST", "endpoint": "/v1/chat/completions"}
    assert metric(router, "http_requests_total", **chat, status_code="499") == 1


def test_metrics_show_instances_by_state_and_their_load(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance)
    assert metric(router, "router_instances", role="mixed", state="healthy") == 1
    assert metric(router, "router_instance_requests", role="mixed", instance=instance.key) == 0


def test_an_abort_reaches_a_request_that_an_engine_knows_by_the_id_of_a_retry(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    async def until_aborted(request: Received, respond: Responder) -> None:
        while not other.aborted:
            await asyncio.sleep(0.01)
        await respond.answer(200, chat_answer("so far"))

    failing, other = stand_in("mixed", answers(500)), stand_in("mixed", until_aborted)
    router = make_router(failing, other, policy="round_robin")
    with ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(router.chat, request_id=f"r{i}") for i in range(2)]
        wait_until(lambda: other.running == 2, "both requests")
        answer = router.client.post("/v1/abort_requests", json={"req_ids": ["chatcmpl-r0_0", "r1"]}).json()
        assert answer["result"]["not_found"] == []
        assert [one.result(10).status_code for one in asked] == [200, 200]
    ids = {f"chatcmpl-{request.json['request_id']}_0" for request in other.received}
    assert any(known.endswith("-retry1_0") for known in ids)
    assert ids <= set(other.aborted[0]["req_ids"])


@pytest.mark.parametrize("body", [{"req_ids": ["r0"]}, {"abort_all": True}])
def test_a_request_that_fails_because_of_an_abort_is_not_retried(
    make_router: MakeRouter, stand_in: MakeStandIn, body: dict[str, object]
) -> None:
    async def until_aborted(_: Received, respond: Responder) -> None:
        while not asked.aborted:
            await asyncio.sleep(0.01)
        await respond.answer(500, b"{}")

    asked, other = stand_in("mixed", until_aborted), stand_in("mixed")
    router = make_router(asked, other, policy="round_robin")
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(router.chat, request_id="r0")
        wait_until(lambda: asked.running == 1, "the request")
        router.client.post("/v1/abort_requests", json=body)
        assert (answer.result(10).status_code, answer.result().json()["error"]["code"]) == (409, "aborted")
    assert other.received == []


class TestReadiness:
    """``GET /ready``, with which load balancers choose a router. ``/health`` only shows that the process runs."""

    def test_a_router_is_ready_while_an_instance_accepts_requests(
        self, make_router: MakeRouter, stand_in: MakeStandIn
    ) -> None:
        instance = stand_in()
        router = make_router(instance)
        assert (router.client.get("/ready").status_code, router.client.get("/ready").json()) == (
            200,
            {"status": "ready"},
        )
        router.client.post("/admin/drain", json={"instance": instance.key})
        answer = router.client.get("/ready")
        assert (answer.status_code, answer.json()["status"]) == (503, "not ready")
        assert answer.json()["reason"] == f"no mixed instance can take the request ({instance.key} is draining)"
        assert router.client.get("/health").status_code == 200

    def test_a_router_of_pairs_needs_both_roles(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        router = make_router(stand_in("prefill"), splitwise=True)
        assert "no decode instance is registered" in router.client.get("/ready").json()["reason"]
        decode = stand_in("decode")
        decode.register(router.url)
        assert router.client.get("/ready").status_code == 200
        known = router.app.registry.get(decode.key)
        assert known is not None
        known.mark_unhealthy("it refused a connection")
        assert "it refused a connection" in router.client.get("/ready").json()["reason"]

    def test_the_path_needs_no_token(self, make_router: MakeRouter, tmp_path: Path) -> None:
        (tmp_path / "token").write_text("secret")
        assert make_router(admin_token_file=str(tmp_path / "token")).client.get("/ready").status_code == 503

    def test_a_router_that_is_stopping_is_not_ready_and_lets_clients_close_connections(
        self, make_router: MakeRouter, stand_in: MakeStandIn
    ) -> None:
        router = make_router(stand_in())
        assert "connection" not in router.chat().headers
        router.app.prepare_to_leave()
        assert router.client.get("/ready").json()["reason"] == "the router is stopping"
        answer = router.chat()
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
