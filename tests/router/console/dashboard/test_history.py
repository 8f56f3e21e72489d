"""The history of polls: the increase of counters in pieces of a span, and averages."""

from __future__ import annotations

from router.console.dashboard.figures import InstanceFigures, Listed
from router.console.dashboard.history import History, InstanceReport, Moment, Span

SPAN = Span("20 s", 20, 4)


def poll(time: float, **counts: float) -> tuple[float, dict[str, float]]:
    """Return the time of a poll, and the count of each instance."""
    return time, counts


def count_increase(*polls: tuple[float, dict[str, float]]) -> list[float]:
    """Return the increase in each piece of the span."""
    history, counted = History(), dict(polls)
    for time in counted:
        history.add(Moment(time))
    pieces = history.count_pieces(
        SPAN, lambda moment: {key: {"count": count} for key, count in counted[moment.time].items()}
    )
    return [piece.get("count", 0.0) for piece in pieces]


def test_an_increase_is_counted_in_the_piece_of_the_poll_that_finds_it() -> None:
    assert count_increase(poll(1001, a=10), poll(1004, a=15), poll(1006, a=16), poll(1020, a=20)) == [5, 1, 0, 4]


def test_the_counts_of_the_first_poll_are_no_increase() -> None:
    assert count_increase(poll(1020, a=500)) == [0, 0, 0, 0]


def test_the_increase_is_counted_for_each_instance_even_if_a_poll_lacks_it() -> None:
    assert count_increase(poll(1010, a=10), poll(1012, b=100), poll(1020, a=13, b=101)) == [0, 0, 0, 4]


def test_the_increase_of_an_instance_that_joins_is_counted() -> None:
    history = History()
    figures = InstanceFigures(None, None, None, None, None, None, False, {}, {}, 0.0)
    counts = {1016.0: None, 1017.0: 0.0, 1018.0: 0.0, 1019.0: 2.0, 1020.0: 3.0}
    for time, count in counts.items():
        reports = {} if count is None else {"a": InstanceReport(Listed("a", "mixed", ""), figures)}
        history.add(Moment(time, instances=reports))
    assert history.count_span(SPAN, lambda each: {key: {"n": counts[each.time] or 0.0} for key in each.instances}) == {
        "n": 3
    }


def test_a_counter_that_restarts_is_counted_from_0() -> None:
    assert count_increase(poll(1018, a=50), poll(1020, a=3)) == [0, 0, 0, 3]


def test_a_counter_that_decreases_while_others_increase_is_no_restart() -> None:
    """vLLM counts the cached tokens of a prompt earlier than all of its tokens."""
    history = History()
    counts = {1005.0: (500, 200), 1010.0: (470, 230), 1015.0: (502, 230)}
    for time in counts:
        history.add(Moment(time))
    read = {time: {"a": {"computed": computed, "own": own}} for time, (computed, own) in counts.items()}
    assert history.count_span(SPAN, lambda moment: read[moment.time]) == {"computed": 2, "own": 30}


def test_the_end_of_one_counter_is_no_restart() -> None:
    history = History()
    read = {1018.0: {"router": {"a": 70, "b": 10}}, 1020.0: {"router": {"b": 11}}}
    for time in read:
        history.add(Moment(time))
    assert history.count_span(SPAN, lambda moment: read[moment.time]) == {"b": 1}


def test_an_increase_before_the_span_is_not_counted() -> None:
    assert count_increase(poll(900, a=0), poll(950, a=7), poll(1020, a=9)) == [0, 0, 0, 2]


def test_polls_that_are_older_than_the_history_are_deleted() -> None:
    history = History(seconds=10)
    for time in range(20):
        history.add(Moment(time))
    assert [each.time for each in history.list_moments(100)] == list(range(9, 20))
    assert [each.time for each in history.list_moments(2)] == [17, 18, 19]


def test_pieces_before_the_first_poll_are_unknown() -> None:
    history = History()
    assert history.count_unknown_pieces(SPAN) == 4
    for time, unknown in ((1012, 3), (1016, 2), (1031, 0)):
        history.add(Moment(time))
        assert history.count_unknown_pieces(SPAN) == unknown


def test_an_empty_history_has_no_figures() -> None:
    history = History()
    assert (history.last, history.count_span(SPAN, lambda _: {})) == (None, {})
    assert history.average_pieces(SPAN, lambda _: 1.0) == [None] * 4


def test_a_figure_is_averaged_over_the_polls_that_have_it() -> None:
    history = History()
    for time, value in ((1004, 1.0), (1011, 2.0), (1013, 4.0), (1020, None)):
        history.add(Moment(time, trouble="" if value is None else str(value)))
    means = history.average_pieces(SPAN, lambda each: float(each.trouble) if each.trouble else None)
    assert means == [1.0, None, 3.0, None]


def test_the_label_of_a_piece_is_the_time_since_its_end() -> None:
    assert Span("3 min", 180, 6).label_pieces() == [
        *("150 s ago", "2 min ago", "90 s ago", "1 min ago", "30 s ago", "now")
    ]
