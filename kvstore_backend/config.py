"""Every dialect of configuration -> one ``PoolConfig``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "FileSettings",
    "MemorySettings",
    "MooncakeSettings",
    "PoolConfig",
    "default_backend",
    "load_config",
]


@dataclass(frozen=True)
class MooncakeSettings:
    """How to join a Mooncake cluster; names as in FastDeploy's ``mooncake_config.json``. Sizes in bytes."""

    master_server_addr: str
    local_hostname: str
    metadata_server: str
    protocol: str
    rdma_devices: str
    global_segment_size: int
    local_buffer_size: int


@dataclass(frozen=True)
class FileSettings:
    """A folder shared by processes, and the bytes at which it evicts."""

    path: Path
    size: int


@dataclass(frozen=True)
class MemorySettings:
    """The bytes at which this process's own store evicts."""

    size: int


@dataclass(frozen=True)
class PoolConfig:
    """Which store to open, and how; checked when it was loaded."""

    store: MooncakeSettings | FileSettings | MemorySettings

    @property
    def backend(self) -> str:
        """``mooncake``, ``file`` or ``memory``."""
        raise NotImplementedError


def default_backend() -> str:
    """``mooncake`` where its library can be imported, else ``file``."""
    raise NotImplementedError


def load_config(
    backend: str,
    *,
    explicit: Mapping[str, object] | None = None,
    config_path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> PoolConfig:
    """The configuration of ``backend``: each value from ``explicit``, else file, else environment, else a default.

    Args:
        backend: ``mooncake``, ``file`` or ``memory``.
        explicit: values by the field names of the backend's settings, such as flags an operator typed; ``None``
            values count as not given.
        config_path: a JSON file; not given, the environment's ``MOONCAKE_CONFIG_PATH`` (for ``mooncake``).
        environ: the environment; not given, the process's own.

    Raises:
        ConfigError: one sentence naming the flag, file key or variable at fault and what would be right.
    """
    raise NotImplementedError
