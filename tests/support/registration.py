"""The registration of an instance at a router, in FastDeploy's format."""

from __future__ import annotations

from typing import Any

__all__ = ["registration_fields"]


def registration_fields(role: str, port: int) -> dict[str, Any]:
    """Return the members of a registration. The instance has one port for everything."""
    return {
        "role": role,
        "host_ip": "127.0.0.1",
        "port": port,
        "metrics_port": port,
        "connector_port": port,
        "engine_worker_queue_port": port,
        "rdma_ports": ["7100"],
        "device_ids": [0],
        "transfer_protocol": ["ipc", "rdma"],
        "tp_size": 1,
        "is_paused": False,
        "version": None,
        "connected_decodes": [],
    }
