"""Opening of a native client of Mooncake: its library, the servers that it needs, and its setup.

The setup of the native client would try for 90 s if no server answers, and hang with a server that hangs. So the
servers are asked first. It ends the process if Mooncake's build has no client for a kind of metadata server: another
process checks that, without the address, so that the answer comes quickly (0.2 s) and no server sees it.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from kvstore_backend.backend import PoolUnavailable
from kvstore_backend.config import (
    DEFAULT_TENANT,
    MooncakeSettings,
    binds_address,
    is_named_port_bound,
    set_native_cluster,
    set_native_defaults,
    talkative_environment,
)

__all__ = [
    "INSTALL",
    "connect_to_master",
    "find_missing_backend",
    "find_missing_coordinator",
    "is_installed",
    "join_cluster",
    "load_client_class",
    "replace_client",
    "require_library",
    "restore_client",
    "send_http_probe",
]

INSTALL = (
    "pip install mooncake-transfer-engine-non-cuda (with CUDA 12: mooncake-transfer-engine, "
    "with CUDA 13: mooncake-transfer-engine-cuda13, on Ascend: mooncake-transfer-engine-npu)"
)
"""Remedy for a missing Mooncake."""

_NO_OFFLOADING = -1300
_PROBE_SECONDS = 1.5
# The setup of the native client holds Python's lock, for 6 s if another server listens at the master's address. The
# pause after a failed try is this many times as long as the try, so that tries cost the process at most a twentieth of
# its time.
_PAUSE_FACTOR = 20
# The native client's class, if it is replaced by another for all other importers.
_REPLACED: list[Any] = []
_SECONDS = 20.0  # for a machine under load; a build that has the backend may try to connect
# Messages that a build without the backend logs, and the programs that cause them.
_NO_COORDINATOR, _NO_METADATA = "Invalid HA backend entry", "Unable to find metadata storage plugin"
_ASK_COORDINATOR = """
import os, sys
from mooncake.store import MooncakeDistributedStore
MooncakeDistributedStore().setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", sys.argv[1])
os._exit(0)
"""
_ASK_METADATA = """
import os, sys
from mooncake.engine import TransferEngine
TransferEngine().initialize("127.0.0.1", sys.argv[1], "tcp", "")
os._exit(0)
"""
_NAMES = {"etcd": "etcd", "redis": "Redis", "k8s": "Kubernetes"}
_FLAGS = {"etcd": "-DSTORE_USE_ETCD=ON", "redis": "-DSTORE_USE_REDIS=ON", "k8s": "-DSTORE_USE_K8S_LEASE=ON"}
_METADATA_FLAGS = {"etcd": "-DUSE_ETCD=ON", "redis": "-DUSE_REDIS=ON"}


def require_library(settings: MooncakeSettings | None = None) -> None:
    """Raise ``PoolUnavailable`` if Mooncake's library cannot be loaded, or lacks what these settings need."""
    try:
        load_client_class()
    except ImportError as exc:
        raise PoolUnavailable(
            f"Mooncake's library cannot be loaded ({exc}): {INSTALL}, or choose the storage backend file"
        ) from exc
    if settings is not None and (missing := find_missing_backend(settings)):
        raise PoolUnavailable("; ".join(missing))


def is_installed() -> bool:
    """Return whether Mooncake's library can be loaded here."""
    try:
        load_client_class()
    except ImportError:
        return False
    return True


def replace_client(client: type) -> None:
    """Replace ``mooncake.store.MooncakeDistributedStore`` by ``client`` for later imports.

    This file continues to use the native class, so ``client`` may itself use a ``MooncakeStore``.

    Raises:
        PoolUnavailable: Mooncake's library cannot be loaded.
    """
    require_library()
    if not _REPLACED:
        _REPLACED.append(load_client_class())
    import mooncake.store

    mooncake.store.MooncakeDistributedStore = client


def restore_client() -> None:
    """Undo ``replace_client``."""
    if _REPLACED:
        import mooncake.store

        mooncake.store.MooncakeDistributedStore = _REPLACED.pop()


def load_client_class() -> Any:
    """Return the native client's class; its import loads shared libraries that a machine may lack."""
    if _REPLACED:
        return _REPLACED[0]
    set_native_defaults()
    from mooncake.store import MooncakeDistributedStore

    return MooncakeDistributedStore


def join_cluster(settings: MooncakeSettings) -> Any:
    """Return a native client that has joined the cluster.

    Raises:
        PoolUnavailable: as ``MooncakeStore``.
    """
    require_library(settings)
    native = load_client_class()()
    with connect_to_master(settings) as connection:
        local_hostname = _drop_port(settings) or _find_own_address(connection)
    _check_servers(settings)
    # With a metadata server Mooncake chooses its own address, and skips loopback unless configured otherwise. Without
    # another network it fails, after 30 s a try if the masters are behind etcd.
    if "://" in settings.metadata_server and not binds_address() and not _has_network():
        raise PoolUnavailable("this machine has no network but loopback: set MC_TCP_BIND_ADDRESS=127.0.0.1")
    if settings.ha_backend:
        set_native_cluster(settings)
    began = time.monotonic()
    try:
        code = native.setup(
            local_hostname,
            settings.metadata_server,
            settings.global_segment_size,
            settings.local_buffer_size,
            settings.protocol,
            settings.rdma_devices,
            settings.master_server_addr,
            None,
            settings.enable_ssd_offload,
            settings.ssd_offload_path,
            # Versions before 0.3.13 have no tenants.
            *([settings.tenant_id] if settings.tenant_id != DEFAULT_TENANT else []),
        )
    except ValueError as exc:
        raise PoolUnavailable(
            f"Mooncake refuses its SSD folder {settings.ssd_offload_path!r} ({exc}): ssd_offload_path must be the "
            "absolute path of a folder that exists, may be written and is no link"
        ) from exc
    pause = _PAUSE_FACTOR * (time.monotonic() - began)
    if code:
        raise PoolUnavailable(_explain_failed_setup(settings, code), pause)
    return native


