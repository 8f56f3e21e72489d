"""Settings of each store and of the pool, field by field: environment variable, parser, default.

A field's name is its key in the JSON file. For Mooncake, keys and variables are FastDeploy's, so that its files and
scripts work; dialects.py translates the names of others, and sources.py decides which source of a value wins.
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
"""Mooncake's name for the tenant of clients that name none."""


def _read_from(variable: str, parse: Callable[[object], object] | None = None, also: str = "") -> dict[str, object]:
    """Return a field's metadata.

    Args:
        variable: the environment variable with the value.
        also: another engine's variable, used if ``variable`` is not set.
        parse: checks the value or raises ``ValueError``; not given: the value is the URL of a separate store, whose
            settings sources.py builds.
    """
    return {"variable": variable, "parse": parse, "also": also}


@dataclass(frozen=True)
class MooncakeSettings:
    """Settings to join a Mooncake cluster.

    Attributes:
        master_server_addr: ``host:port`` of the master; with several masters ``etcd://host:port;host:port``,
            ``redis://host:port`` or ``k8s://namespace/lease``, where the leading master is registered. With
            ``file:///folder`` these are the settings of a folder, and all other settings here are ignored.
        metadata_server: URL of the metadata server (``http://``, ``etcd://``, ``redis://``), or ``P2PHANDSHAKE`` for
            none. Clients with different values cannot read each other's memory.
        local_hostname: name by which other clients reach this machine; empty: the address from which it reaches the
            master.
        protocol: ``tcp``, ``rdma`` or ``ascend``.
        rdma_devices: names separated by commas; empty: Mooncake's choice.
        global_segment_size: bytes of this machine's memory given to the pool; 0 for none.
        local_buffer_size: bytes of Mooncake's own staging, which our calls do not need.
        cluster_id: with several masters, the cluster that they belong to, as their ``--cluster_id`` says.
        tenant_id: owner of the blocks; they count against its quota, if the master separates tenants
            (``--enable_multi_tenants``).
        enable_ssd_offload: let Mooncake store blocks on this machine's SSD when its memory is full; its master must
            run with ``--enable_offload=true``.
        ssd_offload_path: the folder for that.
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

    @property
    def etcd_addresses(self) -> list[str]:
        """Addresses of the etcd servers that know the leading master; empty for another service or a single master."""
        return self.list_servers(self.master_server_addr) if self.ha_backend == "etcd" else []

    @staticmethod
    def list_servers(url: str) -> list[str]:
        """Return ``host:port`` of each server of an address or a URL of these settings."""
        return url.rpartition("://")[2].split(";")


@dataclass(frozen=True)
class FileSettings:
    """Settings of a folder that processes of this machine share.

    Attributes:
        path: the folder, on a tmpfs (quick) or an SSD (large). FastDeploy's variable for it is also read.
        size: bytes at which the least recently used blocks are evicted, the same for all processes that have it open;
            None: the size stored in the folder, and 1 GiB for a new folder.
    """

    backend: ClassVar[str] = "file"

    path: Path = field(
        default_factory=default_folder,
        metadata=_read_from("KVSTORE_FILE_PATH", parse_folder, also="FILE_BACKEND_STORAGE_DIR"),
    )
    size: int | None = field(default=None, metadata=_read_from("KVSTORE_FILE_SIZE", parse_positive_size))


@dataclass(frozen=True)
class MemorySettings:
    """Settings of this process's own memory, which no other process shares.

    Attributes:
        size: bytes at which the least recently used blocks are evicted.
    """

    backend: ClassVar[str] = "memory"

    size: int = field(default=1 << 30, metadata=_read_from("KVSTORE_MEMORY_SIZE", parse_positive_size))


StoreSettings: TypeAlias = MooncakeSettings | FileSettings | MemorySettings
"""Settings of any one store."""

STORE_SETTINGS: dict[str, type[StoreSettings]] = {
    kind.backend: kind for kind in (MooncakeSettings, FileSettings, MemorySettings)
}
"""Settings class of each backend, by its name."""


@dataclass(frozen=True)
class PoolConfig:
    """Configuration of a pool: which store to open, and how. ``load_config`` makes and checks it.

    Attributes:
        store: the shared store.
        async_write: save in the background, like MindIE's ``asyncWrite``; with a fast store, saves start from there.
        fast: a smaller, quicker store of this machine in front of the shared store.
        kv: the form in which blocks are stored, ``int8`` or ``fp8``, half or a quarter as large and not exactly as
            computed; empty: unchanged. Only the reference engine knows other forms.
    """

    store: MooncakeSettings | FileSettings | MemorySettings
    async_write: bool = field(default=False, metadata=_read_from("KVSTORE_ASYNC_WRITE", parse_switch))
    fast: MemorySettings | FileSettings | None = field(default=None, metadata=_read_from("KVSTORE_FAST_TIER"))

    kv: str = field(default="", metadata=_read_from("KVSTORE_KV", parse_kv_form))

    @property
    def backend(self) -> str:
        """Name of the shared store: ``mooncake``, ``file`` or ``memory``."""
        return self.store.backend

    def require_plain(self, who: str) -> PoolConfig:
        """Return this configuration for ``who``, an engine that stores blocks only unchanged.

        Raises:
            ConfigError: the configuration has another form.
        """
        if self.kv:
            raise ConfigError(
                f"kv is {self.kv!r} (KVSTORE_KV), and {who} stores blocks as they are: leave kv out, or use our engine"
            )
        return self
