"""Numbers as people read them."""

from __future__ import annotations

__all__ = ["format_bytes"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(nbytes: float) -> str:
    """Bytes in the largest unit that leaves a digit before the point, such as ``1.5 GiB``."""
    for unit in _UNITS:
        if abs(nbytes) < 1024 or unit == _UNITS[-1]:
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" or abs(nbytes) >= 100 else f"{nbytes:.1f} {unit}"
