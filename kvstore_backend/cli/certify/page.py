"""Writes the results of ``kvstore certify`` as one HTML file without references to other files."""

from __future__ import annotations

import html
from collections.abc import Sequence

from kvstore_backend.cli.certify.cases import Result

__all__ = ["COLUMNS", "describe_result", "make_page"]

COLUMNS = ("case", "requests", "wrong", "failed", "longest s", "hits", "healed s", "result")

_STYLE = """
:root { color-scheme: light dark; --line: #c8ccd2; --bad: #b3261e; --good: #1b6e3c; --text: #1d2126; --back: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --line: #474d55; --bad: #ff8a80; --good: #7ddc9c; --text: #e6e8eb; --back: #16191d; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: right; vertical-align: top; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
.bad { color: var(--bad); } .good { color: var(--good); }
"""


def describe_result(result: Result) -> tuple[str, ...]:
    """Return the cells of a result's line in a table, in the order of ``COLUMNS``."""
    if result.skipped:
        return (result.case, "", "", "", "", "", "", "not run")
    healed = "" if result.healed_seconds is None else f"{result.healed_seconds:.1f}"
    figures = (str(result.requests), str(result.wrong), str(result.failed), f"{result.longest_seconds:.1f}")
    return (result.case, *figures, f"{result.hits:.0f}", healed, "FAILED" if result.problems else "passed")


def make_page(
    title: str,
    facts: Sequence[tuple[str, str]],
    columns: Sequence[str],
    results: Sequence[tuple[Sequence[str], Sequence[str]]],
) -> str:
    """Return the HTML text of a page with a table of results.

    Args:
        title: title of the page.
        facts: names and values of further information, such as the time and the command.
        columns: titles of the table's columns.
        results: for each line of the table its cells, of which the last one has the result, and sentences that explain
            the result.
    """
    heads = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    rows = []
    for line, sentences in results:
        *cells, last = map(html.escape, line)
        kind = {"passed": "good", "FAILED": "bad"}.get(last, "")
        reasons = "<br>".join(map(html.escape, sentences))
        rows.append(
            "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + f'<td class="{kind}">{last}<br>{reasons}</td></tr>'
        )
    lines = "".join(f"<li>{html.escape(name)}: {html.escape(value)}</li>" for name, value in facts)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1><ul>{lines}</ul>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></body></html>\n"
    )
