"""Findings and measurements of a command, printed as text or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

__all__ = [
    "Finding",
    "fail",
    "format_table",
    "ok",
    "print_findings",
    "print_json",
    "print_table",
    "warn",
]


@dataclass(frozen=True)
class Finding:
    """One line: the state of ``subject`` in one sentence, and a remedy."""

    level: Literal["ok", "warn", "fail"]
    subject: str
    text: str
    remedy: str = ""


def ok(subject: str, text: str) -> Finding:
    """Return a finding without a problem."""
    return Finding("ok", subject, text)


def warn(subject: str, text: str, remedy: str = "") -> Finding:
    """Return a finding that the operator should know, although the pool can be used."""
    return Finding("warn", subject, text, remedy)


def fail(subject: str, text: str, remedy: str = "") -> Finding:
    """Return a finding that prevents the use of the pool as configured."""
    return Finding("fail", subject, text, remedy)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a line for each finding, and its remedy below it."""
    width = max((len(finding.subject) for finding in findings), default=0)
    for finding in findings:
        print(f"{finding.level:<5} {finding.subject:<{width}}  {finding.text}")
        if finding.remedy:
            print(f"{'':<5} {'':<{width}}  -> {finding.remedy}")


def print_json(value: object) -> None:
    """Print one JSON document; findings and other dataclasses become objects."""
    json.dump(value, sys.stdout, indent=2, default=asdict)
    print()


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print ``rows`` below ``heads``: the first column aligned left, the others right."""
    print("\n".join(format_table(heads, rows)))


def format_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table as ``print_table`` prints it."""
    cells = [list(heads), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *padded]).rstrip())
    return lines
