"""request_num: the fewest requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.policies import InstanceLoad, RequestFeatures
from router.policies.request_num import RequestNum

REQUEST = RequestFeatures(prompt_tokens=100)

_candidates = st.lists(
    st.builds(InstanceLoad, st.uuids().map(str), st.integers(0, 100), st.integers(0, 10_000)), min_size=1, max_size=8
)


@given(candidates=_candidates)
def test_request_num_takes_the_fewest_requests(candidates: list[InstanceLoad]) -> None:
    decision = RequestNum().choose_instance(REQUEST, candidates)
    assert decision.reasons["requests"] == min(candidate.requests for candidate in candidates)
