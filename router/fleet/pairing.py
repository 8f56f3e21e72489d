"""Pairing: which prefill and decode instance may work together, and the addresses that each is given of the other."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

from router.fleet.instance import Instance
from router.fleet.registration import EngineKind, Registration
from router.http import encode_member

__all__ = ["PairInfo", "can_decode_for", "disaggregate_info", "may_pair", "pairing_kind"]

# Pairs of instances whose ``disaggregate_info`` is kept encoded.
MAX_PAIRS = 10_000


def can_decode_for(prefill_tp_size: int, decode_tp_sizes: Collection[int]) -> bool:
    """Whether a decode instance of one of these tensor-parallel sizes can take over from such a prefill instance."""
    return 1 in decode_tp_sizes or prefill_tp_size in decode_tp_sizes


def disaggregate_info(prefill: Registration, decode: Registration) -> dict[str, Any]:
    """The member of a request by which a pair's two engines know of each other, in FastDeploy's form."""
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


def may_pair(prefill: Registration, decode: Registration) -> bool:
    """Whether the KV blocks that ``prefill`` computes can be handed over to ``decode``.

    Instances of different engines, or of vLLM's with different connectors, do not understand each other. KV blocks of
    two versions of a model must never meet. A prefill instance that connects to decode instances ahead
    (FastDeploy's FD_ENABLE_PD_RDMA_EAGER_CONNECT) hands over to those it names, once it names any.
    """
    return (
        pairing_kind(prefill) == pairing_kind(decode)
        and prefill.version == decode.version
        and can_decode_for(prefill.tp_size, {decode.tp_size})
        and (not prefill.connected_decodes or decode.key in prefill.connected_decodes)
    )


def pairing_kind(registration: Registration) -> Hashable:
    """Engine, and connector of vLLM's: both instances of a pair are of one kind."""
    is_vllm = registration.engine is EngineKind.VLLM
    return registration.engine, registration.kv_connector if is_vllm else None


class PairInfo:
    """The member ``disaggregate_info`` of a pair's requests, encoded once for each pair."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[Registration, Registration, bytes]] = {}

    def encode_pair(self, prefill: Instance, decode: Instance) -> bytes:
        """The member as ``http.body.splice`` takes it."""
        keys = (prefill.key, decode.key)
        registrations = (prefill.registration, decode.registration)
        known = self._known.get(keys)
        if known is not None and known[0] is registrations[0] and known[1] is registrations[1]:
            return known[2]
        info = encode_member("disaggregate_info", disaggregate_info(*registrations))
        if len(self._known) >= MAX_PAIRS:
            self._known.clear()
        self._known[keys] = (*registrations, info)
        return info
