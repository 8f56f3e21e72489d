"""Appearance of the page: its colours, each of which has one meaning everywhere, and its style sheet ``style.css``."""

from __future__ import annotations

from pathlib import Path

__all__ = ["COLOURS", "ICON", "LINE_COLOURS", "STYLE"]

COLOURS = {
    "own_cache": "var(--own)",
    "pool": "var(--pool)",
    "handed_over": "var(--handed)",
    "computed": "var(--computed)",
    "muted": "var(--muted)",
    "bad": "var(--bad)",
    "warn": "var(--warn)",
    "accent": "var(--accent)",
}
"""The colours in CSS notation. Origins have Okabe and Ito's colours, which colour-blind people can distinguish, too."""

LINE_COLOURS = ("var(--line-1)", "var(--line-2)", "var(--line-3)")
"""Colours of the lines in one chart, from the faintest to the strongest."""

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 20">'
    '<rect x="1" y="1" width="8" height="8" rx="2" fill="#0072b2"/>'
    '<rect x="11" y="1" width="8" height="8" rx="2" fill="#0072b2"/>'
    '<rect x="1" y="11" width="8" height="8" rx="2" fill="#009e73"/>'
    '<rect x="11" y="11" width="8" height="8" rx="2" fill="#d55e00"/></svg>'
)

STYLE = Path(__file__).with_name("style.css").read_text()
