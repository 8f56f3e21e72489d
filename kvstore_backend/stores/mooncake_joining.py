"""Opens a native client of Mooncake: loads the library, checks the servers, and joins the cluster.

``setup`` of the native client would try for 90 s if no server answers, and would hang if a server hangs. So this module
probes the servers first. ``setup`` also ends the process if Mooncake was built without a client for the configured kind
of metadata server. So another process first checks whether there is such a client; with an empty address this takes
only 0.2 s.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
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
    verbose_environment,
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
    "send_http_probe",
]

INSTALL = (
    "pip install mooncake-transfer-engine-non-cuda (with CUDA 12: mooncake-transfer-engine, "
    "with CUDA 13: mooncake-transfer-engine-cuda13, on Ascend: mooncake-transfer-engine-npu)"
)
"""Command that installs Mooncake, for error messages."""

_NO_OFFLOADING = -1300
# Requests to the kernel for network interfaces, the size of an entry in the answer, and flags (netdevice(7)).
_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913
_IFREQ_BYTES = 40
_IFF_LOOPBACK, _IFF_RUNNING = 0x8, 0x40
_PROBE_SECONDS = 1.5
# ``setup`` of the native client holds Python's lock: for 6 s if the server at the master's address is not a master. The
# pause after a failed try is 20 times as long as the try, so that tries take at most 5 % of the process's time.
_PAUSE_FACTOR = 20
# The native client's class, after ``replace_client`` has shown another class to other importers.
_REPLACED: list[Any] = []
# A program that runs longer tries to connect, so the build has the backend. Enough for a machine under load.
_SECONDS = 20.0
# Messages that a build without the backend logs, and programs that cause the messages.
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
    """Raise ``PoolUnavailable`` if Mooncake's library cannot be loaded, or its build does not support ``settings``.

    The build must have clients for the configured metadata server, and for the service that elects masters.
    """
    try:
        load_client_class()
    except ImportError as exc:
        raise PoolUnavailable(
            f'Mooncake\'s library cannot be loaded ({exc}): run {INSTALL}, or set the storage backend to "file"'
        ) from exc
    if settings is not None and (missing := find_missing_backend(settings)):
        raise PoolUnavailable("; ".join(missing))


def is_installed() -> bool:
    """Return whether Mooncake's library can be loaded on this machine."""
    try:
        load_client_class()
    except ImportError:
        return False
    return True


def replace_client(client: type) -> None:
    """Replace the class ``mooncake.store.MooncakeDistributedStore`` by ``client`` for later imports.

    This module continues to use the native class, so ``client`` may itself use a ``MooncakeStore``.

    Raises:
        PoolUnavailable: Mooncake's library cannot be loaded.
    """
    require_library()
    if not _REPLACED:
        _REPLACED.append(load_client_class())
    import mooncake.store

    mooncake.store.MooncakeDistributedStore = client


def load_client_class() -> Any:
    """Import and return the class of Mooncake's native client.

    Raises:
        ImportError: Mooncake, or a shared library that it needs, is missing.
    """
    if _REPLACED:
        return _REPLACED[0]
    set_native_defaults()
    from mooncake.store import MooncakeDistributedStore

    return MooncakeDistributedStore


def join_cluster(settings: MooncakeSettings) -> Any:
    """Return a native client of Mooncake that has joined the configured cluster.

    Raises:
        PoolUnavailable: the library cannot be loaded, a server does not answer, or the cluster refuses this client.
    """
    require_library(settings)
    native = load_client_class()()
    with connect_to_master(settings) as connection:
        local_hostname = _drop_port(settings) or _find_own_address(connection)
    _check_servers(settings)
    # With a metadata server Mooncake chooses its own address. By default it does not choose loopback, and fails if
    # there is no other network; with masters in etcd each try takes 30 s.
    if "://" in settings.metadata_server and not binds_address() and not _has_network():
        raise PoolUnavailable(
            "this machine has no network except loopback; Mooncake uses loopback only if you set "
            "MC_TCP_BIND_ADDRESS=127.0.0.1"
        )
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
            f"Mooncake refuses the SSD folder {settings.ssd_offload_path!r} ({exc}): ssd_offload_path must be the "
            "absolute path of an existing, writable folder that is not a link"
        ) from exc
    pause = _PAUSE_FACTOR * (time.monotonic() - began)
    if code:
        raise PoolUnavailable(_explain_failed_setup(settings, code), pause)
    return native


