"""Instances: who has registered, who may be chosen, and what the router has running on each.

An instance's life::

    (unknown) ──register, probe ok──► healthy ◄──probes ok, or registers again and answers a probe──┐
                                         │                                                          │
                                         └──refused a connection, or failed some probes──► unhealthy┘
                                                                                              │
    forgotten ◄──its heartbeat stopped; or it never had one, and stays unhealthy as long──────┘

Only healthy instances that are neither paused (by their own account) nor draining (by the operator's order) are
chosen; those whose circuit breaker is open, only if no other can be. One that comes back from being unhealthy is taken
for restarted: what was known of its cache is void, and it gets its share of requests little by little.

Instances that a register file names, or the snapshot of an earlier start, begin as unhealthy and are probed at once.

All times are seconds of one monotonic clock, ``time.monotonic`` where nobody injects another.
"""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from router.breaker import Breaker
from router.policies import Candidate
from router.upstream import Address

__all__ = ["STATES", "Instance", "Registration", "RegistrationError", "Registry", "Role"]

_log = logging.getLogger("router.instances")

# A name or an address of either kind, an IPv6 one perhaps with its zone.
_HOST = re.compile(r"[\w.:%-]+", re.ASCII)

STATES = ("healthy", "paused", "draining", "unhealthy")
"""What ``Instance.state`` may be."""

# An instance that came back gets this part of its share at first, and all of it after this long.
FIRST_WEIGHT = 0.1
SLOW_START_SECONDS = 10.0

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
    """The model's version; instances that name none are of one version too."""
    connected_decodes: frozenset[str]
    """Keys of the decode instances that a prefill instance has connected to ahead; empty where it does not do that."""
    metrics_port: int
    fields: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Its identity: ``host_ip:port``."""
        return str(self.address)

    @property
    def identity(self) -> tuple[object, ...]:
        """What stays as it is while the instance's process lives."""
        return (
            *(self.role, self.connector_port, self.rdma_ports, self.device_ids, self.transfer_protocol, self.tp_size),
            *(self.version, self.metrics_port, self.fields.get("engine_worker_queue_port")),
        )

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Registration:
        """Read the body of ``POST /register``.

        Raises:
            RegistrationError: a field is missing or makes no sense.
        """
        _check_encodable(fields)
        address = _address(fields)
        protocols = _strings(fields, "transfer_protocol")
        for protocol in protocols:
            if protocol not in _PROTOCOLS:
                raise RegistrationError(f"transfer_protocol has {protocol!r}; it may have 'ipc', 'rdma' and 'tcp'")
        return cls(
            role=_role(fields.get("role")),
            address=address,
            connector_port=_optional_port(fields, "connector_port"),
            rdma_ports=_strings(fields, "rdma_ports"),
            device_ids=_strings(fields, "device_ids"),
            transfer_protocol=protocols,
            tp_size=_tp_size(fields.get("tp_size")),
            is_paused=bool(fields.get("is_paused")),
            version=str(fields["version"]) if fields.get("version") is not None else None,
            connected_decodes=_keys(fields, "connected_decodes"),
            metrics_port=int(_optional_port(fields, "metrics_port") or address.port),
            fields=dict(fields),
        )


