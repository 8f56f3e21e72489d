"""What this machine's build of Mooncake was compiled without, of that which a configuration asks for.

Mooncake ends the process that names a metadata server it has no client for, so it is asked in another process. The
address is left out there, so that the answer comes at once (0.2 s) and no server sees it.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from kvstore_backend.config import MooncakeSettings

__all__ = ["find_missing_backend", "find_missing_coordinator"]

_SECONDS = 20.0  # a machine under load; a build that has the backend may try to connect
# What a build without the backend logs, and the programs that make it do so.
_NO_COORDINATOR, _NO_METADATA = "Invalid HA backend entry", "Unable to find metadata storage plugin"
_QUICKLY = """
import os, sys
os.environ.update(MC_LOG_LEVEL="INFO", MC_STORE_CLIENT_SETUP_RETRIES="1")
"""
_ASK_COORDINATOR = """
from mooncake.store import MooncakeDistributedStore
MooncakeDistributedStore().setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", sys.argv[1])
os._exit(0)
"""
_ASK_METADATA = """
from mooncake.engine import TransferEngine
TransferEngine().initialize("127.0.0.1", sys.argv[1], "tcp", "")
os._exit(0)
"""
_NAMES = {"etcd": "etcd", "redis": "Redis", "k8s": "Kubernetes"}
_FLAGS = {"etcd": "-DSTORE_USE_ETCD=ON", "redis": "-DSTORE_USE_REDIS=ON", "k8s": "-DSTORE_USE_K8S_LEASE=ON"}
_METADATA_FLAGS = {"etcd": "-DUSE_ETCD=ON", "redis": "-DUSE_REDIS=ON"}


def find_missing_backend(settings: MooncakeSettings) -> tuple[str, str] | None:
    """What is missing and the remedy, where Mooncake was built without what the settings name; ``None``: nothing."""
    if missing := find_missing_coordinator(settings.ha_backend, f"master_server_addr is {settings.master_server_addr}"):
        return missing
    scheme = settings.metadata_server.partition("://")[0]
    if scheme not in _METADATA_FLAGS:
        return None
    missing = (
        f"metadata_server is {settings.metadata_server}, and this build of Mooncake has no client for "
        f"{_NAMES[scheme]} there",
        f"say P2PHANDSHAKE in every client, or build Mooncake with {_METADATA_FLAGS[scheme]}",
    )
    return _ask(_ASK_METADATA, scheme, _NO_METADATA, missing)


def find_missing_coordinator(backend: str, named: str) -> tuple[str, str] | None:
    """What is missing and the remedy, where Mooncake was built without the means to elect a master there.

    Of masters behind etcd it is not asked: their backend is in PyPI's wheels.

    Args:
        backend: ``etcd``, ``redis`` or ``k8s``.
        named: for the sentence, where somebody has named it.
    """
    if backend not in ("redis", "k8s"):
        return None
    missing = (
        f"{named}, and this build of Mooncake has no {_NAMES[backend]} backend (UNAVAILABLE_IN_CURRENT_MODE), as the "
        "wheels of PyPI have none",
        f"elect the masters through etcd (etcd://host:port), or build Mooncake with {_FLAGS[backend]}",
    )
    return _ask(_ASK_COORDINATOR, backend, _NO_COORDINATOR, missing)


def _ask(program: str, scheme: str, complaint: str, missing: tuple[str, str]) -> tuple[str, str] | None:
    """``missing``, unless Mooncake takes an address of this scheme; or that it cannot be asked."""
    try:
        return None if _has(program, scheme, complaint) else missing
    except OSError as exc:
        return (
            f"whether this build of Mooncake has a client for {_NAMES[scheme]} cannot be found out: no process can be "
            f"started ({exc})",
            f"see that {sys.executable} can be run, and that there are memory and process numbers for it",
        )


@cache
def _has(program: str, scheme: str, complaint: str) -> bool:
    """Whether Mooncake takes an address of this scheme.

    Raises:
        OSError: no process can be started.
    """
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _QUICKLY + program, f"{scheme}://"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True  # it tries to connect
    return complaint not in asked.stderr + asked.stdout
