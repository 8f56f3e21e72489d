"""Settings of each store and of the pool. Each field has an environment variable, a parser and a default.

The name of a field is its key in the JSON file. Keys and variables for Mooncake are those of FastDeploy, so
FastDeploy's files and scripts work. ``dialects.py`` translates the names of other engines. ``sources.py`` selects the
source of each value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeAlias

from kvstore_backend.backend import ConfigError
from kvstore_backend.config.values import (
    default_folder,
    default_metadata_server,
    default_protocol,
    parse_device_names,
    parse_folder,
    parse_kv_form,
    parse_master_address,
    parse_metadata_server,
    parse_positive_size,
    parse_protocol,
    parse_segment_size,
    parse_size,
    parse_switch,
    parse_tenant,
    parse_text,
)

__all__ = [
    "DEFAULT_TENANT",
    "STORE_SETTINGS",
    "FileSettings",
    "MemorySettings",
    "MooncakeSettings",
    "PoolConfig",
    "StoreSettings",
]

DEFAULT_TENANT = "default"
"""Tenant of the clients that configure no tenant, as Mooncake names it."""


def _read_from(variable: str, parse: Callable[[object], object] | None = None, also: str = "") -> dict[str, object]:
    """Return the metadata for a field of a settings class.

    Args:
        variable: the environment variable with the value.
        parse: returns the checked value, or raises ``ValueError``; None if the value is the URL of another store.
        also: another engine's variable for the value, used if ``variable`` is not set.
    """
    return {"variable": variable, "parse": parse, "also": also}


@dataclass(frozen=True)
class MooncakeSettings:
    """Settings to join a Mooncake cluster.

    Attributes:
        master_server_addr: ``host:port`` of the master. With several masters, the place where the leading master is
            registered: ``etcd://host:port;host:port``, ``redis://host:port`` or ``k8s://namespace/lease``. With
            ``file:///folder``, the pool is a folder, and all other settings of Mooncake are ignored.
        metadata_server: URL of the metadata server (``http://``, ``etcd://``, ``redis://``); ``P2PHANDSHAKE`` if there
            is none. Clients with different values cannot read each other's memory.
        local_hostname: name by which other clients reach this machine; if empty, the address from which this machine
            connects to the master is used.
        protocol: ``tcp``, ``rdma`` or ``ascend``.
        rdma_devices: names of RDMA devices, separated by commas; if empty, Mooncake chooses the devices.
        global_segment_size: bytes of memory that this process gives to the pool; may be 0.
        local_buffer_size: bytes of Mooncake's own staging buffer, which the calls of this package do not need.
        cluster_id: with several masters, the id of their cluster; the same as the masters' ``--cluster_id``.
        tenant_id: tenant that owns the blocks. The blocks count against the quota of the tenant if the master separates
            tenants (``--enable_multi_tenants``).
        enable_ssd_offload: whether Mooncake stores blocks on this machine's SSD when its memory is full. The master
            must run with ``--enable_offload=true``.
        ssd_offload_path: folder on the SSD for these blocks; if empty, Mooncake's default folder is used.
    """

    backend: ClassVar[str] = "mooncake"

    master_server_addr: str = field(metadata=_read_from("MOONCAKE_MASTER_SERVER_ADDR", parse_master_address))
    metadata_server: str = field(
        default_factory=default_metadata_server, metadata=_read_from("MOONCAKE_METADATA_SERVER", parse_metadata_server)
    )
    local_hostname: str = field(default="", metadata=_read_from("MOONCAKE_LOCAL_HOSTNAME", parse_text))
    protocol: str = field(default_factory=default_protocol, metadata=_read_from("MOONCAKE_PROTOCOL", parse_protocol))
    rdma_devices: str = field(default="", metadata=_read_from("MOONCAKE_RDMA_DEVICES", parse_device_names))
    global_segment_size: int = field(
        default=1 << 30, metadata=_read_from("MOONCAKE_GLOBAL_SEGMENT_SIZE", parse_segment_size)
    )
    local_buffer_size: int = field(default=128 << 20, metadata=_read_from("MOONCAKE_LOCAL_BUFFER_SIZE", parse_size))
    cluster_id: str = field(default="mooncake_cluster", metadata=_read_from("MC_STORE_CLUSTER_ID", parse_text))
    tenant_id: str = field(default=DEFAULT_TENANT, metadata=_read_from("MOONCAKE_TENANT_ID", parse_tenant))
    enable_ssd_offload: bool = field(default=False, metadata=_read_from("MOONCAKE_ENABLE_SSD_OFFLOAD", parse_switch))
    ssd_offload_path: str = field(default="", metadata=_read_from("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", parse_text))

    @property
    def ha_backend(self) -> str:
        """Service that knows the leading master: ``etcd``, ``redis`` or ``k8s``; empty for a single master."""
        scheme, separator, _ = self.master_server_addr.partition("://")
        return scheme if separator else ""

    @staticmethod
    def list_servers(url: str) -> list[str]:
        """Return the ``host:port`` of each server in an address or URL, such as ``etcd://a:2379;b:2379``."""
        return url.rpartition("://")[2].split(";")


@dataclass(frozen=True)
class FileSettings:
    """Settings of a folder that the processes of this machine share.

    Attributes:
        path: the folder, on a tmpfs (fast) or an SSD (large). FastDeploy's variable for the folder is also read.
        size: bytes at which the least recently used blocks are evicted. The size must be the same in all processes that
            have the folder open. If it is None, the limit is the size stored in the folder, or 1 GiB for a new folder.
    """

    backend: ClassVar[str] = "file"

    path: Path = field(
        default_factory=default_folder,
        metadata=_read_from("KVSTORE_FILE_PATH", parse_folder, also="FILE_BACKEND_STORAGE_DIR"),
    )
    size: int | None = field(default=None, metadata=_read_from("KVSTORE_FILE_SIZE", parse_positive_size))


@dataclass(frozen=True)
class MemorySettings:
    """Settings of a store in this process's own memory, which other processes cannot use.

    Attributes:
        size: bytes at which the least recently used blocks are evicted.
    """

    backend: ClassVar[str] = "memory"

    size: int = field(default=1 << 30, metadata=_read_from("KVSTORE_MEMORY_SIZE", parse_positive_size))


StoreSettings: TypeAlias = MooncakeSettings | FileSettings | MemorySettings
"""Settings of one store of any kind."""

STORE_SETTINGS: dict[str, type[StoreSettings]] = {
    kind.backend: kind for kind in (MooncakeSettings, FileSettings, MemorySettings)
}
"""Class of the settings of each store, by the name of the store."""


@dataclass(frozen=True)
class PoolConfig:
    """Configuration of a pool: the store to open, and its options. ``load_config`` creates and checks it.

    Attributes:
        store: settings of the shared store.
        async_write: whether blocks are written to the shared store in the background, like MindIE's ``asyncWrite``.
        fast: settings of the fast tier, a smaller store of this machine in front of the shared store, or None.
        kv: form in which blocks are stored: ``int8`` or ``fp8`` (one byte for each element instead of two or four; the
            values are not exact); empty: unchanged. Only the reference engine supports ``int8`` and ``fp8``.
    """

    store: MooncakeSettings | FileSettings | MemorySettings
    async_write: bool = field(default=False, metadata=_read_from("KVSTORE_ASYNC_WRITE", parse_switch))
    fast: MemorySettings | FileSettings | None = field(default=None, metadata=_read_from("KVSTORE_FAST_TIER"))

    kv: str = field(default="", metadata=_read_from("KVSTORE_KV", parse_kv_form))

    @property
    def backend(self) -> str:
        """Kind of the shared store: ``mooncake``, ``file`` or ``memory``."""
        return self.store.backend

    def require_plain(self, who: str) -> PoolConfig:
        """Return this configuration, for an engine that can only store blocks unchanged.

        Args:
            who: name of the engine, for the message.

        Raises:
            ConfigError: ``kv`` is not empty.
        """
        if self.kv:
            raise ConfigError(
                f"kv is {self.kv!r} (KVSTORE_KV), but {who} stores blocks unchanged; leave kv out, or use our "
                "reference engine"
            )
        return self
