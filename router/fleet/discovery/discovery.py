"""Discovery: registers the instances of ready pods, and removes those of pods that are not ready.

The instance of a terminating pod is drained: it gets no new requests, and is listed with its running requests until the
pod is deleted, so that a preStop hook can wait until they end. This also applies to an instance that registers itself,
but such an instance is removed only when its heartbeats stop, whatever the state of its pod is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvcommon.waiting import wait_for_event
from router.fleet.discovery.identity import IdentityHidden, ask_identity
from router.fleet.discovery.pod_watch import PodWatch
from router.fleet.discovery.pods import READY, TERMINATING, UNREADY, Pod
from router.fleet.registration import Registration, RegistrationError
from router.http import UpstreamError

if TYPE_CHECKING:
    from router.fleet.health import HealthMonitor
    from router.fleet.instance import Instance
    from router.fleet.registry import Registry
    from router.http import Address, ConnectionPool
    from router.settings import RouterSettings

__all__ = ["Discovery"]

_log = logging.getLogger("router.fleet.discovery")

# Time limit for each query about the engine of an instance.
ASK_SECONDS = 4.0
# Interval for registering instances again that failed their first probe or were removed.
RECONCILE_SECONDS = 5.0


class Discovery:
    """Registers and removes instances so that the registry matches the cluster's pods."""

    def __init__(
        self,
        settings: RouterSettings,
        registry: Registry,
        health: HealthMonitor,
        upstream: ConnectionPool,
        *,
        announce: Callable[[Instance], Awaitable[None]],
        announce_orders: Callable[[Instance], Awaitable[None]],
        announce_removal: Callable[[Instance], None],
    ) -> None:
        """
        Args:
            settings: the settings of service discovery.
            registry: the instances.
            health: probes new instances.
            upstream: the connections to instances.
            announce: reports an added instance to the other processes.
            announce_orders: reports the operator commands of an instance to the other processes.
            announce_removal: reports a removed instance to the other processes.

        Raises:
            SettingsError: the credentials for the API server cannot be used.
        """
        self._registry = registry
        self._health = health
        self._upstream = upstream
        self._announce = announce
        self._announce_orders = announce_orders
        self._announce_removal = announce_removal
        self._is_changed = asyncio.Event()
        self._watch = PodWatch(settings, self._is_changed.set)
        self._troubles: dict[str, str] = {}  # for each ready pod that cannot be registered, the reason

    @property
    def is_current(self) -> bool:
        """Whether the API server is reachable, so that the known state of the pods is current."""
        return not self._watch.trouble

    def count_pods(self) -> dict[str, int]:
        """Return the number of pods in each state."""
        counts = Counter(pod.state for pod in self._watch.pods.values())
        return {state: counts[state] for state in (READY, UNREADY, TERMINATING)}

    async def keep_discovering(self) -> None:
        """Watch the pods and update the registry, until this task is cancelled."""
        await asyncio.gather(self._watch.keep_current(), self._keep_reconciling())

    async def _keep_reconciling(self) -> None:
        while True:
            await wait_for_event(self._is_changed, RECONCILE_SECONDS)
            self._is_changed.clear()
            try:
                if self._watch.was_listed:
                    await self._reconcile()
            except Exception:
                _log.exception("the instances could not be updated from the state of the pods; another try follows")

    async def _reconcile(self) -> None:
        pods = dict(self._watch.pods)
        for instance in self._registry:
            await self._check_instance(instance, pods)
        terminating = {_find_key(pod) for pod in pods.values() if pod.state == TERMINATING}
        for instance in self._registry:
            if instance.key in terminating and not instance.draining:
                instance.set_draining(True, until_restart=True)
                await self._announce_orders(instance)
        self._troubles = {name: each for name, each in self._troubles.items() if name in pods}
        ready = [pod for pod in pods.values() if pod.state == READY]
        await asyncio.gather(*map(self._add_instance, ready))

    async def _check_instance(self, instance: Instance, pods: Mapping[str, Pod]) -> None:
        """Remove an instance that service discovery has added, if its pod is gone, not ready, or has other fields."""
        name = instance.registration.fields.get("pod")
        if name is None or instance.has_heartbeat:
            return
        pod = pods.get(name)
        is_same = pod is not None and _find_key(pod) == instance.key and _has_fields_of(pod, instance)
        if pod is None or not is_same or pod.state == UNREADY:
            why = "is gone" if pod is None else "is not ready" if pod.state == UNREADY else "has changed"
            _log.info(
                "%s instance %s is removed from the router: its pod %s %s", instance.role.value, instance.key, name, why
            )
            self._registry.remove(instance)
            self._announce_removal(instance)

    async def _add_instance(self, pod: Pod) -> None:
        try:
            if pod.trouble:
                raise RegistrationError(pod.trouble)
            if self._registry.get(_find_key(pod)) is not None:
                self._troubles.pop(pod.name, None)
                return
            instance = await self._health.probe_and_register(await self._complete(pod.fields))
        except RegistrationError as exc:
            if self._troubles.get(pod.name) != str(exc):
                self._troubles[pod.name] = str(exc)
                _log.warning("pod %s cannot be registered: %s", pod.name, exc)
            return
        self._troubles.pop(pod.name, None)
        await self._announce(instance)

    async def _complete(self, fields: Mapping[str, Any]) -> Registration:
        """Return the registration of an instance. Query the instance for the fields that the pod does not specify."""
        known = Registration.from_fields({"role": "mixed", **fields})
        queried = {} if "engine" in fields else await self._ask_identity(known.address)
        if "role" not in fields and "role" not in queried and self._registry.splitwise:
            raise RegistrationError("it has no role; label it kvrouter/role=prefill or kvrouter/role=decode")
        registration = Registration.from_fields({"role": "mixed", **queried, **fields})
        self._registry.check_role(registration.role)
        return registration

    async def _ask_identity(self, address: Address) -> dict[str, Any]:
        async def fetch(path: str) -> tuple[int, bytes]:
            response = await self._upstream.fetch(address, "GET", path, timeout=ASK_SECONDS)
            return response.status, response.body

        try:
            return await ask_identity(fetch)
        except UpstreamError as exc:
            raise RegistrationError(f"the router cannot find out which engine the pod's server runs: {exc}") from exc
        except IdentityHidden as exc:
            raise RegistrationError(f"its server {exc}; set the label kvrouter/engine") from None


def _find_key(pod: Pod) -> str:
    """Return the key of the pod's instance; ``""`` if the pod's fields are invalid."""
    try:
        return Registration.from_fields({"role": "mixed", **pod.fields}).key
    except RegistrationError:
        return ""


def _has_fields_of(pod: Pod, instance: Instance) -> bool:
    """Return whether the instance's registration has the fields that the pod specifies now."""
    fields = instance.registration.fields
    return all(fields.get(name) == value for name, value in pod.fields.items())
