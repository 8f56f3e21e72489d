"""Every dialect of configuration -> one ``PoolConfig``.

settings.py      the settings of each store and of the pool, field by field: variable, parser, default
values.py        parsers of values: sizes, addresses, switches, folders; and defaults that depend on the machine
dialects.py      other engines' files and our URLs, translated to our names
sources.py       load_config, read_config: explicit values, URL, JSON file, environment, default: the first one wins,
                 except for MOONCAKE_PROTOCOL, which overrides a file
environment.py   variables that are not settings of a pool: those of other engines and of Mooncake's library
checkpoints.py   a model's name at a hub -> the folder of its download
"""

from kvstore_backend.config.checkpoints import find_checkpoint, is_hub_name
from kvstore_backend.config.dialects import parse_mindie_pool
from kvstore_backend.config.environment import (
    ascend_buffer_pool,
    binds_address,
    engine_variables,
    fastdeploy_plugins,
    is_named_port_bound,
    library_folders,
    named_model,
    named_protocol,
    named_rdma_devices,
    named_variables,
    offload_bucket,
    offload_limit,
    set_native_cluster,
    set_native_defaults,
    set_snapshot_folder,
    talkative_environment,
    wants_native_log,
)
from kvstore_backend.config.settings import (
    DEFAULT_TENANT,
    FileSettings,
    MemorySettings,
    MooncakeSettings,
    PoolConfig,
)
from kvstore_backend.config.sources import (
    describe_override,
    describe_unknown,
    describe_url,
    load_config,
    names_pool,
    names_protocol,
    read_config,
)
from kvstore_backend.config.values import (
    has_active_port,
    hide_password,
    list_rdma_devices,
    parse_master_address,
    parse_size,
    parse_switch,
    parse_tenant,
)

__all__ = [
    "DEFAULT_TENANT",
    "FileSettings",
    "MemorySettings",
    "MooncakeSettings",
    "PoolConfig",
    "ascend_buffer_pool",
    "binds_address",
    "describe_override",
    "describe_unknown",
    "describe_url",
    "engine_variables",
    "fastdeploy_plugins",
    "find_checkpoint",
    "has_active_port",
    "hide_password",
    "is_hub_name",
    "is_named_port_bound",
    "library_folders",
    "list_rdma_devices",
    "load_config",
    "named_model",
    "named_protocol",
    "named_rdma_devices",
    "named_variables",
    "names_pool",
    "names_protocol",
    "offload_bucket",
    "offload_limit",
    "parse_master_address",
    "parse_mindie_pool",
    "parse_size",
    "parse_switch",
    "parse_tenant",
    "read_config",
    "set_native_cluster",
    "set_native_defaults",
    "set_snapshot_folder",
    "talkative_environment",
    "wants_native_log",
]
