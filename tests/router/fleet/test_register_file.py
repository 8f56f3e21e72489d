"""The register file: the form of FastDeploy's Go router, and one sentence for each error."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.fleet.register_file import read_register_file
from router.fleet.registration import EngineKind, Role
from router.settings import SettingsError
from tests.router.conftest import MakeRouter, MakeStandIn
from tests.router.stand_in import LoopThread, StandIn
from tests.support.ports import free_port
from tests.support.waiting import wait_until

# From FastDeploy's golang_router/examples, but the second entry has its lists as text.
EXAMPLE = """
instances:
  - role: "prefill"
    host_ip: 127.0.0.1
    port: 8097
    connector_port: 8001
    engine_worker_queue_port: 8002
    transfer_protocol:
      - ipc
      - rdma
    rdma_ports: [7100, "7101"]
    device_ids: [0, "1"]
    metrics_port: 8003
  - {role: decode, host_ip: 127.0.0.1, port: "8098", transfer_protocol: "ipc,rdma", rdma_ports: "7100, 7101"}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "register.yaml"
    path.write_text(text)
    return path


def test_the_go_routers_example_is_read(tmp_path: Path) -> None:
    prefill, decode = read_register_file(write(tmp_path, EXAMPLE))
    assert (prefill.role, prefill.key, prefill.connector_port) == (Role.PREFILL, "127.0.0.1:8097", "8001")
    assert (prefill.rdma_ports, prefill.device_ids, prefill.metrics_port) == (("7100", "7101"), ("0", "1"), 8003)
    assert (decode.role, decode.key, decode.metrics_port) == (Role.DECODE, "127.0.0.1:8098", 8098)
    assert (decode.transfer_protocol, decode.rdma_ports) == (("ipc", "rdma"), ("7100", "7101"))


def test_tp_size_is_the_number_of_devices_as_in_the_go_router(tmp_path: Path) -> None:
    assert [entry.tp_size for entry in read_register_file(write(tmp_path, EXAMPLE))] == [2, 1]


def test_an_entry_can_name_another_engine(tmp_path: Path) -> None:
    entry = "{role: prefill, host_ip: a, port: 1, engine: sglang, bootstrap_port: 9001}"
    (prefill,) = read_register_file(write(tmp_path, f"instances: [{entry}]"))
    assert (prefill.engine, prefill.bootstrap_port) == (EngineKind.SGLANG, 9001)


def test_unknown_fields_have_no_effect_and_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entries = [f"{{role: mixed, host_ip: a, port: {port}, conector_port: 5}}" for port in (1, 2)]
    text = f"instances: [{', '.join(entries)}]\nowner: x\n"
    assert [entry.connector_port for entry in read_register_file(write(tmp_path, text))] == [None, None]
    # Routers of earlier tests may still log their end.
    (record,) = [each for each in caplog.records if each.name == "router.fleet.register_file"]
    assert record.getMessage().endswith(
        "register.yaml: unknown fields of an instance have no effect: owner, conector_port "
        "(did you mean connector_port?)"
    )


@pytest.mark.parametrize("text", ["instances:", "instances: []"])
def test_a_file_can_be_without_instances(tmp_path: Path, text: str) -> None:
    assert read_register_file(write(tmp_path, text)) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have 'instances:'"),
        ("[1]", "must have 'instances:'"),
        ("instances: 5", "instances is 5; it must be a list"),
        ("instances: [5]", "instances[0] is 5; it must have role, host_ip and port"),
        ("instances: [{role: mixed, port: 1}]", "instances[0]: host_ip is None"),
        ("instances: [{role: mixed, host_ip: a}]", "instances[0]: port is None; it must be a port"),
        ("instances: [{role: mixd, host_ip: a, port: 1}]", "instances[0]: role is 'mixd'; it must be one of"),
        (
            "instances: [{role: mixed, host_ip: a, port: 1}, {role: mixed, host_ip: a, port: '1'}]",
            "instances[1] has the host_ip and port of instances[0], a:1",
        ),
        ("instances: [", "is not YAML"),
        ("instances:\n- {role: mixed, host_ip: a, port: 1, port: 2}", "line 2: 'port' is given twice"),
        ("instances: [{role: mixed, host_ip: a, port: %s}]" % ("1" * 5000), "a whole number of 5000 digits"),
        ("instances: " + "[" * 10_000, "its maps and lists are nested too deeply"),
        (
            "instances: [{role: mixed, host_ip: a, port: 1, version: !!binary AAAA}]",
            "the field 'version' cannot",
        ),
    ],
)
def test_an_error_is_one_sentence_with_the_entry_and_the_field(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SettingsError) as refused:
        read_register_file(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_error_for_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"register\.yaml: No such file or directory"):
        read_register_file(tmp_path / "register.yaml")


def test_in_the_go_routers_dialect_a_missing_file_is_a_warning(
    tmp_path: Path, make_router: MakeRouter, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "register.yaml"
    router = make_router(dialect="go", register_path=str(path))
    assert list(router.app.registry) == []
    assert f"manager.register-path {path} does not exist, so no instances are read from it" in caplog.messages
    with pytest.raises(SettingsError, match=r"register\.yaml: No such file or directory"):
        make_router(register_path=str(path))


def test_an_entry_with_a_role_of_the_other_mode_is_an_error(tmp_path: Path, make_router: MakeRouter) -> None:
    path = write(tmp_path, "instances: [{role: decode, host_ip: a, port: 1}]")
    with pytest.raises(SettingsError, match=r"instances\[0\]: role is 'decode', but this router runs without"):
        make_router(register_path=str(path))


def list_in_file(*instances: StandIn) -> str:
    entries = (f"{{role: {i.role}, host_ip: 127.0.0.1, port: {i.port}}}" for i in instances)
    return f"instances: [{', '.join(entries)}]"


def test_instances_of_the_file_serve_without_a_registration(
    tmp_path: Path, make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    router = make_router(register_path=str(write(tmp_path, list_in_file(stand_in()))))
    wait_until(lambda: router.chat().status_code == 200, "an answer")


def test_an_instance_of_the_file_is_healthy_when_it_starts_and_is_never_removed(
    tmp_path: Path, make_router: MakeRouter, thread: LoopThread
) -> None:
    late = StandIn("mixed", thread, port=free_port())
    settings = {"health_check_interval_secs": 0.05, "heartbeat_expiry_secs": 0.1}
    router = make_router(register_path=str(write(tmp_path, list_in_file(late))), **settings)

    def state() -> object:
        return [entry["state"] for entry in router.client.get("/registered").json()["mixed"]]

    wait_until(lambda: "Connection refused" in router.chat().text, "a probe that fails")
    try:
        late.start()
        wait_until(lambda: state() == ["healthy"], "the instance to be healthy")
    finally:
        late.stop()
    wait_until(lambda: state() == ["unhealthy"], "the probes to fail")
    rounds = router.app.health
    for _ in range(3):
        thread.run(rounds.check_all())
    assert state() == ["unhealthy"]
