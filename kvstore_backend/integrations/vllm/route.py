"""Selects the route of blocks between vLLM's memory and the pool: ``memory`` in ``kv_connector_extra_config``.

staged  blocks pass through host buffers (``kvstore_backend.staging``): pinned buffers and a CUDA stream for KV on a
        GPU; for KV in host memory, threads make the same copies
direct  the pool reads and writes vLLM's memory. On a GPU Mooncake does this by RDMA. The host cannot read the memory of
        a GPU, so the blocks have no checksums.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Literal

from kvstore_backend.backend import ConfigError
from kvstore_backend.config import MooncakeSettings, PoolConfig
from kvstore_backend.integrations.vllm.memory import GroupedMemory, KVMemory
from kvstore_backend.pool import BlockPool
from kvstore_backend.transfers import DirectMemory, TransferMemory

__all__ = ["Route", "choose_route", "open_route", "read_route"]

Route = Literal["staged", "direct"]
_ROUTES: tuple[Route, ...] = ("staged", "direct")

# Mooncake's builds for CUDA 12 and 13.
_CUDA_WHEELS = ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")


def read_route(extra: Mapping[str, object]) -> Route | None:
    """Return the route that ``memory`` in ``kv_connector_extra_config`` names; None if it names none.

    Raises:
        ConfigError: the value of ``memory`` is not a route.
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
    """Return the configured route, or the default: ``staged`` for KV on a GPU, ``direct`` for KV in host memory.

    Raises:
        ConfigError: ``direct`` is configured, the KV is on a GPU, and the pool cannot reach a GPU's memory.
    """
    if named == "direct" and memory.is_on_device:
        _require_device_access(config)
    return named or ("staged" if memory.is_on_device else "direct")


def open_route(route: Route, memory: KVMemory | GroupedMemory, pool: BlockPool) -> TransferMemory:
    """Return the object with which transfers on ``route`` reach KV memory; register memory for the pool's calls."""
    if route == "staged":
        if isinstance(memory, GroupedMemory):
            from kvstore_backend.staging import StagedGroups

            return StagedGroups([_stage(group, pool) for group in memory.groups], memory.num_blocks)
        return _stage(memory, pool)
    for span in memory.list_allocations():
        pool.register(*span)
    return DirectMemory(memory.locate_blocks, memory.clear_blocks, memory.record_event)


def _stage(memory: KVMemory, pool: BlockPool) -> TransferMemory:
    from kvstore_backend.staging import KVTensors, StagedMemory  # this import loads torch

    return StagedMemory(KVTensors(memory.merge_layers(), memory.num_blocks), pool)


def _require_device_access(config: PoolConfig) -> None:
    """Raise ``ConfigError`` if the pool cannot read and write the memory of a GPU."""
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
        '"memory": "direct" in kv_connector_extra_config requires that Mooncake reaches the memory of the GPU, but '
        f"{trouble}; Mooncake reaches it only by RDMA with GPUDirect, in its build for CUDA; remove "
        '"memory" from kv_connector_extra_config, so that blocks pass through host buffers'
    )


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
