"""Figures of a test run, printed at its end: the effects of faults on callers, and the starts after crashes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["REPORTS", "STARTS", "Report", "starts_table", "table"]


@dataclass
class Report:
    """Figures of the requests during a fault."""

    fault: str = ""
    tried: int = 0
    hits: int = 0
    wrong_bytes: int = 0
    exceptions: int = 0
    longest_stall_s: float = 0.0


REPORTS: list[Report] = []
STARTS: dict[str, tuple[int, int]] = {}
"""The numbers of successful starts and of all starts after a crash, by the kind of process."""


def table() -> Iterator[str]:
    """Yield a heading, and a line for each fault."""
    yield f"{'fault':<52}{'requests':>9}{'hits':>7}{'wrong bytes':>13}{'exceptions':>12}{'longest stall ms':>18}"
    for row in REPORTS:
        stall = f"{row.longest_stall_s * 1000:.0f}"
        yield f"{row.fault:<52}{row.tried:>9}{row.hits:>7}{row.wrong_bytes:>13}{row.exceptions:>12}{stall:>18}"


def starts_table() -> Iterator[str]:
    """Yield a line for each kind of process."""
    for name, (started, tried) in STARTS.items():
        yield f"{name:<52}{started:>4} of {tried} started"
