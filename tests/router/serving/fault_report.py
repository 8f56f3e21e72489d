"""The results of clients while instances fail, collected during a test run and printed at its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["REPORTS", "Report", "table"]


@dataclass
class Report:
    """The results of the requests during one fault."""

    fault: str
    requests: int
    served: int
    """Requests with the whole correct response."""
    lost: int
    """Failed requests that another pair could have served, because the client had not got a byte."""
    wrong: int
    """Requests with a wrong result: another status, no clear error, or a wrong text."""
    left_running: int
    """Legs that still run after the end of their requests, and loads that did not return to zero."""
    violations: int = 0
    """Violations of a dialect's rules, if the instances check them."""


REPORTS: list[Report] = []


def table() -> Iterator[str]:
    """Make a heading and one line for each fault."""
    yield f"{'fault':<58}{'requests':>9}{'served':>8}{'lost':>6}{'wrong':>7}{'left running':>14}{'violations':>12}"
    for row in REPORTS:
        counts = (
            f"{row.requests:>9}{row.served:>8}{row.lost:>6}{row.wrong:>7}{row.left_running:>14}{row.violations:>12}"
        )
        yield f"{row.fault:<58}{counts}"
