"""Counters of a half of the vLLM connector."""

from __future__ import annotations

from kvstore_backend.integrations.vllm.counts import Counts, add_counts


def test_operations_add_up_by_outcome_with_their_bytes_and_seconds() -> None:
    counts = Counts("abc")
    counts.add_operation("load", 0.5, 100, ok=2, failed=1)
    counts.add_operation("load", 0.25, 50, ok=1)
    assert counts.pop_counts() == {
        "abc": {"load ok": 3, "load failed": 1, "load bytes": 150, "load seconds": 0.75},
    }


def test_what_was_counted_is_told_once() -> None:
    counts = Counts("abc")
    counts.add_decision("load")
    counts.add_decision("load")
    assert counts.pop_counts() == {"abc": {"decide load": 2}}
    assert counts.pop_counts() == {}


def test_an_operation_of_nothing_counts_nothing() -> None:
    counts = Counts("abc")
    counts.add_operation("lookup", ok=0, absent=0)
    assert counts.pop_counts() == {}


def test_counts_of_workers_add_up_and_stay_as_they_were() -> None:
    one, other = {"a": {"load ok": 1, "load failed": 2}}, {"a": {"load ok": 3}, "b": {"save ok": 4}}
    assert add_counts(one, other) == {"a": {"load ok": 4, "load failed": 2}, "b": {"save ok": 4}}
    assert (one, other) == ({"a": {"load ok": 1, "load failed": 2}}, {"a": {"load ok": 3}, "b": {"save ok": 4}})
