"""Pairing: the conditions under which two instances can be a pair."""

from __future__ import annotations

from typing import Any

import pytest

from router.fleet.pairing import can_decode_for, may_pair
from tests.router.fleet.registrations import registration


@pytest.mark.parametrize(
    ("prefill", "decode", "fits"), [(1, 1, True), (4, 4, True), (4, 1, True), (1, 4, False), (4, 2, False)]
)
def test_tp_sizes_are_equal_or_that_of_decode_is_one(prefill: int, decode: int, fits: bool) -> None:
    assert can_decode_for(prefill, {decode}) is fits


@pytest.mark.parametrize(
    ("prefill", "decode", "paired"),
    [
        ({}, {}, True),
        ({"version": "a"}, {"version": "b"}, False),
        ({"version": None}, {"version": "a"}, False),
        ({"tp_size": 4}, {"tp_size": 1}, True),
        ({"tp_size": 1}, {"tp_size": 4}, False),
        ({"connected_decodes": ["10.0.0.1:52501"]}, {}, True),
        ({"connected_decodes": ["10.0.0.1:52502"]}, {}, False),
        ({"engine": "sglang"}, {"engine": "sglang"}, True),
        ({"engine": "sglang", "kv_connector": "mooncake"}, {"engine": "sglang"}, True),
        ({"engine": "sglang"}, {}, False),
        ({"engine": "vllm"}, {"engine": "vllm", "kv_connector": "nixl"}, True),
        ({"engine": "vllm"}, {"engine": "vllm", "kv_connector": "mooncake"}, False),
    ],
)
def test_a_pair_has_one_engine_version_and_connector_and_fitting_sizes_and_is_connected(
    prefill: dict[str, Any], decode: dict[str, Any], paired: bool
) -> None:
    one, other = registration(role="prefill", **prefill), registration(port=52501, **decode)
    assert may_pair(one, other) is paired
