"""FastDeploy's pairs: the ``disaggregate_info`` of a request."""

from __future__ import annotations

from typing import Any

import pytest

from router.serving.dialects.fastdeploy import disaggregate_info
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
def test_ipc_is_used_only_on_one_host_if_both_have_it_and_tp_sizes_are_equal(
    prefill: dict[str, Any], decode: dict[str, Any], protocol: str
) -> None:
    info = disaggregate_info(registration(role="prefill", **prefill), registration(port=52501, **decode))
    assert info["transfer_protocol"] == protocol


def test_disaggregate_info_has_fastdeploys_form() -> None:
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
