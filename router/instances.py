"""Instances: who has registered, who may be chosen, and what the router has running on each.

An instance's life::

    (unknown) ──register, probe ok──► healthy ◄──probes ok, or registers again and answers a probe──┐
                                         │                                                          │
                                         └──refused a connection, or failed some probes──► unhealthy┘
                                                                                              │
    forgotten ◄──its heartbeat stopped; or it never had one, and stays unhealthy as long──────┘

Only healthy instances that are not paused are chosen.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.policies import Candidate
from router.upstream import Address

__all__ = ["Instance", "Registration", "RegistrationError", "Registry", "Role"]

_log = logging.getLogger("router.instances")

_PROTOCOLS = ("ipc", "rdma", "tcp")


class Role(str, enum.Enum):
    """What an instance does: everything, or one half of a pair."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


class RegistrationError(ValueError):
    """A registration that cannot be accepted: one sentence, naming the field and what would be right."""


@dataclass(frozen=True)
class Registration:
    """What an instance says of itself, as FastDeploy's instances do; ports and ids as strings.

    ``fields`` keeps everything it sent, including what this router does not know.
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
    fields: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Its identity: ``host_ip:port``."""
        return str(self.address)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Registration:
        """Read the body of ``POST /register``.

        Raises:
            RegistrationError: a field is missing or makes no sense.
        """
        host = fields.get("host_ip")
        if not isinstance(host, str) or not host:
            raise RegistrationError(f"host_ip is {host!r}; it must be the address the instance listens at")
        protocols = _strings(fields, "transfer_protocol")
        for protocol in protocols:
            if protocol not in _PROTOCOLS:
                raise RegistrationError(f"transfer_protocol has {protocol!r}; it may have 'ipc', 'rdma' and 'tcp'")
        return cls(
            role=_role(fields.get("role")),
            address=Address(host, int(_port(fields, "port"))),
            connector_port=_port(fields, "connector_port") if fields.get("connector_port") else None,
            rdma_ports=_strings(fields, "rdma_ports"),
            device_ids=_strings(fields, "device_ids"),
            transfer_protocol=protocols,
            tp_size=_tp_size(fields.get("tp_size")),
            is_paused=bool(fields.get("is_paused")),
            version=str(fields["version"]) if fields.get("version") is not None else None,
            fields=dict(fields),
        )


class Instance:
    """One registered instance: its registration, its health, and its load (``candidate``)."""

    def __init__(self, registration: Registration, now: float) -> None:
        self.registration = registration
        self.candidate = Candidate(registration.key)
        self.healthy = True
        self.trouble = ""
        self.has_heartbeat = False
        self.last_registered = now
        self.last_healthy = now
        self._failed_probes = 0
        self._passed_probes = 0

    def __repr__(self) -> str:
        load = f"requests={self.candidate.requests} tokens={self.candidate.tokens}"
        return f"<Instance {self.role.value} {self.key} {self.state} {load}>"

    @property
    def key(self) -> str:
        """Its identity: ``host_ip:port``."""
        return self.candidate.key

    @property
    def role(self) -> Role:
        """What it does."""
        return self.registration.role

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self.registration.address

    @property
    def state(self) -> str:
        """``healthy``, ``paused`` or ``unhealthy``."""
        if not self.healthy:
            return "unhealthy"
        return "paused" if self.registration.is_paused else "healthy"

    @property
    def available(self) -> bool:
        """Whether it may be chosen."""
        return self.healthy and not self.registration.is_paused

    def begin(self, tokens: int) -> None:
        """Count a request of ``tokens`` prompt tokens as running here."""
        self.candidate.requests += 1
        self.candidate.tokens += tokens

    def end(self, tokens: int) -> None:
        """Take back a ``begin``."""
        self.candidate.requests -= 1
        self.candidate.tokens -= tokens

    def mark_healthy(self, now: float) -> None:
        """It may be chosen (again)."""
        if not self.healthy:
            _log.info("%s instance %s is healthy again", self.role.value, self.key)
        self.healthy, self.trouble = True, ""
        self.last_healthy = now
        self._failed_probes = 0

    def mark_unhealthy(self, trouble: str) -> None:
        """It may not be chosen until probes, or a registration, show that it works."""
        if self.healthy:
            _log.warning("%s instance %s is unhealthy: %s", self.role.value, self.key, trouble)
        self.healthy, self.trouble = False, trouble
        self._passed_probes = 0

    def probe_passed(self, now: float, threshold: int) -> None:
        """Note a good probe; ``threshold`` of them in a row make it healthy."""
        self._failed_probes = 0
        self._passed_probes += 1
        if self._passed_probes >= threshold:
            self.mark_healthy(now)

    def probe_failed(self, trouble: str, threshold: int) -> None:
        """Note a bad probe; ``threshold`` of them in a row make it unhealthy."""
        self._passed_probes = 0
        self._failed_probes += 1
        if self._failed_probes >= threshold:
            self.mark_unhealthy(trouble)


