"""What a client asks may not hold up all others: the cost of each thing that it can ask, in instructions.

``stalls.py`` lists them, and measures their time: work in C counts as one instruction here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.router.stalls import OPERATIONS, Operation, StalledRouter, measure_stalls, running_router

# About 10 ms, of the 20 that nothing may take; work in C comes to it.
MAX_INSTRUCTIONS = 1_000_000
INSTANCES = 1000
# Those of tens of megabytes take their time in C; how many pipelined requests are read at once, ``test_server`` tests.
COUNTED = [each for each in OPERATIONS if "64 MB" not in each.name and each.answers <= 1]


@pytest.fixture(scope="module")
def router() -> Iterator[StalledRouter]:
    with running_router(INSTANCES, in_instructions=True) as started:
        yield started


@pytest.mark.parametrize("operation", [each for each in COUNTED if not each.settings], ids=lambda each: each.name)
def test_nothing_that_a_client_asks_holds_the_others_up(router: StalledRouter, operation: Operation) -> None:
    longest, answer = router.measure(operation)
    assert longest <= MAX_INSTRUCTIONS
    assert answer.startswith(b"HTTP/1.1 ")


@pytest.mark.parametrize(
    "operation", [each for each in COUNTED if "policy" in each.settings], ids=lambda each: each.name
)
def test_nor_does_it_with_another_policy(operation: Operation) -> None:
    longest, answer = measure_stalls(operation, INSTANCES, in_instructions=True)
    assert longest <= MAX_INSTRUCTIONS
    assert answer.startswith(b"HTTP/1.1 ")


def test_nor_does_it_while_requests_wait() -> None:
    waiting = [each for each in COUNTED if each.waiting]
    with running_router(INSTANCES, True, waiting[0].settings) as limited:
        measured = {each.name: limited.measure(each) for each in waiting}
    assert {name: longest for name, (longest, _) in measured.items() if longest > MAX_INSTRUCTIONS} == {}
    for each in waiting:
        assert measured[each.name][1].startswith(b"HTTP/1.1 ") or not each.answers


def test_everything_is_counted_by_one_of_these() -> None:
    assert all(not each.settings or "policy" in each.settings or each.waiting for each in COUNTED)
    assert len({str(each.settings) for each in COUNTED if each.waiting}) == 1
