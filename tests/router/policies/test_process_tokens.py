"""process_tokens: the fewest prompt tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.policies import InstanceLoad, RequestFeatures
from router.policies.process_tokens import ProcessTokens

REQUEST = RequestFeatures(prompt_tokens=100)

_candidates = st.lists(
    st.builds(InstanceLoad, st.uuids().map(str), st.integers(0, 100), st.integers(0, 10_000)), min_size=1, max_size=8
)


@given(candidates=_candidates)
def test_process_tokens_takes_the_fewest_tokens(candidates: list[InstanceLoad]) -> None:
    decision = ProcessTokens().choose_instance(REQUEST, candidates)
    assert decision.reasons["tokens"] == min(candidate.tokens for candidate in candidates)
