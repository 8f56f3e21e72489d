"""Registrations in the form of FastDeploy's instances."""

from __future__ import annotations

from typing import Any

import pytest

from router.fleet.registration import EngineKind, KvConnector, Registration, RegistrationError, Role
from tests.router.fleet.registrations import registration


def _nested(depth: int) -> Any:
    return [_nested(depth - 1)] if depth else []


def test_all_fields_of_fastdeploy_are_parsed() -> None:
    parsed = registration()
    assert (parsed.role, parsed.key, parsed.connector_port) == (Role.DECODE, "10.0.0.1:52500", "8002")
    assert (parsed.rdma_ports, parsed.device_ids, parsed.tp_size) == (("7100", "7101"), ("0", "1"), 2)
    assert (parsed.version, parsed.is_paused) == ("v1", False)


def test_role_host_and_port_are_enough() -> None:
    parsed = Registration.from_fields({"role": "mixed", "host_ip": "10.0.0.1", "port": "8000"})
    assert (parsed.connector_port, parsed.rdma_ports, parsed.tp_size) == (None, (), 1)
    assert (parsed.engine, parsed.bootstrap_port, parsed.kv_connector) == (
        EngineKind.FASTDEPLOY,
        8998,
        KvConnector.NIXL,
    )


def test_unknown_fields_are_retained() -> None:
    assert registration(gpu="H800").fields["gpu"] == "H800"


