"""FleetSync: keeps the same instances in all processes.

Each process sends the others what it learns about an instance.
"""

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

# All records are sent again at this interval, to report the state of each instance and to replace lost messages.
RENEWAL_SECONDS = 10.0


_NO_ORDERS = Orders()


@dataclass(slots=True)
class _Known:
    """The last data that was received or sent about one address, even if no instance is registered there now."""

    version: Version = NEVER
    """Version of the registration or of the removal."""
    orders: Orders = _NO_ORDERS
    ordered: Version = NEVER
    """Version of the operator commands ``orders``."""
    is_void: bool = False
    """Whether ``orders`` have ended, because the instance was removed. The next instance at the address has none."""
    noted_at: float = -math.inf


class FleetSync:
    """Sends the instances' records to the other processes, and applies the records of the other processes.

    A record has the registration of one instance, its health, its models and the operator commands for it.

    Registrations, heartbeats and operator commands are shared. Each process checks the health of instances itself. If
    one process finds an instance dead, the other processes probe it immediately. Of two registrations, or of two
    commands, the one with the later version is valid (``records.py``). A heartbeat's age is measured by the clock of
    the receiving process, from the moment of reception.
    """

    def __init__(self, link: Link, registry: Registry, health: HealthMonitor) -> None:
        self._link = link
        self._registry = registry
        self._health = health
        self._versions = Versions(link.name)
        self._known: dict[str, _Known] = {}
        link.subscribe_to_records(self._on_record)
        link.subscribe_to_departures(self._reset_heartbeats)
        link.subscribe_to_topic("suspect", self._on_suspect)
        link.subscribe_to_topic("lost_cache", self._on_lost_cache)
        link.answer_topic("heard", lambda _: True)
        registry.events.troubles.subscribe(lambda each: link.publish_event("suspect", each.key))
        registry.events.logged.subscribe(lambda each: link.publish_event("said", [each.key, each.logged_changes]))
        link.subscribe_to_topic("said", self._on_logged)
        registry.events.lost_caches.subscribe(self._send_changed_orders)

    async def announce_instance(self, instance: Instance) -> None:
        """Send the record of a new registration, and wait until all processes of this router have received it."""
        known = self._known.get(instance.key)
        if known is not None and not known.is_void and instance.orders == _NO_ORDERS:
            orders = known.orders
            if orders.until_restart:  # the instance may have restarted
                orders = orders._replace(draining=False, until_restart=False)
            instance.apply_orders(orders)
        self._send_record(instance, is_news=True)
        await self._link.ask_peers("heard")

    async def announce_orders(self, instance: Instance) -> None:
        """Send a command for an instance to all other processes, and wait until they have received the command.

        After that, the operator's next command has a later version, whichever router receives it.
        """
        self._send_record(instance, is_news=False)
        await self._link.ask_peers("heard", everywhere=True)

    def announce_removal(self, instance: Instance) -> None:
        """Notify the other processes that service discovery has removed an instance."""
        self._send_record(instance, is_news=True, is_removed=True)
        if (known := self._known.get(instance.key)) is not None:
            known.is_void = True

    def announce_lost_cache(self, key: str) -> None:
        """Notify the other processes that an instance's own cache is empty."""
        self._link.publish_event("lost_cache", key)

    def find_orders_version(self, key: str) -> Version:
        """Return the version of the latest operator commands for the address ``key``; ``NEVER`` if there were none."""
        known = self._known.get(key)
        return NEVER if known is None else known.ordered

    def note_restored_orders(self, instance: Instance, version: Version) -> None:
        """Record the version of commands that this process has restored from the snapshot of an earlier process."""
        if self._link.is_alone:
            return  # without other processes, commands get no versions
        self._versions.note(version)
        known = self._note_key(instance.key)
        known.orders, known.ordered = instance.orders, version

    async def keep_renewing(self) -> None:
        """Send the records of healthy instances periodically, until cancelled. If this is the only process, return."""
        while not self._link.is_alone:
            await asyncio.sleep(RENEWAL_SECONDS)
            for instance in self._registry:
                if instance.healthy:
                    self._send_record(instance, is_news=False)
            self._forget_old(time.monotonic())

    def _forget_old(self, now: float) -> None:
        """Discard the data of addresses at which no instance has been registered for ``STALE_SECONDS``."""
        for key, known in list(self._known.items()):
            if self._registry.get(key) is not None:
                known.noted_at = now
            elif now - known.noted_at > STALE_SECONDS:
                del self._known[key]

    def _send_record(self, instance: Instance, *, is_news: bool, is_removed: bool = False) -> None:
        if not self._link.is_alone:
            record = {**self._make_record(instance, is_news=is_news), "is_removed": is_removed}
            self._link.keep_record(instance.key, record)

    def _make_record(self, instance: Instance, *, is_news: bool) -> dict[str, Any]:
        known = self._note_key(instance.key)
        # The commands also differ if another instance than that of the last commands is registered at this address.
        if instance.orders != known.orders:
            known.orders, known.ordered = instance.orders, self._versions.make_next()
        if is_news:
            known.version = self._versions.make_next()
        record = instance.to_record()
        return {
            **record,
            "version": known.version,
            "orders": {"version": known.ordered, **record["orders"]},
            "is_removed": False,
            "teller": self._link.name,
            "said": instance.logged_changes,
            "healthy": instance.healthy,
            "models_age": time.monotonic() - instance.models_asked_at,
        }

    def _note_key(self, key: str) -> _Known:
        known = self._known.setdefault(key, _Known())
        known.noted_at = time.monotonic()
        return known

    def _on_record(self, key: str, record: dict[str, Any]) -> None:
        """Apply the record of an instance from another process."""
        version, ordered = read_versions(record)
        self._versions.note(version, ordered)
        is_first = key not in self._known
        known, instance = self._note_key(key), self._registry.get(key)
        is_later = version > known.version
        known.version = max(version, known.version)
        if record["is_removed"]:
            if is_later and (instance is None or not instance.has_heartbeat):
                if instance is not None:
                    self._registry.remove(instance)
                known.is_void = True
            return
        if ordered > known.ordered:
            known.orders, known.ordered = _read_orders(record), ordered
            if instance is not None:
                instance.apply_orders(known.orders, is_remote=self._peer_logs(ordered[1]))
        if instance is not None:
            self._update_instance(instance, record, is_later=is_later)
        # An instance that this process has removed is added again at its next registration or heartbeat. If it sends no
        # heartbeats, it is added again as soon as another process can reach it.
        elif is_later or is_first or (version == known.version and not record["has_heartbeat"]):
            self._add_instance(record, known.orders, proven=record["healthy"] and (is_later or is_first))

    def _update_instance(self, instance: Instance, record: dict[str, Any], *, is_later: bool) -> None:
        self._update_models(instance, record)
        now = time.monotonic()
        if record["healthy"]:
            instance.note_health_elsewhere(now)
        if not is_later:
            return
        if record["has_heartbeat"]:
            is_known = record["fields"] == instance.registration.fields
            registration = instance.registration if is_known else self._read_registration(record)
            if registration is not None:
                instance.renew_registration(registration, now, proven=False)
        if not instance.healthy:
            self._health.probe_soon(instance)

    def _add_instance(self, record: dict[str, Any], orders: Orders, *, proven: bool) -> None:
        is_same_router = self._link.is_of_same_router(record["teller"])
        if record["permanent"] and not record["has_heartbeat"] and not is_same_router:
            return  # it is in another router's register file, from which an operator may have removed it meanwhile
        registration = self._read_registration(record)
        if registration is None:
            return
        instance = self._registry.add_known_instance(
            registration,
            time.monotonic(),
            proven=proven,
            permanent=record["permanent"] and is_same_router,
            has_heartbeat=record["has_heartbeat"],
        )
        if is_same_router:
            instance.logged_changes.update(record["said"])
        self._update_models(instance, record)
        instance.apply_orders(orders, is_remote=self._peer_logs(record["teller"]))
        if not instance.healthy:
            self._health.probe_soon(instance)

    def _read_registration(self, record: dict[str, Any]) -> Registration | None:
        try:
            registration = Registration.from_fields(record["fields"])
            self._registry.check_role(registration.role)
        except RegistrationError as exc:
            fields = record["fields"]
            key = f"{fields.get('host_ip')}:{fields.get('port')}"
            _log.warning("instance %s, which another process reported, cannot be added to this router: %s", key, exc)
            return None
        return registration

    def _peer_logs(self, teller: str) -> bool:
        """Return whether another process of this router logs an event that the process ``teller`` has sent to this one.

        If ``teller`` belongs to this router, it logs the event; if not, the first process of this router does.
        """
        return self._link.is_of_same_router(teller) or not self._link.is_first

    def _update_models(self, instance: Instance, record: dict[str, Any]) -> None:
        """Store the models that another process received from the instance, unless this process queried it later."""
        asked_at = time.monotonic() - record["models_age"]
        if record["models"] is not None and asked_at > instance.models_asked_at:
            instance.set_models(frozenset(record["models"]), asked_at, is_remote=self._peer_logs(record["teller"]))

    def _send_changed_orders(self, key: str) -> None:
        """Send the commands of an instance that has restarted, because the restart may have ended its drain.

        If the instance was removed, its commands have ended. But while the other routers cannot be reached, they may
        still have the instance, so its commands stay.
        """
        instance, known = self._registry.get(key), self._known.get(key)
        if instance is None and known is not None:
            known.is_void = not self._link.trouble
        if instance is not None and instance.orders != (_NO_ORDERS if known is None else known.orders):
            self._send_record(instance, is_news=False)

    def _reset_heartbeats(self, _: str) -> None:
        """Assume that an instance sends no heartbeats until one arrives: the ended process may have got the last."""
        for instance in self._registry:
            instance.has_heartbeat = False  # until its next heartbeat, it is removed if its probes fail

    def _on_suspect(self, sender: str, key: str) -> None:
        instance = self._registry.get(key)
        if instance is not None and instance.healthy:
            _log.debug("process %s reports that instance %s fails", sender, key)
            self._health.probe_soon(instance)

    def _on_logged(self, sender: str, content: list[Any]) -> None:
        """Record changes of an instance that another process of this router has logged, so that each is logged once."""
        key, said = content
        if self._link.is_of_same_router(sender) and (instance := self._registry.get(key)) is not None:
            instance.logged_changes.update(said)

    def _on_lost_cache(self, _: str, key: str) -> None:
        if (instance := self._registry.get(key)) is not None:
            self._registry.events.lost_caches.emit(instance.key)


def _read_orders(record: dict[str, Any]) -> Orders:
    return Orders(**{name: value for name, value in record["orders"].items() if name != "version"})
