"""Parts that a configuration needs and this machine's build of Mooncake lacks.

Mooncake ends the process if it has no client for a given kind of metadata server, so the check runs in another process.
It omits the address, so that the answer comes quickly (0.2 s) and no server sees it.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from kvstore_backend.config import MooncakeSettings

__all__ = ["find_missing_backend", "find_missing_coordinator"]

_SECONDS = 20.0  # for a machine under load; a build that has the backend may try to connect
# Messages that a build without the backend logs, and the programs that cause them.
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
    """Return what Mooncake's build lacks for the settings, and the remedy; ``None``: nothing."""
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
    """Return what Mooncake's build lacks to elect masters through ``backend``, and the remedy; ``None``: nothing.

    For etcd no check is made: PyPI's wheels have that backend.

    Args:
        backend: ``etcd``, ``redis`` or ``k8s``.
        named: text for the message on where the backend is configured.
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
    """Return ``missing`` if Mooncake refuses an address of this scheme; ``None`` if it accepts it.

    If this cannot be checked, return that instead.
    """
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
    """Return whether Mooncake accepts an address of this scheme.

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
