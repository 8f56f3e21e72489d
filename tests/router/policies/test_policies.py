"""Policies: plain data in, one of the candidates and its reasons out."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies import POLICIES, InstanceLoad, RequestFeatures

REQUEST = RequestFeatures(prompt_tokens=100)

_candidates = st.lists(
    st.builds(InstanceLoad, st.uuids().map(str), st.integers(0, 100), st.integers(0, 10_000)), min_size=1, max_size=8
)


@pytest.mark.parametrize("name", POLICIES)
@given(candidates=_candidates)
def test_every_policy_chooses_a_candidate_and_says_why(name: str, candidates: list[InstanceLoad]) -> None:
    decision = POLICIES[name]().choose_instance(REQUEST, candidates)
    assert decision.key in {candidate.key for candidate in candidates}
    assert decision.reasons["policy"] == name


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_spreads_equal_candidates(name: str) -> None:
    policy = POLICIES[name]()
    candidates = [InstanceLoad("a"), InstanceLoad("b"), InstanceLoad("c")]
    chosen = Counter(policy.choose_instance(REQUEST, candidates).key for _ in range(300))
    assert all(chosen[key] > 50 for key in "abc")


@given(candidates=_candidates)
def test_request_num_takes_the_fewest_requests(candidates: list[InstanceLoad]) -> None:
    decision = POLICIES["request_num"]().choose_instance(REQUEST, candidates)
    assert decision.reasons["requests"] == min(candidate.requests for candidate in candidates)


@given(candidates=_candidates)
def test_process_tokens_takes_the_fewest_tokens(candidates: list[InstanceLoad]) -> None:
    decision = POLICIES["process_tokens"]().choose_instance(REQUEST, candidates)
    assert decision.reasons["tokens"] == min(candidate.tokens for candidate in candidates)


def test_round_robin_goes_round() -> None:
    policy = POLICIES["round_robin"]()
    candidates = [InstanceLoad("a"), InstanceLoad("b")]
    assert [policy.choose_instance(REQUEST, candidates).key for _ in range(5)] == ["a", "b", "a", "b", "a"]


def test_round_robin_goes_on_when_candidates_come_and_go() -> None:
    policy = POLICIES["round_robin"]()
    for count in (1, 5, 2, 3, 1):
        candidates = [InstanceLoad(str(i)) for i in range(count)]
        assert policy.choose_instance(REQUEST, candidates).key in {candidate.key for candidate in candidates}