def _drop_port(settings: MooncakeSettings) -> str:
    """Return the host of ``local_hostname``, to which Mooncake adds a free port.

    A client with the same name as a crashed one would take the crashed client's memory for its own, and be killed when
    it writes there. By default nothing listens at that port, which is only a name. Ascend's cards are an exception.
    """
    host, colon, port = settings.local_hostname.rpartition(":")
    is_named = colon and port.isdigit() and (":" not in host or host.endswith("]"))
    if not is_named or settings.protocol == "ascend" or is_named_port_bound():
        return settings.local_hostname
    return host


def _check_servers(settings: MooncakeSettings) -> None:
    """Raise ``PoolUnavailable`` for a server that hangs: the setup of the native client would hang with it."""
    if not settings.ha_backend and send_http_probe(settings.master_server_addr) is None:
        raise PoolUnavailable(
            f"what listens at {settings.master_server_addr} does not answer: it is not a Mooncake master, or one that "
            "hangs: restart it, or correct the address"
        )
    if settings.metadata_server.startswith("http"):
        url = urlsplit(settings.metadata_server)
        remedy = "start mooncake_master with --enable_http_metadata_server=true, or use P2PHANDSHAKE everywhere"
        address = f"{url.hostname}:{url.port or 80}"
        _open_connection(address, "Mooncake metadata server", remedy).close()
        if send_http_probe(address) is None:
            raise PoolUnavailable(f"what listens at {address} does not answer as a metadata server: {remedy}")
    elif "://" in settings.metadata_server:
        scheme, servers = settings.metadata_server.partition("://")[0], settings.list_servers(settings.metadata_server)
        _connect_to_any(servers, scheme).close()


def _find_own_address(connection: socket.socket | None) -> str:
    if connection is None:
        raise PoolUnavailable(
            "local_hostname is not given, and masters behind k8s:// do not show it: set MOONCAKE_LOCAL_HOSTNAME to "
            "this machine's address"
        )
    address: str = connection.getsockname()[0]
    return address


def _explain_failed_setup(settings: MooncakeSettings, code: int) -> str:
    if code == _NO_OFFLOADING:
        return (
            f"the master at {settings.master_server_addr} does not offload to SSD: start it with --enable_offload=true "
            "(kvstore master --ssd), or set enable_ssd_offload to false"
        )
    if settings.ha_backend:
        return (
            f"joining the Mooncake cluster {settings.cluster_id!r} through {settings.master_server_addr} failed with "
            f"code {code}: check that a mooncake_master with --enable_ha=true and --cluster_id={settings.cluster_id} "
            "runs (MC_LOG_LEVEL=INFO shows Mooncake's own log)"
        )
    return (
        f"joining the Mooncake cluster of {settings.master_server_addr} failed with code {code}: check that "
        f"a mooncake_master answers there and that {settings.global_segment_size} bytes of memory are free "
        "(MC_LOG_LEVEL=INFO shows Mooncake's own log)"
    )


def send_http_probe(address: str) -> bytes | None:
    """Return the first bytes that a listener at ``host:port`` answers to an HTTP request; None: nothing in time.

    A Mooncake master sends none, and closes the connection.

    Raises:
        OSError: no server listens there.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS) as connection:
        try:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return connection.recv(64)
        except TimeoutError:
            return None
        except ConnectionError:
            return b""


def _has_network() -> bool:
    """Return whether there is a route to another machine.

    Connecting a datagram socket finds the route without sending data.
    """
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address without a host
        except OSError:
            return False
    return True


def connect_to_master(settings: MooncakeSettings) -> AbstractContextManager[socket.socket | None]:
    """Connect to the master, or to a server that knows it; None for Kubernetes."""
    if not settings.ha_backend:
        return _open_connection(settings.master_server_addr, "Mooncake master", "start mooncake_master there")
    if settings.ha_backend == "k8s":
        return contextlib.nullcontext()
    return _connect_to_any(settings.list_servers(settings.master_server_addr), settings.ha_backend)


def _connect_to_any(addresses: Sequence[str], role: str) -> socket.socket:
    """Connect to the first of these servers that answers."""
    for address in addresses[:-1]:
        with contextlib.suppress(PoolUnavailable):
            return _open_connection(address, role, "")
    return _open_connection(addresses[-1], role, f"start {role} there")


def _open_connection(address: str, role: str, remedy: str) -> socket.socket:
    """Connect to ``host:port``; the setup of the native client would try for 90 s if no server answers."""
    host, _, port = address.rpartition(":")
    try:
        return socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS)
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise PoolUnavailable(f"no {role} answers at {address} ({reason}): {remedy}, or correct the address") from exc


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
            [sys.executable, "-c", program, f"{scheme}://"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
            env=talkative_environment(),
        )
    except subprocess.TimeoutExpired:
        return True  # it tries to connect
    return complaint not in asked.stderr + asked.stdout
