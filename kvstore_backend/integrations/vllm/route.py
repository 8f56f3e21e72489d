"""Route of blocks between vLLM's memory and the pool, as ``memory`` in ``kv_connector_extra_config`` names it.

staged  through host buffers (``kvstore_backend.staging``): pinned buffers and a CUDA stream for KV on a GPU; for KV in
        host memory the stand-in runs the same steps
direct  the pool itself reads and writes vLLM's memory. On a GPU Mooncake does that by RDMA. The host cannot read that
        memory, so its blocks have no checksums.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Literal

from kvstore_backend.backend import ConfigError
from kvstore_backend.config import MooncakeSettings, PoolConfig
from kvstore_backend.integrations.vllm.memory import GroupedMemory, KVMemory
from kvstore_backend.pool import BlockPool
from kvstore_backend.transfers import DirectMemory, Event, TransferMemory, Window

__all__ = ["Route", "choose_route", "open_route", "read_route"]

Route = Literal["staged", "direct"]
_ROUTES: tuple[Route, ...] = ("staged", "direct")

# Mooncake's builds for CUDA 12 and 13.
_CUDA_WHEELS = ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")


def read_route(extra: Mapping[str, object]) -> Route | None:
    """Return the route that ``kv_connector_extra_config`` names, or None.

    Raises:
        ConfigError: there is no such route.
    """
    named = extra.get("memory")
    for route in _ROUTES:
        if named == route:
            return route
    if named is None:
        return None
    raise ConfigError(
        f'memory in kv_connector_extra_config is {named!r}; it must be "staged" (through host buffers) or "direct" '
        "(the pool reads and writes vLLM's memory itself)"
    )


def choose_route(named: Route | None, memory: KVMemory | GroupedMemory, config: PoolConfig) -> Route:
    """Return the named route, or the best one if none was named: staged on a GPU, direct in host memory.

    Raises:
        ConfigError: the direct route was named, and this pool cannot reach a GPU's memory.
    """
    if named == "direct" and memory.is_on_device:
        _require_device_access(config)
    return named or ("staged" if memory.is_on_device else "direct")


def open_route(route: Route, memory: KVMemory | GroupedMemory, pool: BlockPool) -> TransferMemory:
    """Return ``memory`` as transfers reach it on this route, and register everything that the pool will touch."""
    if route == "staged":
        if isinstance(memory, GroupedMemory):
            return _StagedGroups([_stage(group, pool) for group in memory.groups], memory.num_blocks)
        return _stage(memory, pool)
    for span in memory.list_allocations():
        pool.register(*span)
    return DirectMemory(memory.locate_blocks, memory.clear_blocks, memory.record_event)


def _stage(memory: KVMemory, pool: BlockPool) -> TransferMemory:
    from kvstore_backend.staging import KVTensors, StagedMemory  # this import loads torch

    return StagedMemory(KVTensors(memory.merge_layers(), memory.num_blocks), pool)


class _StagedGroups:
    """Memory of several groups: a window has blocks of one group, whose buffers fit its size of blocks."""

    def __init__(self, groups: Sequence[TransferMemory], num_blocks: int) -> None:
        self._groups = groups
        self._num_blocks = num_blocks
        self.record_event = groups[0].record_event

    def open_incoming(self, blocks: Sequence[int], after: Event | None) -> Window:
        number, own = self._take_group(blocks)
        return self._groups[number].open_incoming(own, after)

    def open_outgoing(self, blocks: Sequence[int], after: Event | None) -> Window:
        number, own = self._take_group(blocks)
        return self._groups[number].open_outgoing(own, after)

    def _take_group(self, blocks: Sequence[int]) -> tuple[int, list[int]]:
        """Return the group of the first block, and the ids of the leading blocks of that group."""
        number = blocks[0] // self._num_blocks
        leading = itertools.takewhile(lambda block: block // self._num_blocks == number, blocks)
        return number, [block % self._num_blocks for block in leading]


def _require_device_access(config: PoolConfig) -> None:
    """Refuse a pool that cannot read and write a GPU's memory, with a message of one sentence."""
    store = config.store
    if not isinstance(store, MooncakeSettings):
        trouble = f"the pool is a {config.backend} pool"
    elif store.protocol != "rdma":
        trouble = f"the pool's protocol is {store.protocol}"
    elif not any(map(_is_installed, _CUDA_WHEELS)):
        trouble = f"Mooncake's build for CUDA ({' or '.join(_CUDA_WHEELS)}) is not installed"
    else:
        return
    raise ConfigError(
        f'memory in kv_connector_extra_config is "direct", and the KV is on a GPU, but {trouble}; Mooncake reaches a '
        "GPU's memory by RDMA with GPUDirect, in its build for CUDA: leave memory out, and blocks go through host "
        "buffers"
    )


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
