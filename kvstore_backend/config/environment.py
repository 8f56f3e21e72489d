"""Variables of the process's environment that are not settings of a pool: other engines', and Mooncake's own."""

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
    "talkative_environment",
    "wants_native_log",
]

# The reasons, with Mooncake's behaviour without these values. MC_LOG_LEVEL: Mooncake logs every step to stderr.
# MC_RPC_TIMEOUT_MS: a master that hangs costs 30 s a call. MC_STORE_CLIENT_SETUP_RETRIES: it tries 20 times, and each
# try takes as long as the time-out. MC_TCP_SLICE_SIZE: it writes and reads 64 KiB at a time, so a block of 64 KiB with
# its header takes two rounds, which cost 10 us of 90. MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT: it writes blocks to a
# client's SSD in buckets of 500, and never writes blocks of a bucket that is not full when it looks for new ones,
# because 0.3.13 forgets their tasks (https://github.com/kvcache-ai/Mooncake/issues/3006).
_NATIVE_DEFAULTS = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "3",
    "MC_TCP_SLICE_SIZE": "1048576",
    "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "1",
}


def fastdeploy_plugins(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the plugins that ``FD_PLUGINS`` names; without the variable, FastDeploy loads all installed plugins."""
    named = (os.environ if environ is None else environ).get("FD_PLUGINS", "")
    return [name.strip() for name in named.split(",") if name.strip()]


def engine_variables(prefixes: tuple[str, ...], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables with one of these prefixes: the settings of an engine."""
    given = os.environ if environ is None else environ
    return {name: text for name, text in given.items() if name.startswith(prefixes)}


def named_model(environ: Mapping[str, str] | None = None) -> str:
    """Return the checkpoint's folder from ``KVSTORE_MODEL``; empty: not set.

    It is for processes of engines that have no other source for it.
    """
    return (os.environ if environ is None else environ).get("KVSTORE_MODEL", "")


def ascend_buffer_pool(environ: Mapping[str, str] | None = None) -> str:
    """Return ``ASCEND_BUFFER_POOL``, the buffers of Mooncake's transfers on Ascend cards; empty: not set."""
    return (os.environ if environ is None else environ).get("ASCEND_BUFFER_POOL", "").strip()


def named_variables(names: Iterable[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return those of an engine's own variables that are set, sorted by name."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in sorted(names) if name in environ}


def library_folders(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Return the folders of ``LD_LIBRARY_PATH``, where the loader looks for shared libraries first."""
    named = (os.environ if environ is None else environ).get("LD_LIBRARY_PATH", "")
    return [Path(folder) for folder in named.split(":") if folder]


def named_protocol(environ: Mapping[str, str] | None = None) -> str:
    """Return the protocol from ``MOONCAKE_PROTOCOL``, which overrides a file; empty: not set."""
    return (os.environ if environ is None else environ).get("MOONCAKE_PROTOCOL", "").strip().lower()


def named_rdma_devices(pool: PoolConfig | None, environ: Mapping[str, str] | None = None) -> str:
    """Return the RDMA devices for transfers outside the pool: the pool's, or those in ``MOONCAKE_RDMA_DEVICES``."""
    if pool is not None and isinstance(pool.store, MooncakeSettings):
        return pool.store.rdma_devices
    return (os.environ if environ is None else environ).get("MOONCAKE_RDMA_DEVICES", "").strip()


def offload_limit(environ: Mapping[str, str] | None = None) -> int:
    """Return the bytes that Mooncake may write to its SSD folder; 0: not set, and Mooncake takes 90 % of the disk."""
    environ = os.environ if environ is None else environ
    for name in ("MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE", "MOONCAKE_BUCKET_MAX_TOTAL_SIZE"):
        if (text := environ.get(name, "").strip()).isascii() and text.isdigit():
            return int(text)
    return 0


def offload_bucket(environ: Mapping[str, str] | None = None) -> str:
    """Return how many blocks Mooncake writes to a file of its SSD folder: ``MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT``.

    The default is "1".
    """
    variable = "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT"
    return (os.environ if environ is None else environ).get(variable, "").strip() or _NATIVE_DEFAULTS[variable]


def is_named_port_bound(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether ``MC_LEGACY_RPC_PORT_BINDING`` makes Mooncake listen at the port in ``local_hostname``."""
    return "MC_LEGACY_RPC_PORT_BINDING" in (os.environ if environ is None else environ)


def binds_address(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether ``MC_TCP_BIND_ADDRESS`` selects the address of this machine that Mooncake uses."""
    return bool((os.environ if environ is None else environ).get("MC_TCP_BIND_ADDRESS"))


def set_native_defaults() -> None:
    """Set variables that Mooncake's native library reads from the process's environment, unless they are already set.

    Call this before the library is imported.
    """
    for variable, value in _NATIVE_DEFAULTS.items():
        os.environ.setdefault(variable, value)


def wants_native_log(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether ``MC_LOG_LEVEL`` requests the log of Mooncake's native library."""
    return "MC_LOG_LEVEL" in (os.environ if environ is None else environ)


def talkative_environment() -> dict[str, str]:
    """Return the environment of a process that asks Mooncake's library what it can do: it logs much, and tries once."""
    return {**os.environ, "MC_LOG_LEVEL": "INFO", "MC_STORE_CLIENT_SETUP_RETRIES": "1"}


def set_native_cluster(settings: MooncakeSettings) -> None:
    """Set the cluster for Mooncake's native library, which looks up its leader in etcd when it joins."""
    os.environ["MC_STORE_CLUSTER_ID"] = settings.cluster_id


def set_snapshot_folder(folder: str) -> dict[str, str]:
    """Set the snapshot folder for the Mooncake master that this process becomes; return the variables that it sets."""
    # Without the second variable a restarted master forgets all blocks except those that a lease protects at that time.
    variables = {
        "MOONCAKE_SNAPSHOT_LOCAL_PATH": str(Path(folder).absolute()),
        "MOONCAKE_MASTER_SERVICE_SNAPSHOT_TEST_SKIP_CLEANUP": "1",
    }
    os.environ.update(variables)
    return variables