@pytest.mark.parametrize(
    ("field", "given", "parsed_value"),
    [
        ("connector_port", 8002, "8002"),
        ("connector_port", "8002", "8002"),
        ("connector_port", [8002], "8002"),
        ("connector_port", None, None),
        ("connector_port", "", None),
        ("connector_port", 0, None),
        ("rdma_ports", None, ()),
        ("rdma_ports", [7100.0], ("7100",)),
        ("rdma_ports", [7100, "7101"], ("7100", "7101")),
        ("rdma_ports", "7100,7101", ("7100", "7101")),
        ("rdma_ports", 7100, ("7100",)),
        ("device_ids", [0, 1], ("0", "1")),
        ("device_ids", "0,1", ("0", "1")),
        ("transfer_protocol", "ipc,rdma", ("ipc", "rdma")),
        ("tp_size", "4", 4),
        ("tp_size", None, 2),
        ("role", "PREFILL", Role.PREFILL),
        ("role", "decode", Role.DECODE),
        ("role", 1, Role.PREFILL),
        ("role", 0, Role.MIXED),
        ("version", 7, "7"),
        ("version", None, None),
        ("connector_port", "None", None),
        ("metrics_port", 52501, 52501),
        ("metrics_port", None, 52500),
        ("metrics_port", 0, 52500),
        ("connected_decodes", None, frozenset()),
        ("connected_decodes", [{"host_ip": "10.0.0.2", "port": "1"}], frozenset({"10.0.0.2:1"})),
        ("connected_decodes", ["10.0.0.2:1", "[::1]:2"], frozenset({"10.0.0.2:1", "[::1]:2"})),
        ("engine", None, EngineKind.FASTDEPLOY),
        ("engine", "sglang", EngineKind.SGLANG),
        ("engine", "vLLM", EngineKind.VLLM),
        ("bootstrap_port", "9001", 9001),
        ("bootstrap_port", None, 8998),
        ("kv_connector", "mooncake", KvConnector.MOONCAKE),
        ("host_ip", "http://10.0.0.1", "10.0.0.1"),
        ("host_ip", "https://10.0.0.1", "10.0.0.1"),
        ("host_ip", "::1", "::1"),
        ("host_ip", "a-name", "a-name"),
    ],
)
def test_numbers_texts_and_lists_are_accepted(field: str, given: Any, parsed_value: Any) -> None:
    parsed = registration(**{field: given})
    assert (parsed.address.host if field == "host_ip" else getattr(parsed, field)) == parsed_value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"role": "encode"}, "role is 'encode'; it must be one of 'mixed', 'prefill', 'decode'"),
        ({"role": None}, "role is None"),
        ({"role": True}, "role is True"),
        ({"role": 99}, "role is 99; it must be one of 'mixed', 'prefill', 'decode'"),
        ({"host_ip": ""}, "host_ip is ''"),
        ({"host_ip": 5}, "host_ip is 5"),
        ({"host_ip": None}, "host_ip is None; it must be"),
        ({"host_ip": "://a"}, "host_ip is '://a'"),
        ({"host_ip": "ftp://10.0.0.1"}, "host_ip is 'ftp://10.0.0.1'"),
        ({"host_ip": "https://10.0.0.1/v1"}, "host_ip is 'https://10.0.0.1/v1'"),
        ({"metrics_port": "x"}, "metrics_port is 'x'"),
        ({"models": ["a", "b\nc"]}, "models has 'b\\nc'; the characters of a name must be printable"),
        ({"models": [str(number) for number in range(10_001)]}, "models has 10001 names; at most 10000 are allowed"),
        ({"kv_events": {"endpoint": "tcp://*:1"}}, "kv_events is {'endpoint': 'tcp://*:1'}; it must be an object such"),
        ({"kv_events": {"endpoint": "tcp://-:1"}}, "kv_events is {'endpoint': 'tcp://-:1'}"),
        ({"kv_events": {"endpoint": "ipc://" + "x" * 101}}, "kv_events is {'endpoint': 'ipc://xxx"),
        ({"kv_events": {"endpoint": "tcp://a:1", "replay_endpoint": 5}}, "kv_events is {'endpoint': 'tcp://a:1'"),
        ({"connected_decodes": [5]}, "connected_decodes has 5; an entry must be 'host:port', or an object with"),
        ({"connected_decodes": ["d"]}, "connected_decodes has"),
        ({"connected_decodes": [{"host_ip": "a"}]}, "connected_decodes has {'host_ip': 'a'}"),
        ({"port": None}, "port is None; it must be a port, 1 to 65535"),
        ({"port": 0}, "port is 0"),
        ({"port": 65536}, "port is 65536"),
        ({"port": "http"}, "port is 'http'"),
        ({"port": True}, "port is True"),
        ({"connector_port": "x"}, "connector_port is 'x'"),
        ({"connector_port": "99999"}, "connector_port is '99999'; it must be a port"),
        ({"rdma_ports": {"a": 1}}, "rdma_ports is"),
        ({"rdma_ports": [None]}, "rdma_ports is"),
        ({"rdma_ports": [True]}, "rdma_ports is"),
        ({"rdma_ports": [1.5]}, "rdma_ports is"),
        ({"rdma_ports": [float("inf")]}, "rdma_ports is"),
        ({"rdma_ports": ["99999"]}, "rdma_ports has '99999'; a port is 1 to 65535"),
        ({"transfer_protocol": ["udp"]}, "transfer_protocol has 'udp'; its values are 'ipc', 'rdma' and 'tcp'"),
        ({"tp_size": 0}, "tp_size is 0; it must be a positive integer"),
        ({"tp_size": 1.5}, "tp_size is 1.5"),
        ({"tp_size": "1" * 5000}, "it must be a positive integer"),
        ({"port": "1" * 5000}, "it must be a port, 1 to 65535"),
        ({"connected_decodes": ["d:" + "1" * 5000]}, "an entry must be 'host:port'"),
        ({"engine": "tgi"}, "engine is 'tgi'; it must be one of 'fastdeploy', 'vllm', 'sglang', 'openai'"),
        ({"engine": 1}, "engine is 1; it must be one of"),
        ({"bootstrap_port": 70000}, "bootstrap_port is 70000; it must be a port, 1 to 65535"),
        ({"kv_connector": "lmcache"}, "kv_connector is 'lmcache'; it must be one of 'nixl', 'mooncake', 'kvstore'"),
        ({"version": "\ud800x"}, "'version' cannot be encoded as JSON: str is not valid UTF-8"),
        ({"\ud800": 1}, r"'\ud800' cannot be encoded as JSON"),
        ({"gpu": 2**64}, "'gpu' cannot be encoded as JSON: Integer exceeds 64-bit range"),
        ({"port": 16**5000}, "'port' cannot be encoded as JSON"),
        ({"gpu": _nested(252)}, "'gpu' cannot be encoded as JSON: Recursion limit reached"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_of_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RegistrationError) as refused:
        registration(**changes)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        *(("role", "prefill"), ("connector_port", 9), ("rdma_ports", ["9"]), ("device_ids", ["9"]), ("tp_size", 4)),
        *(("transfer_protocol", ["tcp"]), ("version", "v2"), ("metrics_port", 9), ("host_ip", "https://10.0.0.1")),
        *(("engine_worker_queue_port", 9), ("engine", "vllm"), ("bootstrap_port", 9), ("kv_connector", "mooncake")),
        *(("start_id", "another"), ("kv_events", {"endpoint": "tcp://10.0.0.1:5557"})),
    ],
)
def test_a_difference_in_a_fixed_field_means_another_process(field: str, given: Any) -> None:
    assert registration(**{field: given}).identity != registration().identity


def test_a_difference_in_a_variable_field_means_the_same_process() -> None:
    other = registration(is_paused=True, connected_decodes=["10.0.0.2:1"], models=["m"], gpu="H800")
    assert other.identity == registration().identity
