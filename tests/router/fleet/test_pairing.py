"""Pairing: which two instances fit each other, and what each is told of the other."""

from __future__ import annotations

from typing import Any

import pytest

from router.fleet.pairing import can_decode_for, disaggregate_info, may_pair
from tests.router.fleet.registrations import registration


@pytest.mark.parametrize(
    ("prefill", "decode", "protocol"),
    [
        ({}, {}, "ipc"),
        ({"host_ip": "10.0.0.2"}, {}, "rdma"),
        ({"transfer_protocol": ["rdma"]}, {}, "rdma"),
        ({}, {"transfer_protocol": ["rdma"]}, "rdma"),
        ({"tp_size": 2}, {"tp_size": 1}, "rdma"),
        ({"transfer_protocol": ["tcp"]}, {"transfer_protocol": ["tcp"]}, "tcp"),
        ({"transfer_protocol": ["tcp"]}, {"transfer_protocol": ["tcp", "rdma"]}, "tcp"),
        ({"transfer_protocol": ["tcp", "rdma"]}, {"transfer_protocol": ["tcp", "rdma"]}, "rdma"),
    ],
)
def test_ipc_only_on_one_host_where_both_have_it_and_tp_sizes_are_equal(
    prefill: dict[str, Any], decode: dict[str, Any], protocol: str
) -> None:
    info = disaggregate_info(registration(role="prefill", **prefill), registration(port=52501, **decode))
    assert info["transfer_protocol"] == protocol


@pytest.mark.parametrize(
    ("prefill", "decode", "fits"), [(1, 1, True), (4, 4, True), (4, 1, True), (1, 4, False), (4, 2, False)]
)
def test_tp_sizes_are_equal_or_decodes_is_one(prefill: int, decode: int, fits: bool) -> None:
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
def test_a_pair_is_of_one_engine_and_version_and_fitting_size_and_connected_if_it_connects_ahead(
    prefill: dict[str, Any], decode: dict[str, Any], paired: bool
) -> None:
    one, other = registration(role="prefill", **prefill), registration(port=52501, **decode)
    assert may_pair(one, other) is paired


def test_a_pair_is_told_of_each_other_in_fastdeploys_form() -> None:
    info = disaggregate_info(registration(role="prefill", host_ip="10.0.0.2"), registration(connector_port=8004))
    assert info == {
        "prefill_ip": "10.0.0.2",
        "decode_ip": "10.0.0.1",
        "prefill_connector_port": "8002",
        "decode_connector_port": "8004",
        "decode_device_ids": ["0", "1"],
        "decode_rdma_ports": ["7100", "7101"],
        "transfer_protocol": "rdma",
        "decode_tp_size": 2,
    }
