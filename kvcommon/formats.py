"""Numbers, and lines of a timeline, as people read them."""

from __future__ import annotations

__all__ = ["format_bytes", "format_event"]


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes with four digits, in the largest unit with a digit before the point: ``1.5 GiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def format_event(nanoseconds: int, who: str, what: str) -> str:
    """Format a line of a timeline: seconds since its beginning, the process, and what happened there."""
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return f"{seconds:6d}.{rest // 1000:06d} {who:<14} {what}"
