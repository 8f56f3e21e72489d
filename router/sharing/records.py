"""What processes tell each other of one instance, and which of two records counts.

No process compares another one's clock with its own: machines' clocks differ, and are set back. Each part of a record
has a version, a count and its writer's name (L. Lamport, "Time, Clocks, and the Ordering of Events in a Distributed
System", 1978). A writer counts one more than the highest count that it has heard or given, so that a part that was
written with knowledge of another one is the later of the two. Of two whose writers did not know of each other, the
names decide, everywhere alike.

A record has two such parts, which are kept and replaced apart::

    {"version": [count, writer], "fields": ..., "healthy": ..., ...,       the registration, or the removal
     "orders": {"version": [count, writer], "draining": ..., ...}}         the operator's orders
"""

from __future__ import annotations

from typing import Any

__all__ = ["NEVER", "STALE_SECONDS", "Version", "Versions", "merge_records", "read_versions"]

Version = tuple[int, str]
NEVER: Version = (0, "")
"""The version of what nobody has written: an instance of the register file, or orders that were never given."""

# Records that nobody has renewed for so long are dropped, by each holder's own clock.
STALE_SECONDS = 600.0


class Versions:
    """The versions that one process gives."""

    def __init__(self, writer: str) -> None:
        """
        Args:
            writer: the name of this process; no other one ever has it.
        """
        self._writer = writer
        self._count = 0

    def note(self, *heard: Version) -> None:
        """Count on from these versions."""
        self._count = max(self._count, *(count for count, _ in heard))

    def give(self) -> Version:
        """A version that is later than all that were heard or given before."""
        self._count += 1
        return self._count, self._writer


def read_versions(record: Any) -> tuple[Version, Version]:
    """The versions of a record's registration and of its orders.

    Raises:
        ValueError: it is no record of this form, such as one of another version of the router.
    """
    try:
        return _read_version(record["version"]), _read_version(record["orders"]["version"])
    except (KeyError, TypeError, IndexError) as exc:
        raise ValueError(f"it is no record of an instance: {exc!r}") from None


def merge_records(known: dict[str, Any] | None, record: dict[str, Any]) -> dict[str, Any]:
    """Of each part the later one; of equal registrations the one in ``record``, which may be a renewal.

    Raises:
        ValueError: ``record`` is no record.
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