class Registry:
    """All instances by ``host_ip:port``."""

    def __init__(self, splitwise: bool) -> None:
        self.splitwise = splitwise
        self._instances: dict[str, Instance] = {}

    def __repr__(self) -> str:
        return f"<Registry {list(self._instances.values())}>"

    def __iter__(self) -> Any:
        return iter(list(self._instances.values()))

    def get(self, key: str) -> Instance | None:
        """The instance of this key, if it is registered."""
        return self._instances.get(key)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that the router's mode takes."""
        return (Role.PREFILL, Role.DECODE) if self.splitwise else (Role.MIXED,)

    def check_role(self, role: Role) -> None:
        """Raise ``RegistrationError`` if the router's mode does not take ``role``."""
        if role not in self.roles:
            mode = "with --splitwise" if self.splitwise else "without --splitwise"
            takes = " and ".join(r.value for r in self.roles)
            raise RegistrationError(f"role is '{role.value}', but this router runs {mode} and takes {takes} instances")

    def register(self, registration: Registration, now: float) -> Instance:
        """Add an instance that answered its probe, or update it in place: what it runs stays counted.

        Args:
            now: seconds of a monotonic clock.
        """
        instance = self._instances.get(registration.key)
        if instance is None:
            instance = self._instances[registration.key] = Instance(registration, now)
            _log.info("%s instance %s registered", registration.role.value, registration.key)
        else:
            instance.registration = registration
            instance.has_heartbeat = True
            instance.last_registered = now
            instance.mark_healthy(now)
        return instance

    def forget_silent(self, now: float, expiry: float) -> list[Instance]:
        """Remove and return the instances that are gone.

        One that has shown a heartbeat is gone when that stops for ``expiry`` seconds. One that registered only
        once (older FastDeploy, or a person with curl) has none to stop, and is gone after as long without health.
        """
        gone = [
            instance
            for instance in self._instances.values()
            if now - (instance.last_registered if instance.has_heartbeat else instance.last_healthy) > expiry
        ]
        for instance in gone:
            del self._instances[instance.key]
            _log.warning("%s instance %s is gone: not heard of for %g s", instance.role.value, instance.key, expiry)
        return gone

    def available(self, role: Role) -> list[Instance]:
        """The instances of ``role`` that may be chosen."""
        return [i for i in self._instances.values() if i.registration.role is role and i.available]


def _role(value: Any) -> Role:
    # FastDeploy's own enumeration numbers them in this order, and its Go router takes the number too.
    names = [role.value for role in Role]
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return Role(names[value])
    if isinstance(value, str) and value.lower() in names:
        return Role(value.lower())
    raise RegistrationError(f"role is {value!r}; it must be one of 'mixed', 'prefill', 'decode'")


def _port(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, (int, str)) and str(value).isdecimal() and 0 < int(value) < 65536:
        return str(int(value))
    raise RegistrationError(f"{name} is {value!r}; it must be a port, 1 to 65535")


def _strings(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = fields.get(name)
    if value is None:
        return ()
    if isinstance(value, (int, str)):
        value = [part.strip() for part in str(value).split(",") if part.strip()]
    if not isinstance(value, list) or not all(isinstance(part, (int, str)) for part in value):
        raise RegistrationError(f"{name} is {value!r}; it must be a list")
    return tuple(str(part) for part in value)


def _tp_size(value: Any) -> int:
    if value is None:
        return 1
    if isinstance(value, (int, str)) and str(value).isdecimal() and int(value) > 0:
        return int(value)
    raise RegistrationError(f"tp_size is {value!r}; it must be a positive integer")
