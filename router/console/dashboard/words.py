"""Text formats for the page: metrics with their units, and other texts."""

from __future__ import annotations

from collections.abc import Mapping

from router.console.dashboard.figures import COMPUTED, HANDED_OVER, OWN_CACHE, POOL
from router.console.dashboard.history import InstanceReport

__all__ = [
    "NOTHING",
    "ORIGIN_NAMES",
    "ORIGIN_TEXTS",
    "describe_trouble",
    "format_count",
    "format_rate",
    "format_seconds",
    "format_share",
    "make_sentence",
]

ORIGIN_NAMES: Mapping[str, str] = {
    OWN_CACHE: "Own cache",
    POOL: "Pool",
    HANDED_OVER: "Handed over",
    COMPUTED: "Computed",
}
ORIGIN_TEXTS: Mapping[str, str] = {
    OWN_CACHE: "still in the instance's own memory",
    POOL: "read from the pool that all instances share",
    HANDED_OVER: "passed on from a prefill to a decode instance",
    COMPUTED: "not stored anywhere yet, so worked out anew",
}

NOTHING = "\u2013"
"""Shown if there is no value."""

_BREAKERS = {"open": "left out, as requests fail there", "half_open": "one request is being tried"}


def format_count(value: float) -> str:
    """Format a whole number with thousands separators."""
    return f"{value:,.0f}"


def format_rate(value: float) -> str:
    """Format a per-second rate; more decimals for small values."""
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def format_share(share: float) -> str:
    """Format a fraction in per cent. Only exactly 0 and 1 become "0 %" and "100 %"."""
    percent = share * 100
    if 0 < percent < 0.5:
        return "< 1 %"
    if 99.5 <= percent < 100:
        return "> 99 %"
    return f"{percent:.0f} %"


def format_seconds(seconds: float | None) -> str:
    """Format a time, in milliseconds below one second; a dash if there is none."""
    if seconds is None:
        return NOTHING
    if seconds < 0.0995:
        return f"{seconds * 1e3:.1f} ms" if seconds < 0.00995 else f"{seconds * 1e3:.0f} ms"
    return (
        f"{seconds * 1e3:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s" if seconds < 99.5 else f"{seconds:.0f} s"
    )


def make_sentence(said: object) -> str:
    """Return the sentence of an error, with exactly one full stop at its end."""
    return f"{str(said).rstrip('. ')}."


def describe_trouble(report: InstanceReport) -> str:
    """Return an instance's faults as text; ``""`` if it has none."""
    listed, figures = report.listed, report.figures
    said = []
    if listed.state == "unhealthy":
        said.append(listed.trouble or "it does not answer")
    elif report.trouble:
        said.append(report.trouble)
    if listed.breaker in _BREAKERS:
        said.append(_BREAKERS[listed.breaker])
    if figures is not None and figures.pool_paused:
        said.append("it leaves the pool alone for now, as calls to it failed: prompts are computed")
    if figures is not None and figures.rejected:
        said.append(f"{format_count(figures.rejected)} blocks from the pool did not verify")
    return "; ".join(said)
