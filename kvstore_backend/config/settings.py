"""The settings of each store and of the pool, field by field: environment variable, parser, default.

A field's name is its key in the JSON file. For Mooncake keys and variables are FastDeploy's, so that its files and
scripts work; dialects.py translates those of others, and sources.py says which source of a value wins.
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
"""Mooncake's name for the tenant of those who name none."""


def _read_from(variable: str, parse: Callable[[object], object] | None = None, also: str = "") -> dict[str, object]:
    """A field's metadata.

    Args:
        variable: carries the value in the environment.
        also: carries it where ``variable`` does not, by another engine's name.
        parse: checks the value or raises ``ValueError``; not given: the value is the URL of a store of its own, whose
            settings sources.py puts together.
    """
    return {"variable": variable, "parse": parse, "also": also}


@dataclass(frozen=True)
class MooncakeSettings:
    """How to join a Mooncake cluster.

    Attributes:
        master_server_addr: ``host:port`` of the master; with several masters ``etcd://host:port;host:port``,
            ``redis://host:port`` or ``k8s://namespace/lease``, where it is known which of them leads. In its place
            ``file:///folder`` may stand; then these are the settings of a folder, and all others here are not read.
        metadata_server: URL of the metadata server (``http://``, ``etcd://``, ``redis://``), or ``P2PHANDSHAKE`` to do
            without. Clients that differ in it cannot read each other's memory.
        local_hostname: by which the others reach this machine; empty: the address it reaches the master from.
        protocol: ``tcp``, ``rdma`` or ``ascend``.
        rdma_devices: names separated by commas; empty: Mooncake's choice.
        global_segment_size: bytes of this machine's memory given to the pool; 0 for none.
        local_buffer_size: bytes of Mooncake's own staging, which our calls do not need.
        cluster_id: of several masters of which one leads, as their ``--cluster_id`` says.
        tenant_id: whose blocks these are, and whose quota they count against, where the master keeps tenants apart
            (``--enable_multi_tenants``).
        enable_ssd_offload: let Mooncake keep blocks on this machine's SSD where its memory has no room; its master must
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
        """Who knows which of several masters leads: ``etcd``, ``redis`` or ``k8s``; empty where one master is named."""
        scheme, separator, _ = self.master_server_addr.partition("://")
        return scheme if separator else ""

    @property
    def etcd_addresses(self) -> list[str]:
        """Where the etcd servers are that know the leading master; empty where another knows it, or there is one."""
        return self.list_servers(self.master_server_addr) if self.ha_backend == "etcd" else []

    @staticmethod
    def list_servers(url: str) -> list[str]:
        """``host:port`` of each server of an address or a URL of these settings."""
        return url.rpartition("://")[2].split(";")


@dataclass(frozen=True)
class FileSettings:
    """A folder that processes of this machine share.

    Attributes:
        path: the folder, on a tmpfs (quick) or an SSD (large). FastDeploy's variable for it is read, too.
        size: bytes at which the least recently used blocks are evicted, the same for all who have it open; None: as
            the folder has it, and 1 GiB for a new one.
    """

    backend: ClassVar[str] = "file"

    path: Path = field(
        default_factory=default_folder,
        metadata=_read_from("KVSTORE_FILE_PATH", parse_folder, also="FILE_BACKEND_STORAGE_DIR"),
    )
    size: int | None = field(default=None, metadata=_read_from("KVSTORE_FILE_SIZE", parse_positive_size))


@dataclass(frozen=True)
class MemorySettings:
    """This process's own memory, shared with nobody.

    Attributes:
        size: bytes at which the least recently used blocks are evicted.
    """

    backend: ClassVar[str] = "memory"

    size: int = field(default=1 << 30, metadata=_read_from("KVSTORE_MEMORY_SIZE", parse_positive_size))


StoreSettings: TypeAlias = MooncakeSettings | FileSettings | MemorySettings
"""The settings of any one store."""

STORE_SETTINGS: dict[str, type[StoreSettings]] = {
    kind.backend: kind for kind in (MooncakeSettings, FileSettings, MemorySettings)
}
"""The settings class of each backend, by its name."""


@dataclass(frozen=True)
class PoolConfig:
    """Which store to open, and how. ``load_config`` made and checked it.

    Attributes:
        store: the store that is shared.
        async_write: save in the background, as MindIE's ``asyncWrite`` says; where there is a fast store, from that.
        fast: a smaller, quicker store of this machine's own before the shared one.
        kv: the form in which blocks are stored, ``int8`` or ``fp8``, half or a quarter as large and not exactly as
            computed; empty: as they are. Only the reference engine knows other forms.
    """

    store: MooncakeSettings | FileSettings | MemorySettings
    async_write: bool = field(default=False, metadata=_read_from("KVSTORE_ASYNC_WRITE", parse_switch))
    fast: MemorySettings | FileSettings | None = field(default=None, metadata=_read_from("KVSTORE_FAST_TIER"))

    kv: str = field(default="", metadata=_read_from("KVSTORE_KV", parse_kv_form))

    @property
    def backend(self) -> str:
        """``mooncake``, ``file`` or ``memory``."""
        return self.store.backend

    def require_plain(self, who: str) -> PoolConfig:
        """This configuration, for ``who`` stores blocks as they are.

        Raises:
            ConfigError: it says otherwise.
        """
        if self.kv:
            raise ConfigError(
                f"kv is {self.kv!r} (KVSTORE_KV), and {who} stores blocks as they are: leave kv out, or use our engine"
            )
        return self
