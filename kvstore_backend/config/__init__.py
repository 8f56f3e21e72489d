"""Every dialect of configuration -> one ``PoolConfig``.

settings.py      the settings of each store and of the pool, field by field: variable, parser, default
values.py        parsers of values: sizes, addresses, switches, folders; and defaults that depend on the machine
dialects.py      other engines' files and our URLs, translated to our names
sources.py       load_config, read_config: explicit values, URL, JSON file, environment, default: the first one wins
environment.py   variables that are no pool's setting: other engines', and those that Mooncake's library reads
checkpoints.py   a model's name at a hub -> the folder of its download
rdma.py          the RDMA devices of this machine
hints.py         "did you mean ...?"
"""

from kvstore_backend.config.checkpoints import find_checkpoint, is_hub_name
from kvstore_backend.config.environment import (
    fastdeploy_plugins,
    named_model,
    set_native_cluster,
    set_native_defaults,
)
from kvstore_backend.config.rdma import has_active_port, list_rdma_devices
from kvstore_backend.config.settings import FileSettings, MemorySettings, MooncakeSettings, PoolConfig
from kvstore_backend.config.sources import load_config, read_config
from kvstore_backend.config.values import parse_size

__all__ = [
    "FileSettings",
    "MemorySettings",
    "MooncakeSettings",
    "PoolConfig",
    "fastdeploy_plugins",
    "find_checkpoint",
    "has_active_port",
    "is_hub_name",
    "list_rdma_devices",
    "load_config",
    "named_model",
    "parse_size",
    "read_config",
    "set_native_cluster",
    "set_native_defaults",
]
