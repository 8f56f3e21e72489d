"""A registration with the fields of FastDeploy's instances."""

from __future__ import annotations

from typing import Any

from router.fleet.registration import Registration

__all__ = ["registration"]

_FIELDS: dict[str, Any] = {
    "role": "decode",
    "host_ip": "10.0.0.1",
    "port": 52500,
    "metrics_port": 52501,
    "connector_port": 8002,
    "engine_worker_queue_port": 8003,
    "rdma_ports": ["7100", "7101"],
    "device_ids": ["0", "1"],
    "transfer_protocol": ["ipc", "rdma"],
    "tp_size": 2,
    "is_paused": False,
    "version": "v1",
    "connected_decodes": [],
}


def registration(**changes: Any) -> Registration:
    """Return the registration with these changes."""
    return Registration.from_fields({**_FIELDS, **changes})
