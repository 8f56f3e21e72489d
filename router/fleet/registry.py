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

import logging
from collections.abc import Callable
from typing import Any

from router.fleet.breaker import Breaker
from router.fleet.registration import Registration, RegistrationError, Role
from router.http.message import Address
from router.policies import Candidate

__all__ = ["STATES", "Instance", "Registry"]

_log = logging.getLogger("router.fleet.registry")

STATES = ("healthy", "paused", "draining", "unhealthy")
"""What ``Instance.state`` may be."""

# An instance that came back gets this part of its share at first, and all of it after this long.
FIRST_WEIGHT = 0.1
SLOW_START_SECONDS = 10.0


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
