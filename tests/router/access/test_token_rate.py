"""TokenRates: no client uses more tokens than its rate over time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.access.token_rate import BURST_SECONDS, TokenRates


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_request_can_begin_while_tokens_are_left_and_the_next_waits_for_more() -> None:
    clock = Clock()
    rates = TokenRates(100, {}, clock)
    rates.charge_tokens("a", 100 * BURST_SECONDS - 1)
    assert rates.seconds_to_wait("a") == 0
    rates.charge_tokens("a", 251)
    assert rates.seconds_to_wait("a") == pytest.approx(2.51)
    assert rates.seconds_to_wait("b") == 0
    clock.now += 2.52
    assert rates.seconds_to_wait("a") == 0


def test_unused_tokens_are_returned_up_to_a_full_bucket() -> None:
    rates = TokenRates(100, {}, Clock())
    rates.charge_tokens("a", 2000)
    rates.charge_tokens("a", -1500)
    assert rates.seconds_to_wait("a") == 0
    rates.charge_tokens("a", -1_000_000)
    rates.charge_tokens("a", 100 * BURST_SECONDS)
    assert rates.seconds_to_wait("a") > 0


def test_a_clients_own_rate_replaces_the_common_rate() -> None:
    rates = TokenRates(100, {"vip": 0.0, "slow": 1.0}, Clock())
    for client in ("vip", "slow"):
        rates.charge_tokens(client, 21)
    assert rates.seconds_to_wait("vip") == 0
    assert rates.seconds_to_wait("slow") == pytest.approx(12)
    assert TokenRates(0, {"slow": 1.0}).is_limited
    assert not TokenRates(0, {"vip": 0.0}).is_limited


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 3000)), min_size=1, max_size=50))
def test_no_more_than_the_rate_is_used_over_time(requests: list[tuple[float, int]]) -> None:
    clock, rate, used = Clock(), 100.0, 0
    rates = TokenRates(rate, {}, clock)
    for pause, tokens in requests:
        clock.now += pause
        if not rates.seconds_to_wait("a"):
            used += tokens
            rates.charge_tokens("a", tokens)
    # The first burst and the last request can exceed the rate.
    assert used <= rate * (BURST_SECONDS + clock.now) + 3000
