"""Policies that use only loads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.policies import InstanceLoad, PolicyOptions, RequestFeatures
from router.policies.simple import (
    FdMetricsScore,
    FdRemoteMetricsScore,
    PowerOfTwo,
    ProcessTokens,
    RequestNum,
    RoundRobin,
)

REQUEST = RequestFeatures(prompt_tokens=100)

_candidates = st.lists(
    st.builds(InstanceLoad, st.uuids().map(str), st.integers(0, 100), st.integers(0, 10_000)), min_size=1, max_size=8
)


def test_round_robin_alternates() -> None:
    policy = RoundRobin()
    candidates = [InstanceLoad("a"), InstanceLoad("b")]
    assert [policy.choose_instance(REQUEST, candidates).key for _ in range(5)] == ["a", "b", "a", "b", "a"]


def test_round_robin_works_with_a_changing_number_of_candidates() -> None:
    policy = RoundRobin()
    for count in (1, 5, 2, 3, 1):
        candidates = [InstanceLoad(str(i)) for i in range(count)]
        assert policy.choose_instance(REQUEST, candidates).key in {candidate.key for candidate in candidates}


@given(candidates=_candidates)
def test_request_num_chooses_the_fewest_requests(candidates: list[InstanceLoad]) -> None:
    decision = RequestNum().choose_instance(REQUEST, candidates)
    assert decision.reasons["requests"] == min(candidate.requests for candidate in candidates)


@given(candidates=_candidates)
def test_process_tokens_chooses_the_fewest_tokens(candidates: list[InstanceLoad]) -> None:
    decision = ProcessTokens().choose_instance(REQUEST, candidates)
    assert decision.reasons["tokens"] == min(candidate.tokens for candidate in candidates)


def test_power_of_two_avoids_the_busier_of_two() -> None:
    policy = PowerOfTwo()
    candidates = [InstanceLoad("idle"), InstanceLoad("busy", requests=5)]
    assert {policy.choose_instance(RequestFeatures(100), candidates).key for _ in range(50)} == {"idle"}


def test_the_remote_score_counts_waiting_requests_by_their_weight() -> None:
    policy = FdRemoteMetricsScore(PolicyOptions(waiting_weight=10))
    busy, waited = InstanceLoad("busy", running=9, waiting=0), InstanceLoad("waited", running=0, waiting=1)
    assert policy.choose_instance(REQUEST, [busy, waited]).reasons == {
        "policy": "fd_remote_metrics_score",
        "score": 9,
    }


def test_the_remote_score_is_at_least_the_number_of_requests_that_the_router_sent() -> None:
    policy = FdRemoteMetricsScore()
    stale, other = InstanceLoad("stale", requests=8, running=0, waiting=0), InstanceLoad("other", running=5, waiting=0)
    assert policy.choose_instance(REQUEST, [stale, other]).key == "other"


def test_the_remote_score_of_an_unknown_instance_is_the_number_of_sent_requests() -> None:
    policy = FdRemoteMetricsScore()
    unknown, known = InstanceLoad("unknown", requests=3), InstanceLoad("known", running=4, waiting=0)
    assert policy.choose_instance(REQUEST, [unknown, known]).key == "unknown"


def test_the_local_score_is_the_number_of_sent_requests() -> None:
    busy, waited = InstanceLoad("busy", requests=2), InstanceLoad("waited", requests=1, running=9, waiting=9)
    decision = FdMetricsScore().choose_instance(REQUEST, [busy, waited])
    assert (decision.key, decision.reasons) == ("waited", {"policy": "fd_metrics_score", "score": 1})
