"""Access of the pool and hand-overs to the engine's KV memory: directly, or through host buffers."""

from __future__ import annotations

from collections.abc import Sequence

from engine.model.model_runner import ModelRunner
from engine.pool.background import yield_to_compute
from engine.pool.kv_codec import choose_codec
from kvstore_backend import BlockPool
from kvstore_backend.staging import KVTensors, Registry, StagedMemory, StandInDevice
from kvstore_backend.transfers import DirectMemory

__all__ = ["open_direct", "open_staged", "stage_handovers"]

# A hand-over holds its buffers until all of its blocks are in place: smaller ones leave less memory unused.
_HANDOVER_BUFFER_BYTES = 8 << 20


def open_direct(runner: ModelRunner, registry: Registry) -> DirectMemory:
    """Return direct access to the KV memory, which must be in host memory: the CPU reads it, and libraries write to it.

    Raises:
        ValueError: the KV memory is on a device.
    """
    kv = runner.kv
    if kv.device.type != "cpu":
        raise ValueError(f"KV memory of {kv.device.type} has to be staged: the host cannot read it")
    registry.register(kv.data_ptr(), kv.numel() * kv.element_size())

    def clear(blocks: Sequence[int]) -> None:
        kv[list(blocks)] = 0

    return DirectMemory(lambda blocks: [(runner.span(block),) for block in blocks], clear)


def open_staged(runner: ModelRunner, pool: BlockPool) -> StagedMemory:
    """Return access to the KV memory through buffers, with blocks in the form that the pool's namespace names."""
    codec = choose_codec(pool.namespace, runner.kv)
    return StagedMemory(KVTensors([runner.kv], len(runner.kv)), pool, codec, _stand_in(runner))


def stage_handovers(
    runner: ModelRunner, registry: Registry, incoming_bytes: int, buffer_bytes: int = _HANDOVER_BUFFER_BYTES
) -> StagedMemory:
    """Return access to the KV memory through separate buffers for hand-overs; ``incoming_bytes`` for incoming ones."""
    kv = KVTensors([runner.kv], len(runner.kv))
    device = _stand_in(runner)
    return StagedMemory(kv, registry, device=device, buffer_bytes=buffer_bytes, incoming_bytes=incoming_bytes)


def _stand_in(runner: ModelRunner) -> StandInDevice | None:
    """Return the device that copies to and from host memory, if KV memory is the host's; it yields to compute."""
    return StandInDevice(yield_to_compute) if runner.device.type == "cpu" else None
