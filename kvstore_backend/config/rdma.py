"""RDMA devices of this machine, as Linux shows them under ``/sys/class/infiniband``.

The default protocol, the engine's direct KV transfer and ``kvstore doctor`` use this module.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["DEVICES_FOLDER", "has_active_port", "list_rdma_devices"]

DEVICES_FOLDER = Path("/sys/class/infiniband")
"""Folder with one entry per device, such as ``mlx5_0``; missing if the kernel has no RDMA."""


def list_rdma_devices() -> list[str]:
    """Return the names of all devices, sorted; empty: this machine has none."""
    return sorted(device.name for device in DEVICES_FOLDER.iterdir()) if DEVICES_FOLDER.is_dir() else []


def has_active_port(device: str) -> bool:
    """Return whether at least one port of ``device`` has a working cable and driver."""
    return any("ACTIVE" in state.read_text() for state in (DEVICES_FOLDER / device).glob("ports/*/state"))
