"""The messages between the halves of the vLLM connector."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvstore_backend.integrations.vllm.messages import Report


def test_add_report_adds_the_report_of_another_rank() -> None:
    one = Report(Counter({1: 1}), {"a"}, [(2, 0.5)], [(3, 0.25)], {("ad", "/ad"): [b"d"]}, Counter({4: 1}))
    other = Report(Counter({1: 1, 2: 1}), {"b"}, [(4, 1.0)], [(5, 2.0)], {("ad", "/ad"): [None], ("x", "/x"): [b"x"]})
    other.saved[4] = 1
    one.add_report(other)
    assert one == Report(
        Counter({1: 2, 2: 1}),
        {"a", "b"},
        [(2, 0.5), (4, 1.0)],
        [(3, 0.25), (5, 2.0)],
        {("ad", "/ad"): [b"d", None], ("x", "/x"): [b"x"]},
        Counter({4: 2}),
    )


@pytest.mark.parametrize(
    "content",
    [
        {"ended": Counter({1: 1})},
        {"short": {"a"}},
        {"loads": [(1, 0.5)]},
        {"steps": [(1, 0.5)]},
        {"adapters": {("ad", "/ad"): [None]}},
        {"saved": Counter({1: 1})},
    ],
)
def test_a_report_with_any_content_is_not_empty(content: dict[str, Any]) -> None:
    assert not Report(**content).is_empty
    assert Report().is_empty
