"""Trace: the timeline of a run. A seed always gives the same text, in all versions of Python.

So no entry may have the address of an object, a real time, or anything else that differs between two runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcommon.formats import format_event

if TYPE_CHECKING:
    from simulation.world.scheduler import Scheduler

__all__ = ["Trace"]


class Trace:
    """A list of entries: virtual time, actor, and event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.entries: list[tuple[int, str, str]] = []

    def add(self, actor: str, event: str) -> None:
        """Add an entry with the current time: the actor and its event."""
        self.entries.append((self._scheduler.now, actor, event))

    def text(self) -> str:
        """Return the timeline as text, with a line for each entry: seconds, actor, event."""
        return "".join(f"{format_event(*entry)}\n" for entry in self.entries)
