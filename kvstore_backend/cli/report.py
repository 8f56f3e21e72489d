"""A command's findings and figures, printed for people and for machines."""

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
    """One line: how it stands with ``subject``, in one sentence, and a remedy."""

    level: Literal["ok", "warn", "fail"]
    subject: str
    text: str
    remedy: str = ""


def ok(subject: str, text: str) -> Finding:
    """All is well."""
    return Finding("ok", subject, text)


def warn(subject: str, text: str, remedy: str = "") -> Finding:
    """The pool can be used, but somebody should know this."""
    return Finding("warn", subject, text, remedy)


def fail(subject: str, text: str, remedy: str = "") -> Finding:
    """The pool cannot be used as configured."""
    return Finding("fail", subject, text, remedy)


def print_findings(findings: Sequence[Finding]) -> None:
    """A line each, and under it the remedy."""
    width = max((len(finding.subject) for finding in findings), default=0)
    for finding in findings:
        print(f"{finding.level:<5} {finding.subject:<{width}}  {finding.text}")
        if finding.remedy:
            print(f"{'':<5} {'':<{width}}  -> {finding.remedy}")


def print_json(value: object) -> None:
    """One JSON document; findings and other dataclasses as objects."""
    json.dump(value, sys.stdout, indent=2, default=asdict)
    print()


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """``rows`` under ``heads``: the first column to the left, the others to the right."""
    print("\n".join(format_table(heads, rows)))


def format_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """The lines of such a table."""
    cells = [list(heads), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *padded]).rstrip())
    return lines
