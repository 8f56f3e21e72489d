"""The last requests are kept, within bounds, and found by the ids that clients and routers have for them."""

from __future__ import annotations

import pytest

from engine.scheduling.request import Request, SamplingParams, Sequence
from engine.telemetry.why_miss.recent_requests import RecentRequests, digest_salt


def ended(request_id: str, num_tokens: int = 40, choice_of: str = "") -> Sequence:
    return Sequence(Request(request_id, tuple(range(num_tokens)), SamplingParams(1), choice_of=choice_of), 16)


@pytest.mark.parametrize("asked", ["one", "chatcmpl-one", "cmpl-one", "resp_one", "msg_one"])
def test_a_request_is_found_by_its_names(asked: str) -> None:
    recent = RecentRequests()
    recent.add_sequence(ended("one"))
    recent.add_sequence(ended("two"))
    found = recent.find_request(asked)
    assert found is not None
    assert (found.request_id, list(found.tokens)) == ("one", list(range(40)))
    assert recent.find_request("three") is None


def test_no_more_tokens_are_kept_than_fit() -> None:
    recent = RecentRequests(max_tokens=100)
    for name in "abcd":
        recent.add_sequence(ended(name))
    assert [each.request_id for each in recent] == ["d", "c"]
    recent.add_sequence(ended("long", 1000))
    assert [each.request_id for each in recent] == ["long"]


def test_further_choices_are_one_request() -> None:
    recent = RecentRequests()
    recent.add_sequence(ended("one_1", choice_of="one"))
    assert list(recent) == []


def test_salts_are_told_apart_and_not_known() -> None:
    assert digest_salt("") == ""
    assert len({digest_salt("ann"), digest_salt("bob"), "ann", "bob"}) == 4
