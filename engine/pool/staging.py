"""Opens access to KV memory for the pool and for hand-overs: direct access, or through buffers in host memory."""

from __future__ import annotations

from collections.abc import Sequence

from engine.model.model_runner import ModelRunner
from engine.pool.background import yield_to_compute
from engine.pool.kv_codec import choose_codec
from kvstore_backend import BlockPool
from kvstore_backend.staging import KVTensors, Registry, StagedGroups, StagedMemory, StandInDevice
from kvstore_backend.transfers import DirectMemory, TransferMemory

__all__ = ["open_direct", "open_staged", "stage_handovers"]

# A hand-over holds all of its buffers until its end. With small buffers less of their memory is unused.
_HANDOVER_BUFFER_BYTES = 8 << 20


def open_direct(runner: ModelRunner, registry: Registry) -> DirectMemory:
    """Return access to KV memory in host memory without buffers, and register the memory at ``registry``.

    Raises:
        ValueError: the KV memory is not in host memory.
    """
    kv = runner.kv
    if kv.device.type != "cpu":
        raise ValueError(f"KV memory is on {kv.device.type}, which the host cannot read; use staging")
    registry.register(kv.data_ptr(), kv.numel() * kv.element_size())

    def clear(blocks: Sequence[int]) -> None:
        kv[[block % len(kv) for block in blocks]] = 0

    return DirectMemory(lambda blocks: [(runner.span(block),) for block in blocks], clear)


def open_staged(runner: ModelRunner, pool: BlockPool) -> TransferMemory:
    """Return access to KV memory for the pool through buffers in host memory.

    Blocks are compressed as the namespace of ``pool`` says, except those with states of convolution layers.
    """
    groups = []
    for number, group in enumerate(runner.groups.groups):
        kv = runner.view_group(number)
        codec = None if group.kind == "state" else choose_codec(pool.namespace, kv)
        groups.append(StagedMemory(KVTensors([kv], len(kv)), pool, codec, _stand_in(runner)))
    return groups[0] if len(groups) == 1 else StagedGroups(groups, len(runner.kv))


def stage_handovers(
    runner: ModelRunner, registry: Registry, incoming_bytes: int, buffer_bytes: int = _HANDOVER_BUFFER_BYTES
) -> StagedMemory:
    """Return access to KV memory for hand-overs through buffers in host memory, which ``registry`` registers.

    ``incoming_bytes`` is the size of all buffers for incoming hand-overs, ``buffer_bytes`` the size of one buffer.
    """
    kv = KVTensors([runner.kv], len(runner.kv))
    device = _stand_in(runner)
    return StagedMemory(kv, registry, device=device, buffer_bytes=buffer_bytes, incoming_bytes=incoming_bytes)


def _stand_in(runner: ModelRunner) -> StandInDevice | None:
    """Return a replacement for a GPU's copies between buffers and KV memory, or None if KV memory is on a GPU.

    The replacement copies on threads that have a lower priority than the computation.
    """
    return StandInDevice(yield_to_compute) if runner.device.type == "cpu" else None
