"""Registrations as FastDeploy's instances send them, and the registry's rules about who may be chosen."""

from __future__ import annotations

from typing import Any

import pytest

from router.fleet.breaker import FAILURES
from router.fleet.pairing import can_decode_for, disaggregate_info
from router.fleet.registration import Registration, RegistrationError, Role
from router.fleet.registry import Registry

FIELDS: dict[str, Any] = {
    "role": "decode",
    "host_ip": "10.0.0.1",
    "port": 52500,
    "metrics_port": 52501,
    "connector_port": 8002,
    "engine_worker_queue_port": 8003,
    "rdma_ports": ["7100", "7101"],
    "device_ids": ["0", "1"],
    "transfer_protocol": ["ipc", "rdma"],
    "tp_size": 2,
    "is_paused": False,
    "version": "v1",
    "connected_decodes": [],
}


def registration(**changes: Any) -> Registration:
    return Registration.from_fields({**FIELDS, **changes})


def _nested(depth: int) -> Any:
    return [_nested(depth - 1)] if depth else []


def test_everything_fastdeploy_sends_is_understood() -> None:
    parsed = registration()
    assert (parsed.role, parsed.key, parsed.connector_port) == (Role.DECODE, "10.0.0.1:52500", "8002")
    assert (parsed.rdma_ports, parsed.device_ids, parsed.tp_size) == (("7100", "7101"), ("0", "1"), 2)
    assert (parsed.version, parsed.is_paused) == ("v1", False)


def test_role_host_and_port_are_enough() -> None:
    parsed = Registration.from_fields({"role": "mixed", "host_ip": "10.0.0.1", "port": "8000"})
    assert (parsed.connector_port, parsed.rdma_ports, parsed.tp_size) == (None, (), 1)


def test_unknown_fields_are_kept() -> None:
    assert registration(gpu="H800").fields["gpu"] == "H800"


