"""The manifests in ``deploy/kubernetes``, rendered with a real kubectl.

They are checked with the schemas of Kubernetes, with the parsers of the programs, and with each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.manifests import KUBERNETES, Manifest, containers_of, find_manifest, list_pods, render
from tests.support.command_lines import check_command

# Kinds that are not in the schemas of Kubernetes. Tests below check them.
OPERATORS_GROUP = "monitoring.coreos.com/v1"
VERSIONS = ("1.30", "1.34")
SURFACE = json.loads((Path(__file__).parents[1] / "public_surface.json").read_text())
# After the beginning of a pod's termination, a load balancer or kube-proxy may send requests for this time.
SPARE_SECONDS = 5.0
OVERLAYS = ("laptop", "production", "everything")


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Manifest]]:
    """Return the manifests of both overlays, and of one with all components."""
    folder = tmp_path_factory.mktemp("kubernetes") / "kubernetes"
    # kustomize reads only files in one folder, through relative paths.
    everything = folder / "overlays" / "everything"
    everything.mkdir(parents=True)
    for part in ("base", "components"):
        (folder / part).symlink_to(KUBERNETES / part)
    kustomization = {
        "namespace": "kvstore",
        "resources": ["../../base"],
        "components": [f"../../components/{path.name}" for path in sorted((KUBERNETES / "components").iterdir())],
    }
    (everything / "kustomization.yaml").write_text(json.dumps(kustomization))
    overlays = {name: render(KUBERNETES / "overlays" / name) for name in OVERLAYS[:2]}
    return {**overlays, "everything": render(everything)}


@pytest.fixture(params=OVERLAYS)
def manifests(request: pytest.FixtureRequest, rendered: dict[str, list[Manifest]]) -> list[Manifest]:
    return rendered[request.param]


def test_the_manifests_match_the_schemas(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        if manifest["apiVersion"] != OPERATORS_GROUP:
            for version in VERSIONS:
                kubernetes_validate.validate(manifest, version, strict=True)


def test_a_field_with_a_wrong_name_is_detected(manifests: list[Manifest]) -> None:
    router = json.loads(json.dumps(find_manifest(manifests, "Deployment", "router")))
    router["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(router, VERSIONS[0], strict=True)


def test_the_programs_accept_their_flags_and_environment(manifests: list[Manifest]) -> None:
    checked = 0
    for pod in list_pods(manifests).values():
        for container, argv, environ in containers_of(pod):
            if "kvstore-" in container["image"]:
                check_command(argv, environ)
                checked += 1
            if hook := container.get("lifecycle"):
                check_command(hook["preStop"]["exec"]["command"], environ)
                checked += 1
    assert checked >= 6


def test_the_paths_of_probes_exist(manifests: list[Manifest]) -> None:
    routes = {"router": SURFACE["routes"]["router"], "engine": SURFACE["routes"]["engine"]}
    for name, pod in list_pods(manifests).items():
        for container in pod["spec"]["containers"]:
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = container.get(kind, {}).get("httpGet")
                if probe and container["name"] in routes:
                    assert f"GET {probe['path']}" in routes[container["name"]], f"{name}: {kind}"
            if container["name"] in routes:
                assert container["livenessProbe"]["httpGet"]["path"] == "/health"
                assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_the_grace_period_of_a_pod_is_longer_than_its_drain(manifests: list[Manifest]) -> None:
    pods = list_pods(manifests)
    for role in ("prefill", "decode"):
        (engine,) = pods[role]["spec"]["containers"]
        command = engine["lifecycle"]["preStop"]["exec"]["command"]
        wait = float(command[command.index("--wait") + 1])
        assert pods[role]["spec"]["terminationGracePeriodSeconds"] >= wait + 10 + SPARE_SECONDS
        assert command[command.index("--self-port") + 1] == str(engine["ports"][0]["containerPort"])
    (router,) = pods["router"]["spec"]["containers"]
    flags = dict(word.split("=", 1) for word in router["args"] if "=" in word)
    stopping = float(flags["--shutdown-delay-secs"]) + float(flags["--shutdown-grace-secs"])
    assert pods["router"]["spec"]["terminationGracePeriodSeconds"] >= stopping + SPARE_SECONDS


def test_containers_have_few_rights(rendered: dict[str, list[Manifest]]) -> None:
    for overlay in ("laptop", "production"):
        for name, pod in list_pods(rendered[overlay]).items():
            assert pod["spec"]["securityContext"]["runAsNonRoot"], name
            assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
            assert pod["spec"]["automountServiceAccountToken"] is False, name
            for container, *_ in containers_of(pod):
                rights = container["securityContext"]
                assert rights["allowPrivilegeEscalation"] is False, name
                assert rights["readOnlyRootFilesystem"] is True, name
                assert rights["capabilities"] == {"drop": ["ALL"]}, name
                assert "memory" in container.get("resources", {"requests": "memory"})["requests"], name


def test_referenced_objects_exist(manifests: list[Manifest]) -> None:
    pods = list_pods(manifests)
    ports = {name: _port_names(pod) for name, pod in pods.items()}
    claims = {
        each["metadata"]["name"]: {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])}
        for each in manifests
        if "template" in each.get("spec", {})
    }
    for service in (each for each in manifests if each["kind"] == "Service"):
        selector, spec = service["spec"]["selector"], service["spec"]
        (name,) = (each for each, pod in pods.items() if selector.items() <= pod["metadata"]["labels"].items())
        for port in spec["ports"]:
            assert port.get("targetPort", port["port"]) in ports[name], service["metadata"]["name"]
    for name, pod in pods.items():
        volumes = {each["name"] for each in pod["spec"].get("volumes", [])} | claims[name]
        for container, *_ in containers_of(pod):
            assert {each["name"] for each in container.get("volumeMounts", [])} <= volumes, name
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = container.get(kind, {})
                for way in ("httpGet", "tcpSocket"):
                    assert way not in probe or probe[way]["port"] in ports[name], f"{name}: {kind}"
    accounts = {each["metadata"]["name"] for each in manifests if each["kind"] == "ServiceAccount"}
    assert {pod["spec"].get("serviceAccountName", "router") for pod in pods.values()} <= accounts
    for budget in (each for each in manifests if each["kind"] == "PodDisruptionBudget"):
        labels = budget["spec"]["selector"]["matchLabels"]
        assert any(labels.items() <= pod["metadata"]["labels"].items() for pod in pods.values())


def test_the_hosts_in_flags_are_services(manifests: list[Manifest]) -> None:
    services = {each["metadata"]["name"]: each["spec"] for each in manifests if each["kind"] == "Service"}

    def check(host_and_port: str) -> None:
        host, _, port = host_and_port.partition(":")
        assert int(port) in {each["port"] for each in services[host]["ports"]}, host_and_port

    for pod in list_pods(manifests).values():
        for container, argv, environ in containers_of(pod):
            flags = dict(word.split("=", 1) for word in argv if word.startswith("--") and "=" in word)
            for flag in ("--router", "--etcd"):
                if flag in flags:
                    check(flags[flag])
            if "--shared-state" in flags:
                check(flags["--shared-state"].removeprefix("redis://").partition("/")[0])
            if address := environ.get("MOONCAKE_MASTER_SERVER_ADDR"):
                check(address.removeprefix("etcd://"))
            if "lifecycle" in container:
                hook = container["lifecycle"]["preStop"]["exec"]["command"]
                check(hook[hook.index("--router") + 1])
                # Instances must find a router that has no instances yet, and so is not ready.
                assert services[flags["--router"].partition(":")[0]]["publishNotReadyAddresses"] is True


def test_each_member_of_etcd_has_the_addresses_of_all_members(manifests: list[Manifest]) -> None:
    etcd = find_manifest(manifests, "StatefulSet", "etcd")
    ((_, argv, _),) = containers_of(etcd["spec"]["template"])
    flags = dict(word.removeprefix("--").split("=", 1) for word in argv[1:])
    expected = (f"etcd-{i}=http://etcd-{i}.etcd-members:2380" for i in range(etcd["spec"]["replicas"]))
    assert flags["initial-cluster"] == ",".join(expected)
    assert f"{flags['name']}={flags['initial-advertise-peer-urls']}" in flags["initial-cluster"]


def test_a_replaced_member_of_etcd_keeps_its_data(manifests: list[Manifest]) -> None:
    spec = find_manifest(manifests, "StatefulSet", "etcd")["spec"]
    (claim,) = spec["volumeClaimTemplates"]
    (container,) = spec["template"]["spec"]["containers"]
    (mount,) = container["volumeMounts"]
    assert mount["name"] == claim["metadata"]["name"]
    assert f"--data-dir={mount['mountPath']}/etcd" in container["args"]
    security = spec["template"]["spec"]["securityContext"]
    assert security["fsGroup"] == security["runAsGroup"]


def test_the_prometheus_operator_scrapes_all_metrics_ports(rendered: dict[str, list[Manifest]]) -> None:
    manifests = rendered["production"]
    pods = list_pods(manifests)
    monitored, jobs = set(), set()
    for monitor in (each for each in manifests if each["apiVersion"] == OPERATORS_GROUP):
        assert set(monitor) == {"apiVersion", "kind", "metadata", "spec"}
        if monitor["kind"] == "PrometheusRule":
            continue
        if monitor["kind"] == "ServiceMonitor":
            assert set(monitor["spec"]) == {"selector", "endpoints"}
            found = [each for each in manifests if each["kind"] == "Service" and _selects(monitor, each["metadata"])]
            (service,) = found
            ends, ports = monitor["spec"]["endpoints"], {each["name"] for each in service["spec"]["ports"]}
            monitored |= {"router"}
        else:
            assert monitor["kind"] == "PodMonitor"
            assert set(monitor["spec"]) == {"selector", "podMetricsEndpoints"}
            selected = {name for name, pod in pods.items() if _selects(monitor, pod["metadata"])}
            ends, ports = monitor["spec"]["podMetricsEndpoints"], set.union(*(_port_names(pods[n]) for n in selected))
            monitored |= selected
        for end in ends:
            assert set(end) - {"honorLabels"} == {"port", "path", "interval", "relabelings"}
            # The same label as in deploy/prometheus/prometheus.yml, which alerts and dashboards use.
            assert end["relabelings"][0]["targetLabel"] == "job"
            jobs.add(end["relabelings"][0]["replacement"])
            assert end["port"] in ports
            assert end["path"] == "/metrics"
    assert monitored == {"router", "prefill", "decode", "master"}
    prometheus = yaml.safe_load((KUBERNETES.parent / "prometheus/prometheus.yml").read_text())
    assert jobs == {each["job_name"] for each in prometheus["scrape_configs"]}


def test_the_prometheus_operator_has_the_tested_alerts(rendered: dict[str, list[Manifest]]) -> None:
    rule = find_manifest(rendered["production"], "PrometheusRule", "kvstore")
    assert rule["spec"] == yaml.safe_load((KUBERNETES.parent / "prometheus/alerts.yml").read_text())


def test_the_autoscalers_use_a_metric_of_the_router(rendered: dict[str, list[Manifest]]) -> None:
    rule = yaml.safe_load((KUBERNETES / "components/autoscaling/prometheus-adapter-values.yaml").read_text())
    (external,) = rule["rules"]["external"]
    figures = SURFACE["one request"]["samples"]
    manifests = rendered["production"]
    scalers = [each for each in manifests if each["kind"] == "HorizontalPodAutoscaler"]
    assert {each["spec"]["scaleTargetRef"]["name"] for each in scalers} == {"prefill", "decode"}
    for scaler in scalers:
        target = scaler["spec"]["scaleTargetRef"]
        assert "replicas" not in find_manifest(manifests, target["kind"], target["name"])["spec"]
        (metric,) = scaler["spec"]["metrics"]
        name = metric["external"]["metric"]["name"]
        assert external["seriesQuery"].startswith(name + "{")
        assert external["name"]["as"] == name
        assert f"{name}{{role}}" in figures
        assert metric["external"]["metric"]["selector"]["matchLabels"] == {"role": target["name"]}


def test_no_manifest_contains_a_secret(manifests: list[Manifest]) -> None:
    assert not [each for each in manifests if each["kind"] == "Secret"]


def test_instances_have_only_the_register_token(rendered: dict[str, list[Manifest]]) -> None:
    pods = list_pods(rendered["production"])
    for role in ("prefill", "decode"):
        (volume,) = (each for each in pods[role]["spec"]["volumes"] if "secret" in each)
        assert [each["key"] for each in volume["secret"]["items"]] == ["register"]


def _port_names(pod: Manifest) -> set[Any]:
    """Return the names and numbers of a pod's ports."""
    return set(_each_port(pod))


def _each_port(pod: Manifest) -> Iterator[Any]:
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", []):
            yield from (port["name"], port["containerPort"])


def _selects(monitor: Manifest, metadata: Manifest) -> bool:
    selector, labels = monitor["spec"]["selector"], metadata.get("labels", {})
    matches = selector.get("matchLabels", {}).items() <= labels.items()
    wanted = selector.get("matchExpressions", [])
    return bool(matches) and all(labels.get(each["key"]) in each["values"] for each in wanted)
