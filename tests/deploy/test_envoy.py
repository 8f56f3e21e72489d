"""The files for Envoy and for gateways with an InferencePool."""

from __future__ import annotations

import subprocess
from pathlib import Path

import kubernetes_validate
import yaml

from router.settings import load_settings
from tests.support.envoy import CONFIG, find_envoy

POOL = Path(__file__).parents[2] / "deploy" / "envoy" / "inferencepool.yaml"


def test_envoy_accepts_the_configuration() -> None:
    command = [str(find_envoy()), "--mode", "validate", "--log-level", "warning", "-c", str(CONFIG)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_pool_its_service_and_its_picker_have_matching_names_and_ports() -> None:
    pool, service, registration, deployment, *_ = yaml.safe_load_all(POOL.read_text())
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    kubernetes_validate.validate(deployment, "1.34", strict=True)
    # Without the account's token the program ends; the account itself, of the routers, mounts none.
    assert pod["spec"]["automountServiceAccountToken"] is True
    # What a namespace demands that enforces "restricted", as ours does.
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["image"] == "kvstore-router:0.1.0"
    assert container["command"] == ["kvrouter", "epp"]
    settings = load_settings(container["args"], {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, epp_port=9002)
    labels = pool["spec"]["selector"]["matchLabels"]
    assert settings.selector == tuple(f"{name}={value}" for name, value in labels.items())
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == [settings.service_discovery_port]
    picker = pool["spec"]["endpointPickerRef"]
    assert picker["name"] == service["metadata"]["name"]
    assert picker["port"]["number"] == settings.epp_port
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert registration["spec"]["selector"] == service["spec"]["selector"]
    assert registration["spec"]["publishNotReadyAddresses"] is True  # no picker is ready before instances register
    ports = {port["targetPort"] for each in (service, registration) for port in each["spec"]["ports"]}
    assert ports == {settings.port, settings.epp_port} == {port["containerPort"] for port in container["ports"]}
    grace = settings.shutdown_delay_secs + settings.shutdown_grace_secs
    assert pod["spec"]["terminationGracePeriodSeconds"] > grace
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == settings.epp_port


def test_network_policies_admit_gateways_and_the_picker() -> None:
    pool, _, _, deployment, *policies = yaml.safe_load_all(POOL.read_text())
    for policy in policies:
        kubernetes_validate.validate(policy, "1.34", strict=True)
    to_picker, to_instances = (policy["spec"] for policy in policies)
    picker = deployment["spec"]["template"]
    assert to_picker["podSelector"]["matchLabels"].items() <= picker["metadata"]["labels"].items()
    open_ports = {port["port"] for rule in to_picker["ingress"] if "from" not in rule for port in rule["ports"]}
    assert open_ports == {port["containerPort"] for port in picker["spec"]["containers"][0]["ports"]}
    assert to_instances["podSelector"] == pool["spec"]["selector"]
    (rule,) = to_instances["ingress"]
    assert [port["port"] for port in rule["ports"]] == [port["number"] for port in pool["spec"]["targetPorts"]]
    assert {"podSelector": to_picker["podSelector"]} in rule["from"]
    assert any(peer.get("namespaceSelector") == {} for peer in rule["from"])
