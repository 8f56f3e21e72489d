"""Plan: all that will happen from outside in a world (requests, orders, faults), as plain data.

A world draws it from the seed before it runs; what then happens follows from the plan and from the seed's other
streams. So a failure can be shrunk by leaving events out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Event", "Plan"]


@dataclass(frozen=True)
class Event:
    """Something that happens ``at`` so many seconds: ``kind`` says what, ``target`` to whom."""

    at: float
    kind: str
    target: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        details = " ".join(f"{name}={value}" for name, value in self.details.items())
        return " ".join(filter(None, (self.kind, self.target, details)))


@dataclass(frozen=True)
class Plan:
    """``settings`` of the world as a whole, and the events, by their time."""

    settings: dict[str, Any]
    events: list[Event]

    def keep(self, events: list[Event]) -> Plan:
        """The plan with these of its events alone."""
        return Plan(self.settings, sorted(events, key=lambda event: event.at))
