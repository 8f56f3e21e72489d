"""The messages between processes about one instance, and which of two records is valid.

No process compares another one's clock with its own, because machines' clocks differ and are adjusted. Instead, each
part of a record has a version: a count and its writer's name (L. Lamport, "Time, Clocks, and the Ordering of Events in
a Distributed System", 1978). A writer uses the highest count that it has received or used, plus one. So a part that was
written with knowledge of another one has the later version. If two writers did not know of each other, the names
decide, in the same way in all processes.

A record has two such parts, which are stored and replaced separately::

    {"version": [count, writer], "fields": ..., "healthy": ..., ...,       the registration, or the removal
     "orders": {"version": [count, writer], "draining": ..., ...}}         the operator commands
"""

from __future__ import annotations

from typing import Any

__all__ = ["NEVER", "STALE_SECONDS", "Version", "Versions", "merge_records", "read_versions"]

Version = tuple[int, str]
NEVER: Version = (0, "")
"""The version of parts that were never written: an instance of the register file, or commands that were never given."""

# Records without renewal for this time are dropped, by the clock of each process that stores them.
STALE_SECONDS = 600.0


class Versions:
    """The versions that one process assigns."""

    def __init__(self, writer: str) -> None:
        """
        Args:
            writer: the name of this process, which no other process ever has.
        """
        self._writer = writer
        self._count = 0

    def note(self, *heard: Version) -> None:
        """Continue counting from these versions."""
        self._count = max(self._count, *(count for count, _ in heard))

    def give(self) -> Version:
        """Return a version that is later than all that were received or assigned before."""
        self._count += 1
        return self._count, self._writer


def read_versions(record: Any) -> tuple[Version, Version]:
    """Return the versions of a record's registration and of its commands.

    Raises:
        ValueError: it is not a record of this format, for example one of another version of the router.
    """
    try:
        return _read_version(record["version"]), _read_version(record["orders"]["version"])
    except (KeyError, TypeError, IndexError) as exc:
        raise ValueError(f"it is no record of an instance: {exc!r}") from None


def merge_records(known: dict[str, Any] | None, record: dict[str, Any]) -> dict[str, Any]:
    """Return the later of each part; of equal registrations the one in ``record``, which may be a renewal.

    Raises:
        ValueError: ``record`` is not a record.
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
        raise ValueError(f"{found!r} is no version: a count and a name")
    return count, writer
