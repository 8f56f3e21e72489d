"""FastDeploy's tests of what an instance says of itself: ``InstanceInfo`` of its Python and of its Go router."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.fleet import Registration, RegistrationError, Role
from router.fleet.register_file import read_register_file
from tests.router.conftest import RouterUnderTest
from tests.router.fastdeploy.origins import translates
from tests.router.stand_in import StandIn

MakeRouter = Callable[..., RouterUnderTest]
MakeStandIn = Callable[..., StandIn]

UTILS = "tests/router/test_router_utils.py"
INSTANCE = "golang_router/internal/manager/instance_test.go"
REGISTER = "golang_router/internal/manager/register_test.go"


def read(**fields: Any) -> Registration:
    """A registration with these fields; those that an instance of a pair needs have values that no test looks at."""
    return Registration.from_fields({"role": "prefill", "host_ip": "127.0.0.1", "port": 8080, **fields})


def read_json(name: str, text: str) -> Registration:
    return read(**{name: json.loads(text)})


def read_yaml(folder: Path, name: str, text: str) -> Registration:
    """A registration with this field as a register file has it."""
    path = folder / "register.yaml"
    fields = {"role": "prefill", "host_ip": "127.0.0.1", "port": "8080", name: text}
    path.write_text(f"instances: [{{{', '.join(f'{key}: {value}' for key, value in fields.items())}}}]")
    (registration,) = read_register_file(path)
    return registration


def refusal(**fields: Any) -> str:
    """Why a registration with these fields is refused; one with None is as if it was not given."""
    with pytest.raises(RegistrationError) as refused:
        read(**fields)
    return str(refused.value)


class TestFields:
    """The fields of a registration."""

    @translates(UTILS, "TestInstanceInfoFromDict::test_from_dict_success")
    def test_role_and_address_are_enough(self) -> None:
        registration = Registration.from_fields({"role": "mixed", "host_ip": "10.0.0.1", "port": 8080})
        assert registration.role is Role.MIXED
        assert (registration.address.host, str(registration.address.port)) == ("10.0.0.1", "8080")

    @pytest.mark.parametrize("missing", ["host_ip", "role"])
    @translates(
        UTILS,
        "TestInstanceInfoFromDict::test_from_dict_missing_required_field_raises_keyerror",
        "TestInstanceInfoFromDict::test_from_dict_missing_role_raises_keyerror",
    )
    def test_a_field_that_is_missing_is_named(self, missing: str) -> None:
        fields = {"role": "mixed", "host_ip": "10.0.0.1", "port": 8080}
        del fields[missing]
        with pytest.raises(RegistrationError, match=f"{missing} is None; it must be"):
            Registration.from_fields(fields)

    @translates(UTILS, "TestInstanceInfoFromDict::test_from_dict_with_optional_fields")
    def test_other_fields_are_read_or_have_defaults(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        told = {"role": "prefill", "host_ip": "10.0.0.2", "port": 9090, "metrics_port": 9091}
        registration = Registration.from_fields({**told, "transfer_protocol": ["ipc"]})
        assert (registration.role, str(registration.metrics_port)) == (Role.PREFILL, "9091")
        assert (registration.transfer_protocol, registration.tp_size) == (("ipc",), 1)
        router, decode = make_router(splitwise=True), stand_in("decode")
        decode.register(router.url, connector_port=None)
        (listed,) = router.client.get("/decode_instances").json()
        assert listed["connector_port"] == "0"

    @translates(INSTANCE, "TestInstanceInfo_URL")
    def test_an_instance_is_known_by_its_url(self) -> None:
        assert read(host_ip="127.0.0.1", port="8080").address.url == "http://127.0.0.1:8080"

    @translates(INSTANCE, "TestNewInstanceInfo")
    def test_all_that_an_instance_of_a_pair_says_is_read(self) -> None:
        registration = read(
            connector_port="9000", transfer_protocol=["rdma"], rdma_ports=["5000", "5001"], device_ids=["0", "1"]
        )
        assert (registration.connector_port, registration.rdma_ports) == ("9000", ("5000", "5001"))
        assert (registration.device_ids, registration.metrics_port) == (("0", "1"), 8080)

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"role": None}, "role is None; it must be one of"),
            ({"role": "custom"}, "role is 'custom'; it must be one of"),
            ({"host_ip": None}, "host_ip is None; it must be"),
            ({"port": "99999"}, "port is '99999'; it must be a port"),
            ({"connector_port": "99999"}, "connector_port is '99999'; it must be a port"),
            ({"transfer_protocol": ["invalid"]}, "transfer_protocol has 'invalid'"),
            ({"transfer_protocol": ["rdma"], "rdma_ports": ["99999"]}, "rdma_ports has '99999'; a port is 1 to 65535"),
        ],
    )
    @translates(INSTANCE, "TestNewInstanceInfo")
    def test_a_field_without_sense_is_refused_by_its_name(self, fields: dict[str, Any], said: str) -> None:
        assert said in refusal(**fields)

    @translates(INSTANCE, "TestNewInstanceInfo", "TestIsValidIP")
    def test_an_instance_may_be_known_by_a_name(self) -> None:
        assert read(host_ip="invalid-ip").address.host == "invalid-ip"

    @pytest.mark.parametrize("host", ["127.0.0.1", "192.168.1.1", "::1"])
    @translates(INSTANCE, "TestIsValidIP")
    def test_an_ip_address_of_either_kind_is_taken(self, host: str) -> None:
        assert read(host_ip=host).address.host == host

    @translates(INSTANCE, "TestIsValidIP")
    def test_an_empty_address_is_refused(self) -> None:
        assert refusal(host_ip="").startswith("host_ip is ''")

    @pytest.mark.parametrize(
        ("host_ip", "host"),
        [("http://127.0.0.1", "127.0.0.1"), ("https://example.com", "example.com"), ("127.0.0.1", "127.0.0.1")],
    )
    @translates(REGISTER, "TestHostFromURL")
    def test_the_host_stands_behind_a_scheme_or_alone(self, host_ip: str, host: str) -> None:
        assert read(host_ip=host_ip).address.host == host

    @pytest.mark.parametrize("host_ip", ["", "://invalid"])
    @translates(REGISTER, "TestHostFromURL")
    def test_an_address_without_a_host_is_refused(self, host_ip: str) -> None:
        assert refusal(host_ip=host_ip).startswith(f"host_ip is {host_ip!r}")

    @pytest.mark.parametrize(("device_ids", "tp_size"), [(["0", "1", "2"], 3), ([], 1)])
    @translates(REGISTER, "TestTpSizeFromWorker")
    def test_an_instance_that_does_not_say_its_tp_size_has_its_devices(
        self, device_ids: list[str], tp_size: int
    ) -> None:
        assert read(device_ids=device_ids).tp_size == tp_size


class TestRoles:
    """Names and numbers of roles."""

    @translates(INSTANCE, "TestInstanceRole_String")
    def test_each_role_has_its_name(self) -> None:
        assert [Role.MIXED.value, Role.PREFILL.value, Role.DECODE.value] == ["mixed", "prefill", "decode"]

    @pytest.mark.parametrize("role", [Role.MIXED, Role.PREFILL, Role.DECODE])
    @translates(INSTANCE, "TestParseInstanceRole")
    @translates(UTILS, "TestInstanceInfoPostInit::test_role_string_conversion")
    def test_a_role_is_read_in_small_and_in_capital_letters(self, role: Role) -> None:
        assert read(role=role.value).role is read(role=role.value.upper()).role is role

    @pytest.mark.parametrize("value", ["invalid", "invalid_role", "custom-role", 123, 99])
    @translates(INSTANCE, "TestParseInstanceRole", "TestRole_UnmarshalJSON")
    @translates(
        UTILS,
        "TestInstanceInfoPostInit::test_invalid_role_string_raises_valueerror",
        "TestInstanceInfoPostInit::test_invalid_role_type_raises_typeerror",
    )
    def test_another_role_is_refused_by_its_value(self, value: object) -> None:
        assert refusal(role=value) == f"role is {value!r}; it must be one of 'mixed', 'prefill', 'decode'"

    @pytest.mark.parametrize(("text", "role"), [("0", Role.MIXED), ('"prefill"', Role.PREFILL)])
    @translates(INSTANCE, "TestRole_UnmarshalJSON")
    def test_json_has_a_name_or_a_number(self, text: str, role: Role) -> None:
        assert read_json("role", text).role is role

    @pytest.mark.parametrize(("text", "role"), [("1", Role.PREFILL), ("decode", Role.DECODE)])
    @translates(INSTANCE, "TestRole_UnmarshalYAML")
    def test_yaml_has_a_name_or_a_number(self, tmp_path: Path, text: str, role: Role) -> None:
        assert read_yaml(tmp_path, "role", text).role is role

    @translates(INSTANCE, "TestRole_MarshalJSON")
    def test_a_role_is_listed_by_its_name(self, go_router: MakeRouter, stand_in: MakeStandIn) -> None:
        router = go_router(stand_in("mixed"))
        assert b'"role":"mixed"' in router.client.get("/registered").content


class TestPortsAndLists:
    """Numbers that are texts, and texts that are numbers."""

    @pytest.mark.parametrize(("text", "port"), [("8080", "8080"), ('"9090"', "9090")])
    @translates(INSTANCE, "TestPort_UnmarshalJSON")
    def test_json_has_a_port_as_number_or_text(self, text: str, port: str) -> None:
        assert read_json("connector_port", text).connector_port == port

    @translates(INSTANCE, "TestPort_UnmarshalYAML")
    def test_yaml_has_a_port_as_number(self, tmp_path: Path) -> None:
        assert read_yaml(tmp_path, "connector_port", "8080").connector_port == "8080"

    @translates(INSTANCE, "TestIntToStringList_UnmarshalJSON")
    def test_a_list_has_texts_and_whole_numbers(self) -> None:
        registration = read_json("rdma_ports", '["1", 2, 3.0]')
        assert registration.rdma_ports == read_json("device_ids", '["1", 2, 3.0]').device_ids == ("1", "2", "3")

    @pytest.mark.parametrize("text", ["[1.5]", "[true]"])
    @translates(INSTANCE, "TestIntToStringList_UnmarshalJSON")
    def test_a_list_has_nothing_else(self, text: str) -> None:
        assert "it must be a list of texts or whole numbers" in refusal(rdma_ports=json.loads(text))

    @pytest.mark.parametrize("port", ["8080", "1", "65535"])
    @translates(INSTANCE, "TestIsValidPort")
    def test_ports_are_from_1_to_65535(self, port: str) -> None:
        assert str(read(port=port).address.port) == port

    @pytest.mark.parametrize("port", ["0", "65536", "invalid", ""])
    @translates(INSTANCE, "TestIsValidPort")
    def test_another_port_is_refused(self, port: str) -> None:
        assert refusal(port=port) == f"port is {port!r}; it must be a port, 1 to 65535"

    @translates(REGISTER, "TestPortStringToInt")
    def test_a_port_of_a_pair_is_read_or_refused(self) -> None:
        assert read(connector_port="8080").connector_port == "8080"
        assert read(connector_port="").connector_port is None
        assert refusal(connector_port="invalid").startswith("connector_port is 'invalid'")


class TestRegister:
    """``POST /register`` at a router that is started as the Go router is."""

    @pytest.mark.parametrize(
        ("splitwise", "role", "said"),
        [
            (True, "mixed", "splitwise mode only supports PREFILL/DECODE instances"),
            (False, "prefill", "only MIXED instances are allowed"),
        ],
    )
    @translates(REGISTER, "TestRegisterInstanceCore")
    def test_a_role_that_the_mode_does_not_take_is_refused(
        self, go_router: MakeRouter, stand_in: MakeStandIn, splitwise: bool, role: str, said: str
    ) -> None:
        router = go_router(splitwise=splitwise)
        answer = stand_in(role).register(router.url, transfer_protocol=["rdma"])
        assert (answer.status_code, answer.json()["code"]) == (400, 400)
        assert said in answer.json()["msg"]

    @translates(REGISTER, "TestRegisterInstanceCore")
    def test_an_instance_that_lacks_fields_is_refused(self, go_router: MakeRouter) -> None:
        assert go_router().client.post("/register", json={"role": "mixed"}).status_code == 400

    @translates(REGISTER, "TestRegisterInstanceCore", "TestRegisterInstance")
    def test_a_good_registration_is_answered_in_the_go_routers_words(
        self, go_router: MakeRouter, stand_in: MakeStandIn
    ) -> None:
        router, instance = go_router(), stand_in("mixed")
        fields = {"role": "mixed", "host_ip": "127.0.0.1", "port": instance.port, "transfer_protocol": ["rdma"]}
        answer = router.client.post("/register", json=fields)
        assert (answer.status_code, answer.json()) == (200, {"code": 200, "msg": "Register success"})

    @pytest.mark.parametrize("body", [b"invalid json", b""])
    @translates(REGISTER, "TestRegisterInstance")
    def test_a_body_that_is_no_object_is_a_400(self, go_router: MakeRouter, body: bytes) -> None:
        assert go_router().client.post("/register", content=body).status_code == 400
