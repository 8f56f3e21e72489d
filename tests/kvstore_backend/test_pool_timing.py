"""Whether a pool pays: the arithmetic, and the two measurements over stand-ins whose speed is known."""

from __future__ import annotations

import math

import pytest

from kvstore_backend import PoolUnavailable, load_config, pool_timing
from kvstore_backend.pool_timing import Comparison, InstanceUnavailable, time_computing, time_loading
from tests.support.timed_instance import timed_instance


@pytest.mark.parametrize(
    ("fixed", "load", "compute", "least"), [(0.01, 0.001, 0.002, 10), (0, 0.001, 0.002, 0), (0.01, 0.002, 0.002, None)]
)
def test_a_hit_pays_from_the_length_on_at_which_it_makes_up_for_its_fixed_time(
    fixed: float, load: float, compute: float, least: int | None
) -> None:
    assert Comparison(fixed, load, compute).least_tokens == least


@pytest.mark.timing
def test_computing_is_timed_without_the_time_that_any_request_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_timing, "_LONG_ENOUGH_SECONDS", 0.2)
    with timed_instance(0.001) as url:
        assert 0.0005 < time_computing(url) < 0.01


@pytest.mark.timing
def test_an_instance_with_a_short_context_is_timed_within_it() -> None:
    with timed_instance(0.0) as url:
        assert 0 <= time_computing(url) < 0.01


def test_what_is_no_instance_is_said_in_a_sentence() -> None:
    refused = pytest.raises(InstanceUnavailable, match="does not answer: Client error '400")
    with timed_instance(0.0, context=1) as url, refused:
        time_computing(url)
    with pytest.raises(InstanceUnavailable, match="does not answer"):
        time_computing(url)


def test_an_instance_whose_context_has_no_room_for_a_second_prompt_is_named_in_a_sentence() -> None:
    refused = pytest.raises(InstanceUnavailable, match="accepted no prompt of more than 32 words")
    with timed_instance(0.0, context=32) as url, refused:
        time_computing(url)


@pytest.mark.timing
def test_loading_is_timed_and_leaves_nothing_behind() -> None:
    fixed, token = time_loading(load_config("memory"), 1024)
    assert 0 <= fixed < 1
    assert 0 <= token < 0.01
    assert math.isfinite(Comparison(fixed, token, 1.0).seconds_to_load(1000))


def test_a_pool_without_room_is_said_in_a_sentence() -> None:
    with pytest.raises(PoolUnavailable, match="blocks that were just stored could not be read"):
        time_loading(load_config("memory:?size=1MiB"), 1024)
