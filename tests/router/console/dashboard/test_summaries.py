"""Summaries of figures: quantiles, the origins of prompts, the outcomes of requests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest

from router.console.dashboard import summaries
from router.console.dashboard.figures import InstanceFigures, Listed
from router.console.dashboard.history import History, InstanceReport, Moment, Span
from router.console.dashboard.summaries import (
    count_origins,
    count_origins_by_instance,
    count_work,
    estimate_quantile,
    pick_requests,
    share_origins,
    sum_answers,
)

INFINITE = float("inf")


def make_report(key: str, role: str, origins: Mapping[str, float] | None) -> InstanceReport:
    figures = InstanceFigures(origins, None, None, None, None, None, False, {}, {}, 0.0)
    return InstanceReport(Listed(key, role, ""), figures)


@pytest.mark.parametrize(
    ("quantile", "counts", "seconds"),
    [
        (0.5, {0.1: 0, 0.2: 10, INFINITE: 10}, pytest.approx(0.15)),
        (0.9, {0.1: 5, 0.2: 10, INFINITE: 10}, pytest.approx(0.18)),
        (0.99, {0.1: 5, INFINITE: 10}, 0.1),
        (0.5, {0.1: 0, INFINITE: 0}, None),
        (0.5, {}, None),
    ],
    ids=["in the first bucket", "in the second bucket", "above all bounds", "no observations", "no buckets"],
)
def test_quantiles_are_estimated_as_prometheus_does(
    quantile: float, counts: Mapping[float, float], seconds: float | None
) -> None:
    assert estimate_quantile(quantile, counts) == seconds


def test_a_pairs_prompt_counts_once_for_all_instances() -> None:
    prefill = make_report("p", "prefill", {"own_cache": 10, "pool": 20, "handed_over": 0, "computed": 30})
    decode = make_report("d", "decode", {"own_cache": 5, "pool": 0, "handed_over": 50, "computed": 5})
    moment = Moment(1, instances={"p": prefill, "d": decode, "silent": make_report("silent", "mixed", None)})
    assert count_origins(moment) == {
        "p": {"own_cache": 10, "pool": 20, "handed_over": 0, "computed": 30},
        "d": {"handed_over": 50},
    }
    assert partial(count_origins, instance="d")(moment)["d"]["own_cache"] == 5


def test_the_origins_of_each_instance_are_read_once_from_each_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for a view of hundreds of instances does not grow with the square of their number."""
    history = History()
    for time in (10, 20):
        origins = {"own_cache": 0, "pool": 0, "handed_over": 0, "computed": time}
        reports = {key: make_report(key, "mixed", origins) for key in ("a", "b")}
        history.add(Moment(time, instances={**reports, "silent": make_report("silent", "mixed", None)}))
    read: list[float] = []

    def note_and_count(moment: Moment) -> dict[str, Mapping[tuple[str, str], float]]:
        read.append(moment.time)
        return count_work(moment)

    monkeypatch.setattr(summaries, "count_work", note_and_count)
    increase = {"own_cache": 0, "pool": 0, "handed_over": 0, "computed": 10}
    assert count_origins_by_instance(history, Span("20 s", 20, 2)) == {"a": increase, "b": increase}
    assert read == [10, 20]


def test_shares_add_up_to_one_with_and_without_direct_transfers() -> None:
    tokens = {"own_cache": 1.0, "pool": 1.0, "handed_over": 2.0, "computed": 0.0}
    assert share_origins(tokens, with_handed_over=False) == {"own_cache": 0.5, "pool": 0.5, "computed": 0}
    assert share_origins(tokens, with_handed_over=True)["handed_over"] == 0.5
    assert share_origins({}, with_handed_over=True) == {}


def test_responses_are_counted_by_their_outcome() -> None:
    answers = {"200": 5.0, "429": 2.0, "499": 1.0, "502": 1.0, "504": 1.0}
    assert sum_answers(answers) == {"answered": 5, "refused": 2, "left": 1, "failed": 2}


@pytest.mark.parametrize(
    ("chosen", "picked"),
    [("", "abcd"), ("slow", "bacd"), ("failed", "bd"), ("missed", "a")],
)
def test_the_last_requests_are_picked_by_outcome_time_or_cached_tokens(chosen: str, picked: str) -> None:
    requests = [
        {"request_id": "a", "status": 200, "first_byte_ms": 2.0, "prompt_tokens": 10, "cached_tokens": 4},
        {"request_id": "b", "status": 200, "first_byte_ms": 3.0, "error": "instance_lost"},
        {"request_id": "c", "status": 499, "first_byte_ms": 0.0, "prompt_tokens": None, "cached_tokens": None},
        {"request_id": "d", "status": 429, "first_byte_ms": 0.0, "prompt_tokens": 10, "cached_tokens": 5},
    ]
    assert "".join(each["request_id"] for each in pick_requests(requests, chosen)) == picked
