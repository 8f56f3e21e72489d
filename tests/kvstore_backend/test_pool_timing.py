"""The comparison of loading with computing, and its two measurements with stand-ins of known speed."""

from __future__ import annotations

import math

import pytest

from kvstore_backend import PoolUnavailable, load_config, pool_timing
from kvstore_backend.pool_timing import Comparison, InstanceUnavailable, time_computing, time_loading
from tests.support.timed_instance import timed_instance


@pytest.mark.parametrize(
    ("fixed", "load", "compute", "least"), [(0.01, 0.001, 0.002, 10), (0, 0.001, 0.002, 0), (0.01, 0.002, 0.002, None)]
)
def test_a_hit_saves_time_if_it_has_at_least_this_many_tokens(
    fixed: float, load: float, compute: float, least: int | None
) -> None:
    assert Comparison(fixed, load, compute).least_tokens == least


@pytest.mark.timing
def test_computing_is_measured_without_the_fixed_time_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_timing, "_LONG_ENOUGH_SECONDS", 0.2)
    with timed_instance(0.001) as url:
        assert 0.0005 < time_computing(url) < 0.01


@pytest.mark.timing
def test_an_instance_with_a_short_context_is_measured() -> None:
    with timed_instance(0.0) as url:
        assert 0 <= time_computing(url) < 0.01


def test_an_instance_that_does_not_answer_is_reported() -> None:
    refused = pytest.raises(InstanceUnavailable, match="does not answer: Client error '400")
    with timed_instance(0.0, context=1) as url, refused:
        time_computing(url)
    with pytest.raises(InstanceUnavailable, match="does not answer"):
        time_computing(url)


def test_an_instance_that_accepts_only_short_prompts_is_reported() -> None:
    refused = pytest.raises(InstanceUnavailable, match="accepted no prompt of more than 32 words")
    with timed_instance(0.0, context=32) as url, refused:
        time_computing(url)


@pytest.mark.timing
def test_loading_is_measured() -> None:
    fixed, token = time_loading(load_config("memory"), 1024)
    assert 0 <= fixed < 1
    assert 0 <= token < 0.01
    assert math.isfinite(Comparison(fixed, token, 1.0).seconds_to_load(1000))


def test_a_pool_that_is_too_small_is_reported() -> None:
    with pytest.raises(PoolUnavailable, match="blocks that were just stored could not be read"):
        time_loading(load_config("memory:?size=1MiB"), 1024)
