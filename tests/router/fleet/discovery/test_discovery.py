"""Discovery of instances in pods: a router, a mock of the API server, and stand-ins for the engines in the pods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import StandIn
from tests.support.kubernetes import KubernetesApi, make_pod
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.fleet.discovery.pod_watch.FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr("router.fleet.discovery.discovery.RECONCILE_SECONDS", 0.1)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[KubernetesApi]:
    made = KubernetesApi(tmp_path / "account")
    yield made
    made.stop()


@pytest.fixture
def discovering(make_router: MakeRouter, api: KubernetesApi) -> Callable[..., RouterUnderTest]:
    """A function that starts routers with discovery of pods."""

    def start(**settings: Any) -> RouterUnderTest:
        return make_router(
            service_discovery="kubernetes",
            selector=("app=kv",),
            kubernetes_api=api.url,
            kubernetes_account=str(api.account),
            **settings,
        )

    return start


@pytest.fixture
def instance(stand_in: MakeStandIn, api: KubernetesApi) -> StandIn:
    """An engine in the ready pod ``a``."""
    made = stand_in()
    api.put(pod_of(made))
    return made


@pytest.fixture
def router(discovering: Callable[..., RouterUnderTest], instance: StandIn) -> RouterUnderTest:
    """A router that has found ``instance``."""
    made = discovering()
    wait_for(made, {"ns/a": "healthy"})
    return made


def pod_of(instance: StandIn, name: str = "a", **changes: Any) -> dict[str, Any]:
    return make_pod(name, port=instance.port, **changes)


def states(router: RouterUnderTest) -> dict[str, str]:
    listed = router.client.get("/registered").json()
    return {each["pod"]: each["state"] for role in ("mixed", "prefill", "decode") for each in listed[role]}


def wait_for(router: RouterUnderTest, expected: dict[str, str]) -> None:
    wait_until(lambda: states(router) == expected, f"the instances {expected}")


def test_ready_pods_serve_and_others_do_not(
    router: RouterUnderTest, api: KubernetesApi, instance: StandIn, stand_in: MakeStandIn
) -> None:
    second = stand_in()
    api.put(pod_of(second, "b", ready=False))
    assert router.chat().status_code == 200
    api.put(pod_of(second, "b"))
    wait_for(router, {"ns/a": "healthy", "ns/b": "healthy"})
    api.put(pod_of(instance, ready=False))
    wait_for(router, {"ns/b": "healthy"})
    api.delete("b")
    wait_for(router, {})
    figures = router.client.get("/metrics").text
    assert "router_discovery_up 1.0" in figures
    assert 'router_discovered_pods{state="not_ready"} 1.0' in figures


def test_labels_or_the_server_determine_roles_and_engines(
    discovering: Callable[..., RouterUnderTest], api: KubernetesApi, stand_in: MakeStandIn
) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    decode.owner = "fastdeploy"
    api.put(pod_of(prefill, labels={"kvrouter/role": "prefill", "kvrouter/engine": "fastdeploy"}))
    api.put(pod_of(decode, "b", labels={"llm-d.ai/role": "decode"}))
    router = discovering(splitwise=True)
    wait_for(router, {"ns/a": "healthy", "ns/b": "healthy"})
    assert router.client.get("/ready").status_code == 200


def test_a_pod_without_a_role_is_logged_once(
    discovering: Callable[..., RouterUnderTest],
    api: KubernetesApi,
    stand_in: MakeStandIn,
    caplog: pytest.LogCaptureFixture,
) -> None:
    instance = stand_in()
    api.put(pod_of(instance, labels={"kvrouter/engine": "vllm"}))
    router = discovering(splitwise=True)
    message = "pod ns/a cannot be registered: it has no role; label it kvrouter/role=prefill or kvrouter/role=decode"
    wait_until(lambda: message in caplog.messages, "the log line")
    api.put(pod_of(instance, labels={"kvrouter/engine": "vllm", "kvrouter/role": "decode"}))
    wait_for(router, {"ns/a": "healthy"})
    assert caplog.messages.count(message) == 1


def test_a_terminating_pod_drains_until_its_deletion(
    router: RouterUnderTest, api: KubernetesApi, instance: StandIn
) -> None:
    api.put(pod_of(instance, terminating=True, ready=False))
    wait_for(router, {"ns/a": "draining"})
    api.delete("a")
    wait_for(router, {})
    api.put(pod_of(instance, "b"))  # at the address of the previous pod
    wait_for(router, {"ns/b": "healthy"})


def test_a_restarted_container_is_registered_again(
    router: RouterUnderTest, api: KubernetesApi, instance: StandIn
) -> None:
    router.client.post("/admin/drain", json={"instance": instance.key})
    api.put(pod_of(instance, restarts=1))
    wait_for(router, {"ns/a": "healthy"})


def test_an_instance_that_registers_itself_stays_while_its_pod_is_not_ready(
    discovering: Callable[..., RouterUnderTest], api: KubernetesApi, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    router = discovering()

    def is_alive() -> bool:
        return instance.register(router.url, pod="ns/a").status_code == 200

    for _ in range(2):  # on a busy machine, its probe can fail
        wait_until(is_alive, "its heartbeat")
    api.put(pod_of(instance))
    api.put(pod_of(instance, ready=False))
    other = stand_in()
    api.put(pod_of(other, "b"))
    expected = {"ns/a": "healthy", "ns/b": "healthy"}
    wait_until(lambda: is_alive() and states(router) == expected, f"the instances {expected}")
    api.put(pod_of(instance, ready=False, terminating=True))
    expected["ns/a"] = "draining"
    wait_until(lambda: is_alive() and states(router) == expected, f"the instances {expected}")


def test_without_the_api_server_known_instances_are_retained(
    router: RouterUnderTest, api: KubernetesApi, instance: StandIn
) -> None:
    wait_until(lambda: api.num_watchers, "a watch")
    api.stop()
    wait_until(lambda: "router_discovery_up 0.0" in router.client.get("/metrics").text, "the figure")
    assert router.chat().status_code == 200
    assert states(router) == {"ns/a": "healthy"}


def test_a_pod_that_does_not_answer_is_tried_again(
    discovering: Callable[..., RouterUnderTest], api: KubernetesApi, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    instance.health = 503
    api.put(pod_of(instance))
    router = discovering()
    wait_until(lambda: instance.probes, "a probe")
    instance.health = 200
    wait_for(router, {"ns/a": "healthy"})


@pytest.mark.parametrize(
    ("status", "reason"), [(401, "so its engine is not known; set the label kvrouter/engine"), (0, "cannot connect")]
)
def test_a_server_with_an_unknown_engine_is_logged(
    *,
    discovering: Callable[..., RouterUnderTest],
    api: KubernetesApi,
    stand_in: MakeStandIn,
    caplog: pytest.LogCaptureFixture,
    status: int,
    reason: str,
) -> None:
    instance = stand_in()
    instance.models_status = status
    if not status:
        instance.stop()
    api.put(pod_of(instance))
    discovering()
    wait_until(
        lambda: any("pod ns/a cannot be registered" in each and reason in each for each in caplog.messages), reason
    )


def test_the_first_worker_discovers_pods_for_all(
    discovering: Callable[..., RouterUnderTest], api: KubernetesApi, instance: StandIn
) -> None:
    first, second = discovering(workers=2).workers
    for worker in (first, second):
        wait_for(worker, {"ns/a": "healthy"})
    assert api.lists == 1
    api.put(pod_of(instance, ready=False))
    for worker in (first, second):
        wait_for(worker, {})
    assert "router_discovery_up 1.0" in second.client.get("/metrics").text