@pytest.mark.parametrize(
    ("field", "given", "understood"),
    [
        ("connector_port", 8002, "8002"),
        ("connector_port", "8002", "8002"),
        ("connector_port", [8002], "8002"),
        ("connector_port", None, None),
        ("connector_port", 0, None),
        ("rdma_ports", None, ()),
        ("rdma_ports", [7100, "7101"], ("7100", "7101")),
        ("rdma_ports", "7100,7101", ("7100", "7101")),
        ("rdma_ports", 7100, ("7100",)),
        ("device_ids", [0, 1], ("0", "1")),
        ("device_ids", "0,1", ("0", "1")),
        ("transfer_protocol", "ipc,rdma", ("ipc", "rdma")),
        ("tp_size", "4", 4),
        ("tp_size", None, 1),
        ("role", "PREFILL", Role.PREFILL),
        ("role", 1, Role.PREFILL),
        ("version", 7, "7"),
        ("version", None, None),
        ("connector_port", "None", None),
        ("metrics_port", 52501, 52501),
        ("metrics_port", None, 52500),
        ("metrics_port", 0, 52500),
        ("connected_decodes", None, frozenset()),
        ("connected_decodes", [{"host_ip": "10.0.0.2", "port": "1"}], frozenset({"10.0.0.2:1"})),
        ("connected_decodes", ["10.0.0.2:1", "[::1]:2"], frozenset({"10.0.0.2:1", "[::1]:2"})),
        ("host_ip", "http://10.0.0.1", "10.0.0.1"),
    ],
)
def test_numbers_texts_and_lists_are_all_taken(field: str, given: Any, understood: Any) -> None:
    parsed = registration(**{field: given})
    assert (parsed.address.host if field == "host_ip" else getattr(parsed, field)) == understood


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"role": "encode"}, "role is 'encode'; it must be one of 'mixed', 'prefill', 'decode'"),
        ({"role": None}, "role is None"),
        ({"role": True}, "role is True"),
        ({"host_ip": ""}, "host_ip is ''"),
        ({"host_ip": 5}, "host_ip is 5"),
        ({"host_ip": "https://10.0.0.1"}, "host_ip is 'https://10.0.0.1'"),
        ({"metrics_port": "x"}, "metrics_port is 'x'"),
        ({"connected_decodes": [5]}, "connected_decodes has 5; an entry must be 'host:port', or an object with"),
        ({"connected_decodes": ["d"]}, "connected_decodes has"),
        ({"connected_decodes": [{"host_ip": "a"}]}, "connected_decodes has {'host_ip': 'a'}"),
        ({"port": None}, "port is None; it must be a port, 1 to 65535"),
        ({"port": 0}, "port is 0"),
        ({"port": 65536}, "port is 65536"),
        ({"port": "http"}, "port is 'http'"),
        ({"port": True}, "port is True"),
        ({"connector_port": "x"}, "connector_port is 'x'"),
        ({"rdma_ports": {"a": 1}}, "rdma_ports is"),
        ({"rdma_ports": [None]}, "rdma_ports is"),
        ({"transfer_protocol": ["udp"]}, "transfer_protocol has 'udp'; it may have 'ipc', 'rdma' and 'tcp'"),
        ({"tp_size": 0}, "tp_size is 0; it must be a positive integer"),
        ({"tp_size": 1.5}, "tp_size is 1.5"),
        ({"tp_size": "1" * 5000}, "it must be a positive integer"),
        ({"port": "1" * 5000}, "it must be a port, 1 to 65535"),
        ({"connected_decodes": ["d:" + "1" * 5000]}, "an entry must be 'host:port'"),
        ({"version": "\ud800x"}, "'version' cannot be passed on as JSON: str is not valid UTF-8"),
        ({"\ud800": 1}, r"'\ud800' cannot be passed on as JSON"),
        ({"gpu": 2**64}, "'gpu' cannot be passed on as JSON: Integer exceeds 64-bit range"),
        ({"port": 16**5000}, "'port' cannot be passed on as JSON"),
        ({"gpu": _nested(252)}, "'gpu' cannot be passed on as JSON: Recursion limit reached"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RegistrationError) as refused:
        registration(**changes)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("splitwise", "role", "taken"),
    [
        (True, "prefill", True),
        (True, "decode", True),
        (True, "mixed", False),
        (False, "mixed", True),
        (False, "prefill", False),
        (False, "decode", False),
    ],
)
def test_each_mode_takes_its_roles(splitwise: bool, role: str, taken: bool) -> None:
    registry = Registry(splitwise)
    if taken:
        registry.check_role(Role(role))
    else:
        with pytest.raises(RegistrationError, match=f"role is '{role}'"):
            registry.check_role(Role(role))


def test_registering_again_updates_in_place_and_keeps_the_load() -> None:
    registry = Registry(splitwise=True)
    instance = registry.register(registration(), now=0.0)
    instance.load.requests, instance.load.tokens = 1, 10
    again = registry.register(registration(version="v2", role="prefill"), now=5.0)
    assert again is instance
    assert (again.role, again.registration.version, again.load.requests) == (Role.PREFILL, "v2", 1)


def test_a_paused_instance_is_not_available() -> None:
    registry = Registry(splitwise=True)
    registry.register(registration(is_paused=True), now=0.0)
    assert not registry.register(registration(is_paused=True), now=1.0).is_available


def test_an_instance_is_unhealthy_after_the_threshold_of_failed_probes_in_a_row() -> None:
    instance = Registry(splitwise=True).register(registration(), now=0.0)
    states = []
    for failed in (True, True, False, True, True, True):
        if failed:
            instance.record_failed_probe("no answer", threshold=3)
        else:
            instance.record_passed_probe(1.0, threshold=1)
        states.append(instance.state)
    assert states == ["healthy"] * 5 + ["unhealthy"]


def test_an_instance_is_healthy_after_the_threshold_of_good_probes_in_a_row() -> None:
    instance = Registry(splitwise=True).register(registration(), now=0.0)
    instance.mark_unhealthy("refused")
    states = []
    for failed in (False, True, False, False):
        if failed:
            instance.record_failed_probe("no answer", threshold=3)
        else:
            instance.record_passed_probe(1.0, threshold=2)
        states.append(instance.state)
    assert states == ["unhealthy"] * 3 + ["healthy"]


