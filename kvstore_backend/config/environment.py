"""Reads and sets environment variables of other engines and of Mooncake's library, which are no settings of a pool."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvstore_backend.config.settings import MooncakeSettings, PoolConfig

__all__ = [
    "PRECISION_VARIABLES",
    "ascend_buffer_pool",
    "binds_address",
    "choose_rdma_devices",
    "engine_variables",
    "fastdeploy_plugins",
    "is_named_port_bound",
    "library_folders",
    "offload_bucket",
    "offload_limit",
    "read_model_folder",
    "read_protocol",
    "select_variables",
    "set_native_cluster",
    "set_native_defaults",
    "set_snapshot_folder",
    "verbose_environment",
    "wants_native_log",
]

PRECISION_VARIABLES = (
    "DNNL_DEFAULT_FPMATH_MODE",
    "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH",
)
"""Variables with which libraries of engines (cuBLAS, oneDNN, PyTorch, FlashInfer) calculate with another precision."""

# Mooncake's behaviour without these values:
# - MC_LOG_LEVEL: Mooncake logs every step to stderr.
# - MC_RPC_TIMEOUT_MS: a call takes 30 s if the master hangs.
# - MC_STORE_CLIENT_SETUP_RETRIES: joining tries 20 times, and each try takes as long as the time-out.
# - MC_TCP_SLICE_SIZE: TCP moves 64 KiB at a time, so a block of 64 KiB with its header takes two rounds: 10 us of 90.
# - MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT: blocks are written to a client's SSD in groups (buckets) of 500. Blocks in a
#   bucket that is not full are never written, because Mooncake 0.3.13 forgets their tasks
#   (https://github.com/kvcache-ai/Mooncake/issues/3006).
_NATIVE_DEFAULTS = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "3",
    "MC_TCP_SLICE_SIZE": "1048576",
    "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "1",
}


def fastdeploy_plugins(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of FastDeploy's plugins in ``FD_PLUGINS``; empty if the variable is not set."""
    named = (os.environ if environ is None else environ).get("FD_PLUGINS", "")
    return [name.strip() for name in named.split(",") if name.strip()]


def engine_variables(prefixes: tuple[str, ...], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables with names that begin with one of ``prefixes``, such as an engine's."""
    given = os.environ if environ is None else environ
    return {name: text for name, text in given.items() if name.startswith(prefixes)}


def read_model_folder(environ: Mapping[str, str] | None = None) -> str:
    """Return the folder of the model's checkpoint from ``KVSTORE_MODEL``; empty if the variable is not set.

    Processes of an engine that do not get the folder from the engine use this variable.
    """
    return (os.environ if environ is None else environ).get("KVSTORE_MODEL", "")


def ascend_buffer_pool(environ: Mapping[str, str] | None = None) -> str:
    """Return ``ASCEND_BUFFER_POOL``: number and size of buffers for transfers on Ascend cards; empty if not set."""
    return (os.environ if environ is None else environ).get("ASCEND_BUFFER_POOL", "").strip()


def select_variables(names: Iterable[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the values of those environment variables of ``names`` that are set, sorted by name."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in sorted(names) if name in environ}


def library_folders(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Return the folders in ``LD_LIBRARY_PATH``, in which the system first searches for shared libraries."""
    named = (os.environ if environ is None else environ).get("LD_LIBRARY_PATH", "")
    return [Path(folder) for folder in named.split(":") if folder]


def read_protocol(environ: Mapping[str, str] | None = None) -> str:
    """Return the protocol in ``MOONCAKE_PROTOCOL``, which overrides the protocol in a file; empty if not set."""
    return (os.environ if environ is None else environ).get("MOONCAKE_PROTOCOL", "").strip().lower()


def choose_rdma_devices(pool: PoolConfig | None, environ: Mapping[str, str] | None = None) -> str:
    """Return the RDMA devices for direct transfers: those of a Mooncake pool, otherwise ``MOONCAKE_RDMA_DEVICES``."""
    if pool is not None and isinstance(pool.store, MooncakeSettings):
        return pool.store.rdma_devices
    return (os.environ if environ is None else environ).get("MOONCAKE_RDMA_DEVICES", "").strip()


def offload_limit(environ: Mapping[str, str] | None = None) -> int:
    """Return the size limit of Mooncake's SSD folder in bytes; 0 without one (it may then fill 90 % of the disk)."""
    environ = os.environ if environ is None else environ
    for name in ("MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE", "MOONCAKE_BUCKET_MAX_TOTAL_SIZE"):
        if (text := environ.get(name, "").strip()).isascii() and text.isdigit():
            return int(text)
    return 0


def offload_bucket(environ: Mapping[str, str] | None = None) -> str:
    """Return ``MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT``: the number of blocks in a file of Mooncake's SSD folder, as text.

    Without the variable, the result is "1".
    """
    variable = "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT"
    return (os.environ if environ is None else environ).get(variable, "").strip() or _NATIVE_DEFAULTS[variable]


def is_named_port_bound(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether ``MC_LEGACY_RPC_PORT_BINDING`` makes Mooncake listen at the port in ``local_hostname``."""
    return "MC_LEGACY_RPC_PORT_BINDING" in (os.environ if environ is None else environ)


def binds_address(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether ``MC_TCP_BIND_ADDRESS`` is set, which selects the address of this machine that Mooncake uses."""
    return bool((os.environ if environ is None else environ).get("MC_TCP_BIND_ADDRESS"))


def set_native_defaults() -> None:
    """Set the variables that Mooncake's native library reads, except variables that are already set.

    Must be called before the library is imported.
    """
    for variable, value in _NATIVE_DEFAULTS.items():
        os.environ.setdefault(variable, value)


def wants_native_log(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the user has set ``MC_LOG_LEVEL``, to see the log of Mooncake's native library."""
    return "MC_LOG_LEVEL" in (os.environ if environ is None else environ)


def verbose_environment() -> dict[str, str]:
    """Return the environment of a process that tests Mooncake's library, with a full log and only one try to join."""
    return {**os.environ, "MC_LOG_LEVEL": "INFO", "MC_STORE_CLIENT_SETUP_RETRIES": "1"}


def set_native_cluster(settings: MooncakeSettings) -> None:
    """Set the id of the cluster for which Mooncake's native library looks up the leading master in etcd."""
    os.environ["MC_STORE_CLUSTER_ID"] = settings.cluster_id


def set_snapshot_folder(folder: str) -> dict[str, str]:
    """Set the environment variables of a Mooncake master that writes snapshots to ``folder``; return the variables."""
    # Without ..._SKIP_CLEANUP a restarted master forgets all blocks that have no lease at that time.
    variables = {
        "MOONCAKE_SNAPSHOT_LOCAL_PATH": str(Path(folder).absolute()),
        "MOONCAKE_MASTER_SERVICE_SNAPSHOT_TEST_SKIP_CLEANUP": "1",
    }
    os.environ.update(variables)
    return variables
