"""Discovery: registers the instances of ready pods, and removes those of pods that are not ready.

A terminating pod drains: it gets no new requests, and stays listed with its running requests until it is gone, so that
its own hook can wait for them. For instances that register themselves, heartbeats decide, not the state of their pods;
only the drain is applied.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from router.fleet.discovery.identity import ask_identity
from router.fleet.discovery.pod_watch import PodWatch
from router.fleet.discovery.pods import READY, TERMINATING, UNREADY, Pod
from router.fleet.registration import Registration, RegistrationError

if TYPE_CHECKING:
    from router.fleet.health import HealthMonitor
    from router.fleet.instance import Instance
    from router.fleet.registry import Registry
    from router.http import ConnectionPool
    from router.settings import RouterSettings

__all__ = ["Discovery"]

_log = logging.getLogger("router.fleet.discovery")

# After this time, retry an instance that failed its first probe or was removed since.
RECONCILE_SECONDS = 5.0


class Discovery:
    """Updates the registry to match the cluster's pods."""

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
            announce: reports an added instance to the router's other processes.
            announce_orders: reports the operator commands of an instance to them.
            announce_removal: reports a removed instance to them.

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
        self._troubles: dict[str, str] = {}  # of pods that are ready, but cannot be registered

    @property
    def is_current(self) -> bool:
        """Whether the API server reports the state of the pods at present."""
        return not self._watch.trouble

    def count_pods(self) -> dict[str, int]:
        """Return the number of pods by state."""
        counts = Counter(pod.state for pod in self._watch.pods.values())
        return {state: counts[state] for state in (READY, UNREADY, TERMINATING)}

    async def keep_discovering(self) -> None:
        """Watch and reconcile until cancelled."""
        await asyncio.gather(self._watch.keep_current(), self._keep_reconciling())

    async def _keep_reconciling(self) -> None:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_changed.wait(), RECONCILE_SECONDS)
            self._is_changed.clear()
            try:
                if self._watch.was_listed:
                    await self._reconcile()
            except Exception:
                _log.exception("the fleet was not brought in line with the pods; the next try follows")

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
        """Remove an instance that was added here, if its pod has changed."""
        name = instance.registration.fields.get("pod")
        if name is None or instance.has_heartbeat:
            return
        pod = pods.get(name)
        is_same = pod is not None and _find_key(pod) == instance.key and _is_told(pod, instance)
        if pod is None or not is_same or pod.state == UNREADY:
            why = "is gone" if pod is None else "is not ready" if pod.state == UNREADY else "has changed"
            _log.info("%s instance %s is removed: its pod %s %s", instance.role.value, instance.key, name, why)
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
                _log.warning("pod %s is not registered: %s", pod.name, exc)
            return
        self._troubles.pop(pod.name, None)
        await self._announce(instance)

    async def _complete(self, fields: Mapping[str, Any]) -> Registration:
        """Return the registration of an instance, completed by the fields that only the instance itself knows.

        Raises:
            RegistrationError: it cannot be registered like this.
        """
        known = Registration.from_fields({"role": "mixed", **fields})
        if "engine" not in fields:
            told = await ask_identity(self._upstream, known.address)
        else:
            told = {}
        if "role" not in fields and "role" not in told and self._registry.splitwise:
            raise RegistrationError("it has no role: label it kvrouter/role=prefill or kvrouter/role=decode")
        registration = Registration.from_fields({"role": "mixed", **told, **fields})
        self._registry.check_role(registration.role)
        return registration


def _find_key(pod: Pod) -> str:
    """Return the key of the pod's instance; ``""`` if it cannot have one."""
    try:
        return Registration.from_fields({"role": "mixed", **pod.fields}).key
    except RegistrationError:
        return ""


def _is_told(pod: Pod, instance: Instance) -> bool:
    """Return whether the instance is registered as the pod describes it now."""
    fields = instance.registration.fields
    return all(fields.get(name) == value for name, value in pod.fields.items())
