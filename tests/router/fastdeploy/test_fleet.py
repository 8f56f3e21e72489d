"""FastDeploy's tests of its Go router's manager: which instances are registered, how they do, and what they report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.fleet import Instance, Registration, Registry
from router.policies import RequestFeatures
from router.serving.dialects.fastdeploy import disaggregate_info
from router.serving.selection import Selector
from router.settings import RouterSettings, SettingsError, load_settings
from tests.router.conftest import RouterUnderTest
from tests.router.fastdeploy.origins import translates
from tests.router.stand_in import StandIn, answers
from tests.support.ports import free_port
from tests.support.waiting import wait_until

MakeRouter = Callable[..., RouterUnderTest]
MakeStandIn = Callable[..., StandIn]

HANDLER = "golang_router/internal/manager/handler_test.go"
HEALTH = "golang_router/internal/manager/health_test.go"
METRICS = "golang_router/internal/manager/metrics_test.go"
REGISTER = "golang_router/internal/manager/register_test.go"


def add(registry: Registry, role: str, host: str, port: int = 8000, **fields: Any) -> Instance:
    """Register a healthy instance at ``registry``, which nobody probes."""
    told = {"role": role, "host_ip": host, "port": port, **fields}
    return registry.register(Registration.from_fields(told), now=0.0)


def pair(**settings: Any) -> tuple[Registry, Selector]:
    """A registry of pairs with one prefill instance and one decode instance, and who chooses of it."""
    registry = Registry(splitwise=True)
    add(registry, "prefill", "worker1")
    add(registry, "decode", "worker2")
    return registry, Selector(RouterSettings(splitwise=True, **settings), registry)


class TestSettings:
    """What the Go router's file sets."""

    @translates(HANDLER, "TestInit")
    def test_the_manager_is_set_by_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "config.yaml"
        path.write_text(
            "server: {splitwise: true}\n"
            "manager:\n"
            "  health-check-timeout-secs: 5.0\n"
            "  health-check-endpoint: /health\n"
            "  health-failure-threshold: 3\n"
            "  health-success-threshold: 2\n"
        )
        settings = load_settings(["--config_path", str(path), "--port", "9000"], {})
        assert settings.splitwise is True
        assert (settings.health_check_endpoint, settings.health_check_timeout_secs) == ("/health", 5.0)
        assert (settings.health_failure_threshold, settings.health_success_threshold) == (3, 2)

    @pytest.mark.parametrize("splitwise", [True, False])
    @translates(REGISTER, "TestGetSplitwise")
    def test_a_router_knows_its_mode(self, go_router: MakeRouter, splitwise: bool) -> None:
        assert go_router(splitwise=splitwise).app.registry.splitwise is splitwise


class TestWhoIsRegistered:
    """The registry, and the paths that list it."""

    @translates(HANDLER, "TestWorkerMapToList", "TestManager_GetHealthyURLs")
    @translates(HEALTH, "TestReadServers")
    @translates(REGISTER, "TestGetAllMapServers")
    def test_instances_are_listed_by_role(self) -> None:
        registry = Registry(splitwise=True)
        for role, host in (("prefill", "w1"), ("prefill", "w2"), ("decode", "w3"), ("mixed", "w4")):
            add(registry, role, host)
        listed = {role: [i.address.url for i in registry if i.role.value == role] for role in ("prefill", "decode")}
        assert listed == {"prefill": ["http://w1:8000", "http://w2:8000"], "decode": ["http://w3:8000"]}
        assert {i.key for i in registry if i.healthy} == {"w1:8000", "w2:8000", "w3:8000", "w4:8000"}
        assert [i for i in registry if i.role.value == "invalid"] == []

    @translates(REGISTER, "TestGetAllMapServers_NilManager")
    def test_a_new_registry_lists_nothing(self) -> None:
        assert list(Registry(splitwise=False)) == []

    @translates(REGISTER, "TestGetWorkerInfo")
    def test_an_instance_is_found_by_its_address(self) -> None:
        registry = pair()[0]
        found = [registry.get(key) for key in ("worker1:8000", "worker2:8000", "notfound:8000")]
        assert [instance and instance.role.value for instance in found] == ["prefill", "decode", None]

    @translates(REGISTER, "TestRegisteredNumber")
    def test_the_numbers_of_instances(self, go_router: MakeRouter, stand_in: MakeStandIn) -> None:
        answer = go_router(stand_in("prefill"), stand_in("decode"), splitwise=True).client.get("/registered_number")
        assert answer.status_code == 200
        assert '"prefill":1' in answer.text
        assert '"decode":1' in answer.text

    @translates(REGISTER, "TestRegistered")
    def test_the_list_of_instances_has_both_roles(self, go_router: MakeRouter, stand_in: MakeStandIn) -> None:
        answer = go_router(stand_in("prefill"), stand_in("decode"), splitwise=True).client.get("/registered")
        assert answer.status_code == 200
        listed = answer.json()
        assert [entry["worker_type"] for entry in (*listed["prefill"], *listed["decode"])] == ["prefill", "decode"]


