"""The merge of two records takes the later parts, in any order of arrival and with any clocks."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.sharing.records import NEVER, Versions, merge_records, read_versions
from tests.router.sharing.links import make_record

WRITERS = st.sampled_from("abc")


def read_parts(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["fields"], record["orders"]["draining"]


def build(count: int, writer: str, ordered: int, orderer: str) -> dict[str, Any]:
    """Return a record with contents that depend only on its versions."""
    orders = {"version": [ordered, orderer], "draining": f"{ordered}{orderer}"}
    return {"version": [count, writer], "fields": f"{count}{writer}", "orders": orders}


RECORDS = st.lists(st.builds(build, st.integers(0, 4), WRITERS, st.integers(0, 4), WRITERS), min_size=1, max_size=5)


@given(RECORDS)
def test_the_order_and_the_repetition_of_records_do_not_change_the_result(
    records: list[dict[str, Any]],
) -> None:
    merged = [functools.reduce(merge_records, order, None) for order in itertools.permutations([*records, records[0]])]
    assert all(each == merged[0] for each in merged)


def test_registration_and_commands_are_replaced_separately() -> None:
    registered, ordered = build(2, "a", 0, ""), build(1, "b", 7, "b")
    assert read_parts(merge_records(registered, ordered)) == ("2a", "7b")
    assert read_parts(merge_records(ordered, registered)) == ("2a", "7b")


def test_a_renewal_of_the_same_version_updates_the_health() -> None:
    renewed = {**make_record(1), "healthy": False}
    assert merge_records({**make_record(1), "healthy": True}, renewed) == renewed


def test_a_new_version_is_later_than_all_that_its_writer_knows() -> None:
    first, second = Versions("a"), Versions("b")
    versions = [first.make_next() for _ in range(3)]
    assert versions == sorted(versions) == [(1, "a"), (2, "a"), (3, "a")]
    assert first.make_next() > second.make_next() > NEVER
    second.note((9, "a"), (4, "c"))
    assert second.make_next() == (10, "b")
    second.note((3, "a"))
    assert second.make_next() == (11, "b")


def test_the_names_decide_between_writers_that_do_not_know_each_other() -> None:
    assert Versions("a").make_next() < Versions("b").make_next()


@pytest.mark.parametrize(
    "record",
    [
        *(None, 5, "text", [], {}, {"version": [1, "a"]}, {"version": [1, "a"], "orders": None}),
        *({**make_record(1), "version": each} for each in (None, 1.5, [1], [1, "a", 2], ["1", "a"], [1, 2], "1a")),
        {"written_at": 1e9, "is_news": True, "draining": True},
    ],
)
def test_an_invalid_record_is_refused(record: Any) -> None:
    with pytest.raises(ValueError, match=r"not a record of an instance|not a version|unpack"):
        read_versions(record)
