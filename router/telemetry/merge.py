"""Merges the metrics of several processes, as if they were one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client.core import Metric

__all__ = ["add_counts", "dump_families", "merge_families"]

# Gauges whose values are added, because each process has a part of the total. Of other gauges the value of the first
# process is used: it is already a total over all processes, or a mean.
_ADDED_GAUGES = frozenset(
    {"router_running_requests", "router_queued_requests", "router_queued_requests_by_priority", "router_workers"}
)
# Counters of which the highest value is used. Each process has the total at the time of its start.
_HIGHEST_COUNTS = frozenset({"router_worker_restarts"})

_Dump = Sequence[Any]
# The values of a family. A key is the name of a sample and its labels.
_Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def dump_families(families: Iterable[Metric]) -> list[_Dump]:
    """Return metric families as plain values, which can be sent to another process."""
    return [
        (family.name, family.documentation, family.type, [(s.name, s.labels, s.value) for s in family.samples])
        for family in families
    ]


def add_counts(known: Sequence[_Dump], figures: Sequence[_Dump]) -> list[_Dump]:
    """Add the counters of an ended process to the ``known`` counters. The gauges and quantiles are dropped."""
    added = [family for family in merge_families((), [known, figures]) if family.type != "gauge"]
    for family in added:
        family.samples = [sample for sample in family.samples if "quantile" not in sample.labels]
    return dump_families(added)


def merge_families(own: Iterable[Metric], others: Iterable[Sequence[_Dump]]) -> list[Metric]:
    """Merge ``own`` families with the metrics of other processes.

    Counters are added, also those of a histogram's buckets. Quantiles cannot be added, so the highest value of all
    processes is used.
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
    """Merge the samples of a family into the ``known`` samples."""
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
