"""Formats metrics with their units, and other texts of the page."""

from __future__ import annotations

from collections.abc import Mapping

from router.console.dashboard.figures import COMPUTED, HANDED_OVER, OWN_CACHE, POOL
from router.console.dashboard.history import InstanceReport

__all__ = [
    "NOTHING",
    "ORIGIN_NAMES",
    "ORIGIN_TEXTS",
    "REASON_TEXTS",
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
    OWN_CACHE: "cached in the instance's own memory",
    POOL: "read from the pool that all instances share",
    HANDED_OVER: "transferred from a prefill to a decode instance",
    COMPUTED: "computed, because no cache had them",
}

REASON_TEXTS: Mapping[str, str] = {
    "policy": "the policy that chose this instance",
    "cost": "queued work plus alpha times the request's own work, in tokens; the least cost was chosen",
    "queued": "tokens of work that waited at this instance before this request",
    "own tokens": "prompt tokens that the router expected in the instance's own cache; an estimate",
    "own unused secs": "seconds since a request last used the part of this prompt in the instance's own cache",
    "pool tokens": "prompt tokens that the router expected in the pool only; an estimate",
    "alpha": "cost of a token of work, in queued tokens; it grows with the number of waiting requests",
    "fetch cost": "cost of a token from the pool; computing one costs 1",
    "cached tokens expected": "prompt tokens that the router expected in a cache; an estimate",
    "candidates": "number of instances to choose from",
    "turn": "number of choices before this one; the instances are chosen in turn",
    "requests": "requests that ran at this instance",
    "other requests": "requests that ran at the other instance that was considered",
    "tokens": "prompt tokens that this instance had to process before this request",
    "score": "the score of this instance, the lowest of all; a score grows with the load",
    "hit ratio": "part of the prompt that the router expected in the instance's own cache, 0 to 1",
    "load difference": "difference of the highest and the lowest load; it was too large to consider caches",
    "by": "what the choice depends on: a session's key, the beginning of the prompt, or the fewest requests",
    "overloaded": "number of instances that were not considered because they had too many requests",
}
"""The meaning of each value in the reasons of a policy."""

NOTHING = "\u2013"
"""The text in place of a missing value."""

_BREAKERS = {"open": "not used, because requests failed there", "half_open": "one request is being tried"}


def format_count(value: float | None) -> str:
    """Format a number without decimals, with thousands separators; ``NOTHING`` if there is none."""
    return NOTHING if value is None else f"{value:,.0f}"


def format_rate(value: float) -> str:
    """Format a rate per second. Small values have more decimals."""
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def format_share(share: float | None) -> str:
    """Format a fraction as a percentage; ``NOTHING`` if there is none.

    Only exactly 0 and 1 become "0 %" and "100 %".
    """
    if share is None:
        return NOTHING
    percent = share * 100
    if 0 < percent < 0.5:
        return "< 1 %"
    if 99.5 <= percent < 100:
        return "> 99 %"
    return f"{percent:.0f} %"


def format_seconds(seconds: float | None) -> str:
    """Format a time, in milliseconds below one second; ``NOTHING`` if there is none."""
    if seconds is None:
        return NOTHING
    if seconds < 0.0995:
        return f"{seconds * 1e3:.1f} ms" if seconds < 0.00995 else f"{seconds * 1e3:.0f} ms"
    return (
        f"{seconds * 1e3:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s" if seconds < 99.5 else f"{seconds:.0f} s"
    )


def make_sentence(text: object) -> str:
    """Return the text of an error with exactly one full stop at its end."""
    return f"{str(text).rstrip('. ')}."


def describe_trouble(report: InstanceReport) -> str:
    """Return the problems of an instance as text; ``""`` if it has none."""
    listed, figures = report.listed, report.figures
    parts = []
    if listed.state == "unhealthy":
        parts.append(listed.trouble or "it does not answer")
    elif report.trouble:
        parts.append(report.trouble)
    if listed.breaker in _BREAKERS:
        parts.append(_BREAKERS[listed.breaker])
    if figures is not None and figures.pool_paused:
        parts.append("it does not use the pool now, because calls to it failed; prompts are computed")
    if figures is not None and figures.rejected:
        parts.append(f"{format_count(figures.rejected)} blocks from the pool had a wrong checksum")
    return "; ".join(parts)
