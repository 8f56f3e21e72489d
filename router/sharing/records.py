"""The record of one instance, which processes exchange, and the choice between two records.

No process compares another process's clock with its own, because machines' clocks differ and are adjusted. Instead,
each part of a record has a version: a count and its writer's name (L. Lamport, "Time, Clocks, and the Ordering of
Events in a Distributed System", 1978). A writer uses the highest count that it has received or used, plus one. So if a
writer has received another part before it writes its own part, its own part has the later version. If two writers did
not know of each other's parts, the names decide, in the same way in all processes.

A record has two parts, which are stored and replaced separately::

    {"version": [count, writer], "fields": ..., "healthy": ..., ...,       the registration, or the removal
     "orders": {"version": [count, writer], "draining": ..., ...}}         the operator commands
"""

from __future__ import annotations

from typing import Any

__all__ = ["NEVER", "STALE_SECONDS", "Version", "Versions", "merge_records", "read_versions"]

Version = tuple[int, str]
NEVER: Version = (0, "")
"""Version of a part that was never written: an instance from the register file, or commands that were never given."""

# A record without renewal for this time is dropped. Each process that stores it uses its own clock.
STALE_SECONDS = 600.0


class Versions:
    """Assigns versions to the records that one process writes."""

    def __init__(self, writer: str) -> None:
        """
        Args:
            writer: name of this process. No other process ever has the same name.
        """
        self._writer = writer
        self._count = 0

    def note(self, *versions: Version) -> None:
        """Record versions of other processes, so that the next versions here are later."""
        self._count = max(self._count, *(count for count, _ in versions))

    def make_next(self) -> Version:
        """Return a version that is later than all versions received or assigned before."""
        self._count += 1
        return self._count, self._writer


def read_versions(record: Any) -> tuple[Version, Version]:
    """Return the versions of a record's registration and of its commands.

    Raises:
        ValueError: ``record`` does not have this format; another version of the router may have written it.
    """
    try:
        return _read_version(record["version"]), _read_version(record["orders"]["version"])
    except (KeyError, TypeError, IndexError) as exc:
        raise ValueError(f"the message is not a record of an instance: {exc!r}") from None


def merge_records(known: dict[str, Any] | None, record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the later registration and the later commands of two records.

    If both registrations have the same version, use the one in ``record``, because it may be a renewal.

    Raises:
        ValueError: ``record`` does not have the format of a record.
    """
    version, ordered = read_versions(record)
    if known is None:
        return record
    known_version, known_ordered = read_versions(known)
    later = record if version >= known_version else known
    return {**later, "orders": (record if ordered >= known_ordered else known)["orders"]}


def _read_version(found: Any) -> Version:
    count, writer = found
    if not isinstance(count, int) or not isinstance(writer, str):
        raise ValueError(f"{found!r} is not a version; a version is a count and a name")
    return count, writer
