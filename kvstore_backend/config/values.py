"""Parsers for the values of settings, from text or JSON; and defaults that depend on the machine.

A parser returns the checked value, or raises ``ValueError``. The error's message is the end of a sentence that says
which values are valid ("the address must be host:port, ..."). The caller adds the beginning: the setting and its value.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import tempfile
from fractions import Fraction
from pathlib import Path
from urllib.parse import urlsplit

__all__ = [
    "DEVICES_FOLDER",
    "SHARED_MEMORY",
    "MissingDeviceError",
    "default_folder",
    "default_metadata_server",
    "default_protocol",
    "has_active_port",
    "hide_password",
    "list_rdma_devices",
    "parse_device_names",
    "parse_folder",
    "parse_kv_form",
    "parse_master_address",
    "parse_metadata_server",
    "parse_positive_size",
    "parse_protocol",
    "parse_segment_size",
    "parse_size",
    "parse_switch",
    "parse_tenant",
    "parse_text",
]

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
"""Folder in memory (a tmpfs) that most machines have."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|B|KB|MB|GB|TB|KIB|MIB|GIB|TIB)", re.IGNORECASE)
# Mooncake cannot allocate a smaller segment.
_MIN_SEGMENT_BYTES = 16 << 20
_KV_FORMS = ("int8", "fp8")
# A Kubernetes namespace and a lease in it, or only a lease, in the namespace "default".
_LEASE = re.compile(r"(?:[a-z0-9-]+/)?[a-z0-9.-]+", re.ASCII)
_SWITCHES = {"true": True, "1": True, "on": True, "yes": True, "false": False, "0": False, "off": False, "no": False}


class MissingDeviceError(ValueError):
    """Error: a protocol needs devices that this machine lacks."""


def parse_size(value: object) -> int:
    """Parse a number of bytes from a number or from text: ``1073741824``, ``"1GiB"`` (2**30), ``"1GB"`` (10**9)."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError('a size is a number of bytes, or text such as "4GiB" or "512MB"')
    unit = match[2].upper() or "B"
    return int(Fraction(match[1]) * (1024 if "I" in unit else 1000) ** "BKMGT".index(unit[0]))


def parse_positive_size(value: object) -> int:
    """Parse a size, and refuse 0."""
    if (size := parse_size(value)) == 0:
        raise ValueError("a size must be more than 0 bytes")
    return size


def parse_segment_size(value: object) -> int:
    """Parse the size of the memory that a client gives to a Mooncake pool; 0 is valid."""
    if 0 < (size := parse_size(value)) < _MIN_SEGMENT_BYTES:
        raise ValueError("Mooncake needs at least 16MiB, or 0 to contribute no memory to the pool")
    return size


def parse_text(value: object) -> str:
    """Return a text without spaces at its beginning and end; refuse values of other types."""
    if not isinstance(value, str):
        raise ValueError("the value must be text")
    return value.strip()


def parse_tenant(value: object) -> str:
    """Parse the name of a tenant; refuse names that Mooncake's master refuses."""
    if not (text := parse_text(value)) or text.startswith("_") or not text.isprintable():
        raise ValueError("a tenant's name must have only printable characters and not begin with _; team-a is valid")
    return text


def parse_master_address(value: object) -> str:
    """Parse the address of a Mooncake master, or the URL of the service where the leading master is registered.

    The URL is ``etcd://`` and the addresses of the etcd servers, ``redis://`` and the address of the Redis server, or
    ``k8s://`` and the lease in Kubernetes. Mooncake must be built with Redis or Kubernetes; PyPI's wheels are not.
    """
    text = value.strip() if isinstance(value, str) else ""
    scheme, separator, rest = text.partition("://")
    if scheme in ("etcd", "redis") and separator:
        return _parse_servers(scheme, rest)
    if scheme == "k8s" and separator:
        if not _LEASE.fullmatch(rest):
            raise ValueError("k8s:// must be followed by namespace/lease, such as k8s://default/mooncake-master")
        return text
    if separator:
        raise ValueError(
            "the address must be host:port, such as 127.0.0.1:15001, or for several masters "
            "etcd://host:port;host:port, redis://host:port or k8s://namespace/lease"
        )
    return _parse_address(value)


def _parse_servers(scheme: str, rest: str) -> str:
    """Parse the part after ``scheme://``: etcd servers, separated by ``;`` or ``,``, or one Redis server."""
    try:
        if scheme == "redis":
            return f"redis://{_parse_address(rest.removesuffix('/'))}"
        servers = (server.strip().removeprefix("http://").removesuffix("/") for server in re.split("[;,]", rest))
        return "etcd://" + ";".join(_parse_address(server) for server in servers)
    except ValueError:
        several = "" if scheme == "redis" else ", or by several host:port separated by ;"
        password = "; set the password in MC_REDIS_PASSWORD" if scheme == "redis" else ""
        raise ValueError(f"{scheme}:// must be followed by host:port{several}{password}") from None


def hide_password(value: object) -> object:
    """Return ``value`` for a message, with ``...`` in place of user and password before an ``@`` in an address."""
    return re.sub("(^|://)[^/@]*@", r"\1...@", value) if isinstance(value, str) else value


