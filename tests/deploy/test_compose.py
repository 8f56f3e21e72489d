"""``deploy/compose.yaml`` and its other files, checked with the schema of the Compose specification
(``compose-spec.json``, from github.com/compose-spec/compose-spec at 170098b, Apache 2.0), with the parsers of the
programs, and with haproxy."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.command_lines import check_command

DEPLOY = Path(__file__).parents[2] / "deploy"
SCHEMA = json.loads(Path(__file__).with_name("compose-spec.json").read_text())
SURFACE = json.loads((Path(__file__).parents[1] / "public_surface.json").read_text())
FILES = ("compose.yaml", "compose.ha.yaml")


def load(*names: str) -> dict[str, Any]:
    """Return the services of merged files."""
    services: dict[str, Any] = {}
    for name in names:
        for service, members in copy.deepcopy(yaml.safe_load((DEPLOY / name).read_text())["services"]).items():
            known = services.setdefault(service, {})
            environment = {**known.get("environment", {}), **members.get("environment", {})}
            known.update(members)
            if environment:
                known["environment"] = environment
    return services


@pytest.fixture(params=[FILES[:1], FILES], ids=["one master", "three masters"])
def services(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load(*request.param)


@pytest.mark.parametrize("name", FILES)
def test_the_file_matches_the_schema(name: str) -> None:
    jsonschema.Draft7Validator(SCHEMA).validate(yaml.safe_load((DEPLOY / name).read_text()))


def test_the_programs_accept_their_flags_and_environment(services: dict[str, Any]) -> None:
    checked = 0
    for name, service in services.items():
        if service["image"].startswith("kvstore-"):
            environ = {key: expand(value, {}) for key, value in service.get("environment", {}).items()}
            check_command([*entry_point(service), *service["command"]], environ)
            for hook in service.get("pre_stop", ()):
                check_command(hook["command"], environ)
            checked += 1
            assert service["image"].rpartition(":")[0] == f"kvstore-{target_of(service, name)}"
    assert checked >= 6


def test_hosts_in_flags_are_services(services: dict[str, Any]) -> None:
    served = {name: ports_of(name, service) for name, service in services.items()}
    for name, service in services.items():
        words = [*service.get("command", []), *map(str, service.get("environment", {}).values())]
        words += [word for hook in service.get("pre_stop", ()) for word in hook["command"]]
        for host, port in re.findall(r"\b([a-z][a-z0-9-]*):(\d{4,5})\b", " ".join(words)):
            assert int(port) in served[host], f"{name}: {host}:{port}"
        assert set(service.get("depends_on", {})) <= set(services)


def test_mounted_files_exist(services: dict[str, Any]) -> None:
    declared = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["volumes"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = expand(volume, {}).partition(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in declared


def test_a_folder_of_the_user_replaces_the_small_model() -> None:
    (volume,) = load("compose.yaml")["prefill"]["volumes"]
    assert expand(volume, {}) == "model:/models:ro"
    assert expand(volume, {"MODEL_FOLDER": "/srv/model"}) == "/srv/model:/models/checkpoint:ro"


def test_a_stop_leaves_time_for_running_requests() -> None:
    services = load("compose.yaml")
    for role in ("prefill", "decode"):
        ((hook),) = services[role]["pre_stop"]
        wait = float(hook["command"][hook["command"].index("--wait") + 1])
        assert seconds(services[role]["stop_grace_period"]) >= wait + 15
    router = services["router-1"]
    delay = float(next(word.partition("=")[2] for word in router["command"] if "shutdown-delay" in word))
    assert seconds(router["stop_grace_period"]) >= delay + 25 + 5


def test_published_ports_are_open_only_to_this_machine(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_haproxy_accepts_its_configuration(tmp_path: Path) -> None:
    haproxy = shutil.which("haproxy") or shutil.which("/usr/sbin/haproxy")
    if haproxy is None:
        pytest.skip("haproxy is not installed")
    # The names can be resolved only in the network of the containers.
    text = (DEPLOY / "compose/haproxy.cfg").read_text()
    here = tmp_path / "haproxy.cfg"
    here.write_text(re.sub(r"(server \S+) \S+:", r"\1 127.0.0.1:", text))
    done = subprocess.run([haproxy, "-c", "-f", here], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    for path in re.findall(r"httpchk GET (\S+)", text):
        assert f"GET {path}" in SURFACE["routes"]["router"]


def test_prometheus_scrapes_the_same_jobs_as_without_containers() -> None:
    def read(path: str) -> Mapping[str, Any]:
        jobs = yaml.safe_load((DEPLOY / path).read_text())["scrape_configs"]
        return {job["job_name"]: strip(job) for job in jobs}

    def strip(job: dict[str, Any]) -> dict[str, Any]:
        for targets in job.get("static_configs", ()):
            targets["targets"] = []
        for way in job.get("http_sd_configs", ()):
            way["url"] = way["url"].rpartition("/")[2]
        return job

    assert read("compose/prometheus.yml") == read("prometheus/prometheus.yml")


def ports_of(name: str, service: Mapping[str, Any]) -> set[int]:
    """Return the ports of a service in the network of the containers."""
    text = " ".join(map(str, service.get("command", ())))
    known = {"redis": {6379}, "otel-collector": {4318}, "etcd": {2379}, "prometheus": {9090}}
    if name == "haproxy":
        return set(map(int, re.findall(r"bind :(\d+)", (DEPLOY / "compose/haproxy.cfg").read_text())))
    return known.get(name) or set(map(int, re.findall(r"port=(\d+)", text)))


def target_of(service: Mapping[str, Any], name: str) -> str:
    """Return the stage of the Containerfile. A further master uses the image of the first one."""
    return str(service["build"]["target"]) if "build" in service else {"master": "tools"}[name.partition("-")[0]]


def entry_point(service: Mapping[str, Any]) -> list[str]:
    """Return the entry point of the service; that of its image if it has none."""
    if "entrypoint" in service:
        return list(service["entrypoint"])
    text = (DEPLOY / "container/Containerfile").read_text()
    stage = service["image"].partition(":")[0].removeprefix("kvstore-")
    found = re.search(rf"^FROM \w+ AS {stage}\n(?:(?!FROM).*\n)*?ENTRYPOINT (.*)$", text, re.MULTILINE)
    return list(json.loads(found[1])) if found else []


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace ``${NAME:-default}`` and ``${NAME:+replacement}`` as Compose does."""

    def value_of(found: re.Match[str]) -> str:
        value = values.get(found[1], "")
        return (value or found[3]) if found[2] == "-" else (found[3] if value else "")

    return re.sub(r"\$\{(\w+):([-+])([^}]*)\}", value_of, str(text))


def seconds(text: str) -> float:
    """Return the seconds of a duration in the format of Compose."""
    assert text.endswith("s")
    return float(text[:-1])
