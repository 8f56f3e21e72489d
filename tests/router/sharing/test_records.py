"""Of two records the later parts count, in whatever order they are heard, and whatever clocks say."""

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


def members(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["fields"], record["orders"]["draining"]


def told(count: int, writer: str, ordered: int, orderer: str) -> dict[str, Any]:
    """What is told is the same wherever the version is."""
    orders = {"version": [ordered, orderer], "draining": f"{ordered}{orderer}"}
    return {"version": [count, writer], "fields": f"{count}{writer}", "orders": orders}


RECORDS = st.lists(st.builds(told, st.integers(0, 4), WRITERS, st.integers(0, 4), WRITERS), min_size=1, max_size=5)


@given(RECORDS)
def test_who_hears_the_same_records_knows_the_same_in_whatever_order_and_however_often(
    records: list[dict[str, Any]],
) -> None:
    merged = [functools.reduce(merge_records, order, None) for order in itertools.permutations([*records, records[0]])]
    assert all(each == merged[0] for each in merged)


def test_registration_and_orders_are_replaced_apart() -> None:
    registered, ordered = told(2, "a", 0, ""), told(1, "b", 7, "b")
    assert members(merge_records(registered, ordered)) == ("2a", "7b")
    assert members(merge_records(ordered, registered)) == ("2a", "7b")


def test_a_renewal_of_the_same_version_says_how_the_instance_is_now() -> None:
    renewed = {**make_record(1), "healthy": False}
    assert merge_records({**make_record(1), "healthy": True}, renewed) == renewed


def test_a_version_is_later_than_all_that_its_writer_knew_of() -> None:
    first, second = Versions("a"), Versions("b")
    given = [first.make_next() for _ in range(3)]
    assert given == sorted(given) == [(1, "a"), (2, "a"), (3, "a")]
    assert first.make_next() > second.make_next() > NEVER
    second.note((9, "a"), (4, "c"))
    assert second.make_next() == (10, "b")
    second.note((3, "a"))
    assert second.make_next() == (11, "b")


def test_of_two_writers_that_did_not_know_of_each_other_the_names_decide() -> None:
    assert Versions("a").make_next() < Versions("b").make_next()


@pytest.mark.parametrize(
    "record",
    [
        *(None, 5, "text", [], {}, {"version": [1, "a"]}, {"version": [1, "a"], "orders": None}),
        *({**make_record(1), "version": each} for each in (None, 1.5, [1], [1, "a", 2], ["1", "a"], [1, 2], "1a")),
        {"written_at": 1e9, "is_news": True, "draining": True},
    ],
)
def test_what_is_no_record_of_this_form_is_refused_with_a_sentence(record: Any) -> None:
    with pytest.raises(ValueError, match=r"not a record of an instance|not a version|unpack"):
        read_versions(record)
