"""Formats numbers of bytes, and lines of a timeline, for display."""

from __future__ import annotations

__all__ = ["format_bytes", "format_event"]


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes with at most four digits and a unit: ``1.5 GiB`` for 1,610,612,736 bytes."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def format_event(nanoseconds: int, who: str, what: str) -> str:
    """Format one line of a timeline.

    Args:
        nanoseconds: time since the beginning of the timeline.
        who: the process in which the event happened.
        what: description of the event.
    """
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return f"{seconds:6d}.{rest // 1000:06d} {who:<14} {what}"
