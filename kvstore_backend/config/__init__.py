"""Reads the configuration of a pool in every dialect, and returns it as a ``PoolConfig``.

settings.py      the settings of each store and of the pool: for each the environment variable, the parser, the default
values.py        parsers of values: sizes, addresses, switches, folders; and defaults that depend on the machine
dialects.py      reads other engines' files, and URLs, and translates the names of settings
sources.py       load_config and read_config: take each value from the arguments, a URL, a file, the environment or a
                 default
environment.py   reads environment variables that are not settings of a pool: of other engines and Mooncake's library
checkpoints.py   finds the folder of a downloaded model by the model's name at a hub
"""

from kvstore_backend.config.checkpoints import find_checkpoint, is_hub_name
from kvstore_backend.config.dialects import parse_mindie_pool
from kvstore_backend.config.environment import (
    PRECISION_VARIABLES,
    ascend_buffer_pool,
    binds_address,
    choose_rdma_devices,
    engine_variables,
    fastdeploy_plugins,
    is_named_port_bound,
    library_folders,
    offload_bucket,
    offload_limit,
    read_model_folder,
    read_protocol,
    select_variables,
    set_native_cluster,
    set_native_defaults,
    set_snapshot_folder,
    verbose_environment,
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
    "PRECISION_VARIABLES",
    "FileSettings",
    "MemorySettings",
    "MooncakeSettings",
    "PoolConfig",
    "ascend_buffer_pool",
    "binds_address",
    "choose_rdma_devices",
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
    "read_model_folder",
    "read_protocol",
    "select_variables",
    "set_native_cluster",
    "set_native_defaults",
    "set_snapshot_folder",
    "verbose_environment",
    "wants_native_log",
]
