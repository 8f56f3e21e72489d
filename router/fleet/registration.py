"""Registration: the fields that an instance sends about itself, in FastDeploy's format, and the kind of its engine."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from router.http import Address

__all__ = [
    "ENDPOINT",
    "MAX_MODELS",
    "EngineKind",
    "KvConnector",
    "NotHealthy",
    "Registration",
    "RegistrationError",
    "Role",
    "RoleRefused",
]

# A host name, an IPv4 address, or an IPv6 address with an optional zone. A scheme may precede it.
_HOST = re.compile(r"(http://|https://)?([\w.:%-]+)", re.ASCII)

MAX_MODELS = 10_000
"""Limit of the models of one instance, because each name costs time in every process."""

ENDPOINT = re.compile(r"tcp://(\[[\w:.%]+\]|[A-Za-z0-9][\w.-]*):\d{1,5}|ipc://.{1,100}", re.ASCII)
"""Pattern of a ZeroMQ endpoint to which a process on this or another machine can connect."""

_PROTOCOLS = ("ipc", "rdma", "tcp")
# The default of SGLang's flag --disaggregation-bootstrap-port.
_BOOTSTRAP_PORT = 8998


class Role(str, enum.Enum):
    """The part of a request that an instance computes: the whole request (mixed), or the prefill or decode part."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


class EngineKind(str, enum.Enum):
    """The engine of an instance, which decides the format of requests. Our own engine counts as FastDeploy."""

    FASTDEPLOY = "fastdeploy"
    VLLM = "vllm"
    SGLANG = "sglang"
    OPENAI = "openai"
    """Any engine with OpenAI's endpoints except FastDeploy, vLLM and SGLang."""


class KvConnector(str, enum.Enum):
    """Connector for KV transfer in a pair of vLLM instances: vLLM's NixlConnector or MooncakeConnector, or ours."""

    NIXL = "nixl"
    MOONCAKE = "mooncake"
    KVSTORE = "kvstore"


_AnyEnum = TypeVar("_AnyEnum", bound=enum.Enum)


class RegistrationError(ValueError):
    """A registration cannot be accepted. The message is one sentence that names the field and a valid value."""


class RoleRefused(RegistrationError):
    """The router's mode does not accept the instance's role."""


class NotHealthy(RegistrationError):
    """The instance does not respond to a probe with status 200. ``url`` is the address that was probed."""

    def __init__(self, message: str, url: str) -> None:
        super().__init__(message)
        self.url = url


