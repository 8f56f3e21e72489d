"""Computes further metrics from polled values: origins of prompt tokens, outcomes of requests, quantiles.

The origin of a prompt token is the place that its KV came from: the instance's own cache, the pool, a hand-over, or
computation by the instance.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from router.console.dashboard.figures import HANDED_OVER, ORIGINS, RouterFigures
from router.console.dashboard.history import History, Moment, Span

__all__ = [
    "count_origins",
    "count_origins_by_instance",
    "count_work",
    "estimate_quantile",
    "pick_requests",
    "read_router",
    "share_origins",
    "sum_answers",
]

K = TypeVar("K", bound=Hashable)


def estimate_quantile(quantile: float, counts: Mapping[float, float]) -> float | None:
    """Estimate a quantile like Prometheus: the value that is not exceeded by this fraction of the observations.

    Args:
        quantile: the fraction, from 0 to 1.
        counts: for each bound, including infinity, the number of observations that do not exceed it.

    Returns:
        The value; None if there are no observations.
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
    """Return the counters of prompt tokens, by instance and then by origin; only for ``instance`` unless it is ``""``.

    If all instances are counted, a decode instance only has the tokens that were handed over to it, because its prefill
    instance counts the prompt, too.
    """
    counted: dict[str, Mapping[str, float]] = {}
    for key, report in moment.instances.items():
        if report.figures is None or report.figures.origins is None or instance not in ("", key):
            continue
        origins = report.figures.origins
        if not instance and report.listed.role == "decode":
            origins = {HANDED_OVER: origins[HANDED_OVER]}
        counted[key] = origins
    return counted


def count_work(moment: Moment) -> dict[str, Mapping[tuple[str, str], float]]:
    """Return the counters of each instance's work, for the methods of ``History``, which sum counters with equal keys.

    The outer keys are instances. The inner keys are pairs of an instance and the name of a counter: one of ``ORIGINS``,
    ``generated``, ``first_tokens`` and ``first_token_seconds``.
    """
    counted: dict[str, Mapping[tuple[str, str], float]] = {}
    for key, report in moment.instances.items():
        if (figures := report.figures) is not None:
            counts = {
                **(figures.origins or {}),
                "generated": figures.generated or 0.0,
                "first_tokens": figures.first_tokens,
                "first_token_seconds": figures.first_token_seconds,
            }
            counted[key] = {(key, name): count for name, count in counts.items()}
    return counted


def count_origins_by_instance(history: History, span: Span) -> dict[str, dict[str, float]]:
    """Return the increase of prompt tokens in a span, by instance and then by origin.

    An instance that does not report its prompt tokens is omitted. The counters of a poll are read once, not once for
    each instance, because there may be hundreds of instances.
    """
    increases: dict[str, dict[str, float]] = {}
    for (instance, name), increase in history.count_span(span, count_work).items():
        if name in ORIGINS:
            increases.setdefault(instance, {})[name] = increase
    return increases


def share_origins(tokens: Mapping[str, float], *, with_handed_over: bool) -> dict[str, float]:
    """Return the fraction of tokens from each origin, from 0 to 1; empty if there are no tokens.

    Args:
        tokens: number of tokens by origin.
        with_handed_over: whether tokens that were handed over are part of the total.
    """
    wanted = [origin for origin in ORIGINS if with_handed_over or origin != HANDED_OVER]
    total = sum(tokens.get(origin, 0.0) for origin in wanted)
    return {origin: tokens.get(origin, 0.0) / total for origin in wanted} if total > 0 else {}


def pick_requests(requests: Sequence[Mapping[str, Any]], chosen: str) -> list[Mapping[str, Any]]:
    """Return the requests of one kind.

    Args:
        requests: the requests, in the format of the access log.
        chosen: the kind. ``slow``: all requests, sorted by the time to the first byte, longest first. ``failed``:
            requests that were refused, failed, or ended with an error. ``missed``: requests with less than half of the
            prompt tokens from a cache. Any other value: all requests.
    """
    if chosen == "slow":
        return sorted(requests, key=lambda each: float(each.get("first_byte_ms") or 0.0), reverse=True)
    if chosen == "failed":
        return [each for each in requests if each.get("error") or (each["status"] >= 400 and each["status"] != 499)]
    if chosen == "missed":
        counted = [each for each in requests if each.get("prompt_tokens") and each.get("cached_tokens") is not None]
        return [each for each in counted if each["cached_tokens"] * 2 < each["prompt_tokens"]]
    return list(requests)


def sum_answers(by_status: Mapping[str, float]) -> dict[str, float]:
    """Return the number of requests by outcome: ``answered``, ``refused``, ``left`` (by the client) and ``failed``."""
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
    """Return a function that applies ``read`` to the router's values of one poll, for the methods of ``History``."""

    def read_counters(moment: Moment) -> Mapping[str, Mapping[K, float]]:
        return {} if moment.router is None else {"router": read(moment.router)}

    return read_counters