class TestPairs:
    """What a pair is told of each other, and who is chosen."""

    @translates(REGISTER, "TestBuildDisaggregateInfo")
    def test_a_pair_on_one_host_that_has_rdma_only(self) -> None:
        registry = Registry(splitwise=True)
        told = {"transfer_protocol": ["rdma"], "device_ids": ["0", "1"]}
        prefill = add(
            registry, "prefill", "127.0.0.1", 8000, connector_port="9000", rdma_ports=["5000", "5001"], **told
        )
        decode = add(registry, "decode", "127.0.0.1", 8001, connector_port="9001", rdma_ports=["5002", "5003"], **told)
        info = disaggregate_info(prefill.registration, decode.registration)
        assert (info["prefill_ip"], info["decode_ip"]) == ("127.0.0.1", "127.0.0.1")
        assert (info["transfer_protocol"], info["decode_tp_size"]) == ("rdma", 2)

    @translates(REGISTER, "TestBuildDisaggregateInfo")
    def test_an_instance_that_is_gone_is_in_no_pair(self, go_router: MakeRouter) -> None:
        answer = go_router(splitwise=True).chat()
        assert answer.status_code == 503
        assert "no prefill instance" in answer.text

    @translates(HANDLER, "TestSelectWorker")
    def test_the_only_mixed_instance_is_chosen(self) -> None:
        registry = Registry(splitwise=False)
        add(registry, "mixed", "worker1")
        selection = Selector(RouterSettings(), registry).choose(RequestFeatures(1))
        assert selection.answering.address.url == "http://worker1:8000"

    @translates(HANDLER, "TestSelectWorkerPair")
    def test_the_only_pair_is_chosen(self) -> None:
        selection = pair()[1].choose(RequestFeatures(1))
        assert selection.prefill is not None
        assert (selection.prefill.key, selection.answering.key) == ("worker1:8000", "worker2:8000")


