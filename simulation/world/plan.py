"""Plan: the events of a run (requests, orders of operators, faults), as plain data.

A world draws its plan from the seed before the run. So a failure can be shrunk: the same seed runs again with fewer
events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Event", "Plan"]


@dataclass(frozen=True)
class Event:
    """An event of a plan.

    Attributes:
        at: time of the event, in virtual seconds since the beginning.
        kind: kind of the fault or event.
        target: the actor to which it happens.
        details: further data for this kind of event.
    """

    at: float
    kind: str
    target: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        details = " ".join(f"{name}={value}" for name, value in self.details.items())
        return " ".join(filter(None, (self.kind, self.target, details)))


@dataclass(frozen=True)
class Plan:
    """The settings of a world, and its events in the order of their times."""

    settings: dict[str, Any]
    events: list[Event]

    def keep(self, events: list[Event]) -> Plan:
        """Return a plan with the same settings and only these events."""
        return Plan(self.settings, sorted(events, key=lambda event: event.at))