def test_an_instance_whose_heartbeat_stops_is_forgotten() -> None:
    registry = Registry(splitwise=True)
    for now in (0.0, 5.0, 10.0):
        instance = registry.register(registration(), now)
    instance.record_passed_probe(41.0, threshold=1)
    assert registry.forget_silent(now=40.0, expiry=30.0) == []
    assert registry.forget_silent(now=41.0, expiry=30.0) == [instance]
    assert list(registry) == []


def test_an_instance_that_registered_once_stays_as_long_as_it_is_healthy() -> None:
    registry = Registry(splitwise=True)
    instance = registry.register(registration(), now=0.0)
    instance.record_passed_probe(100.0, threshold=1)
    assert registry.forget_silent(now=120.0, expiry=30.0) == []
    assert registry.forget_silent(now=131.0, expiry=30.0) == [instance]


def test_one_that_is_expected_is_healthy_after_its_first_good_probe() -> None:
    instance = Registry(splitwise=True).add_unproven(registration(), now=0.0, permanent=False)
    assert (instance.state, instance.is_available) == ("unhealthy", False)
    instance.record_passed_probe(1.0, threshold=3)
    assert (instance.state, instance.is_available) == ("healthy", True)


def test_a_permanent_instance_is_never_forgotten() -> None:
    registry = Registry(splitwise=True)
    instance = registry.add_unproven(registration(), now=0.0, permanent=True)
    registry.register(registration(), now=1.0)
    assert registry.forget_silent(now=1e9, expiry=30.0) == []
    assert list(registry) == [instance]


def test_a_heartbeat_that_says_nothing_new_changes_nothing() -> None:
    registry = Registry(splitwise=True)
    registry.register(registration(), now=0.0)
    before = registry.generation
    registry.register(registration(), now=5.0)
    assert registry.generation == before


def test_an_instance_that_comes_back_has_a_new_breaker() -> None:
    instance = Registry(splitwise=True).register(registration(), now=0.0)
    for _ in range(FAILURES):
        instance.record_failure(1.0, "it answered with 500")
    assert "breaker=open" in repr(instance)
    instance.mark_unhealthy("it refused a connection")
    instance.mark_healthy(2.0)
    assert instance.breaker.state == "closed"


def test_repr_tells_an_operator_role_address_state_and_load() -> None:
    instance = Registry(splitwise=True).register(registration(), now=0.0)
    instance.load.requests, instance.load.tokens = 1, 10
    assert repr(instance) == "<Instance decode 10.0.0.1:52500 healthy requests=1 tokens=10>"


@pytest.mark.parametrize(
    ("prefill", "decode", "protocol"),
    [
        ({}, {}, "ipc"),
        ({"host_ip": "10.0.0.2"}, {}, "rdma"),
        ({"transfer_protocol": ["rdma"]}, {}, "rdma"),
        ({}, {"transfer_protocol": ["rdma"]}, "rdma"),
        ({"tp_size": 2}, {"tp_size": 1}, "rdma"),
        ({"transfer_protocol": ["tcp"]}, {"transfer_protocol": ["tcp"]}, "tcp"),
        ({"transfer_protocol": ["tcp"]}, {"transfer_protocol": ["tcp", "rdma"]}, "tcp"),
        ({"transfer_protocol": ["tcp", "rdma"]}, {"transfer_protocol": ["tcp", "rdma"]}, "rdma"),
    ],
)
def test_ipc_only_on_one_host_where_both_have_it_and_tp_sizes_are_equal(
    prefill: dict[str, Any], decode: dict[str, Any], protocol: str
) -> None:
    info = disaggregate_info(registration(role="prefill", **prefill), registration(port=52501, **decode))
    assert info["transfer_protocol"] == protocol


@pytest.mark.parametrize(
    ("prefill", "decode", "fits"), [(1, 1, True), (4, 4, True), (4, 1, True), (1, 4, False), (4, 2, False)]
)
def test_tp_sizes_are_equal_or_decodes_is_one(prefill: int, decode: int, fits: bool) -> None:
    assert can_decode_for(prefill, {decode}) is fits
