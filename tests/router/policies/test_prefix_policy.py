"""Policies with an index of prefixes restore it after a restart."""

from __future__ import annotations

import pytest

from router.policies import POLICIES, InstanceLoad, RequestFeatures


def instances(count: int) -> list[InstanceLoad]:
    return [InstanceLoad(f"10.0.0.{i}:8000") for i in range(count)]


def prompt(*chunks: int, tokens: int = 0) -> RequestFeatures:
    return RequestFeatures(tokens or 100 * len(chunks), lambda: chunks, tokens_per_chunk=100)


@pytest.mark.parametrize("name", ["cache_aware", "pool_aware"])
def test_the_index_is_restored_after_a_restart(name: str) -> None:
    policy, restarted = POLICIES[name](), POLICIES[name]()
    first = policy.choose_instance(prompt(1, 2, 3), instances(8)).key
    restarted.load_dump(policy.dump())  # type: ignore[attr-defined]
    decision = restarted.choose_instance(prompt(1, 2, 3), instances(8))
    assert (decision.key, decision.cached_tokens) == (first, 300)


@pytest.mark.parametrize("name", ["cache_aware", "pool_aware"])
def test_a_sibling_shares_the_index_and_reports_its_choices(name: str) -> None:
    policy, reported = POLICIES[name](), []
    policy.subscribe_to_chains(lambda chunks, key: reported.append(key))  # type: ignore[attr-defined]
    sibling = policy.make_sibling()
    first = sibling.choose_instance(prompt(1, 2, 3), instances(8)).key
    decision = policy.choose_instance(prompt(1, 2, 3), instances(8))
    assert (decision.key, decision.cached_tokens, reported) == (first, 300, [first, first])
    policy.forget_instance(first)
    assert sibling.choose_instance(prompt(1, 2, 3), instances(1)).reasons.get("own_tokens", 0) == 0
