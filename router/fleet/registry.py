"""Registry: all instances, and who is told when one of them fails or loses its cache.

Instances that a register file lists, or the snapshot of an earlier start, begin as unhealthy and are probed at once.

All times are seconds of one monotonic clock, ``time.monotonic`` where nobody injects another.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator

from router.fleet.instance import Instance
from router.fleet.registration import Registration, Role, RoleRefused
from router.policies import InstanceLoad

__all__ = ["Registry"]

_log = logging.getLogger("router.fleet.registry")


# Instances may list adapters without end.
MAX_GONE_MODELS = 1000


class Registry:
    """All instances by ``host_ip:port``."""

    def __init__(self, splitwise: bool) -> None:
        self.splitwise = splitwise
        self.generation = 0
        """Grows whenever other instances may be chosen, or be paired, than before."""
        self.gone_models: set[str] = set()
        """The names of models that nobody serves any more, because the instances that did are gone."""
        self.models_wanted_at = -math.inf
        """When a request last named a model that nobody knows: instances may have loaded it since they were asked."""
        self.make_load: Callable[[str], InstanceLoad] = InstanceLoad
        """Makes the load of each instance that is added."""
        self._instances: dict[str, Instance] = {}
        self._arrival_callbacks: list[Callable[[Instance], None]] = []
        self._lost_cache_callbacks: list[Callable[[str], None]] = []
        self._failure_callbacks: list[Callable[[Instance], None]] = []
        self._trouble_callbacks: list[Callable[[Instance], None]] = []
        self._said_callbacks: list[Callable[[Instance], None]] = []
        self._orders_callbacks: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<Registry {list(self._instances.values())}>"

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._instances.values()))

    def get(self, key: str) -> Instance | None:
        """The instance of this key, if it is registered."""
        return self._instances.get(key)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that the router's mode takes."""
        return (Role.PREFILL, Role.DECODE) if self.splitwise else (Role.MIXED,)

    def check_role(self, role: Role) -> None:
        """Raise ``RoleRefused`` if the router's mode does not take ``role``."""
        if role not in self.roles:
            mode = "with --splitwise" if self.splitwise else "without --splitwise"
            takes = " and ".join(r.value for r in self.roles)
            raise RoleRefused(f"role is '{role.value}', but this router runs {mode} and takes {takes} instances")

    def register(self, registration: Registration, now: float) -> Instance:
        """Add an instance that answered its probe, or renew its registration.

        Args:
            now: seconds of a monotonic clock.
        """
        instance = self._instances.get(registration.key)
        if instance is None:
            _log.info("%s instance %s registered", registration.role.value, registration.key)
            _log.debug("it says of itself: %s", dict(registration.fields))
            return self._add_instance(Instance(registration, self, now, proven=True))
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
        """Add an instance that has not registered with this process, but of which it has been told.

        Args:
            now: seconds of a monotonic clock.
            permanent: it is never forgotten, however long it is silent.
            has_heartbeat: it has registered more than once, elsewhere or earlier.
            proven: who tells has it for healthy; otherwise it is unhealthy until it is probed.
        """
        instance = Instance(registration, self, now, proven=proven, permanent=permanent, has_heartbeat=has_heartbeat)
        return self._add_instance(instance)

    def forget_silent(self, now: float, expiry: float) -> list[Instance]:
        """Remove and return the instances that are gone: see ``Instance.is_silent``."""
        gone = [instance for instance in self._instances.values() if instance.is_silent(now, expiry)]
        for instance in gone:
            instance.log_change("health", logging.WARNING, "is gone", f"not heard of for {expiry:g} s")
            self.remove(instance)
        return gone

    def excuse_silence(self, seconds: float) -> None:
        """Count these seconds for no instance's silence: this process could not have heard any."""
        for instance in self._instances.values():
            instance.last_registered += seconds
            instance.last_healthy += seconds

    def remove(self, instance: Instance) -> None:
        """Forget ``instance``, which gets no more requests; those it runs go on."""
        del self._instances[instance.key]
        self.bump_generation()
        self.announce_lost_cache(instance)
        if len(self.gone_models) < MAX_GONE_MODELS:
            self.gone_models.update(instance.models or ())
        for each in self._instances.values():
            self.gone_models.difference_update(each.models or ())

    def on_models_change(self, instance: Instance) -> None:
        """An instance serves other models than before."""
        self.gone_models.difference_update(instance.models or ())
        self.bump_generation()

    def bump_generation(self) -> None:
        """Void the choices that were prepared: other instances may be chosen, or be paired, than before."""
        self.generation += 1

    def subscribe_to_arrivals(self, callback: Callable[[Instance], None]) -> None:
        """Call ``callback`` with each instance that is added, and with one that another kind of instance replaces."""
        self._arrival_callbacks.append(callback)

    def announce_arrival(self, instance: Instance) -> None:
        """Tell the subscribers that ``instance`` is new, or of another kind than before."""
        for callback in self._arrival_callbacks:
            callback(instance)

    def subscribe_to_lost_caches(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with the key of each instance that has restarted or is gone, and so lost its cache."""
        self._lost_cache_callbacks.append(callback)

    def announce_lost_cache(self, instance: Instance) -> None:
        """Tell the subscribers that ``instance`` has restarted or is gone."""
        for callback in self._lost_cache_callbacks:
            callback(instance.key)

    def subscribe_to_failures(self, callback: Callable[[Instance], None]) -> None:
        """Call ``callback`` with each instance whose probes keep failing, at each failed probe."""
        self._failure_callbacks.append(callback)

    def announce_failure(self, instance: Instance) -> None:
        """Tell the subscribers that ``instance`` does not answer probes."""
        for callback in self._failure_callbacks:
            callback(instance)

    def subscribe_to_troubles(self, callback: Callable[[Instance], None]) -> None:
        """Call ``callback`` with each instance that turns out not to be healthy any more."""
        self._trouble_callbacks.append(callback)

    def announce_trouble(self, instance: Instance) -> None:
        """Tell the subscribers that ``instance`` is not healthy any more."""
        for callback in self._trouble_callbacks:
            callback(instance)

    def subscribe_to_said(self, callback: Callable[[Instance], None]) -> None:
        """Call ``callback`` with each instance of whose health this process has logged a change."""
        self._said_callbacks.append(callback)

    def announce_said(self, instance: Instance) -> None:
        """Tell the subscribers that a change of ``instance`` was logged."""
        for callback in self._said_callbacks:
            callback(instance)

    def subscribe_to_orders(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever the operator's orders about an instance have changed."""
        self._orders_callbacks.append(callback)

    def announce_orders(self) -> None:
        """Tell the subscribers that the operator's orders about an instance have changed."""
        for callback in self._orders_callbacks:
            callback()

    def _add_instance(self, instance: Instance) -> Instance:
        self._instances[instance.key] = instance
        self.bump_generation()
        self.announce_arrival(instance)
        return instance
