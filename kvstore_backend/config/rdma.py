"""The RDMA devices of this machine, as Linux shows them under ``/sys/class/infiniband``.

The default protocol, the engine's direct hand-over and ``kvstore doctor`` all ask here.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["DEVICES_FOLDER", "has_active_port", "list_rdma_devices"]

DEVICES_FOLDER = Path("/sys/class/infiniband")
"""One entry a device, such as ``mlx5_0``; missing where the kernel has no RDMA."""


def list_rdma_devices() -> list[str]:
    """The names of all devices, sorted; empty: this machine has none."""
    return sorted(device.name for device in DEVICES_FOLDER.iterdir()) if DEVICES_FOLDER.is_dir() else []


def has_active_port(device: str) -> bool:
    """Whether a cable and a driver make at least one port of ``device`` usable."""
    return any("ACTIVE" in state.read_text() for state in (DEVICES_FOLDER / device).glob("ports/*/state"))