class Instance:
    """One registered instance: its registration, its health, and its load (``candidate``)."""

    def __init__(self, registration: Registration, registry: Registry, now: float, *, proven: bool) -> None:
        """
        Args:
            proven: it has answered a probe, so that it is healthy.
        """
        self.registration = registration
        self.candidate = Candidate(registration.key)
        self.breaker = Breaker()
        self.healthy = proven
        self.trouble = "" if proven else "it has not answered a probe yet"
        self.draining = False
        self.permanent = False
        self.has_heartbeat = False
        self.last_registered = now
        self.last_healthy = now
        self._registry = registry
        self._proven = proven
        self._warm_at = now
        self._failed_probes = 0
        self._passed_probes = 0

    def __repr__(self) -> str:
        load = f"requests={self.candidate.requests} tokens={self.candidate.tokens}"
        breaker = "" if self.breaker.state == "closed" else f" breaker={self.breaker.state}"
        return f"<Instance {self.role.value} {self.key} {self.state}{breaker} {load}>"

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
        """One of ``STATES``."""
        if not self.healthy:
            return "unhealthy"
        if self.draining:
            return "draining"
        return "paused" if self.registration.is_paused else "healthy"

    @property
    def available(self) -> bool:
        """Whether it may be chosen."""
        return self.healthy and not self.draining and not self.registration.is_paused

    def weight(self, now: float) -> float:
        """The part of its share of requests that it should get: less than 1 for a while after it came back."""
        if now >= self._warm_at:
            return 1.0
        return max(FIRST_WEIGHT, 1.0 - (self._warm_at - now) / SLOW_START_SECONDS)

    def drain(self, draining: bool) -> None:
        """Take no new requests, or take them again; what runs is not touched."""
        if self.draining != draining:
            _log.info("%s instance %s %s", self.role.value, self.key, "drains" if draining else "takes requests again")
            self.draining = draining
            self._registry.changed()

    def succeeded(self, now: float) -> None:
        """A request to it got the first good byte of its answer."""
        if self.breaker.failures and self.breaker.succeeded():
            _log.info("%s instance %s answers requests again", self.role.value, self.key)
            self._warm_at = now + SLOW_START_SECONDS
            self._registry.changed()

    def failed(self, now: float, reason: str) -> None:
        """A request to it failed: no answer, a broken one, or a 5xx; not 429 or 4xx."""
        if self.breaker.failed(now):
            _log.warning("%s instance %s keeps failing requests: %s", self.role.value, self.key, reason)
            self._registry.changed()

    def try_one(self, now: float) -> None:
        """A request is sent to it although its breaker is not closed."""
        self.breaker.try_one(now)
        self._registry.changed()

    def mark_healthy(self, now: float) -> None:
        """It may be chosen (again)."""
        self.last_healthy = now
        self._failed_probes = 0
        if self.healthy:
            return
        self.healthy, self.trouble = True, ""
        self.breaker = Breaker()
        if self._proven:
            _log.info("%s instance %s is healthy again", self.role.value, self.key)
            self._warm_at = now + SLOW_START_SECONDS
            self._registry.lost_cache(self)
        else:
            _log.info("%s instance %s answered its first probe", self.role.value, self.key)
            self._proven = True
        self._registry.changed()

    def mark_unhealthy(self, trouble: str) -> None:
        """It may not be chosen until probes, or a registration, show that it works. What it runs goes on."""
        self._passed_probes = 0
        self.trouble = trouble
        if self.healthy:
            _log.warning("%s instance %s is unhealthy: %s", self.role.value, self.key, trouble)
            self.healthy = False
            self._registry.changed()

    def probe_passed(self, now: float, threshold: int) -> None:
        """Note a good probe; ``threshold`` of them in a row make it healthy, the first one if it never was."""
        self._failed_probes = 0
        self._passed_probes += 1
        if self._passed_probes >= threshold or not self._proven:
            self.mark_healthy(now)

    def probe_failed(self, trouble: str, threshold: int, *, may_finish: bool = False) -> None:
        """Note a bad probe; ``threshold`` of them in a row make it unhealthy, and what waits for it is given up.

        Args:
            may_finish: it only accepts nothing new, as a process does that is ending: what it runs goes on.
        """
        self._passed_probes = 0
        self._failed_probes += 1
        if self._failed_probes >= threshold:
            self.mark_unhealthy(trouble)
            if not may_finish:
                self._registry.failed(self)


