"""Trace: what happened in a world, in order; equal seeds give equal text, on all versions of Python.

No entry has an object's address, a real time, or anything else that differs between two runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcommon.formats import format_event

if TYPE_CHECKING:
    from simulation.world.scheduler import Scheduler

__all__ = ["Trace"]


class Trace:
    """Lines of (virtual time, who, what)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.entries: list[tuple[int, str, str]] = []

    def add(self, who: str, what: str) -> None:
        """Note what happens now."""
        self.entries.append((self._scheduler.now, who, what))

    def text(self) -> str:
        """The timeline, a line for each entry: seconds, who, what."""
        return "".join(f"{format_event(*entry)}\n" for entry in self.entries)
