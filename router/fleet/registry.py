"""Registry: stores all instances, and emits events when an instance changes.

An instance from a register file, or from the snapshot of an earlier start, is unhealthy until a probe succeeds. The
first probe follows immediately.

All times are seconds of one monotonic clock, ``time.monotonic`` unless the caller injects another.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator

from router.fleet.instance import FleetEvents, Instance
from router.fleet.registration import Registration, Role, RoleRefused
from router.policies import InstanceLoad

__all__ = ["Registry"]

_log = logging.getLogger("router.fleet.registry")


# Limit of ``Registry.gone_models``, because instances may list any number of LoRA adapters.
MAX_GONE_MODELS = 1000


class Registry:
    """All registered instances, by their keys ``host_ip:port``."""

    def __init__(self, splitwise: bool) -> None:
        self.splitwise = splitwise
        self.events = events = FleetEvents()
        """The events of all instances."""
        events.new_models.subscribe(lambda each: self.gone_models.difference_update(each.models or ()))
        self.gone_models: set[str] = set()
        """Names of models that only removed instances have served."""
        self.models_wanted_at = -math.inf
        """Time at which a request last named an unknown model. Probes then query instances for new models."""
        self.make_load: Callable[[str], InstanceLoad] = InstanceLoad
        """Creates the load counters of an instance that is added, from its key."""
        self._instances: dict[str, Instance] = {}

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._instances.values()))

    def get(self, key: str) -> Instance | None:
        """Return the instance with this key; None if it is not registered."""
        return self._instances.get(key)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that the router's mode accepts."""
        return (Role.PREFILL, Role.DECODE) if self.splitwise else (Role.MIXED,)

    def check_role(self, role: Role) -> None:
        """Raise ``RoleRefused`` if the router's mode does not accept ``role``."""
        if role not in self.roles:
            mode = "with --splitwise" if self.splitwise else "without --splitwise"
            takes = " and ".join(r.value for r in self.roles)
            raise RoleRefused(f"role is '{role.value}', but this router runs {mode} and takes {takes} instances")

    def register(self, registration: Registration, now: float) -> Instance:
        """Add an instance that has responded to its probe, or renew the registration of a known instance."""
        instance = self._instances.get(registration.key)
        if instance is None:
            _log.info("%s instance %s registered", registration.role.value, registration.key)
            _log.debug("the registration of instance %s: %s", registration.key, dict(registration.fields))
            return self._add_instance(self._make_instance(registration, now, proven=True))
        _log.debug("%s instance %s registered again: %s", registration.role.value, registration.key, instance)
        instance.renew_registration(registration, now)
        return instance

    def add_known_instance(
        self,
        registration: Registration,
        now: float,
        *,
        permanent: bool,
        has_heartbeat: bool = False,
        proven: bool = False,
    ) -> Instance:
        """Add an instance that has not registered with this process, but is in a file, or known to another process.

        Args:
            registration: the instance's registration.
            now: the present time.
            permanent: whether the instance is never removed, even if it does not respond.
            has_heartbeat: whether the instance has registered more than once, with another process or earlier.
            proven: whether the source reports the instance as healthy. If not, it is unhealthy until a probe succeeds.
        """
        instance = self._make_instance(
            registration, now, proven=proven, permanent=permanent, has_heartbeat=has_heartbeat
        )
        return self._add_instance(instance)

    def forget_silent(self, now: float, expiry: float) -> list[Instance]:
        """Remove the instances that have probably ended (``Instance.is_silent`` returns True), and return them."""
        gone = [instance for instance in self._instances.values() if instance.is_silent(now, expiry)]
        for instance in gone:
            instance.log_change("health", logging.WARNING, "is gone", f"it has not registered for {expiry:g} s")
            self.remove(instance)
        return gone

    def excuse_silence(self, seconds: float) -> None:
        """Do not count ``seconds``, in which this process did not run, as time without heartbeat or passed probe."""
        for instance in self._instances.values():
            instance.last_registered += seconds
            instance.last_healthy += seconds

    def remove(self, instance: Instance) -> None:
        """Remove ``instance``. It gets no new requests, and its running requests continue."""
        del self._instances[instance.key]
        self.events.bump_generation()
        self.events.lost_caches.emit(instance.key)
        if len(self.gone_models) < MAX_GONE_MODELS:
            self.gone_models.update(instance.models or ())
        for each in self._instances.values():
            self.gone_models.difference_update(each.models or ())

    def _make_instance(self, registration: Registration, now: float, **state: bool) -> Instance:
        return Instance(registration, self.make_load(registration.key), self.events, now, **state)

    def _add_instance(self, instance: Instance) -> Instance:
        self._instances[instance.key] = instance
        self.events.bump_generation()
        self.events.arrivals.emit(instance)
        return instance
