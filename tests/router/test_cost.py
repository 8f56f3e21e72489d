"""No operation of a client stalls the requests of others: the cost of each in instructions.

``stalls.py`` lists the operations, and measures their time. A function in C counts as one instruction here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.router.stalls import OPERATIONS, Operation, StalledRouter, measure_stalls, running_router

# About 10 ms of the limit of 20 ms; work in C is added to it.
MAX_INSTRUCTIONS = 1_000_000
INSTANCES = 1000
# Operations with tens of megabytes spend their time in C. ``test_server`` tests the number of pipelined requests.
COUNTED = [each for each in OPERATIONS if "64 MB" not in each.name and each.answers <= 1]


@pytest.fixture(scope="module")
def router() -> Iterator[StalledRouter]:
    with running_router(INSTANCES, in_instructions=True) as started:
        yield started


@pytest.mark.parametrize("operation", [each for each in COUNTED if not each.settings], ids=lambda each: each.name)
def test_no_operation_of_a_client_stalls_others(router: StalledRouter, operation: Operation) -> None:
    longest, answer = router.measure(operation)
    assert longest <= MAX_INSTRUCTIONS
    assert answer.startswith(b"HTTP/1.1 ")


@pytest.mark.parametrize(
    "operation", [each for each in COUNTED if "policy" in each.settings], ids=lambda each: each.name
)
def test_no_operation_with_another_policy_stalls_others(operation: Operation) -> None:
    longest, answer = measure_stalls(operation, INSTANCES, in_instructions=True)
    assert longest <= MAX_INSTRUCTIONS
    assert answer.startswith(b"HTTP/1.1 ")


def test_no_operation_stalls_others_while_requests_wait() -> None:
    waiting = [each for each in COUNTED if each.waiting]
    with running_router(INSTANCES, True, waiting[0].settings) as limited:
        measured = {each.name: limited.measure(each) for each in waiting}
    assert {name: longest for name, (longest, _) in measured.items() if longest > MAX_INSTRUCTIONS} == {}
    for each in waiting:
        assert measured[each.name][1].startswith(b"HTTP/1.1 ") or not each.answers


def test_every_operation_is_in_one_of_these_tests() -> None:
    assert all(not each.settings or "policy" in each.settings or each.waiting for each in COUNTED)
    assert len({str(each.settings) for each in COUNTED if each.waiting}) == 1
