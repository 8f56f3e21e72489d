"""Checks of ``kvstore doctor`` that put and read no blocks. Each function checks one subject."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import mmap
import os
import resource
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from kvcommon.formats import format_bytes
from kvstore_backend.backend import PoolUnavailable
from kvstore_backend.cli.report import Finding, fail, ok, warn
from kvstore_backend.config import (
    DEFAULT_TENANT,
    FileSettings,
    MooncakeSettings,
    has_active_port,
    list_rdma_devices,
    offload_bucket,
    offload_limit,
    set_native_defaults,
)
from kvstore_backend.stores.file.folder import find_refusal, scan_blocks
from kvstore_backend.stores.file.ledger import find_size
from kvstore_backend.stores.mooncake_admin import MasterAdmin, find_admin, list_clusters_in_etcd
from kvstore_backend.stores.mooncake_joining import INSTALL, find_missing_backend, send_http_probe
from kvstore_backend.stores.ssd_folder import DEFAULT_FOLDER

__all__ = [
    "check_capacity",
    "check_events",
    "check_folder",
    "check_hostname",
    "check_library",
    "check_master",
    "check_master_flags",
    "check_memory",
    "check_metadata_server",
    "check_protocol",
    "check_sharing",
    "check_ssd",
    "check_tenants",
    "find_wheels",
    "require_admin",
]

_CONNECT_SECONDS = 1.5
_SYSTEM_LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1"}
_WHEELS = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-npu",
)
# Libraries of CANN, which the build for Ascend cards needs.
_CANN_LIBRARIES = ("libascendcl", "libllm_datadist", "libmetadef", "libhccl", "libhixl")
_FULL_SHARE = 0.95
# Default of --eviction_high_watermark_ratio, which the master does not report: share of memory at which it evicts.
_WATERMARK = 0.9
_PROMPT_TOKENS = 1000
# Share of the disk that Mooncake's offloading may use by default.
_SSD_SHARE = 0.9


def check_library(settings: MooncakeSettings) -> Iterator[Finding]:
    """Check that Mooncake's library can be loaded, and supports the configured metadata server and master election."""
    missing = {name: package for name, package in _SYSTEM_LIBRARIES.items() if not _can_load(name)}
    for name, package in missing.items():
        yield fail("library", f"Mooncake needs {name}, which is missing", f"on Debian: apt-get install {package}")
    if missing:
        return
    set_native_defaults()
    try:
        import mooncake.store  # noqa: F401
    except ImportError as exc:
        remedy = f"{INSTALL}, or choose another backend, such as file:///dev/shm/kvpool"
        if "libcuda" in str(exc):
            installed = " ".join(find_wheels()) or "mooncake-transfer-engine"
            remedy = f"on a machine without a GPU, or with another CUDA: pip uninstall {installed}, then {remedy}"
        if any(name in str(exc) for name in _CANN_LIBRARIES):
            remedy = "on an Ascend machine: source CANN's set_env.sh first; elsewhere: " + remedy
        yield fail("library", f"Mooncake's library cannot be loaded ({exc})", remedy)
        return
    wheels = find_wheels()
    if len(wheels) > 1:
        yield warn(
            "library",
            f"several distributions of Mooncake are installed and overwrite each other's files: {', '.join(wheels)}",
            f"pip uninstall {' '.join(wheels)}, then install one of them",
        )
    version = next(iter(wheels.values()), "of unknown version")
    if missing_part := find_missing_backend(settings):
        yield fail("library", *missing_part)
        return
    yield ok("library", f"Mooncake {version} can be loaded")