def _drop_port(settings: MooncakeSettings) -> str:
    """Return ``local_hostname`` without its port, so that Mooncake chooses a free port.

    A client with the same host and port as a crashed client would regard the crashed client's memory as its own, and
    would be killed when it writes there. The port stays if the protocol is ``ascend``, or if Mooncake really listens at
    this port.
    """
    host, colon, port = settings.local_hostname.rpartition(":")
    is_named = colon and port.isdigit() and (":" not in host or host.endswith("]"))
    if not is_named or settings.protocol == "ascend" or is_named_port_bound():
        return settings.local_hostname
    return host


def _check_servers(settings: MooncakeSettings) -> None:
    """Raise ``PoolUnavailable`` if master or metadata server hangs: ``setup`` of the native client would hang, too."""
    if not settings.ha_backend and send_http_probe(settings.master_server_addr) is None:
        raise PoolUnavailable(
            f"the server at {settings.master_server_addr} does not answer: it is not a Mooncake master, or it "
            "hangs; restart it, or correct the address"
        )
    if settings.metadata_server.startswith("http"):
        url = urlsplit(settings.metadata_server)
        remedy = "start mooncake_master with --enable_http_metadata_server=true, or use P2PHANDSHAKE in every client"
        address = f"{url.hostname}:{url.port or 80}"
        _open_connection(address, "Mooncake metadata server", remedy).close()
        if send_http_probe(address) is None:
            raise PoolUnavailable(f"the server at {address} does not answer as a metadata server: {remedy}")
    elif "://" in settings.metadata_server:
        scheme, servers = settings.metadata_server.partition("://")[0], settings.list_servers(settings.metadata_server)
        _connect_to_any(servers, scheme).close()


