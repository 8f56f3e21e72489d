"""FleetSync: one fleet for all processes. The others take over all that one learns of an instance."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from router.fleet import HealthMonitor, Instance, Registration, RegistrationError, Registry
from router.sharing.link import Link

__all__ = ["FleetSync"]

_log = logging.getLogger("router.sharing.fleet_sync")

# Records are renewed so often, so that they say of each instance how it is; and thrown away when they are older.
RENEWAL_SECONDS = 10.0
STALE_SECONDS = 600.0


class _Orders(NamedTuple):
    """The operator's orders about one instance."""

    draining: bool
    until_restart: bool
    paused: bool
    share: float


_NO_ORDERS = _Orders(draining=False, until_restart=False, paused=False, share=1.0)


class FleetSync:
    """Tells the other processes of instances, and listens to them.

    Shared are registrations, heartbeats and the operator's orders. Each process sees for itself who is healthy; one
    that finds an instance dead lets the others look at once.

    Of orders the latest counts, in any record that it comes with: a drain that ended because one process saw the
    instance restart is not begun again by a heartbeat that another one has just told of.
    """

    def __init__(
        self,
        link: Link,
        registry: Registry,
        health: HealthMonitor,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            clock: seconds since the epoch, because records may outlive processes.
        """
        self._link = link
        self._registry = registry
        self._health = health
        self._clock = clock
        self._written_at: dict[str, float] = {}  # of the latest record of each key
        self._orders: dict[str, tuple[_Orders, float]] = {}  # the latest of each key, and when they were given
        link.subscribe_to_records(self._on_record)
        link.subscribe_to_departures(self._distrust_heartbeats)
        link.subscribe_to_topic("suspect", self._on_suspect)
        link.subscribe_to_topic("lost_cache", self._on_lost_cache)
        link.answer_topic("heard", lambda _: True)
        registry.subscribe_to_troubles(self._on_trouble)
        registry.subscribe_to_lost_caches(self._tell_changed_orders)

    async def announce_instance(self, instance: Instance) -> None:
        """Tell the others of an instance that has registered or got an order, and wait until they know."""
        self._link.keep_record(instance.key, self._make_record(instance, is_news=True))
        await self._link.ask_others("heard")

    def announce_removal(self, instance: Instance) -> None:
        """Tell the others of an instance that was removed, and did not just go silent."""
        self._link.keep_record(instance.key, {**self._make_record(instance, is_news=True), "is_removed": True})

    def announce_lost_cache(self, key: str) -> None:
        """Tell the others that an instance's own cache is empty."""
        self._link.publish_event("lost_cache", key)

    async def keep_renewing(self) -> None:
        """Renew the records of the instances, until cancelled; return at once if there is nobody to tell."""
        while not self._link.is_alone:
            await asyncio.sleep(RENEWAL_SECONDS)
            for instance in self._registry:
                if instance.healthy:
                    self._link.keep_record(instance.key, self._make_record(instance, is_news=False))

    def _make_record(self, instance: Instance, *, is_news: bool) -> dict[str, Any]:
        written_at = self._clock()
        known_orders, ordered_at = self._orders.get(instance.key, (_NO_ORDERS, 0.0))
        orders = _orders_of(instance)
        if orders != known_orders:
            ordered_at = max(written_at, ordered_at + 1e-6)
            self._orders[instance.key] = orders, ordered_at
        if is_news:  # later than all that was heard, though another machine's clock may be ahead
            written_at = max(written_at, self._written_at.get(instance.key, 0.0) + 1e-6)
            self._written_at[instance.key] = written_at
        return {
            "fields": dict(instance.registration.fields),
            "healthy": instance.healthy,
            "permanent": instance.permanent,
            "has_heartbeat": instance.has_heartbeat,
            **orders._asdict(),
            "ordered_at": ordered_at,
            "models": None if instance.models is None else sorted(instance.models),
            "models_age": time.monotonic() - instance.models_asked_at,
            "is_news": is_news,
            "written_at": written_at,
        }

    def _on_record(self, key: str, record: dict[str, Any]) -> None:
        """Take over an instance as another process knows it."""
        known = self._registry.get(key)
        if record.get("is_removed"):
            if known is not None and not known.has_heartbeat and not self._is_outdated(key, record):
                self._registry.remove(known)
            return
        if known is not None:
            self._take_models(known, record)
            self._take_orders(known, record)
        is_old = self._clock() - record["written_at"] > STALE_SECONDS
        if is_old or (known is not None and not record["is_news"]) or self._is_outdated(key, record):
            return
        try:
            registration = Registration.from_fields(record["fields"])
            self._registry.check_role(registration.role)
        except RegistrationError as exc:
            _log.warning("instance %s, of which another router told, is not taken: %s", key, exc)
            return
        now = time.monotonic()
        if known is None:
            known = self._registry.add_known_instance(
                registration,
                now,
                proven=record["healthy"],
                permanent=record["permanent"],
                has_heartbeat=record["has_heartbeat"],
            )
            self._take_models(known, record)
            self._orders.pop(key, None)
            self._take_orders(known, record)
        elif record["has_heartbeat"]:
            known.renew_registration(registration, now, proven=False)
        if not known.healthy:
            self._health.probe_soon(known)

    def _take_models(self, instance: Instance, record: dict[str, Any]) -> None:
        """Note the models that the instance told another process, if that asked it later than this one."""
        record_age = max(0.0, self._clock() - record["written_at"])
        asked_at = time.monotonic() - record_age - record.get("models_age", math.inf)
        if record.get("models") is not None and asked_at > instance.models_asked_at:
            instance.set_models(frozenset(record["models"]), asked_at)

    def _take_orders(self, instance: Instance, record: dict[str, Any]) -> None:
        """Carry out the operator's orders as another process knows them, if they are later than those known here."""
        # Routers of earlier versions do not say when: their news are the latest.
        ordered_at = record.get("ordered_at", record["written_at"] if record["is_news"] else 0.0)
        if ordered_at > self._orders.get(instance.key, (_NO_ORDERS, 0.0))[1]:
            instance.set_draining(record["draining"], until_restart=record.get("until_restart", False))
            instance.set_pause(record["paused"])
            instance.set_share(record["share"])
            self._orders[instance.key] = _orders_of(instance), ordered_at

    def _tell_changed_orders(self, key: str) -> None:
        """An instance has restarted, which may have ended its drain, or is gone."""
        instance = self._registry.get(key)
        if instance is None:
            self._orders.pop(key, None)
        elif self._orders.get(key, (_NO_ORDERS, 0.0))[0] != _orders_of(instance):
            self._link.keep_record(key, self._make_record(instance, is_news=True))

    def _is_outdated(self, key: str, record: dict[str, Any]) -> bool:
        """Whether a later record of this key was heard, or told, before."""
        if record["written_at"] < self._written_at.get(key, 0.0):
            return True
        self._written_at[key] = record["written_at"]
        return False

    def _distrust_heartbeats(self, _: str) -> None:
        """A process is gone, and with it perhaps the way by which instances' heartbeats came."""
        for instance in self._registry:
            instance.has_heartbeat = False  # it is gone when its probes fail, until it registers here

    def _on_trouble(self, instance: Instance) -> None:
        """An instance was found dead here."""
        self._link.publish_event("suspect", instance.key)

    def _on_suspect(self, sender: str, key: str) -> None:
        instance = self._registry.get(key)
        if instance is not None and instance.healthy:
            _log.debug("%s has trouble with %s", sender, key)
            self._health.probe_soon(instance)

    def _on_lost_cache(self, _: str, key: str) -> None:
        if (instance := self._registry.get(key)) is not None:
            self._registry.announce_lost_cache(instance)


def _orders_of(instance: Instance) -> _Orders:
    return _Orders(instance.draining, instance.drains_until_restart, instance.paused, instance.share)
