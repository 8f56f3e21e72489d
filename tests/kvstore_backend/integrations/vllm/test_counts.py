"""Counters of one half of the vLLM connector."""

from __future__ import annotations

from kvstore_backend.integrations.vllm.counts import Counts, add_counts


def test_blocks_are_added_by_outcome_with_their_bytes_and_seconds() -> None:
    counts = Counts("abc")
    counts.add_operation("load", 0.5, 100, ok=2, failed=1)
    counts.add_operation("load", 0.25, 50, ok=1)
    assert counts.pop_counts() == {
        "abc": {"load ok": 3, "load failed": 1, "load bytes": 150, "load seconds": 0.75},
    }


def test_pop_counts_returns_each_count_once() -> None:
    counts = Counts("abc")
    counts.add_decision("load")
    counts.add_decision("load")
    assert counts.pop_counts() == {"abc": {"decide load": 2}}
    assert counts.pop_counts() == {}


def test_an_operation_without_blocks_is_not_counted() -> None:
    counts = Counts("abc")
    counts.add_operation("lookup", ok=0, absent=0)
    assert counts.pop_counts() == {}


def test_add_counts_does_not_change_its_arguments() -> None:
    one, other = {"a": {"load ok": 1, "load failed": 2}}, {"a": {"load ok": 3}, "b": {"save ok": 4}}
    assert add_counts(one, other) == {"a": {"load ok": 4, "load failed": 2}, "b": {"save ok": 4}}
    assert (one, other) == ({"a": {"load ok": 1, "load failed": 2}}, {"a": {"load ok": 3}, "b": {"save ok": 4}})
