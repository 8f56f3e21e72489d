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
    """A list of entries: virtual time, actor, and what happened."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.entries: list[tuple[int, str, str]] = []

    def add(self, who: str, what: str) -> None:
        """Add an entry with the current time: the actor ``who`` did ``what``."""
        self.entries.append((self._scheduler.now, who, what))

    def text(self) -> str:
        """Return the timeline as text, with a line for each entry: seconds, actor, what happened."""
        return "".join(f"{format_event(*entry)}\n" for entry in self.entries)