@dataclass(frozen=True)
class Registration:
    """The data that an instance sends about itself, in the format of FastDeploy's instances. Ports and ids are strings.

    ``fields`` contains all data that the instance sent, including fields that this router does not know.
    """

    role: Role
    address: Address
    connector_port: str | None
    rdma_ports: tuple[str, ...]
    device_ids: tuple[str, ...]
    transfer_protocol: tuple[str, ...]
    tp_size: int
    is_paused: bool
    version: str | None
    """Version of the model; None if the instance registers none. Two instances without a version can form a pair."""
    connected_decodes: frozenset[str]
    """Keys of the decode instances to which a prefill instance has connected in advance; empty if there are none."""
    metrics_port: int
    engine: EngineKind
    bootstrap_port: int
    """SGLang only: the port at which a prefill instance exchanges connection data with decode instances."""
    kv_connector: KvConnector
    """vLLM only: the KV connector of the instance."""
    models: frozenset[str]
    """Names of the models that the instance serves; empty if the router should query the instance for them."""
    kv_events: Mapping[str, str]
    """Where the instance publishes KV events: ``endpoint``, optionally ``replay_endpoint`` and ``topic``; or empty."""
    start_id: str
    """Value that only one process at this address ever has, which identifies the process; ``""`` if unknown."""
    fields: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Key of the instance: ``host_ip:port``."""
        return str(self.address)

    @property
    def takes_cache_salt(self) -> bool:
        """Whether the instance separates caches by ``cache_salt``: its registration says so, or its engine is vLLM."""
        return bool(self.fields.get("cache_salt", self.engine is EngineKind.VLLM))

    @property
    def identity(self) -> tuple[object, ...]:
        """The fields that a process never changes. A registration with other values comes from another process."""
        return (
            *(self.role, self.connector_port, self.rdma_ports, self.device_ids, self.transfer_protocol, self.tp_size),
            *(self.version, self.metrics_port, self.address.tls, self.fields.get("engine_worker_queue_port")),
            *(self.engine, self.bootstrap_port, self.kv_connector, self.start_id, *self.kv_events.values()),
        )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Registration:
        """Parse the body of ``POST /register``.

        Raises:
            RegistrationError: a field is missing or invalid.
        """
        _check_encodable(fields)
        address = _parse_address(fields)
        protocols = _parse_strings(fields, "transfer_protocol")
        for protocol in protocols:
            if protocol not in _PROTOCOLS:
                raise RegistrationError(f"transfer_protocol has {protocol!r}; its values are 'ipc', 'rdma' and 'tcp'")
        role, device_ids = _parse_role(fields.get("role")), _parse_strings(fields, "device_ids")
        return cls(
            role=role,
            address=address,
            connector_port=_parse_optional_port(fields, "connector_port"),
            rdma_ports=_parse_rdma_ports(fields, role),
            device_ids=device_ids,
            transfer_protocol=protocols,
            tp_size=_parse_tp_size(fields.get("tp_size"), len(device_ids)),
            is_paused=bool(fields.get("is_paused")),
            version=str(fields["version"]) if fields.get("version") is not None else None,
            connected_decodes=_parse_instance_keys(fields, "connected_decodes"),
            metrics_port=int(_parse_optional_port(fields, "metrics_port") or address.port),
            engine=_parse_name(fields, "engine", EngineKind.FASTDEPLOY),
            bootstrap_port=int(_parse_optional_port(fields, "bootstrap_port") or _BOOTSTRAP_PORT),
            kv_connector=_parse_name(fields, "kv_connector", KvConnector.NIXL),
            models=_parse_models(fields),
            kv_events=_parse_kv_events(fields.get("kv_events")),
            start_id=str(fields.get("start_id") or ""),
            fields=dict(fields),
        )


def _check_encodable(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        try:
            orjson.dumps({"instances": [{"registration": {name: value}}]})  # as deeply nested as in a snapshot
        except orjson.JSONEncodeError as exc:
            raise RegistrationError(f"the field {name!r} cannot be encoded as JSON: {exc}") from None


def _parse_kv_events(value: Any) -> Mapping[str, str]:
    if not value:
        return {}
    known = ("endpoint", "replay_endpoint", "topic")
    source = {name: value[name] for name in known if value.get(name)} if isinstance(value, dict) else {}
    endpoints = [source.get("endpoint"), source.get("replay_endpoint", "ipc://none")]
    if not all(isinstance(each, str) and ENDPOINT.fullmatch(each) for each in endpoints) or not isinstance(
        source.get("topic", ""), str
    ):
        example = '{"endpoint": "tcp://host:5557", "replay_endpoint": "tcp://host:5558", "topic": ""}'
        raise RegistrationError(f"kv_events is {value!r}; it must be an object such as {example}")
    return source


def _parse_models(fields: Mapping[str, Any]) -> frozenset[str]:
    models = frozenset(_parse_strings(fields, "models"))
    if len(models) > MAX_MODELS:
        raise RegistrationError(f"models has {len(models)} names; at most {MAX_MODELS} are allowed")
    for name in models:
        if not name.isprintable():
            raise RegistrationError(f"models has {name!r}; the characters of a name must be printable")
    return models


def _parse_role(value: Any) -> Role:
    # FastDeploy's enumeration of roles has these numbers, and its Go router accepts them, too.
    names = [role.value for role in Role]
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return Role(names[value])
    if isinstance(value, str) and value.lower() in names:
        return Role(value.lower())
    raise RegistrationError(f"role is {value!r}; it must be one of 'mixed', 'prefill', 'decode'")


def _parse_name(fields: Mapping[str, Any], name: str, default: _AnyEnum) -> _AnyEnum:
    value = fields.get(name)
    if value is None:
        return default
    for member in type(default):
        if isinstance(value, str) and value.lower() == member.value:
            return member
    names = ", ".join(repr(member.value) for member in type(default))
    raise RegistrationError(f"{name} is {value!r}; it must be one of {names}")


def _parse_address(fields: Mapping[str, Any]) -> Address:
    # A scheme in front of the address is accepted, as in both of FastDeploy's routers.
    host = fields.get("host_ip")
    found = _HOST.fullmatch(host) if isinstance(host, str) else None
    if found is None:
        raise RegistrationError(f"host_ip is {host!r}; it must be the address at which the instance listens")
    return Address(found[2], int(_parse_port(fields, "port")), tls=found[1] == "https://")


def _parse_instance_keys(fields: Mapping[str, Any], name: str) -> frozenset[str]:
    # FastDeploy's prefill instances send the objects that they got from GET /decode_instances.
    value = fields.get(name)
    keys = set()
    for entry in [] if value is None else value if isinstance(value, list) else [value]:
        if isinstance(entry, str):
            host, _, port = entry.rpartition(":")
            entry = {"host_ip": host.strip("[]"), "port": port}
        try:
            keys.add(str(_parse_address(entry)))
        except (RegistrationError, AttributeError):
            raise RegistrationError(
                f"{name} has {entry!r}; an entry must be 'host:port', or an object with host_ip and port"
            ) from None
    return frozenset(keys)


def _parse_optional_port(fields: Mapping[str, Any], name: str) -> str | None:
    # FastDeploy sends 0 or null for an unused port, sometimes converted to text.
    return None if fields.get(name) in (None, 0, "", "0", "None") else _parse_port(fields, name)


def _parse_port(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    number = _parse_whole_number(value)
    if 0 < number < 65536:
        return str(number)
    raise RegistrationError(f"{name} is {value!r}; it must be a port, 1 to 65535")


def _parse_strings(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = fields.get(name)
    if value is None:
        return ()
    if isinstance(value, (int, str)):
        value = [part.strip() for part in str(value).split(",") if part.strip()]
    if not isinstance(value, list) or not all(map(_is_text_or_whole, value)):
        raise RegistrationError(f"{name} is {value!r}; it must be a list of texts or whole numbers")
    return tuple(part if isinstance(part, str) else str(int(part)) for part in value)


def _is_text_or_whole(value: Any) -> bool:
    # JSON has only one type of number, so an encoder may write 3 as 3.0.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, str) or (is_number and value == value // 1)


def _parse_rdma_ports(fields: Mapping[str, Any], role: Role) -> tuple[str, ...]:
    # Only instances of a pair use these ports. A mixed instance may send any text, as with FastDeploy's Go router.
    ports = _parse_strings(fields, "rdma_ports")
    for port in ports:
        if role is not Role.MIXED and not 0 < _parse_whole_number(port) < 65536:
            raise RegistrationError(f"rdma_ports has {port!r}; a port is 1 to 65535")
    return ports


def _parse_tp_size(value: Any, num_devices: int) -> int:
    # An instance that sends no tp_size has as many ranks as devices, as with FastDeploy's Go router.
    if value is None:
        return num_devices or 1
    if number := _parse_whole_number(value):
        return number
    raise RegistrationError(f"tp_size is {value!r}; it must be a positive integer")


def _parse_whole_number(value: Any) -> int:
    """Return ``value`` as an integer; 0 if it is not a whole number, or has 20 digits or more."""
    text = str(value) if isinstance(value, (int, str)) else ""
    return int(text) if text.isdecimal() and len(text) < 20 else 0
