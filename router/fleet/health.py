"""HealthMonitor: probes all instances regularly, and removes instances that have ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from router.fleet.awake import AwakeClock
from router.fleet.models import ListTooLong, parse_models, read_names
from router.fleet.registration import MAX_MODELS, NotHealthy, Registration
from router.fleet.registry import Registry
from router.fleet.tasks import Tasks, gather_spread
from router.http import Address, ConnectFailed, ConnectRefused, NameUnresolved, NoRoom, TimedOut, UpstreamError

if TYPE_CHECKING:
    from router.fleet.instance import Instance
    from router.http import ConnectionPool
    from router.settings import RouterSettings

__all__ = ["HealthMonitor"]

_log = logging.getLogger("router.fleet.health")

# Time after which a probe fetches the list of served models again, because LoRA adapters are loaded and unloaded.
MODELS_SECONDS = 60.0
# If this process did not run for longer than this during a probe, a timeout of the probe does not count.
LOST_SECONDS = 0.1
# Time limit for fetching the list of models. It is short, because a registration waits for the list.
ASK_SECONDS = 2.0


class HealthMonitor:
    """Probes each instance when it registers, at regular intervals, and after requests to it failed."""

    def __init__(self, settings: RouterSettings, registry: Registry, upstream: ConnectionPool, tasks: Tasks) -> None:
        self._settings = settings
        self._registry = registry
        self._upstream = upstream
        self._tasks = tasks
        self._suspects: set[str] = set()
        self._unprobed: set[str] = set()  # instances for which it was logged that their probes cannot be sent
        self._overlong: set[Address] = set()  # instances for which it was logged that their list of models is too long
        self.awake = AwakeClock()
        """Clock of this process; ``keep_ticking`` must run while instances are probed."""
        self._excused = 0.0

    async def keep_probing(self) -> None:
        """Probe all instances now, then each one every ``health_check_interval_secs``, until this task is cancelled."""
        await self._run_round(self.check_all)
        while True:
            await self._run_round(self._probe_one_by_one)

    async def _run_round(self, probe: Callable[[], Awaitable[None]]) -> None:
        try:
            await probe()
            lost = self.awake.lost
            self._registry.excuse_silence(lost - self._excused)
            self._excused = lost
            self._registry.forget_silent(time.monotonic(), self._settings.heartbeat_expiry_secs)
        except Exception:
            _log.exception("a round of probes failed; the next round follows")

    async def _probe_one_by_one(self) -> None:
        """Probe each instance once. The probes are spread over the interval, so that the event loop is not blocked."""
        interval = self._settings.health_check_interval_secs
        ends_at = time.monotonic() + interval
        instances = list(self._registry)
        for instance in instances:
            if self._registry.get(instance.key) is instance:
                self.probe_soon(instance)
            await asyncio.sleep(interval / len(instances))
        await asyncio.sleep(max(0.0, ends_at - time.monotonic()))

    async def probe_and_register(self, registration: Registration) -> Instance:
        """Register an instance, or record its heartbeat. A new or unhealthy instance is probed first.

        Raises:
            RegistrationError: the router's mode does not accept the instance's role, or the probe failed.
        """
        self._registry.check_role(registration.role)
        known = self._registry.get(registration.key)
        if known is not None and known.healthy and known.registration.identity == registration.identity:
            return self._registry.register(registration, time.monotonic())
        try:
            await self._probe_address(registration.address)
        except UpstreamError as exc:
            message = f"instance {registration.key} is not healthy: {exc}"
            raise NotHealthy(message, registration.address.url) from exc
        models = registration.models or await self._ask_models(registration.address)
        instance = self._registry.register(registration, time.monotonic())
        instance.set_models(models, time.monotonic())
        return instance

    async def check_all(self) -> None:
        """Probe all instances concurrently, and record the results."""
        await gather_spread(map(self._check_instance, list(self._registry)))

    async def find_troubles(self) -> dict[str, str]:
        """Probe all instances concurrently, without recording the results.

        Returns:
            For each instance, why its probe failed; ``""`` if it succeeded.
        """

        async def find_trouble(instance: Instance) -> str:
            try:
                await self._probe_address(instance.address)
            except UpstreamError as exc:
                return str(exc)
            return ""

        instances = list(self._registry)
        found = await gather_spread(map(find_trouble, instances))
        return {instance.key: each for instance, each in zip(instances, found, strict=True)}

    def on_trouble(self, instance: Instance, error: Exception) -> None:
        """Handle a failed exchange with ``instance``.

        A refused connection marks the instance as unhealthy. After any other failure the instance is probed soon,
        because the cause may be temporary or in the network: a connection that was not accepted in time, a host name
        that was not resolved, or a failed TLS handshake.
        """
        if isinstance(error, ConnectRefused):
            instance.mark_unhealthy(str(error))
        else:
            self.probe_soon(instance)

    def probe_soon(self, instance: Instance) -> None:
        """Probe ``instance`` in the background, unless such a probe is already running."""
        if instance.key not in self._suspects:
            self._suspects.add(instance.key)
            self._tasks.run_in_background(self._check_suspect(instance))

    async def _check_suspect(self, instance: Instance) -> None:
        try:
            await self._check_instance(instance)
        finally:
            self._suspects.discard(instance.key)

    async def _check_instance(self, instance: Instance) -> None:
        lost = self.awake.lost
        try:
            await self._probe_address(instance.address)
        except (NoRoom, NameUnresolved) as exc:
            self._log_unprobed(instance, exc)
        except UpstreamError as exc:
            _log.debug("instance %s failed its probe: %s", instance.key, exc)
            is_refused = isinstance(exc, ConnectRefused)
            is_out_of_reach = isinstance(exc, ConnectFailed) and not is_refused
            if (is_out_of_reach or isinstance(exc, TimedOut)) and self.awake.lost - lost > LOST_SECONDS:
                return  # the response may have arrived in time, but this process did not run
            threshold = self._settings.health_failure_threshold
            instance.record_failed_probe(str(exc), threshold, may_finish=is_refused, is_out_of_reach=is_out_of_reach)
        else:
            if self._should_ask_models(instance):
                models = await self._ask_models(instance.address)
                # If the list could not be fetched, a healthy instance keeps its known models. An unhealthy instance
                # does not, because its process may be a different one now.
                if models is not None or not instance.healthy:
                    instance.set_models(models, time.monotonic())
            self._unprobed.discard(instance.key)
            instance.record_passed_probe(time.monotonic(), self._settings.health_success_threshold)

    def _log_unprobed(self, instance: Instance, error: UpstreamError) -> None:
        """Log that a probe of ``instance`` cannot be sent. Log it only once, until a probe can be sent again."""
        if instance.key not in self._unprobed:
            self._unprobed.add(instance.key)
            _log.error("no probe could be sent to instance %s, so its state is unchanged: %s", instance.key, error)
        self._unprobed.intersection_update(each.key for each in self._registry)

    def _should_ask_models(self, instance: Instance) -> bool:
        if instance.registration.models:
            return False
        if instance.models is None or not instance.healthy:
            return True
        asked_at = instance.models_asked_at
        return asked_at < self._registry.models_wanted_at or time.monotonic() - asked_at > MODELS_SECONDS

    async def _probe_address(self, address: Address) -> None:
        """Probe the instance at ``address``; raise ``UpstreamError`` if the probe failed."""
        endpoint = self._settings.health_check_endpoint
        timeout = self._settings.health_check_timeout_secs
        response = await self._upstream.fetch(address, "GET", endpoint, timeout=timeout)
        if response.status != 200:
            raise UpstreamError(f"{address} answered GET {endpoint} with {response.status}")

    async def _ask_models(self, address: Address) -> frozenset[str] | None:
        """Fetch the names of the models that the instance at ``address`` serves.

        Returns:
            The names, at most ``MAX_MODELS``; empty if the instance does not list its models; None if the request
            failed, or the list is too long to be parsed, and the request should be repeated later.
        """
        try:
            answer = await self._upstream.fetch(address, "GET", "/v1/models", timeout=ASK_SECONDS)
            if answer.status >= 500:
                raise UpstreamError(f"{address} answered GET /v1/models with {answer.status}")
            listed = parse_models(answer.body) if answer.status == 200 else []
        except UpstreamError as exc:
            _log.info("instance %s did not list its models: %s", address, exc)
            return None
        except ListTooLong as exc:
            self._log_overlong(address, f"{exc}; this instance gets no requests for models that it did not list before")
            return None
        except ValueError:
            listed = []
        if len(listed) == MAX_MODELS:
            self._log_overlong(address, f"it lists {MAX_MODELS} models or more; further ones are ignored")
        return read_names(listed)

    def _log_overlong(self, address: Address, sentence: str) -> None:
        """Log once that the list of models of an instance is too long."""
        self._overlong.intersection_update(each.address for each in self._registry)
        if address not in self._overlong:
            self._overlong.add(address)
            _log.warning("instance %s: %s", address, sentence)
