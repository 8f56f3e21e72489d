"""Every dialect of configuration -> one ``PoolConfig``."""

from kvstore_backend.config.settings import (
    FileSettings,
    MemorySettings,
    MooncakeSettings,
    PoolConfig,
    fastdeploy_plugins,
    load_config,
    named_model,
    parse_size,
    read_config,
    set_native_cluster,
    set_native_defaults,
)

__all__ = [
    "FileSettings",
    "MemorySettings",
    "MooncakeSettings",
    "PoolConfig",
    "fastdeploy_plugins",
    "load_config",
    "named_model",
    "parse_size",
    "read_config",
    "set_native_cluster",
    "set_native_defaults",
]
