"""The variables of the process's environment that are no setting of a pool: other engines', and Mooncake's own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvstore_backend.config.settings import MooncakeSettings, PoolConfig

__all__ = [
    "ascend_buffer_pool",
    "binds_address",
    "engine_variables",
    "fastdeploy_plugins",
    "is_named_port_bound",
    "library_folders",
    "named_model",
    "named_protocol",
    "named_rdma_devices",
    "named_variables",
    "offload_bucket",
    "offload_limit",
    "set_native_cluster",
    "set_native_defaults",
    "set_snapshot_folder",
    "wants_native_log",
]

# MC_LOG_LEVEL: Mooncake logs every step to stderr otherwise. MC_RPC_TIMEOUT_MS: a master that hangs costs 30 s a
# call otherwise. MC_STORE_CLIENT_SETUP_RETRIES: it tries 20 times otherwise, each as long as the time-out.
# MC_TCP_SLICE_SIZE: it writes and reads 64 KiB at a time otherwise, so that a block of 64 KiB with its header before it
# takes two rounds, which cost 10 us of 90. MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT: blocks go to an owner's SSD in
# buckets of 500 otherwise, and those that fill none when it looks for new ones are never written, as 0.3.13 forgets
# their tasks (https://github.com/kvcache-ai/Mooncake/issues/3006).
_NATIVE_DEFAULTS = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "3",
    "MC_TCP_SLICE_SIZE": "1048576",
    "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "1",
}


def fastdeploy_plugins(environ: Mapping[str, str] | None = None) -> list[str]:
    """The plugins that ``FD_PLUGINS`` names; FastDeploy loads all that are installed where it is not set."""
    named = (os.environ if environ is None else environ).get("FD_PLUGINS", "")
    return [name.strip() for name in named.split(",") if name.strip()]


def engine_variables(prefixes: tuple[str, ...], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that are named so at their beginning: those by which an engine is set."""
    given = os.environ if environ is None else environ
    return {name: text for name, text in given.items() if name.startswith(prefixes)}


def named_model(environ: Mapping[str, str] | None = None) -> str:
    """The checkpoint's folder by ``KVSTORE_MODEL``, for processes of engines that are not told it; empty: not set."""
    return (os.environ if environ is None else environ).get("KVSTORE_MODEL", "")


def ascend_buffer_pool(environ: Mapping[str, str] | None = None) -> str:
    """``ASCEND_BUFFER_POOL``, the buffers that Mooncake's transfers on Ascend cards go through; empty: not set."""
    return (os.environ if environ is None else environ).get("ASCEND_BUFFER_POOL", "").strip()


def named_variables(names: Iterable[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Those of an engine's own variables that are set, in the order of their names."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in sorted(names) if name in environ}


def library_folders(environ: Mapping[str, str] | None = None) -> list[Path]:
    """The folders of ``LD_LIBRARY_PATH``, in which the loader looks for shared libraries first."""
    named = (os.environ if environ is None else environ).get("LD_LIBRARY_PATH", "")
    return [Path(folder) for folder in named.split(":") if folder]


def named_protocol(environ: Mapping[str, str] | None = None) -> str:
    """The protocol by ``MOONCAKE_PROTOCOL``, which comes before a file's; empty: not set."""
    return (os.environ if environ is None else environ).get("MOONCAKE_PROTOCOL", "").strip().lower()


def named_rdma_devices(pool: PoolConfig | None, environ: Mapping[str, str] | None = None) -> str:
    """The RDMA devices for transfers past the pool: the pool's, or where it has none by ``MOONCAKE_RDMA_DEVICES``."""
    if pool is not None and isinstance(pool.store, MooncakeSettings):
        return pool.store.rdma_devices
    return (os.environ if environ is None else environ).get("MOONCAKE_RDMA_DEVICES", "").strip()


def offload_limit(environ: Mapping[str, str] | None = None) -> int:
    """The bytes that Mooncake may write to its SSD folder; 0: it is not said, and Mooncake takes 90 % of the disk."""
    environ = os.environ if environ is None else environ
    for name in ("MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE", "MOONCAKE_BUCKET_MAX_TOTAL_SIZE"):
        if (text := environ.get(name, "").strip()).isascii() and text.isdigit():
            return int(text)
    return 0


def offload_bucket(environ: Mapping[str, str] | None = None) -> str:
    """How many blocks Mooncake writes to a file of its SSD folder, by ``MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT``.

    "1" unless somebody has set it.
    """
    variable = "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT"
    return (os.environ if environ is None else environ).get(variable, "").strip() or _NATIVE_DEFAULTS[variable]


def is_named_port_bound(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``MC_LEGACY_RPC_PORT_BINDING`` has Mooncake listen at the port that ``local_hostname`` names."""
    return "MC_LEGACY_RPC_PORT_BINDING" in (os.environ if environ is None else environ)


def binds_address(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``MC_TCP_BIND_ADDRESS`` says which of this machine's addresses Mooncake gives itself."""
    return bool((os.environ if environ is None else environ).get("MC_TCP_BIND_ADDRESS"))


def set_native_defaults() -> None:
    """Set the variables that Mooncake's native library reads from the process's environment, where nobody else has.

    Called before the library is imported.
    """
    for variable, value in _NATIVE_DEFAULTS.items():
        os.environ.setdefault(variable, value)


def wants_native_log(environ: Mapping[str, str] | None = None) -> bool:
    """Whether somebody has asked for the log of Mooncake's native library, by ``MC_LOG_LEVEL``."""
    return "MC_LOG_LEVEL" in (os.environ if environ is None else environ)


def set_native_cluster(settings: MooncakeSettings) -> None:
    """Tell Mooncake's native library which cluster's leader to ask etcd for; it reads that when it joins."""
    os.environ["MC_STORE_CLUSTER_ID"] = settings.cluster_id


def set_snapshot_folder(folder: str) -> dict[str, str]:
    """Tell a Mooncake master that this process becomes where its snapshots are; the variables that say it."""
    # Without the second a master that is started anew forgets all blocks but those that a lease protects right then.
    variables = {
        "MOONCAKE_SNAPSHOT_LOCAL_PATH": str(Path(folder).absolute()),
        "MOONCAKE_MASTER_SERVICE_SNAPSHOT_TEST_SKIP_CLEANUP": "1",
    }
    os.environ.update(variables)
    return variables
