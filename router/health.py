"""Health: asks every instance in parallel whether it works, and forgets those that are gone."""

from __future__ import annotations

import asyncio
import logging
import time

from router.instances import Instance, Registration, RegistrationError, Registry
from router.settings import RouterSettings
from router.tasks import Tasks
from router.upstream import Address, Upstream, UpstreamError

__all__ = ["HealthMonitor"]

_log = logging.getLogger("router.health")


class HealthMonitor:
    """Probes instances when they register, periodically, and when live traffic makes one suspect."""

    def __init__(self, settings: RouterSettings, registry: Registry, upstream: Upstream, tasks: Tasks) -> None:
        self._settings = settings
        self._registry = registry
        self._upstream = upstream
        self._tasks = tasks
        self._suspects: set[str] = set()

    async def run(self) -> None:
        """Probe all instances, now and every ``health_check_interval_secs``, until cancelled."""
        while True:
            try:
                await self.check_all()
                self._registry.forget_silent(time.monotonic(), self._settings.heartbeat_expiry_secs)
            except Exception:
                _log.exception("a round of probes failed; the next one follows")
            await asyncio.sleep(self._settings.health_check_interval_secs)

    async def register(self, registration: Registration) -> Instance:
        """Admit an instance, or note its heartbeat. New ones and unhealthy ones are probed first.

        Raises:
            RegistrationError: the router's mode does not take its role, or it does not answer its probe.
        """
        self._registry.check_role(registration.role)
        known = self._registry.get(registration.key)
        if known is None or not known.healthy:
            trouble = await self._probe(registration.address)
            if trouble:
                raise RegistrationError(f"instance {registration.key} is not healthy: {trouble}")
        return self._registry.register(registration, time.monotonic())

    async def check_all(self) -> dict[str, str]:
        """Probe all instances at once; return what is wrong with each, ``""`` where nothing is."""
        instances = list(self._registry)
        troubles = await asyncio.gather(*(self._check(instance) for instance in instances))
        return {instance.key: trouble for instance, trouble in zip(instances, troubles, strict=True)}

    def suspect(self, instance: Instance) -> None:
        """Probe ``instance`` soon, because a connection to it broke."""
        if instance.key not in self._suspects:
            self._suspects.add(instance.key)
            self._tasks.start(self._recheck(instance))

    async def _recheck(self, instance: Instance) -> None:
        try:
            await self._check(instance)
        finally:
            self._suspects.discard(instance.key)

    async def _check(self, instance: Instance) -> str:
        trouble = await self._probe(instance.address)
        if trouble:
            instance.probe_failed(trouble, self._settings.health_failure_threshold)
        else:
            now = time.monotonic()
            instance.probe_passed(now, self._settings.health_success_threshold)
        return trouble

    async def _probe(self, address: Address) -> str:
        """What is wrong at ``address``, in one sentence; ``""`` if nothing is."""
        endpoint = self._settings.health_check_endpoint
        timeout = self._settings.health_check_timeout_secs
        try:
            answer = await self._upstream.fetch(address, "GET", endpoint, timeout=timeout)
        except UpstreamError as exc:
            return str(exc)
        return "" if answer.status == 200 else f"{address} answered GET {endpoint} with {answer.status}"
