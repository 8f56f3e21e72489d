"""FastDeploy, and our own engine: both legs at once, one body, and in it the addresses that each needs of the other.

A pair's members, and the addresses in ``disaggregate_info``, are those of FastDeploy's own router.
"""

from __future__ import annotations

from typing import Any

from router.fleet import Instance, Registration
from router.http import encode_member
from router.serving.dialects.dialect import OF_PAIRS, LegAsk, Pair
from router.serving.reading.api import EngineIds
from router.serving.reading.parsed_request import ParsedRequest

__all__ = ["FastDeployPair", "ask_fastdeploy", "disaggregate_info"]


def disaggregate_info(prefill: Registration, decode: Registration) -> dict[str, Any]:
    """The member of a request by which a pair's two engines know of each other."""
    one_host = prefill.address.host == decode.address.host
    shared = set(prefill.transfer_protocol) & set(decode.transfer_protocol)
    use_ipc = one_host and "ipc" in shared and prefill.tp_size == decode.tp_size
    # FastDeploy knows "ipc" and "rdma", and rdma is what it falls back to; tcp is said only where both said only that.
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
    """Prefill opens the connection to decode, and hands the prompt's KV over while it answers its own client."""

    merges_segments = True

    def __init__(self, prefill: Instance, decode: Instance) -> None:
        super().__init__(prefill, decode)
        self._info = encode_member("disaggregate_info", disaggregate_info(*self.registrations))

    def ask(self, parsed: ParsedRequest, request_id: str) -> tuple[LegAsk, LegAsk, EngineIds | None]:
        members = {"request_id": encode_member("request_id", request_id), "disaggregate_info": self._info}
        ask = LegAsk(members, OF_PAIRS)
        assert parsed.body is not None
        return ask, ask, EngineIds(parsed.api.id_prefix, request_id, parsed.body.choices)


def ask_fastdeploy(parsed: ParsedRequest, request_id: str) -> LegAsk:
    """The changes for an instance alone."""
    return LegAsk({"request_id": encode_member("request_id", request_id)}, OF_PAIRS)
