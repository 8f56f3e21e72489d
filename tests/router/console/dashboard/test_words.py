"""Figures with their units, and texts for the reasons of policies."""

from __future__ import annotations

import pytest

from kvcommon.formats import format_bytes
from router.console.dashboard.words import REASON_TEXTS, format_count, format_rate, format_seconds, format_share
from router.policies import POLICIES, InstanceLoad, RequestFeatures


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_count(12345.0), "12,345"),
        (format_rate(0.05), "0.05"),
        (format_rate(12.34), "12.3"),
        (format_rate(1234.0), "1,234"),
        (format_rate(0.0), "0"),
        (format_share(0.0), "0 %"),
        (format_share(0.001), "< 1 %"),
        (format_share(0.8249), "82 %"),
        (format_share(0.9999), "> 99 %"),
        (format_share(1.0), "100 %"),
        (format_seconds(None), "\u2013"),
        (format_seconds(0.0021), "2.1 ms"),
        (format_seconds(0.187), "187 ms"),
        (format_seconds(1.284), "1.28 s"),
        (format_seconds(120.0), "120 s"),
        (format_bytes(512.0), "512 bytes"),
        (format_bytes(1.5 * 2**30), "1.5 GiB"),
    ],
)
def test_a_figure_is_formatted_with_its_unit(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize("name", POLICIES)
def test_each_reason_of_a_policy_has_a_text(name: str) -> None:
    policy, candidates = POLICIES[name](), [InstanceLoad("a"), InstanceLoad("b", requests=1000, tokens=1000)]
    for request in (
        RequestFeatures(100),
        RequestFeatures(100, lambda: (1, 2), tokens_per_chunk=50),
        RequestFeatures(100, key="k"),
    ):
        for loads in (candidates, candidates[:1]):
            reasons = policy.choose_instance(request, loads).reasons
            assert {each.replace("_", " ") for each in reasons} <= REASON_TEXTS.keys()
