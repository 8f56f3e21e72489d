"""What happened between two looks: growth in pieces of time, quantiles, shares of origins."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest

from router.console.dashboard.figures import InstanceFigures, Listed
from router.console.dashboard.history import (
    History,
    InstanceReport,
    Moment,
    Span,
    count_origins,
    estimate_quantile,
    share_origins,
    sum_answers,
)

SPAN = Span("20 s", 20, 4)
INFINITE = float("inf")


def report(key: str, role: str, origins: Mapping[str, float] | None) -> InstanceReport:
    figures = InstanceFigures(origins, None, None, None, None, None, False, {}, {}, 0.0)
    return InstanceReport(Listed(key, role, ""), figures)


def moment(time: float, **tokens: float) -> Moment:
    """A look at instances that have computed so many tokens."""
    reports = [report(key, "mixed", {"computed": count}) for key, count in tokens.items()]
    return Moment(time, instances={each.listed.key: each for each in reports})


def grown(*moments: Moment) -> list[float]:
    history = History()
    for each in moments:
        history.add(each)
    return [piece.get("computed", 0.0) for piece in history.count_pieces(SPAN, count_origins)]


def test_growth_is_counted_in_the_piece_in_which_it_was_seen() -> None:
    assert grown(moment(1001, a=10), moment(1004, a=15), moment(1006, a=16), moment(1020, a=20)) == [5, 1, 0, 4]


def test_what_stood_there_at_the_first_look_is_no_growth() -> None:
    assert grown(moment(1020, a=500)) == [0, 0, 0, 0]


def test_an_instance_that_comes_later_or_is_missed_once_is_told_from_the_others() -> None:
    assert grown(moment(1010, a=10), moment(1012, b=100), moment(1020, a=13, b=101)) == [0, 0, 0, 4]


def test_a_counter_that_begins_anew_counts_from_nothing() -> None:
    assert grown(moment(1018, a=50), moment(1020, a=3)) == [0, 0, 0, 3]


def test_what_is_older_than_the_span_does_not_count() -> None:
    assert grown(moment(900, a=0), moment(950, a=7), moment(1020, a=9)) == [0, 0, 0, 2]


def test_an_hour_is_kept_and_no_more() -> None:
    history = History(seconds=10)
    for time in range(20):
        history.add(moment(time))
    assert [each.time for each in history.list_moments(100)] == list(range(9, 20))
    assert [each.time for each in history.list_moments(2)] == [17, 18, 19]


def test_an_empty_history_has_nothing() -> None:
    history = History()
    assert (history.last, history.count_span(SPAN, count_origins)) == (None, {})
    assert history.average_pieces(SPAN, lambda _: 1.0) == [None] * 4


def test_a_figure_is_averaged_where_there_are_any() -> None:
    history = History()
    for time, value in ((1004, 1.0), (1011, 2.0), (1013, 4.0), (1020, None)):
        history.add(Moment(time, trouble="" if value is None else str(value)))
    means = history.average_pieces(SPAN, lambda each: float(each.trouble) if each.trouble else None)
    assert means == [1.0, None, 3.0, None]


def test_pieces_are_labelled_by_how_long_ago_they_ended() -> None:
    assert Span("3 min", 180, 6).label_pieces() == [
        *("150 s ago", "2 min ago", "90 s ago", "1 min ago", "30 s ago", "now")
    ]


@pytest.mark.parametrize(
    ("quantile", "counts", "seconds"),
    [
        (0.5, {0.1: 0, 0.2: 10, INFINITE: 10}, pytest.approx(0.15)),
        (0.9, {0.1: 5, 0.2: 10, INFINITE: 10}, pytest.approx(0.18)),
        (0.99, {0.1: 5, INFINITE: 10}, 0.1),
        (0.5, {0.1: 0, INFINITE: 0}, None),
        (0.5, {}, None),
    ],
    ids=["half way", "in the second bucket", "above all bounds", "no observations", "no buckets"],
)
def test_quantiles_are_estimated_as_prometheus_does(
    quantile: float, counts: Mapping[float, float], seconds: float | None
) -> None:
    assert estimate_quantile(quantile, counts) == seconds


def test_a_pairs_prompt_counts_once_in_the_whole_fleet() -> None:
    prefill = report("p", "prefill", {"own_cache": 10, "pool": 20, "handed_over": 0, "computed": 30})
    decode = report("d", "decode", {"own_cache": 5, "pool": 0, "handed_over": 50, "computed": 5})
    look = Moment(1, instances={"p": prefill, "d": decode, "silent": report("silent", "mixed", None)})
    assert count_origins(look) == {
        "p": {"own_cache": 10, "pool": 20, "handed_over": 0, "computed": 30},
        "d": {"pool": 0, "handed_over": 50, "computed": 5},
    }
    assert partial(count_origins, instance="d")(look)["d"]["own_cache"] == 5


def test_shares_add_up_to_one_with_or_without_what_was_handed_over() -> None:
    tokens = {"own_cache": 1.0, "pool": 1.0, "handed_over": 2.0, "computed": 0.0}
    assert share_origins(tokens, with_handed_over=False) == {"own_cache": 0.5, "pool": 0.5, "computed": 0}
    assert share_origins(tokens, with_handed_over=True)["handed_over"] == 0.5
    assert share_origins({}, with_handed_over=True) == {}


def test_answers_are_told_by_who_ended_them() -> None:
    answers = {"200": 5.0, "429": 2.0, "499": 1.0, "502": 1.0, "504": 1.0}
    assert sum_answers(answers) == {"answered": 5, "refused": 2, "left": 1, "failed": 2}
