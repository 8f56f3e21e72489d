"""The figures of several processes as one, as if they were a single router."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client.core import Metric

__all__ = ["add_counts", "dump_families", "merge_families"]

# Of these each process has a part. Any other gauge is about all of them already, or a mean of which one is enough.
_ADDED_GAUGES = frozenset(
    {"router_running_requests", "router_queued_requests", "router_queued_requests_by_priority", "router_workers"}
)
# Of these each process has a count of all, as it was when it started.
_HIGHEST_COUNTS = frozenset({"router_worker_restarts"})

_Dump = Sequence[Any]
# By the sample's name and its labels.
_Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def dump_families(families: Iterable[Metric]) -> list[_Dump]:
    """Families of figures as plain values, for another process."""
    return [
        (family.name, family.documentation, family.type, [(s.name, s.labels, s.value) for s in family.samples])
        for family in families
    ]


def add_counts(known: Sequence[_Dump], figures: Sequence[_Dump]) -> list[_Dump]:
    """The counts of processes that have ended: those ``known``, and those of one more. Its gauges ended with it."""
    added = [family for family in merge_families((), [known, figures]) if family.type != "gauge"]
    for family in added:
        family.samples = [sample for sample in family.samples if "quantile" not in sample.labels]
    return dump_families(added)


def merge_families(own: Iterable[Metric], others: Iterable[Sequence[_Dump]]) -> list[Metric]:
    """``own`` families with the figures of other processes.

    Counts are added, those of a histogram's buckets, too. Quantiles cannot be: of those the highest is taken, so that
    none looks better than it is.
    """
    merged: dict[str, Metric] = {}
    values: dict[str, _Values] = {}
    for dump in (dump_families(own), *others):
        for name, documentation, kind, samples in dump:
            merged.setdefault(name, Metric(name, documentation, kind))
            _add_samples(values.setdefault(name, {}), name, kind, samples)
    for name, family in merged.items():
        for (sample, labels), value in values[name].items():
            family.add_sample(sample, dict(labels), value)
    return list(merged.values())


def _add_samples(known: _Values, name: str, kind: str, samples: Iterable[tuple[str, dict[str, str], float]]) -> None:
    """Merge the samples of a family into those that are ``known``."""
    is_added = kind != "gauge" or name in _ADDED_GAUGES
    is_highest = name in _HIGHEST_COUNTS
    for sample, labels, value in samples:
        key = (sample, tuple(labels.items()))
        if key not in known:
            known[key] = value
        elif is_highest or "quantile" in labels:
            known[key] = max(known[key], value)
        elif is_added:
            known[key] += value
