"""WaitingLine: higher priorities are first, clients of one priority take turns, and no request waits endlessly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.access.line import MAX_PASSED_OVER, WaitingLine


def admit_any(_: str) -> bool:
    return True


def take_all(line: WaitingLine[str]) -> list[str]:
    taken = []
    while (place := line.take_next(admit_any)) is not None:
        taken.append(place.turn)
    return taken


def test_higher_priorities_are_first_and_clients_of_one_take_turns() -> None:
    line: WaitingLine[str] = WaitingLine()
    for priority, client, turn in ((0, "a", "a1"), (0, "a", "a2"), (5, "b", "b1"), (0, "c", "c1"), (-5, "d", "d1")):
        line.join_line(priority, client, turn)
    assert line.count_by_priority() == {5: 1, 0: 3, -5: 1}
    assert take_all(line) == ["b1", "a1", "c1", "a2", "d1"]
    assert line.waiting == 0


def test_a_client_that_cannot_be_admitted_does_not_block_lower_priorities() -> None:
    line: WaitingLine[str] = WaitingLine()
    line.join_line(1, "full", "f1")
    line.join_line(0, "a", "a1")
    assert line.waiting == 2
    place = line.take_next(lambda client: client != "full")
    assert place is not None
    assert place.turn == "a1"
    assert line.take_next(lambda client: client != "full") is None


def test_a_low_priority_is_passed_over_a_limited_number_of_times() -> None:
    line: WaitingLine[str] = WaitingLine()
    line.join_line(0, "low", "low")
    for number in range(100):
        line.join_line(1, "high", f"high{number}")
    assert take_all(line).index("low") == MAX_PASSED_OVER


def test_in_a_full_line_a_higher_priority_replaces_the_lowest() -> None:
    line: WaitingLine[str] = WaitingLine()
    for priority, client, turn in ((0, "a", "a1"), (0, "b", "b1"), (0, "b", "b2"), (3, "c", "c1"), (3, "c", "c2")):
        line.join_line(priority, client, turn)
    for priority, client, expected in ((3, "c", "b2"), (0, "b", None), (0, "d", "b2"), (-1, "d", None)):
        place = line.find_last(priority, client)
        assert (place.turn if place else None) == expected


@given(
    low=st.integers(-10, 9),
    before=st.lists(st.tuples(st.integers(-10, 10), st.sampled_from("abc")), max_size=30),
    meanwhile=st.lists(st.lists(st.integers(-10, 10), max_size=3), min_size=1, max_size=10),
)
def test_every_waiter_is_served_within_a_bound(
    low: int, before: list[tuple[int, str]], meanwhile: list[list[int]]
) -> None:
    line: WaitingLine[int] = WaitingLine()
    for number, (priority, client) in enumerate(before):
        line.join_line(priority, client, number)
    waiter = len(before)
    line.join_line(low, "waiter", waiter)
    # Each earlier client of its priority has one turn before it; all later requests are after it.
    clients_before = {client for priority, client in before if priority == low}
    priorities = {low, *(priority for priority, _ in before), *(each for some in meanwhile for each in some)}
    bound = (MAX_PASSED_OVER + len(priorities)) * (len(clients_before) + 1)
    number = waiter
    for turn in range(bound):
        for priority in meanwhile[turn % len(meanwhile)]:
            number += 1
            line.join_line(priority, f"new{number}", number)
        place = line.take_next(admit_any)
        assert place is not None
        if place.turn == waiter:
            return
    raise AssertionError(f"not served within {bound} turns")
