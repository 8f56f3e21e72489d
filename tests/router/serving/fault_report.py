"""What the faults of instances cost clients, collected over a run and printed at its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["REPORTS", "Report", "table"]


@dataclass
class Report:
    """What one fault did to the requests that met it."""

    fault: str
    requests: int
    served: int
    """Requests that got the whole right answer."""
    lost: int
    """Requests without it that another pair could have served: those of which the client had not had a byte."""
    wrong: int
    """Requests that ended in another way than they should: another status, no clear error, a wrong text."""
    left_running: int
    """Legs that an instance still works on though nobody waits for them, and loads that do not count back to zero."""
    violations: int = 0
    """Rules of a dialect that were broken, where the instances check them."""


REPORTS: list[Report] = []


def table() -> Iterator[str]:
    """A heading and one line a fault."""
    yield f"{'fault':<58}{'requests':>9}{'served':>8}{'lost':>6}{'wrong':>7}{'left running':>14}{'violations':>12}"
    for row in REPORTS:
        counts = (
            f"{row.requests:>9}{row.served:>8}{row.lost:>6}{row.wrong:>7}{row.left_running:>14}{row.violations:>12}"
        )
        yield f"{row.fault:<58}{counts}"