class TestRegisterFile:
    """``manager.register-path``."""

    @translates(REGISTER, "TestRegisterInstancesFromConfig")
    def test_a_router_begins_with_the_instances_of_the_file(self, go_router: MakeRouter, tmp_path: Path) -> None:
        path = tmp_path / "test_config.yaml"
        path.write_text(
            f"instances:\n"
            f"  - role: mixed\n"
            f"    host_ip: 127.0.0.1\n"
            f"    port: {free_port()}\n"
            f"    transfer_protocol:\n"
            f"      - rdma\n"
        )
        listed = go_router(register_path=str(path)).client.get("/registered").json()["mixed"]
        assert [entry["transfer_protocol"] for entry in listed] == [["rdma"]]

    @translates(REGISTER, "TestRegisterInstancesFromConfig_EmptyFile")
    def test_a_file_without_instances_is_good(self, go_router: MakeRouter, tmp_path: Path) -> None:
        path = tmp_path / "empty.yaml"
        path.write_text("instances: []")
        assert list(go_router(register_path=str(path)).app.registry) == []

    @translates(REGISTER, "TestRegisterInstancesFromConfig_InvalidPath")
    def test_a_router_starts_without_a_file_that_is_not_there(self, go_router: MakeRouter, tmp_path: Path) -> None:
        assert list(go_router(register_path=str(tmp_path / "path.yaml")).app.registry) == []

    @translates(REGISTER, "TestRegisterInstancesFromConfig_InvalidYAML")
    def test_a_file_that_is_no_yaml_ends_the_start_in_one_sentence(self, go_router: MakeRouter, tmp_path: Path) -> None:
        path = tmp_path / "invalid.yaml"
        path.write_text("invalid: yaml: content:")
        with pytest.raises(SettingsError, match="it is not YAML"):
            go_router(register_path=str(path))


class TestHealth:
    """Probes."""

    @translates(HEALTH, "TestCheckServiceHealth", "TestCheckWorkerHealth")
    def test_an_instance_that_answers_200_is_healthy(self, go_router: MakeRouter, stand_in: MakeStandIn) -> None:
        instance = stand_in()
        router = go_router(instance, health_failure_threshold=1, health_success_threshold=1)
        router.thread.run(router.app.health.check_all())
        assert [each.state for each in router.app.registry] == ["healthy"]

    @translates(HEALTH, "TestCheckServiceHealth", "TestCheckWorkerHealth")
    def test_an_instance_that_answers_500_is_unhealthy(self, go_router: MakeRouter, stand_in: MakeStandIn) -> None:
        instance = stand_in()
        router = go_router(instance, health_failure_threshold=1, health_success_threshold=1)
        instance.health = 500
        router.thread.run(router.app.health.check_all())
        assert [(each.state, each.trouble) for each in router.app.registry] == [
            ("unhealthy", f"{instance.key} answered GET /health with 500")
        ]

    @translates(HEALTH, "TestCheckServiceHealth")
    def test_an_instance_that_does_not_answer_in_time_is_unhealthy(
        self, go_router: MakeRouter, stand_in: MakeStandIn
    ) -> None:
        instance = stand_in()
        router = go_router(instance, health_check_timeout_secs=0.2, health_failure_threshold=1)
        instance.answers_probes = False

        def probed() -> list[str]:
            router.thread.run(router.app.health.check_all())
            return [each.state for each in router.app.registry]

        wait_until(lambda: probed() == ["unhealthy"], "a probe that is not answered")

    @translates(HEALTH, "TestCheckServiceHealth")
    def test_an_instance_without_address_is_refused(self, go_router: MakeRouter) -> None:
        answer = go_router().client.post("/register", json={"role": "mixed", "host_ip": "", "port": 1})
        assert (answer.status_code, answer.json()["code"]) == (400, 400)

    @translates(HEALTH, "TestHealthGenerate")
    def test_health_generate_probes_the_pair(self, go_router: MakeRouter, stand_in: MakeStandIn) -> None:
        prefill, decode = stand_in("prefill"), stand_in("decode")
        router = go_router(prefill, decode, splitwise=True)
        before = prefill.probes, decode.probes
        answer = router.client.get("/health_generate")
        assert (answer.status_code, answer.json()) == (200, {"code": 200, "msg": "Health check complete"})
        assert (prefill.probes, decode.probes) == (before[0] + 1, before[1] + 1)

    @translates(HEALTH, "TestMonitorInstanceHealthCore")
    def test_healthy_instances_stay(self, go_router: MakeRouter, stand_in: MakeStandIn) -> None:
        prefill, decode = stand_in("prefill"), stand_in("decode")
        router = go_router(prefill, decode, splitwise=True)
        router.thread.run(router.app.health.check_all())
        assert {each.key: each.state for each in router.app.registry} == {
            prefill.key: "healthy",
            decode.key: "healthy",
        }