def _find_own_address(connection: socket.socket | None) -> str:
    if connection is None:
        raise PoolUnavailable(
            "local_hostname is not given, and cannot be found automatically with masters behind k8s://; set "
            "MOONCAKE_LOCAL_HOSTNAME to this machine's address"
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
    """Send an HTTP request to ``host:port``; return the first bytes of the response, or None if none arrives in time.

    A Mooncake master closes the connection without a response, so for a master the result is ``b""``.

    Raises:
        OSError: no server listens at the address.
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
    """Return whether a network interface other than loopback is connected and has an IPv4 address.

    Mooncake chooses such an interface. No route to other networks is needed.
    """
    addresses = array.array("B", bytes(1000 * _IFREQ_BYTES))
    request = struct.pack("iL", len(addresses), addresses.buffer_info()[0])
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        (size,) = struct.unpack_from("i", fcntl.ioctl(probe, _SIOCGIFCONF, request))
        for start in range(0, size, _IFREQ_BYTES):
            with contextlib.suppress(OSError):  # the interface was removed meanwhile
                entry = fcntl.ioctl(probe, _SIOCGIFFLAGS, bytes(addresses[start : start + _IFREQ_BYTES]))
                (flags,) = struct.unpack_from("H", entry, 16)
                if flags & _IFF_RUNNING and not flags & _IFF_LOOPBACK:
                    return True
    return False


def connect_to_master(settings: MooncakeSettings) -> AbstractContextManager[socket.socket | None]:
    """Return a connection to the master, or to a server that knows the master's address.

    The connection is None if Mooncake finds the master through Kubernetes, because then there is no such server.
    """
    if not settings.ha_backend:
        return _open_connection(settings.master_server_addr, "Mooncake master", "start mooncake_master there")
    if settings.ha_backend == "k8s":
        return contextlib.nullcontext()
    return _connect_to_any(settings.list_servers(settings.master_server_addr), settings.ha_backend)


def _connect_to_any(addresses: Sequence[str], role: str) -> socket.socket:
    """Connect to the first server of ``addresses`` that answers; raise ``PoolUnavailable`` if none does."""
    for address in addresses[:-1]:
        with contextlib.suppress(PoolUnavailable):
            return _open_connection(address, role, "")
    return _open_connection(addresses[-1], role, f"start {role} there")


def _open_connection(address: str, role: str, remedy: str) -> socket.socket:
    """Connect to ``host:port``; raise ``PoolUnavailable`` with ``remedy`` if no server answers in time."""
    host, _, port = address.rpartition(":")
    try:
        return socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS)
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise PoolUnavailable(f"no {role} answers at {address} ({reason}): {remedy}, or correct the address") from exc


def find_missing_backend(settings: MooncakeSettings) -> tuple[str, str] | None:
    """Check whether Mooncake's build supports the configured metadata server and election of masters.

    Returns:
        ``None`` if it supports both; else a text that says which client is missing in the build, and a remedy.
    """
    if missing := find_missing_coordinator(settings.ha_backend, f"master_server_addr is {settings.master_server_addr}"):
        return missing
    scheme = settings.metadata_server.partition("://")[0]
    if scheme not in _METADATA_FLAGS:
        return None
    missing = (
        f"metadata_server is {settings.metadata_server}, and this build of Mooncake has no client for "
        f"{_NAMES[scheme]} there",
        f"set P2PHANDSHAKE in every client, or build Mooncake with {_METADATA_FLAGS[scheme]}",
    )
    return _check_scheme(_ASK_METADATA, scheme, _NO_METADATA, missing)


def find_missing_coordinator(backend: str, named: str) -> tuple[str, str] | None:
    """Check whether Mooncake's library can elect masters through ``backend``.

    Etcd is not checked, because PyPI's wheels have the backend for etcd.

    Args:
        backend: ``etcd``, ``redis`` or ``k8s``; empty for a single master.
        named: beginning of the message, which says where the backend is configured.

    Returns:
        ``None`` if the library has the backend; else a text that says which backend is missing, and a remedy.
    """
    if backend not in ("redis", "k8s"):
        return None
    missing = (
        f"{named}, and this build of Mooncake has no {_NAMES[backend]} backend (UNAVAILABLE_IN_CURRENT_MODE); PyPI's "
        "wheels have none",
        f"elect the masters through etcd (etcd://host:port), or build Mooncake with {_FLAGS[backend]}",
    )
    return _check_scheme(_ASK_COORDINATOR, backend, _NO_COORDINATOR, missing)


def _check_scheme(program: str, scheme: str, complaint: str, missing: tuple[str, str]) -> tuple[str, str] | None:
    """Return ``None`` if Mooncake's build has a client for the URL scheme ``scheme``, otherwise ``missing``.

    If no process can be started for the check, return a text that says so, and a remedy.

    Args:
        program: Python code that another process runs for the check.
        scheme: ``etcd``, ``redis`` or ``k8s``.
        complaint: what Mooncake prints if its build has no client for the scheme.
        missing: text that says which client is missing, and a remedy.
    """
    try:
        return None if _accepts_scheme(program, scheme, complaint) else missing
    except OSError as exc:
        return (
            f"the check whether this build of Mooncake has a client for {_NAMES[scheme]} failed: no process can be "
            f"started ({exc})",
            f"check that {sys.executable} can be run, and that memory and process numbers are free",
        )


@cache
def _accepts_scheme(program: str, scheme: str, complaint: str) -> bool:
    """Return whether Mooncake has a client for ``scheme``: the Python code ``program`` does not print ``complaint``.

    Raises:
        OSError: no process can be started.
    """
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program, f"{scheme}://"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
            env=verbose_environment(),
        )
    except subprocess.TimeoutExpired:
        return True  # the program tries to connect
    return complaint not in ended.stderr + ended.stdout
