"""Prints the findings, measurements and progress of a command, as text or JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Literal, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = [
    "Finding",
    "Tell",
    "fail",
    "format_table",
    "ok",
    "print_findings",
    "print_json",
    "print_table",
    "show_progress",
    "warn",
]


@dataclass(frozen=True)
class Finding:
    """Result of a check of ``kvstore doctor``: a subject, a sentence about the subject, and a remedy (may be empty)."""

    level: Literal["ok", "warn", "fail"]
    subject: str
    text: str
    remedy: str = ""


def ok(subject: str, text: str) -> Finding:
    """Return a finding that reports the result of a check without a problem."""
    return Finding("ok", subject, text)


def warn(subject: str, text: str, remedy: str = "") -> Finding:
    """Return a finding that reports a problem that does not prevent the use of the pool."""
    return Finding("warn", subject, text, remedy)


def fail(subject: str, text: str, remedy: str = "") -> Finding:
    """Return a finding that reports why the pool cannot be used as configured."""
    return Finding("fail", subject, text, remedy)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a line for each finding, and below the line the remedy, if the finding has one."""
    width = max((len(finding.subject) for finding in findings), default=0)
    for finding in findings:
        print(f"{finding.level:<5} {finding.subject:<{width}}  {finding.text}")
        if finding.remedy:
            print(f"{'':<5} {'':<{width}}  -> {finding.remedy}")


def print_json(value: object) -> None:
    """Print a value as one JSON document. Dataclasses, such as findings, become objects."""
    json.dump(value, sys.stdout, indent=2, default=asdict)
    print()


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table of ``rows`` with the titles ``heads``. The first column is aligned left, the others right."""
    print("\n".join(format_table(heads, rows)))


def format_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of the table that ``print_table`` prints."""
    cells = [list(heads), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *padded]).rstrip())
    return lines


LINE_SECONDS = 5.0
"""Seconds between two lines of progress, if the output is not a terminal."""


class Tell(Protocol):
    """Function that a command calls to report its progress.

    The arguments of the function are the amount of work done so far (of ``total``), and a short name of the current
    step.
    """

    def __call__(self, done: float, now: str = "") -> None: ...


@contextlib.contextmanager
def show_progress(title: str, total: float, file: IO[str] | None = None) -> Iterator[Tell]:
    """Show the progress of work: a bar on a terminal, otherwise a line every few seconds.

    Args:
        title: name of the work.
        total: total amount of work.
        file: output, or None for standard error.

    Yields:
        The function to which the ``with`` block reports its progress.
    """
    console = Console(file=file or sys.stderr, highlight=False)
    if not console.is_terminal:
        yield _Lines(title, total, console.file).tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(title, total=total)

        def tell(done: float, now: str = "") -> None:
            progress.update(task, completed=done, description=f"{title}: {now}" if now else title)

        yield tell


class _Lines:
    """Prints progress as one line every ``LINE_SECONDS``."""

    def __init__(self, title: str, total: float, file: IO[str]) -> None:
        self._title = title
        self._total = total
        self._file = file
        self._began = self._told = time.monotonic()

    def tell(self, done: float, now: str = "") -> None:
        clock = time.monotonic()
        if clock - self._told < LINE_SECONDS:
            return
        self._told = clock
        line = f"{self._title}: {now}, " if now else f"{self._title}: "
        line += f"{done / self._total if self._total else 1:.0%} after {clock - self._began:.0f} s"
        if 0 < done < self._total:
            line += f", about {(clock - self._began) * (self._total - done) / done:.0f} s left"
        print(line, file=self._file, flush=True)