def _parse_address(value: object) -> str:
    host, colon, port = value.strip().rpartition(":") if isinstance(value, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536) or (
        not bracketed and re.search(r"[:/@\s]", host)
    ):
        raise ValueError("the address must be host:port, such as 127.0.0.1:15001")
    return f"{host}:{port}"


def parse_metadata_server(value: object) -> str:
    """Parse the URL of a metadata server (Mooncake's own, etcd or Redis), or ``P2PHANDSHAKE``."""
    text = value.strip() if isinstance(value, str) else ""
    scheme, _, rest = text.partition("://")
    if scheme in ("etcd", "redis") and rest:
        return _parse_servers(scheme, rest)
    try:
        url = urlsplit(text)
        usable = text == "P2PHANDSHAKE" or bool(url.scheme in ("http", "https") and url.hostname and url.port != 0)
    except ValueError:  # a port that is not a number, a bracket that is not closed
        usable = False
    if not usable:
        raise ValueError(
            "the metadata server must be P2PHANDSHAKE, or a URL such as http://127.0.0.1:15002/metadata, "
            "etcd://host:port;host:port or redis://host:port"
        )
    return text


def parse_protocol(value: object) -> str:
    """Parse the name of a protocol; refuse ``rdma`` on a machine without RDMA devices.

    Raises:
        MissingDeviceError: the machine has no device for RDMA.
        ValueError: the value is not a protocol.
    """
    if not isinstance(value, str) or value.strip().lower() not in ("tcp", "rdma", "ascend"):
        raise ValueError("the protocol must be tcp or rdma, or ascend with a build of Mooncake for Ascend")
    protocol = value.strip().lower()
    if protocol == "rdma" and not list_rdma_devices():
        raise MissingDeviceError("this machine has no RDMA device; set tcp, or leave the protocol out")
    return protocol


def parse_device_names(value: object) -> str:
    """Parse names of RDMA devices, separated by commas.

    Refuses JSON with the devices of several ranks, which other software accepts.
    """
    if (text := parse_text(value)).startswith("{"):
        raise ValueError("the devices must be names, separated by commas; give each rank its own configuration")
    return text


def parse_switch(value: object) -> bool:
    """Parse a boolean, from JSON or from a word such as ``true``, ``off`` or ``1``."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.strip().lower() not in _SWITCHES:
        raise ValueError("the value must be true or false")
    return _SWITCHES[value.strip().lower()]


def parse_kv_form(value: object) -> str:
    """Parse the form of stored blocks: ``int8``, ``fp8`` (``engine/pool/kv_codec.py``), or "" for unchanged blocks."""
    if not isinstance(value, str) or value.strip().lower() not in ("", *_KV_FORMS):
        raise ValueError(f"the form of blocks must be {' or '.join(_KV_FORMS)}; leave it out to store blocks unchanged")
    return value.strip().lower()


def parse_folder(value: object) -> Path:
    """Return the absolute path of a folder. The folder may not exist yet."""
    if not isinstance(value, (str, Path)) or not str(value).strip():
        raise ValueError("the value must be the path of a folder")
    try:
        path = Path(value).expanduser().absolute()
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return path  # opening the store reports the reason
    except (OSError, RuntimeError, ValueError) as exc:  # too long, ~ with an unknown user, a zero byte
        raise ValueError(f"the value must be the path of a folder: {getattr(exc, 'strerror', None) or exc}") from None
    if not is_folder:
        raise ValueError("the value must be the path of a folder, but it is a file")
    return path


def default_folder() -> Path:
    """Return the default folder of a pool, ``kvstore-<user id>``: in ``SHARED_MEMORY`` if writable, else ``/tmp``."""
    shared = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return shared / f"kvstore-{os.getuid()}"


def default_protocol() -> str:
    """Return the default protocol: ``rdma`` if this machine has an RDMA device, otherwise ``tcp``; log the choice."""
    protocol, reason = ("rdma", "an") if list_rdma_devices() else ("tcp", "no")
    logger.info("protocol is not given: using %s because this machine has %s RDMA device", protocol, reason)
    return protocol


def default_metadata_server() -> str:
    """Return the default metadata server, ``P2PHANDSHAKE``; log it, because all clients must use the same value."""
    logger.info("metadata_server is not given: using P2PHANDSHAKE; every other client of the pool must use it too")
    return "P2PHANDSHAKE"


DEVICES_FOLDER = Path("/sys/class/infiniband")
"""Folder with one entry per RDMA device, such as ``mlx5_0``; missing if the kernel has no RDMA."""


def list_rdma_devices() -> list[str]:
    """Return the names of this machine's RDMA devices, sorted."""
    return sorted(device.name for device in DEVICES_FOLDER.iterdir()) if DEVICES_FOLDER.is_dir() else []


def has_active_port(device: str) -> bool:
    """Return whether the kernel reports at least one port of an RDMA device as active."""
    return any("ACTIVE" in state.read_text() for state in (DEVICES_FOLDER / device).glob("ports/*/state"))
