"""round_robin: one after another."""

from __future__ import annotations

from router.policies import InstanceLoad, RequestFeatures
from router.policies.round_robin import RoundRobin

REQUEST = RequestFeatures(prompt_tokens=100)


def test_round_robin_goes_round() -> None:
    policy = RoundRobin()
    candidates = [InstanceLoad("a"), InstanceLoad("b")]
    assert [policy.choose_instance(REQUEST, candidates).key for _ in range(5)] == ["a", "b", "a", "b", "a"]


def test_round_robin_goes_on_when_candidates_come_and_go() -> None:
    policy = RoundRobin()
    for count in (1, 5, 2, 3, 1):
        candidates = [InstanceLoad(str(i)) for i in range(count)]
        assert policy.choose_instance(REQUEST, candidates).key in {candidate.key for candidate in candidates}
