"""The breaker's states after failures, successes and time."""

from __future__ import annotations

from router.fleet.breaker import FAILURES, OPEN_SECONDS, Breaker


def make_open_breaker(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.record_failure(now)
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = Breaker()
    assert [breaker.record_failure(0.0) for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]
    assert (breaker.state, breaker.admits(0.0)) == ("open", False)


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.record_failure(0.0)
        breaker.record_success()
    assert (breaker.state, breaker.admits(0.0)) == ("closed", True)


def test_it_admits_one_request_after_a_time() -> None:
    breaker = make_open_breaker()
    assert not breaker.admits(OPEN_SECONDS - 0.1)
    assert breaker.admits(OPEN_SECONDS)
    breaker.begin_half_open_trial(OPEN_SECONDS)
    assert (breaker.state, breaker.admits(OPEN_SECONDS)) == ("half_open", False)


def test_the_trials_success_closes_it() -> None:
    breaker = make_open_breaker()
    breaker.begin_half_open_trial(OPEN_SECONDS)
    assert breaker.record_success()
    assert (breaker.state, breaker.failures, breaker.admits(OPEN_SECONDS)) == ("closed", 0, True)


def test_the_trials_failure_opens_it_for_the_same_time_again() -> None:
    breaker = make_open_breaker()
    breaker.begin_half_open_trial(OPEN_SECONDS)
    assert breaker.record_failure(OPEN_SECONDS + 1.0)
    assert (breaker.state, breaker.retry_at) == ("open", 2 * OPEN_SECONDS + 1.0)


def test_failures_of_requests_that_run_already_do_not_keep_it_open_longer() -> None:
    breaker = make_open_breaker(now=0.0)
    assert not breaker.record_failure(OPEN_SECONDS - 0.1)
    assert breaker.admits(OPEN_SECONDS)


def test_another_trial_follows_a_trial_without_a_result() -> None:
    breaker = make_open_breaker()
    breaker.begin_half_open_trial(OPEN_SECONDS)
    assert breaker.admits(2 * OPEN_SECONDS)
