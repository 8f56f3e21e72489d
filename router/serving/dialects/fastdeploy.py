"""FastDeploy, and our own engine: both legs are sent together, with the same body.

The body contains the addresses of both instances in ``disaggregate_info``, as with FastDeploy's own router.
"""

from __future__ import annotations

from typing import Any

from router.fleet import Instance, Registration
from router.http import encode_member
from router.serving.dialects.dialect import OF_PAIRS, LegPlan, Pair
from router.serving.reading.api import EngineIds
from router.serving.reading.parsed_request import ParsedRequest

__all__ = ["FastDeployPair", "disaggregate_info", "plan_fastdeploy"]


def disaggregate_info(prefill: Registration, decode: Registration) -> dict[str, Any]:
    """Return the member ``disaggregate_info``, which gives the engines of a pair each other's addresses."""
    one_host = prefill.address.host == decode.address.host
    shared = set(prefill.transfer_protocol) & set(decode.transfer_protocol)
    use_ipc = one_host and "ipc" in shared and prefill.tp_size == decode.tp_size
    # FastDeploy knows only "ipc" and "rdma"; rdma is its default. "tcp" is for instances that support nothing else.
    network = "tcp" if shared == {"tcp"} else "rdma"
    return {
        "prefill_ip": prefill.address.host,
        "decode_ip": decode.address.host,
        "prefill_connector_port": prefill.connector_port,
        "decode_connector_port": decode.connector_port,
        "decode_device_ids": list(decode.device_ids),
        "decode_rdma_ports": list(decode.rdma_ports),
        "transfer_protocol": "ipc" if use_ipc else network,
        "decode_tp_size": decode.tp_size,
    }


class FastDeployPair(Pair):
    """A pair of FastDeploy instances: both get the request at the same time, and prefill transfers the KV to decode."""

    merges_segments = True

    def __init__(self, prefill: Instance, decode: Instance) -> None:
        super().__init__(prefill, decode)
        self._info = encode_member("disaggregate_info", disaggregate_info(*self.registrations))

    def plan(self, parsed: ParsedRequest, request_id: str) -> tuple[LegPlan, LegPlan, EngineIds | None]:
        members = {"request_id": encode_member("request_id", request_id), "disaggregate_info": self._info}
        plan = LegPlan(members, OF_PAIRS)
        assert parsed.body is not None
        return plan, plan, EngineIds(parsed.api.id_prefix, request_id, parsed.body.choices)


def plan_fastdeploy(parsed: ParsedRequest, request_id: str) -> LegPlan:
    """Return the changes of a request for one instance, not a pair."""
    return LegPlan({"request_id": encode_member("request_id", request_id)}, OF_PAIRS)