def load_at(router: RouterUnderTest, instance: StandIn) -> tuple[int | None, int | None]:
    """The requests that run and that wait at an instance, by its own account, after it was asked now."""
    router.thread.run(router.app.scraper.scrape_all())
    known = router.app.registry.get(instance.key)
    assert known is not None
    return known.load.running, known.load.waiting


ALL = b"fastdeploy:num_requests_running %d\nfastdeploy:num_requests_waiting %d\navailable_gpu_block_num %d"


class TestFigures:
    """An instance's own figures, and the router's count."""

    @translates(METRICS, "TestRedrictCounter")
    def test_each_instance_has_a_count_of_its_own_that_begins_with_0(self) -> None:
        registry = Registry(splitwise=False)
        first, second = (add(registry, "mixed", host) for host in ("service-a", "service-b"))
        assert (first.load.requests, second.load.requests) == (0, 0)
        for _ in range(2):
            first.load.add_request(tokens=0, work=0.0)
        known = registry.get("service-a:8000")
        assert known is not None
        assert (known.load.requests, second.load.requests) == (2, 0)

    @pytest.mark.parametrize(
        ("text", "figures"),
        [
            pytest.param(ALL % (10, 5, 3), (10, 5), id="all"),
            pytest.param(ALL % (5, 3, 10), (5, 3), id="others"),
            pytest.param(
                b"fastdeploy:num_requests_running 8\navailable_gpu_block_num 2", (None, None), id="no waiting"
            ),
            pytest.param(b"", (None, None), id="empty"),
        ],
    )
    @translates(METRICS, "TestParseMetricsResponseOptimized", "TestMetricsParsingHelper")
    def test_figures_count_if_both_are_there(
        self, go_router: MakeRouter, stand_in: MakeStandIn, text: bytes, figures: tuple[int | None, int | None]
    ) -> None:
        instance = stand_in("mixed", answers(200, text))
        assert load_at(go_router(instance), instance) == figures

    @translates(METRICS, "TestGetMetricsByURL_Integration")
    def test_figures_are_asked_at_the_metrics_port(self, go_router: MakeRouter, stand_in: MakeStandIn) -> None:
        instance, figures = stand_in("prefill"), stand_in("mixed", answers(200, ALL % (1, 0, 8)))
        router = go_router(splitwise=True)
        instance.register(router.url, metrics_port=figures.port)
        assert load_at(router, instance) == (1, 0)
        assert [request.target for request in figures.received] == ["/metrics"]

    @pytest.mark.parametrize("host", ["nonexistent worker", "invalid url"])
    @translates(METRICS, "TestGetMetricsByURL_Integration")
    def test_nobody_is_asked_who_is_not_registered(self, go_router: MakeRouter, host: str) -> None:
        router = go_router()
        router.thread.run(router.app.scraper.scrape_all())
        assert router.app.registry.get(f"{host}:8080") is None

    @translates(METRICS, "TestManagerGetMetrics_Integration")
    def test_the_routers_count_and_the_instances_own_stand_side_by_side(
        self, go_router: MakeRouter, stand_in: MakeStandIn
    ) -> None:
        instance = stand_in("prefill", answers(200, ALL % (2, 1, 5)))
        router = go_router(instance, splitwise=True)
        assert load_at(router, instance) == (2, 1)
        (known,) = router.app.registry
        assert known.load.requests == 0

    @translates(METRICS, "TestManagerGetMetrics_Integration")
    def test_an_instance_without_figures_has_the_routers_count(
        self, go_router: MakeRouter, stand_in: MakeStandIn
    ) -> None:
        instance = stand_in("mixed", answers(404, b""))
        router = go_router(instance, policy="fd_remote_metrics_score")
        assert load_at(router, instance) == (None, None)
        decision = router.app.selector.choose(RequestFeatures(1)).decisions[0]
        assert decision.reasons == {"policy": "fd_remote_metrics_score", "score": 0}
