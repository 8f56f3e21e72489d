"""Finds events: changes of the router, its instances and the pool's masters between two polls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from router.console.dashboard.history import InstanceReport, MasterReport, Moment

__all__ = ["Event", "find_events"]

_STATES = {
    "healthy": ("good", "takes requests"),
    "paused": ("warn", "is paused"),
    "draining": ("warn", "drains"),
    "unhealthy": ("bad", "is unreachable"),
}


class Event(NamedTuple):
    """A change of the router, of an instance or of a master."""

    time: float
    """Time of the poll that found the change, in seconds since 1970."""
    kind: str
    """Severity of the change: ``good``, ``warn`` or ``bad``."""
    subject: str
    """Address of the instance or master; ``router`` for the router."""
    text: str
    """What has changed, such as ``breaker closed``; the page shows it after ``subject``."""


def find_events(before: Moment, after: Moment) -> list[Event]:
    """Return the changes between two successive polls."""
    found: list[tuple[str, str, str]] = []
    if bool(before.trouble) != bool(after.trouble):
        kind, text = ("bad", f"does not answer: {after.trouble}") if after.trouble else ("good", "answers again")
        found.append((kind, "router", text))
    for key in before.instances.keys() - after.instances.keys():
        found.append(("warn", key, "is no longer registered"))
    for key, report in after.instances.items():
        if (earlier := before.instances.get(key)) is None:
            found.append(("good", key, f"registered as {report.listed.role}"))
        else:
            found += ((kind, key, text) for kind, text in _compare_reports(earlier, report))
    earlier_masters = {each.address: each for each in before.masters}
    for master in after.masters:
        if master.address in earlier_masters:
            compared = _compare_masters(earlier_masters[master.address], master)
            found += ((kind, master.address, text) for kind, text in compared)
    return [Event(after.time, *each) for each in found]


def _compare_reports(before: InstanceReport, after: InstanceReport) -> Iterator[tuple[str, str]]:
    old, new = before.listed, after.listed
    # States are unknown if the router requires its admin token, and the dashboard does not have it.
    if old.state != new.state and old.state and new.state:
        kind, text = _STATES.get(new.state, ("warn", f"is {new.state}"))
        yield kind, f"{text}: {new.trouble}" if new.state == "unhealthy" and new.trouble else text
    if (old.breaker == "closed") != (new.breaker == "closed"):
        is_closed = new.breaker == "closed"
        yield ("good", "breaker closed") if is_closed else ("bad", "breaker opened: requests fail there")
    if before.figures is None or after.figures is None:
        return
    if before.figures.pool_paused != after.figures.pool_paused:
        is_paused = after.figures.pool_paused
        yield ("bad", "suspended the use of the pool: calls fail") if is_paused else ("good", "uses the pool again")
    if sum((after.figures.origins or {}).values()) < sum((before.figures.origins or {}).values()):
        yield "warn", "restarted: its counters began at 0"


def _compare_masters(before: MasterReport, after: MasterReport) -> Iterator[tuple[str, str]]:
    if bool(before.trouble) != bool(after.trouble):
        yield ("bad", f"is unreachable: {after.trouble}") if after.trouble else ("good", "answers again")
    roles = before.figures and before.figures.role, after.figures and after.figures.role
    if roles[0] and roles[1] and roles[0] != roles[1]:
        yield "good" if roles[1] == "leader" else "warn", f"is {roles[1]} now"
