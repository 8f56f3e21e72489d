"""Derived metrics: origins of prompts, outcomes of requests, quantiles. Plain functions on plain data."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from router.console.dashboard.figures import COMPUTED, HANDED_OVER, ORIGINS, POOL, RouterFigures
from router.console.dashboard.history import Moment

__all__ = ["count_origins", "estimate_quantile", "read_router", "share_origins", "sum_answers"]

K = TypeVar("K", bound=Hashable)


def estimate_quantile(quantile: float, counts: Mapping[float, float]) -> float | None:
    """Estimate the quantile as Prometheus does: the value that this fraction of observations does not exceed; None if
    there are no observations.

    Args:
        counts: number of observations that do not exceed each bound, including infinity.
    """
    bounds = sorted(counts)
    if not bounds or counts[bounds[-1]] <= 0:
        return None
    wanted = quantile * counts[bounds[-1]]
    below, count_below = 0.0, 0.0
    for bound in bounds:
        count = counts[bound]
        if count >= wanted and count > count_below:
            if bound == float("inf"):
                return below
            return below + (bound - below) * (wanted - count_below) / (count - count_below)
        below, count_below = bound, count
    return below


def count_origins(moment: Moment, instance: str = "") -> dict[str, Mapping[str, float]]:
    """Count prompt tokens by origin, of one instance or, with ``""``, of all. Each prompt counts once.

    The prefill instance has already counted a decode instance's prompt. So of a decode instance only those tokens count
    that it read from the pool or computed itself.
    """
    counted: dict[str, Mapping[str, float]] = {}
    for key, report in moment.instances.items():
        if report.figures is None or report.figures.origins is None or instance not in ("", key):
            continue
        origins = report.figures.origins
        if not instance and report.listed.role == "decode":
            origins = {origin: origins[origin] for origin in (POOL, HANDED_OVER, COMPUTED)}
        counted[key] = origins
    return counted


def share_origins(tokens: Mapping[str, float], *, with_handed_over: bool) -> dict[str, float]:
    """Return the fraction of each origin, 0 to 1; empty if there are no tokens.

    Args:
        with_handed_over: whether transferred tokens are part of the total.
    """
    wanted = [origin for origin in ORIGINS if with_handed_over or origin != HANDED_OVER]
    total = sum(tokens.get(origin, 0.0) for origin in wanted)
    return {origin: tokens.get(origin, 0.0) / total for origin in wanted} if total > 0 else {}


def sum_answers(by_status: Mapping[str, float]) -> dict[str, float]:
    """Count requests by outcome: ``answered``, ``refused``, ``left`` (the client disconnected) and ``failed``."""
    sums = {"answered": 0.0, "refused": 0.0, "left": 0.0, "failed": 0.0}
    for status, count in by_status.items():
        if status == "499":
            sums["left"] += count
        elif status.startswith("5"):
            sums["failed"] += count
        elif status.startswith("4"):
            sums["refused"] += count
        else:
            sums["answered"] += count
    return sums


def read_router(
    read: Callable[[RouterFigures], Mapping[K, float]],
) -> Callable[[Moment], Mapping[str, Mapping[K, float]]]:
    """Return a reader of the router's counters for a ``History``."""

    def read_counters(moment: Moment) -> Mapping[str, Mapping[K, float]]:
        return {} if moment.router is None else {"router": read(moment.router)}

    return read_counters
