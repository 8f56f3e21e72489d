"""FleetSync: one fleet for all processes. Each process receives what another one learns about an instance."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass
from typing import Any

from router.fleet import HealthMonitor, Instance, Orders, Registration, RegistrationError, Registry
from router.sharing.link import Link
from router.sharing.records import NEVER, STALE_SECONDS, Version, Versions, read_versions

__all__ = ["FleetSync"]

_log = logging.getLogger("router.sharing.fleet_sync")

# Records are sent again at this interval, to report the present state of each instance, and to replace lost messages.
RENEWAL_SECONDS = 10.0


_NO_ORDERS = Orders()


@dataclass(slots=True)
class _Known:
    """The last data received or sent for one key, whether or not the instance is registered now."""

    version: Version = NEVER
    """The version of the registration, or of the removal."""
    orders: Orders = _NO_ORDERS
    ordered: Version = NEVER
    """The version of ``orders``."""
    noted_at: float = -math.inf


class FleetSync:
    """Sends the instances' data to the other processes, and receives theirs.

    Registrations, heartbeats and operator commands are shared. Each process determines health itself; if one finds an
    instance dead, the others probe it immediately. The versions of two records, or of two commands, decide which is
    later (``records.py``). The age of a heartbeat is measured by the clock of the receiving process, at the moment of
    reception.
    """

    def __init__(self, link: Link, registry: Registry, health: HealthMonitor) -> None:
        self._link = link
        self._registry = registry
        self._health = health
        self._versions = Versions(link.name)
        self._known: dict[str, _Known] = {}
        link.subscribe_to_records(self._on_record)
        link.subscribe_to_departures(self._distrust_heartbeats)
        link.subscribe_to_topic("suspect", self._on_suspect)
        link.subscribe_to_topic("lost_cache", self._on_lost_cache)
        link.answer_topic("heard", lambda _: True)
        registry.events.troubles.subscribe(self._on_trouble)
        registry.events.logged.subscribe(lambda instance: link.publish_event("said", [instance.key, instance.said]))
        link.subscribe_to_topic("said", self._on_said)
        registry.events.lost_caches.subscribe(self._tell_changed_orders)

    async def announce_instance(self, instance: Instance) -> None:
        """Send an instance that has registered to the others, and wait until this router's processes have it."""
        self._tell(instance, is_news=True)
        await self._link.ask_others("heard")

    async def announce_orders(self, instance: Instance) -> None:
        """Send a command for an instance to the others, and wait until the other routers have received it, too.

        So the operator's next command, at any router, has a later version.
        """
        self._tell(instance, is_news=False)
        await self._link.ask_others("heard", everywhere=True)

    def announce_removal(self, instance: Instance) -> None:
        """Send the removal of an instance to the others; not for instances that are only silent."""
        self._tell(instance, is_news=True, is_removed=True)

    def announce_lost_cache(self, key: str) -> None:
        """Notify the others that an instance's own cache is empty."""
        self._link.publish_event("lost_cache", key)

    def find_orders_version(self, key: str) -> Version:
        """Return the version of the latest commands for this instance; ``NEVER`` if there were none."""
        known = self._known.get(key)
        return NEVER if known is None else known.ordered

    def note_restored_orders(self, instance: Instance, version: Version) -> None:
        """Note that the restored commands of ``instance``, from an earlier process, have this version."""
        if self._link.is_alone:
            return  # no version would be assigned to the later commands
        self._versions.note(version)
        known = self._note_key(instance.key)
        known.orders, known.ordered = instance.orders, version

    async def keep_renewing(self) -> None:
        """Send the instances' records periodically, until cancelled; return if there are no other processes."""
        while not self._link.is_alone:
            await asyncio.sleep(RENEWAL_SECONDS)
            for instance in self._registry:
                if instance.healthy:
                    self._tell(instance, is_news=False)
            self._forget_old(time.monotonic())

    def _forget_old(self, now: float) -> None:
        """Discard the data of instances that have been gone for long."""
        for key, known in list(self._known.items()):
            if self._registry.get(key) is not None:
                known.noted_at = now
            elif now - known.noted_at > STALE_SECONDS:
                del self._known[key]

    def _tell(self, instance: Instance, *, is_news: bool, is_removed: bool = False) -> None:
        if not self._link.is_alone:
            record = {**self._make_record(instance, is_news=is_news), "is_removed": is_removed}
            self._link.keep_record(instance.key, record)

    def _make_record(self, instance: Instance, *, is_news: bool) -> dict[str, Any]:
        known = self._note_key(instance.key)
        # They also differ if the instance is a different one from that for which the last commands were.
        if instance.orders != known.orders:
            known.orders, known.ordered = instance.orders, self._versions.give()
        if is_news:
            known.version = self._versions.give()
        record = instance.to_record()
        return {
            **record,
            "version": known.version,
            "orders": {"version": known.ordered, **record["orders"]},
            "is_removed": False,
            "teller": self._link.name,
            "said": instance.said,
            "healthy": instance.healthy,
            "models_age": time.monotonic() - instance.models_asked_at,
        }

    def _note_key(self, key: str) -> _Known:
        known = self._known.setdefault(key, _Known())
        known.noted_at = time.monotonic()
        return known

    def _on_record(self, key: str, record: dict[str, Any]) -> None:
        """Apply another process's record of an instance."""
        version, ordered = read_versions(record)
        self._versions.note(version, ordered)
        is_first = key not in self._known
        known, instance = self._note_key(key), self._registry.get(key)
        is_later = version > known.version
        known.version = max(version, known.version)
        if record["is_removed"]:
            if is_later and instance is not None and not instance.has_heartbeat:
                self._registry.remove(instance)
            return
        if ordered > known.ordered:
            known.orders, known.ordered = _read_orders(record), ordered
            if instance is not None:
                instance.apply_orders(known.orders, is_told=self._is_said_by(ordered[1]))
        if instance is not None:
            self._take_news(instance, record, is_later=is_later)
        # An instance that was removed here returns with its next registration or heartbeat; if it has no heartbeat, as
        # soon as another process can reach it.
        elif is_later or is_first or (version == known.version and not record["has_heartbeat"]):
            self._add_instance(record, known.orders, proven=record["healthy"] and (is_later or is_first))

    def _take_news(self, instance: Instance, record: dict[str, Any], *, is_later: bool) -> None:
        self._take_models(instance, record)
        now = time.monotonic()
        if record["healthy"]:
            instance.note_health_elsewhere(now)
        if not is_later:
            return
        if record["has_heartbeat"] and (registration := self._read_registration(record)) is not None:
            instance.renew_registration(registration, now, proven=False)
        if not instance.healthy:
            self._health.probe_soon(instance)

    def _add_instance(self, record: dict[str, Any], orders: Orders, *, proven: bool) -> None:
        registration = self._read_registration(record)
        if registration is None:
            return
        instance = self._registry.add_known_instance(
            registration,
            time.monotonic(),
            proven=proven,
            permanent=record["permanent"],
            has_heartbeat=record["has_heartbeat"],
        )
        if self._link.is_of_same_router(record["teller"]):
            instance.said.update(record["said"])
        self._take_models(instance, record)
        instance.apply_orders(orders, is_told=self._is_said_by(record["teller"]))
        if not instance.healthy:
            self._health.probe_soon(instance)

    def _read_registration(self, record: dict[str, Any]) -> Registration | None:
        try:
            registration = Registration.from_fields(record["fields"])
            self._registry.check_role(registration.role)
        except RegistrationError as exc:
            fields = record["fields"]
            key = f"{fields.get('host_ip')}:{fields.get('port')}"
            _log.warning("instance %s, of which another router told, is not taken: %s", key, exc)
            return None
        return registration

    def _is_said_by(self, teller: str) -> bool:
        """Return whether the sender, or the first process here, logs this event in this router's log."""
        return self._link.is_of_same_router(teller) or not self._link.is_first

    def _take_models(self, instance: Instance, record: dict[str, Any]) -> None:
        """Note the models that another process received from the instance, if it queried later than this one."""
        asked_at = time.monotonic() - record["models_age"]
        if record["models"] is not None and asked_at > instance.models_asked_at:
            instance.set_models(frozenset(record["models"]), asked_at, is_told=self._is_said_by(record["teller"]))

    def _tell_changed_orders(self, key: str) -> None:
        """Send the commands of an instance that has restarted, which may have ended its drain."""
        instance, known = self._registry.get(key), self._known.get(key)
        if instance is not None and instance.orders != (_NO_ORDERS if known is None else known.orders):
            self._tell(instance, is_news=False)

    def _distrust_heartbeats(self, _: str) -> None:
        """Stop relying on heartbeats: a process is gone, and some heartbeats may have come through it."""
        for instance in self._registry:
            instance.has_heartbeat = False  # until it registers here, it counts as gone when its probes fail

    def _on_trouble(self, instance: Instance) -> None:
        """Handle an instance that was found dead here."""
        self._link.publish_event("suspect", instance.key)

    def _on_suspect(self, sender: str, key: str) -> None:
        instance = self._registry.get(key)
        if instance is not None and instance.healthy:
            _log.debug("%s has trouble with %s", sender, key)
            self._health.probe_soon(instance)

    def _on_said(self, sender: str, content: list[Any]) -> None:
        """Note that another process of the same router has logged a change of an instance; only one of them does."""
        key, said = content
        if self._link.is_of_same_router(sender) and (instance := self._registry.get(key)) is not None:
            instance.said.update(said)

    def _on_lost_cache(self, _: str, key: str) -> None:
        if (instance := self._registry.get(key)) is not None:
            self._registry.events.lost_caches.emit(instance.key)


def _read_orders(record: dict[str, Any]) -> Orders:
    return Orders(**{name: value for name, value in record["orders"].items() if name != "version"})
