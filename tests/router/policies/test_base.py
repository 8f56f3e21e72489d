"""All policies choose one of the candidates and give reasons, with few calls."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies import POLICIES, InstanceLoad, RequestFeatures
from router.policies.base import Turns
from tests.router.calls import list_router_calls

REQUEST = RequestFeatures(prompt_tokens=100)

_candidates = st.lists(
    st.builds(InstanceLoad, st.uuids().map(str), st.integers(0, 100), st.integers(0, 10_000)), min_size=1, max_size=8
)


@pytest.mark.parametrize("name", POLICIES)
@given(candidates=_candidates)
def test_every_policy_chooses_a_candidate_and_gives_reasons(name: str, candidates: list[InstanceLoad]) -> None:
    decision = POLICIES[name]().choose_instance(REQUEST, candidates)
    assert decision.key in {candidate.key for candidate in candidates}
    assert decision.reasons["policy"] == name


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_spreads_requests_over_equal_candidates(name: str) -> None:
    policy = POLICIES[name]()
    candidates = [InstanceLoad("a"), InstanceLoad("b"), InstanceLoad("c")]
    chosen = Counter(policy.choose_instance(REQUEST, candidates).key for _ in range(300))
    assert all(chosen[key] > 50 for key in "abc"), (
        f"{name} chose {dict(chosen)} among equal instances: a policy must spread requests over equal instances, "
        "for example by Turns of router/policies/base.py"
    )


# cache_aware has a method for the loads, because remote_cache_aware uses other loads.
@pytest.mark.parametrize("name", POLICIES)
def test_a_choice_takes_few_calls_for_any_number_of_candidates(name: str) -> None:
    policy = POLICIES[name]()
    candidates = [InstanceLoad(str(number)) for number in range(8)]
    request = RequestFeatures(100)
    calls = list_router_calls(lambda: policy.choose_instance(request, candidates))
    assert len(calls) <= 2 + name.endswith("cache_aware"), (
        f"{name} makes {len(calls)} Python calls for one choice ({', '.join(map(str, calls))}): a choice may make two, "
        "however many candidates there are. Use map and operator.attrgetter instead of generators and lambdas"
    )


def test_equal_candidates_take_turns_and_the_least_is_always_chosen() -> None:
    turns, candidates = Turns(), [InstanceLoad(key) for key in "abc"]
    assert [turns.take_least(candidates, [1, 0, 0]).key for _ in range(6)] == ["b", "b", "c"] * 2
    assert [turns.take_least(candidates, [0, 1, 1]).key for _ in range(3)] == ["a"] * 3
    assert [turns.take_next(candidates).key for _ in range(4)] == ["a", "b", "c", "a"]


def test_a_prefix_is_hashed_once_and_only_if_a_policy_needs_it() -> None:
    hashed: list[int] = []

    def hash_prefix() -> list[int]:
        hashed.append(1)
        return [7]

    features = RequestFeatures(1000, hash_prefix)
    assert hashed == []
    assert (features.chunks, features.chunks, hashed) == ([7], [7], [1])
    assert RequestFeatures(10).chunks == ()


@pytest.mark.parametrize("name", POLICIES)
def test_a_sibling_has_the_same_type_and_its_own_turns(name: str) -> None:
    policy = POLICIES[name]()
    sibling = policy.make_sibling()
    assert type(sibling) is type(policy)
    policy.choose_instance(REQUEST, [InstanceLoad("a")])
    assert sibling.choose_instance(REQUEST, [InstanceLoad("b")]).key == "b"


def test_the_policy_of_the_contributors_guide_passes_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class in the guide passes the tests of policies with the usual imports."""
    guide = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text()
    [written] = re.findall(r"^   ```python\n(.*?)^   ```$", guide, re.MULTILINE | re.DOTALL)
    module: dict[str, Any] = {}
    imports = (
        "from collections.abc import Sequence\n"
        "from operator import attrgetter\n"
        "from router.policies.base import Decision, InstanceLoad, PolicyBase, RequestFeatures\n"
    )
    exec(imports + textwrap.dedent(written), module)
    monkeypatch.setitem(POLICIES, "least_queued", module["LeastQueued"])
    test_every_policy_spreads_requests_over_equal_candidates("least_queued")
    test_a_choice_takes_few_calls_for_any_number_of_candidates("least_queued")
    test_a_sibling_has_the_same_type_and_its_own_turns("least_queued")
