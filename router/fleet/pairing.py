"""Pairing: decides which prefill and decode instances may form a pair."""

from __future__ import annotations

from collections.abc import Collection, Hashable

from router.fleet.instance import Instance
from router.fleet.registration import EngineKind, Registration

__all__ = ["can_decode_for", "may_pair", "pairing_kind", "share_model"]


def can_decode_for(prefill_tp_size: int, decode_tp_sizes: Collection[int]) -> bool:
    """Return whether a decode instance can use the KV of a prefill instance with this tensor-parallel size.

    Args:
        prefill_tp_size: tensor-parallel size of the prefill instance.
        decode_tp_sizes: tensor-parallel sizes that are possible for the decode instance.
    """
    return 1 in decode_tp_sizes or prefill_tp_size in decode_tp_sizes


def may_pair(prefill: Registration, decode: Registration) -> bool:
    """Return whether KV blocks that ``prefill`` computes can be transferred to ``decode``.

    Both instances must have the same engine, for vLLM also the same connector, and the same version of the model. A
    prefill instance that connects to decode instances in advance (FastDeploy's FD_ENABLE_PD_RDMA_EAGER_CONNECT) lists
    them. If its list is not empty, it transfers only to the listed instances.
    """
    return (
        pairing_kind(prefill) == pairing_kind(decode)
        and prefill.version == decode.version
        and can_decode_for(prefill.tp_size, {decode.tp_size})
        and (not prefill.connected_decodes or decode.key in prefill.connected_decodes)
    )


def pairing_kind(registration: Registration) -> Hashable:
    """Return the engine of an instance, and for vLLM its connector. The instances of a pair have the same values."""
    is_vllm = registration.engine is EngineKind.VLLM
    return registration.engine, registration.kv_connector if is_vllm else None


def share_model(prefill: Instance, decode: Instance) -> bool:
    """Return whether both instances serve a common model, or may do so because one of them lists no models."""
    return not prefill.models or not decode.models or not prefill.models.isdisjoint(decode.models)
