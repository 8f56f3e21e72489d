"""Pairing: which prefill and decode instance may work together."""

from __future__ import annotations

from collections.abc import Collection, Hashable

from router.fleet.instance import Instance
from router.fleet.registration import EngineKind, Registration

__all__ = ["can_decode_for", "may_pair", "pairing_kind", "share_model"]


def can_decode_for(prefill_tp_size: int, decode_tp_sizes: Collection[int]) -> bool:
    """Return whether decode with one of these tensor-parallel sizes can continue a prefill with this size."""
    return 1 in decode_tp_sizes or prefill_tp_size in decode_tp_sizes


def may_pair(prefill: Registration, decode: Registration) -> bool:
    """Return whether KV blocks that ``prefill`` computes can be transferred to ``decode``.

    Instances of different engines, or of vLLM with different connectors, are incompatible. KV blocks of two versions of
    a model must never be mixed. A prefill instance that connects to decode instances in advance (FastDeploy's
    FD_ENABLE_PD_RDMA_EAGER_CONNECT) transfers only to those it lists, once it lists any.
    """
    return (
        pairing_kind(prefill) == pairing_kind(decode)
        and prefill.version == decode.version
        and can_decode_for(prefill.tp_size, {decode.tp_size})
        and (not prefill.connected_decodes or decode.key in prefill.connected_decodes)
    )


def pairing_kind(registration: Registration) -> Hashable:
    """Return the engine, and for vLLM the connector. Both instances of a pair have the same kind."""
    is_vllm = registration.engine is EngineKind.VLLM
    return registration.engine, registration.kv_connector if is_vllm else None


def share_model(prefill: Instance, decode: Instance) -> bool:
    """Return whether both serve a common model, or may because one lists no models."""
    return not prefill.models or not decode.models or not prefill.models.isdisjoint(decode.models)
