"""What happened between two looks: growth in pieces of time, quantiles, shares of origins."""

from __future__ import annotations

from router.console.dashboard.figures import InstanceFigures, Listed
from router.console.dashboard.history import History, InstanceReport, Moment, Span

SPAN = Span("20 s", 20, 4)


def look(time: float, **counts: float) -> tuple[float, dict[str, float]]:
    """A look at this time, and who has counted how much by then."""
    return time, counts


def grown(*looks: tuple[float, dict[str, float]]) -> list[float]:
    """The growth in each piece of the span."""
    history, counted = History(), dict(looks)
    for time in counted:
        history.add(Moment(time))
    pieces = history.count_pieces(
        SPAN, lambda moment: {who: {"count": count} for who, count in counted[moment.time].items()}
    )
    return [piece.get("count", 0.0) for piece in pieces]


def test_growth_is_counted_in_the_piece_in_which_it_was_seen() -> None:
    assert grown(look(1001, a=10), look(1004, a=15), look(1006, a=16), look(1020, a=20)) == [5, 1, 0, 4]


def test_what_stood_there_at_the_first_look_is_no_growth() -> None:
    assert grown(look(1020, a=500)) == [0, 0, 0, 0]


def test_an_instance_that_comes_later_or_is_missed_once_is_told_from_the_others() -> None:
    assert grown(look(1010, a=10), look(1012, b=100), look(1020, a=13, b=101)) == [0, 0, 0, 4]


def test_an_instance_that_comes_and_counts_between_other_looks_is_counted() -> None:
    history = History()
    figures = InstanceFigures(None, None, None, None, None, None, False, {}, {}, 0.0)
    counts = {1016.0: None, 1017.0: 0.0, 1018.0: 0.0, 1019.0: 2.0, 1020.0: 3.0}
    for time, count in counts.items():
        reports = {} if count is None else {"a": InstanceReport(Listed("a", "mixed", ""), figures)}
        history.add(Moment(time, instances=reports))
    assert history.count_span(SPAN, lambda each: {key: {"n": counts[each.time] or 0.0} for key in each.instances}) == {
        "n": 3
    }


def test_a_counter_that_begins_anew_counts_from_nothing() -> None:
    assert grown(look(1018, a=50), look(1020, a=3)) == [0, 0, 0, 3]


def test_what_is_older_than_the_span_does_not_count() -> None:
    assert grown(look(900, a=0), look(950, a=7), look(1020, a=9)) == [0, 0, 0, 2]


def test_an_hour_is_kept_and_no_more() -> None:
    history = History(seconds=10)
    for time in range(20):
        history.add(Moment(time))
    assert [each.time for each in history.list_moments(100)] == list(range(9, 20))
    assert [each.time for each in history.list_moments(2)] == [17, 18, 19]


def test_pieces_before_the_first_look_are_unknown() -> None:
    history = History()
    assert history.count_unknown_pieces(SPAN) == 4
    for time, unknown in ((1012, 3), (1016, 2), (1031, 0)):
        history.add(Moment(time))
        assert history.count_unknown_pieces(SPAN) == unknown


def test_an_empty_history_has_nothing() -> None:
    history = History()
    assert (history.last, history.count_span(SPAN, lambda _: {})) == (None, {})
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