class Registry:
    """All instances by ``host_ip:port``."""

    def __init__(self, splitwise: bool) -> None:
        self.splitwise = splitwise
        self.generation = 0
        """Grows whenever who may be chosen, or be paired with whom, may have changed."""
        self._instances: dict[str, Instance] = {}
        self._on_lost_cache: list[Callable[[str], None]] = []
        self._on_failure: list[Callable[[Instance], None]] = []

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
            _log.info("%s instance %s registered", registration.role.value, registration.key)
            return self._add(Instance(registration, self, now, proven=True))
        known, instance.registration = instance.registration, registration
        instance.has_heartbeat = True
        instance.last_registered = now
        if not instance.healthy:  # or else it was not probed, and failed probes before this stay counted
            instance.mark_healthy(now)
        if registration.identity != known.identity:
            self.lost_cache(instance)
        if registration != known:
            self.changed()
        return instance

    def expect(self, registration: Registration, now: float, *, permanent: bool) -> Instance:
        """Add an instance that has not registered in this life of the router; it is unhealthy until it is probed.

        Args:
            now: seconds of a monotonic clock.
            permanent: it is never forgotten, however long nothing is heard of it.
        """
        instance = self._add(Instance(registration, self, now, proven=False))
        instance.permanent = permanent
        return instance

    def changed(self) -> None:
        """Who may be chosen, or be paired with whom, may have changed."""
        self.generation += 1

    def on_lost_cache(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with the key of each instance that has restarted or is gone, and so lost its cache."""
        self._on_lost_cache.append(callback)

    def lost_cache(self, instance: Instance) -> None:
        """``instance`` has restarted or is gone."""
        for callback in self._on_lost_cache:
            callback(instance.key)

    def on_failure(self, callback: Callable[[Instance], None]) -> None:
        """Call ``callback`` with each instance whose probes keep failing, at each failed probe."""
        self._on_failure.append(callback)

    def failed(self, instance: Instance) -> None:
        """``instance`` does not answer probes."""
        for callback in self._on_failure:
            callback(instance)

    def _add(self, instance: Instance) -> Instance:
        self._instances[instance.key] = instance
        self.changed()
        return instance

    def forget_silent(self, now: float, expiry: float) -> list[Instance]:
        """Remove and return the instances that are gone.

        One that has shown a heartbeat is gone when that stops for ``expiry`` seconds. One that registered only
        once (older FastDeploy, or a person with curl) has none to stop, and is gone after as long without health.
        """
        gone = [
            instance
            for instance in self._instances.values()
            if not instance.permanent
            and now - (instance.last_registered if instance.has_heartbeat else instance.last_healthy) > expiry
        ]
        for instance in gone:
            del self._instances[instance.key]
            self.changed()
            self.lost_cache(instance)
            _log.warning("%s instance %s is gone: not heard of for %g s", instance.role.value, instance.key, expiry)
        return gone


def _check_encodable(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        try:
            orjson.dumps({"instances": [{"registration": {name: value}}]})  # the deepest that the router writes it
        except orjson.JSONEncodeError as exc:
            raise RegistrationError(f"{name!r} cannot be passed on as JSON: {exc}") from None


def _role(value: Any) -> Role:
    # FastDeploy's own enumeration numbers them in this order, and its Go router takes the number too.
    names = [role.value for role in Role]
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return Role(names[value])
    if isinstance(value, str) and value.lower() in names:
        return Role(value.lower())
    raise RegistrationError(f"role is {value!r}; it must be one of 'mixed', 'prefill', 'decode'")


def _address(fields: Mapping[str, Any]) -> Address:
    # Both of FastDeploy's routers take an address that says its scheme.
    host = fields.get("host_ip")
    stripped = host.removeprefix("http://") if isinstance(host, str) else ""
    if not _HOST.fullmatch(stripped):
        raise RegistrationError(f"host_ip is {host!r}; it must be the address the instance listens at")
    return Address(stripped, int(_port(fields, "port")))


def _keys(fields: Mapping[str, Any], name: str) -> frozenset[str]:
    # FastDeploy's prefill instances send back the objects that GET /decode_instances gave them.
    value = fields.get(name)
    keys = set()
    for entry in [] if value is None else value if isinstance(value, list) else [value]:
        if isinstance(entry, str):
            host, _, port = entry.rpartition(":")
            entry = {"host_ip": host.strip("[]"), "port": port}
        try:
            keys.add(str(_address(entry)))
        except (RegistrationError, AttributeError):
            raise RegistrationError(
                f"{name} has {entry!r}; an entry must be 'host:port', or an object with host_ip and port"
            ) from None
    return frozenset(keys)


def _optional_port(fields: Mapping[str, Any], name: str) -> str | None:
    # FastDeploy says 0 and null for a port that it does not use, and turns both into text here and there.
    return None if fields.get(name) in (None, 0, "", "0", "None") else _port(fields, name)


def _port(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    number = _whole_number(value)
    if 0 < number < 65536:
        return str(number)
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
    if number := _whole_number(value):
        return number
    raise RegistrationError(f"tp_size is {value!r}; it must be a positive integer")


def _whole_number(value: Any) -> int:
    """The number that ``value`` or its text is; 0 for what is none, and for one of absurdly many digits."""
    text = str(value) if isinstance(value, (int, str)) else ""
    return int(text) if text.isdecimal() and len(text) < 20 else 0