def _can_load(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def find_wheels() -> dict[str, str]:
    """Return the versions of the installed distributions of Mooncake from PyPI, by name."""
    versions = {}
    for wheel in _WHEELS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[wheel] = importlib.metadata.version(wheel)
    return versions


def check_events() -> Iterator[Finding]:
    """Report whether the master in this machine's Mooncake can publish KV events.

    A master that was built without ZeroMQ accepts the flags for KV events and publishes nothing. A master with ZeroMQ
    contains the name of the function ``zmq_bind``.
    """
    program = _find_master_program()
    if program is None:
        return
    with program.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(b"zmq_bind") >= 0:
            text = "can publish KV events (--enable_kv_events); no instance or router of this project reads them"
        elif content.find(b"enable_kv_events") >= 0:
            text = "publishes no KV events, although it accepts --enable_kv_events"
        else:
            text = "publishes no KV events"
    yield ok("KV events", f"the master in this machine's build of Mooncake {text}")


def _find_master_program() -> Path | None:
    """Return the path of Mooncake's native master program: in Mooncake's package, else on the ``PATH``."""
    package = importlib.util.find_spec("mooncake")
    folders = package.submodule_search_locations if package is not None else None
    found = [Path(folder, "mooncake_master") for folder in folders or ()]
    if on_path := shutil.which("mooncake_master"):
        found.append(Path(on_path))
    return next((each for each in found if os.access(each, os.R_OK) and each.stat().st_size), None)


def check_protocol(settings: MooncakeSettings) -> Iterator[Finding]:
    """Check whether this machine has the devices and permissions that the configured protocol needs."""
    present = list_rdma_devices()
    if settings.protocol == "ascend":
        yield warn(
            "protocol", "ascend is passed to Mooncake unchanged; this command cannot check the links between the cards"
        )
        return
    if settings.protocol == "tcp":
        if present:
            yield warn(
                "protocol",
                f"tcp is used though this machine has RDMA devices ({', '.join(present)})",
                "set protocol to rdma in every client of the pool, unless you want tcp",
            )
        else:
            yield ok("protocol", "tcp; this machine has no RDMA device")
        return
    wanted = [name for name in settings.rdma_devices.split(",") if name]
    if absent := [name for name in wanted if name not in present]:
        remedy = f"rdma_devices must name some of {', '.join(present)}" if present else "use protocol tcp"
        yield fail("protocol", f"this machine has no RDMA device {', '.join(absent)}", remedy)
        return
    down = [name for name in wanted or present if not has_active_port(name)]
    if down:
        yield warn(
            "protocol", f"no port of {', '.join(down)} is active", "ibv_devinfo shows why; check cable and driver"
        )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    needed = settings.global_segment_size + settings.local_buffer_size
    if locked != resource.RLIM_INFINITY and locked < needed:
        yield fail(
            "protocol",
            f"RDMA must lock {format_bytes(needed)} of memory; this user may lock {format_bytes(locked)}",
            "ulimit -l unlimited, or --ulimit memlock=-1 for a container",
        )
        return
    yield ok("protocol", f"rdma over {', '.join(wanted or present)}")


def check_hostname(settings: MooncakeSettings) -> Iterator[Finding]:
    """Check whether ``local_hostname`` is a name by which other machines can reach this machine."""
    name, subject = settings.local_hostname, "local_hostname"
    remedy = "leave local_hostname out, or give an address of this machine that other machines reach"
    if not name and settings.ha_backend == "k8s":
        text = "not given, and with masters behind k8s:// this machine's address cannot be found automatically"
        yield fail(subject, text, "set MOONCAKE_LOCAL_HOSTNAME to this machine's address")
        return
    if not name:
        yield ok(subject, "not given, so the address from which this machine reaches the master is used")
        return
    try:
        family, *_, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        yield fail(subject, f"{name!r} cannot be resolved", remedy)
        return
    try:
        with socket.socket(family) as probe:
            probe.bind(address)
    except OSError:
        yield fail(subject, f"{name} resolves to {address[0]}, which is not an address of this machine", remedy)
        return
    masters = settings.list_servers(settings.master_server_addr)
    if _is_loopback(name) and not any(_is_loopback(each.rpartition(":")[0]) for each in masters):
        yield warn(subject, f"every other machine resolves {name} to itself", remedy)
        return
    yield ok(subject, f"{name} is an address of this machine")


def _is_loopback(name: str) -> bool:
    return name == "localhost" or name.startswith("127.") or name.strip("[]") == "::1"


def check_memory(settings: MooncakeSettings) -> Iterator[Finding]:
    """Check whether this machine has enough free memory for what each process gives to the pool."""
    needed = settings.global_segment_size + settings.local_buffer_size
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
            text = (
                f"each process uses {format_bytes(needed)} of the {format_bytes(available)} that this machine has free"
            )
            if needed > available:
                yield fail("memory", text, "lower global_segment_size, or stop other programs that use memory")
            else:
                yield ok("memory", text)


def check_ssd(settings: MooncakeSettings, environ: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Check whether Mooncake accepts the configured folder for SSD offload, and whether the disk has enough space."""
    if not settings.enable_ssd_offload:
        return
    path = Path(settings.ssd_offload_path or DEFAULT_FOLDER)
    if refusal := _find_ssd_refusal(path):
        yield fail("ssd", f"{path} {refusal}, so Mooncake would not start", "name another folder with ssd_offload_path")
        return
    if (blocks := offload_bucket(environ)) != "1":
        text = f"MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT is {blocks}: Mooncake loses blocks in buckets that are not full"
        yield warn("ssd", text, "unset the variable, so that each block gets its own file")
    limit = offload_limit(environ)
    disk = os.statvfs(path)
    room = disk.f_bavail * disk.f_frsize
    used = sum(each.stat().st_blocks * 512 for each in path.rglob("*") if each.is_file())
    wanted = limit or int(_SSD_SHARE * disk.f_blocks * disk.f_frsize)
    text = (
        f"{path} has {format_bytes(used)}, and may have {format_bytes(wanted)}"
        f"{'' if limit else ', 90 % of its filesystem'}; {format_bytes(room)} are free there"
    )
    remedy = "free space, or set MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE to the bytes that the folder may have"
    if room < settings.global_segment_size and used < wanted:
        yield warn("ssd", f"{text}: less than the memory of this client (global_segment_size)", remedy)
    elif used + room < wanted:
        yield warn("ssd", f"{text}: writes will fail before Mooncake begins to evict", remedy)
    else:
        yield ok("ssd", text)


def _find_ssd_refusal(path: Path) -> str:
    """Return why Mooncake would refuse a folder (``FileStorageConfig::ValidatePath``); "" if it accepts the folder."""
    if not path.is_absolute() or ".." in path.parts:
        return "is not an absolute path without .."
    if path.is_symlink():
        return "is a symbolic link"
    if not path.is_dir():
        return "is not a folder" if path.exists() else "does not exist"
    return "" if os.access(path, os.W_OK) else "is not writable for this user"


def check_master(settings: MooncakeSettings) -> tuple[Finding, str]:
    """Check whether a master of the cluster answers.

    Returns:
        The finding, and the ``host:port`` of the leading master; empty if the address is not known.
    """
    if settings.ha_backend == "etcd":
        return _find_leader(settings)
    if settings.ha_backend:
        text = f"this command cannot ask {settings.master_server_addr} which master leads, so no master was checked"
        return warn("master", text, "give the leading master: kvstore doctor mooncake://HOST:PORT"), ""
    address = settings.master_server_addr
    remedy = f"start one there: kvstore master --port {address.rpartition(':')[2]}; or correct master_server_addr"
    try:
        response = send_http_probe(address)
    except OSError as exc:
        reason = exc.strerror or str(exc)
        return fail("master", f"no Mooncake master answers at {address} ({reason})", remedy), ""
    if response == b"":  # a master closes the connection without a response
        return ok("master", f"a server that behaves like a Mooncake master answers at {address}"), address
    if response is None:
        text = f"the server at {address} does not answer: it is not a Mooncake master, or it hangs"
        remedy = "ss -tlnp shows which process listens there; restart the master, or correct master_server_addr"
    elif response.startswith(b"HTTP/"):
        text = f"an HTTP server answers at {address}, not a Mooncake master"
        remedy = "master_server_addr must have the master's --rpc_port, not the port of its metrics or metadata server"
    else:
        text = f"the server at {address} is not a Mooncake master: it answers {response[:30]!r}"
    return fail("master", text, remedy), ""


def _find_leader(settings: MooncakeSettings) -> tuple[Finding, str]:
    where = settings.master_server_addr
    try:
        clusters = list_clusters_in_etcd(settings.list_servers(where))
    except (httpx.HTTPError, ValueError) as exc:
        return fail(
            "etcd", f"no etcd answers at {where} ({exc})", "start etcd there, or correct master_server_addr"
        ), ""
    leader = clusters.get(settings.cluster_id)
    if leader is None:
        known = f"etcd knows the clusters {', '.join(clusters)}" if clusters else "etcd knows no cluster of masters"
        return fail(
            "etcd",
            f"the cluster {settings.cluster_id!r} has no leading master; {known}",
            f"start mooncake_master --enable_ha=true --cluster_id={settings.cluster_id}, or correct cluster_id "
            "(MC_STORE_CLUSTER_ID)",
        ), ""
    text = f"the master at {leader} leads the cluster {settings.cluster_id}, according to {where}"
    return ok("etcd", text), leader


def _listens_on_all(port: int) -> bool:
    """Return whether a process listens at this port on all addresses of this machine, according to ``/proc``."""
    try:
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return False
    return any(line.split()[1] == f"00000000:{port:04X}" and line.split()[3] == "0A" for line in lines)


def check_metadata_server(settings: MooncakeSettings) -> Iterator[Finding]:
    """Check whether Mooncake's metadata server answers at the configured URL, if one is configured."""
    url = settings.metadata_server
    scheme = url.partition("://")[0]
    if scheme in ("etcd", "redis"):
        yield from _check_metadata_in(scheme, url, settings.list_servers(url))
        return
    if not url.startswith("http"):
        yield ok("metadata", f"{url}: no metadata server is needed")
        return
    remedy = (
        "start the master with --enable_http_metadata_server=true "
        f"--http_metadata_server_port={urlsplit(url).port or 80}, or use P2PHANDSHAKE in every client"
    )
    try:
        response = httpx.get(url, params={"key": "kvstore-doctor"}, timeout=_CONNECT_SECONDS, trust_env=False)
    except httpx.HTTPError as exc:
        yield fail("metadata", f"no metadata server answers at {url} ({exc})", remedy)
        return
    if "metadata not found" not in response.text:
        text = f"the server at {url} is not Mooncake's metadata server: it answers with status {response.status_code}"
        yield fail(
            "metadata",
            text,
            f"the URL must have the path /metadata and the port of --http_metadata_server_port; {remedy}",
        )
        return
    if _listens_on_all(urlsplit(url).port or 80) and (urlsplit(url).hostname or "").startswith(("127.", "localhost")):
        text = f"the metadata server of {url} listens on all addresses of this machine, as Mooncake's always does"
        yield warn(
            "metadata",
            text,
            "close this port to other machines, or start the master without a metadata server: kvstore master "
            "--metadata-port 0",
        )
        return
    yield ok("metadata", f"a metadata server answers at {url}")


def _check_metadata_in(scheme: str, url: str, servers: Sequence[str]) -> Iterator[Finding]:
    """Check whether the Redis server, or one of the etcd servers, that has the metadata can be reached."""
    for server in servers:
        host, _, port = server.rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
            yield ok("metadata", f"a server answers at {server}, for the metadata in {url}")
            return
    yield fail(
        "metadata", f"no {scheme} answers at {url}", f"start {scheme} there, or use P2PHANDSHAKE in every client"
    )


def require_admin(
    settings: MooncakeSettings, metrics_address: str | None, setting: str = "--master-metrics"
) -> MasterAdmin:
    """Return a client of the HTTP interface that a cluster's master has at its ``--metrics_port``.

    Args:
        settings: settings with the address of the master.
        metrics_address: address of the HTTP interface, as the user gave it, or None to try the usual ports.
        setting: name of the setting with which users give this address, for messages.

    Raises:
        PoolUnavailable: no master answers, or its HTTP interface does not answer.
    """
    finding, address = check_master(settings)
    if not address:
        raise PoolUnavailable(f"{finding.text}: {finding.remedy}")
    admin = find_admin(address, metrics_address)
    if admin is None and metrics_address:
        raise PoolUnavailable(
            f"no master answers with its metrics at {metrics_address}; correct {setting}, the address "
            f"with the --metrics_port of the master at {address}"
        )
    if admin is None:
        raise PoolUnavailable(
            f"the master at {address} does not answer on the usual ports for metrics; give {setting} HOST:PORT"
        )
    return admin


def check_master_flags(admin: MasterAdmin | None, address: str) -> Iterator[Finding]:
    """Check whether the master is ready, and whether it has refused writes because the pool had no free memory."""
    if admin is None:
        yield warn(
            "master's flags",
            f"the master at {address} does not answer on the usual ports for metrics",
            "give --master-metrics HOST:PORT (its --metrics_port)",
        )
        return
    health = admin.fetch_health()
    if not health["service_ready"]:
        yield fail(
            "master's flags",
            f"the master at {admin.address} has the role {health['role']} and is not ready",
            "wait until the master is ready",
        )
        return
    yield ok(
        "master's flags",
        "lease, eviction watermark and threads cannot be read from outside; recommended: a lease of 10 s "
        "(--default_kv_lease_ttl), a watermark below 1 (--eviction_high_watermark_ratio)",
    )
    metrics = admin.fetch_metrics()
    refused = int(metrics.get("master_put_start_alloc_failures_total", 0))
    if refused:
        yield warn(
            "master's flags",
            f"the master has refused {refused} writes since its start, because the pool had no free memory",
            "give the pool more memory (global_segment_size), or let eviction begin earlier "
            "(--eviction_high_watermark_ratio=0.85)",
        )


def check_tenants(settings: MooncakeSettings, admin: MasterAdmin) -> Iterator[Finding]:
    """Check whether the configured tenant has a quota, and whether all quotas together fit into the pool."""
    subject, name = "tenant", settings.tenant_id
    if not admin.has_tenants():
        yield ok(subject, "the master has one tenant: all clients that reach it may read and remove all blocks")
        if name != DEFAULT_TENANT:
            yield warn(
                subject,
                f"the tenant {name!r} has no quota, because the master does not separate tenants; only the keys of "
                "its blocks are separate",
                "start the master with --tenants FILE, or leave tenant_id out",
            )
        return
    accounts = {account.name: account for account in admin.fetch_accounts()}
    if (own := accounts.get(name)) is None:
        yield fail(
            subject,
            f"the master knows no tenant {name!r}, so it refuses every block",
            f"give the tenant a quota in the file of --tenants, or: curl -X PUT 'http://{admin.address}/api/v1/tenant_quotas?"
            f"tenant_id={name}' -d '{{\"requested_quota_bytes\": 1073741824}}'",
        )
        return
    yield ok(subject, f"the tenant {name!r} uses {format_bytes(own.used)} of {format_bytes(own.granted)}")
    promised = sum(account.granted for account in accounts.values())
    capacity = admin.fetch_metrics().get("master_total_capacity_bytes", 0.0)
    if promised > _WATERMARK * capacity:
        yield warn(
            subject,
            f"the sum of all quotas is {format_bytes(promised)}, and the pool has {format_bytes(capacity)}: when "
            f"{_WATERMARK:.0%} of it is used, the master evicts the oldest blocks of all tenants",
            "lower the quotas until their sum is below --eviction_high_watermark_ratio of the memory",
        )


def check_capacity(
    settings: MooncakeSettings | FileSettings, admin: MasterAdmin | None, kv_bytes: int | None
) -> Iterator[Finding]:
    """Check whether the capacity of the pool is enough for the KV of the model (``kv_bytes`` for each token)."""
    others = used = 0
    if isinstance(settings, FileSettings):
        own, setting = find_size(settings.path, settings.size), "size"
    else:
        own, setting = settings.global_segment_size, "global_segment_size"
        if admin is not None:
            segments = admin.list_segments()
            others, used = sum(each.capacity for each in segments), sum(each.used for each in segments)
    total = own + others
    text = (
        f"each process with this configuration gives {format_bytes(own)}, and the processes that have joined give "
        f"{format_bytes(others)}"
    )
    if isinstance(settings, FileSettings):
        text = f"{format_bytes(own)} for all processes of this machine"
    if kv_bytes is not None:
        prompt = _PROMPT_TOKENS * kv_bytes
        text += f"; {_PROMPT_TOKENS} tokens of the model take {format_bytes(prompt)}"
        if total < prompt:
            yield fail(
                "capacity", text, f"raise {setting} to at least {format_bytes(prompt)}, better to many times that size"
            )
            return
        text += f", so the pool has space for {total // kv_bytes} tokens"
    if total == 0:
        yield fail(
            "capacity", "no client gives memory to the pool", "set global_segment_size in a client, such as 4GiB"
        )
    elif others and used > _FULL_SHARE * others:
        yield warn(
            "capacity", f"{text}; {used / others:.0%} are used", "the pool evicts blocks; give the pool more memory"
        )
    else:
        yield ok("capacity", text)


def check_sharing(settings: MooncakeSettings, admin: MasterAdmin | None) -> Iterator[Finding]:
    """Check whether this process and the clients of the pool can read each other's memory."""
    segments = admin.list_segments() if admin is not None else []
    is_handshaking = settings.metadata_server == "P2PHANDSHAKE"
    others = [each.name for each in segments if each.is_handshaking != is_handshaking]
    if others:
        theirs = "a metadata server" if is_handshaking else "P2PHANDSHAKE"
        yield fail(
            "sharing",
            f"{len(others)} of {len(segments)} clients ({', '.join(others[:3])}) joined with {theirs}, but this "
            f"configuration has {settings.metadata_server}: these clients and this process cannot read each other's "
            "blocks",
            "use one metadata_server in all clients",
        )
    elif segments:
        yield ok("sharing", f"{len(segments)} clients have joined with the same kind of metadata_server")


def check_folder(settings: FileSettings) -> Iterator[Finding]:
    """Check whether the folder of a pool can be used, and whether its filesystem has space for the configured size."""
    path = settings.path
    existing = next(each for each in (path, *path.parents) if each.exists())
    if not existing.is_dir():
        yield fail("folder", f"{existing} is a file, not a folder", "name another folder, or remove the file")
        return
    if existing == path and (refusal := find_refusal(path)) is not None:
        reason, remedy = refusal
        yield fail("folder", f"{path} {reason}", remedy)
        return
    if not os.access(existing, os.W_OK | os.X_OK):
        yield fail("folder", f"{existing} is not writable", "name another folder, or make it writable")
        return
    filesystem = os.statvfs(existing)
    room = filesystem.f_bavail * filesystem.f_frsize
    held = sum(block.nbytes for block in scan_blocks(path / "blocks"))
    size = find_size(path, settings.size)
    state = f"has {format_bytes(held)} of {format_bytes(size)}"
    if existing != path:
        state = f"does not exist; it will be created at its first use, for {format_bytes(size)}"
    text = f"{path} {state}; its filesystem has {format_bytes(room)} free"
    if held + room < size:
        remedy = "lower size, or free space; to remove all blocks, the whole folder may be deleted"
        if str(path).startswith("/dev/shm"):
            remedy += "; a container gets more with --shm-size"
        yield warn("folder", text, remedy)
    else:
        yield ok("folder", text)
