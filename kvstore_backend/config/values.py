"""The values of settings, from text or JSON: each parser returns the checked value, or says how it must be.

A parser raises ``ValueError`` with the end of a sentence ("it must be host:port, ..."); the beginning, which names the
setting and the value, is put before it by the caller.
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

from kvstore_backend.config.rdma import list_rdma_devices

__all__ = [
    "SHARED_MEMORY",
    "MissingDeviceError",
    "default_folder",
    "default_metadata_server",
    "default_protocol",
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
"""A tmpfs, on most machines."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|B|KB|MB|GB|TB|KIB|MIB|GIB|TIB)", re.IGNORECASE)
# Mooncake cannot allocate a smaller segment.
_MIN_SEGMENT_BYTES = 16 << 20
_KV_FORMS = ("int8", "fp8")
# A namespace of Kubernetes and its lease, or a lease of the namespace "default".
_LEASE = re.compile(r"(?:[a-z0-9-]+/)?[a-z0-9.-]+", re.ASCII)
_SWITCHES = {"true": True, "1": True, "on": True, "yes": True, "false": False, "0": False, "off": False, "no": False}


class MissingDeviceError(ValueError):
    """A protocol needs devices that this machine lacks."""


def parse_size(value: object) -> int:
    """A number of bytes from a number or from text: ``1073741824``, ``"1GiB"`` (2**30), ``"1GB"`` (10**9).

    Raises:
        ValueError: the end of a sentence that says how it must be written.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError('a size is a number of bytes, or text such as "4GiB" or "512MB"')
    unit = match[2].upper() or "B"
    return int(Fraction(match[1]) * (1024 if "I" in unit else 1000) ** "BKMGT".index(unit[0]))


def parse_positive_size(value: object) -> int:
    """A size of at least one byte."""
    if (size := parse_size(value)) == 0:
        raise ValueError("it must be more than 0 bytes")
    return size


def parse_segment_size(value: object) -> int:
    """The size of the memory given to a Mooncake cluster, which may be none."""
    if 0 < (size := parse_size(value)) < _MIN_SEGMENT_BYTES:
        raise ValueError("Mooncake needs at least 16MiB, or 0 to contribute no memory to the pool")
    return size


def parse_text(value: object) -> str:
    """Text without the blanks around it."""
    if not isinstance(value, str):
        raise ValueError("it must be text")
    return value.strip()


def parse_tenant(value: object) -> str:
    """The name of a tenant, as Mooncake's master takes it."""
    if not (text := parse_text(value)) or text.startswith("_") or not text.isprintable():
        raise ValueError("a tenant's name has printable characters and does not begin with _, such as team-a")
    return text


def parse_master_address(value: object) -> str:
    """One master's address, or where it is known which of several masters leads.

    That is ``etcd://`` and the addresses of the etcd servers, ``redis://`` and the address of the Redis server, or
    ``k8s://`` and the lease in Kubernetes. All but etcd must be built into Mooncake, which PyPI's wheels are without.
    """
    text = value.strip() if isinstance(value, str) else ""
    scheme, separator, rest = text.partition("://")
    if scheme in ("etcd", "redis") and separator:
        return _parse_servers(scheme, rest)
    if scheme == "k8s" and separator:
        if not _LEASE.fullmatch(rest):
            raise ValueError("after k8s:// it must be namespace/lease, such as k8s://default/mooncake-master")
        return text
    if separator:
        raise ValueError(
            "it must be host:port, such as 127.0.0.1:15001, or for several masters etcd://host:port;host:port, "
            "redis://host:port or k8s://namespace/lease"
        )
    return _parse_address(value)


def _parse_servers(scheme: str, rest: str) -> str:
    """Servers of etcd, each with ``http://`` before it or not, or one of Redis; with ``;`` between them."""
    try:
        if scheme == "redis":
            return f"redis://{_parse_address(rest.removesuffix('/'))}"
        servers = (server.strip().removeprefix("http://").removesuffix("/") for server in re.split("[;,]", rest))
        return "etcd://" + ";".join(_parse_address(server) for server in servers)
    except ValueError:
        several = "" if scheme == "redis" else ", or several of them with ; between"
        password = "; a password goes into MC_REDIS_PASSWORD" if scheme == "redis" else ""
        raise ValueError(f"after {scheme}:// it must be host:port{several}{password}") from None


def hide_password(value: object) -> object:
    """``value`` as a sentence may show it: without what stands before the ``@`` of its addresses."""
    return re.sub("(^|://)[^/@]*@", r"\1...@", value) if isinstance(value, str) else value


def _parse_address(value: object) -> str:
    host, colon, port = value.strip().rpartition(":") if isinstance(value, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536) or (
        not bracketed and re.search(r"[:/@\s]", host)
    ):
        raise ValueError("it must be host:port, such as 127.0.0.1:15001")
    return f"{host}:{port}"


def parse_metadata_server(value: object) -> str:
    """A metadata server's URL, of Mooncake's own server, of etcd or of Redis; or ``P2PHANDSHAKE``."""
    text = value.strip() if isinstance(value, str) else ""
    scheme, _, rest = text.partition("://")
    if scheme in ("etcd", "redis") and rest:
        return _parse_servers(scheme, rest)
    try:
        url = urlsplit(text)
        usable = text == "P2PHANDSHAKE" or bool(url.scheme in ("http", "https") and url.hostname and url.port != 0)
    except ValueError:  # a port that is no number, a bracket that is not closed
        usable = False
    if not usable:
        raise ValueError(
            "it must be P2PHANDSHAKE, or a URL such as http://127.0.0.1:15002/metadata, "
            "etcd://host:port;host:port or redis://host:port"
        )
    return text


def parse_protocol(value: object) -> str:
    """A protocol that this machine has the devices for.

    Raises:
        MissingDeviceError: it has none for RDMA.
        ValueError: this is no protocol.
    """
    if not isinstance(value, str) or value.strip().lower() not in ("tcp", "rdma", "ascend"):
        raise ValueError("it must be tcp or rdma, or ascend where Mooncake was built for it")
    protocol = value.strip().lower()
    if protocol == "rdma" and not list_rdma_devices():
        raise MissingDeviceError("this machine has no RDMA device: say tcp, or leave it out")
    return protocol


def parse_device_names(value: object) -> str:
    """Names of RDMA devices, separated by commas; JSON, which others allow for several ranks, is refused."""
    if (text := parse_text(value)).startswith("{"):
        raise ValueError("it must be names separated by commas; give each rank its own configuration instead")
    return text


def parse_switch(value: object) -> bool:
    """``True`` or ``False``, in JSON or in the words that people write for them."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.strip().lower() not in _SWITCHES:
        raise ValueError("it must be true or false")
    return _SWITCHES[value.strip().lower()]


def parse_kv_form(value: object) -> str:
    """The form in which blocks are stored, one that ``engine/pool/kv_codec.py`` knows; empty: as they are."""
    if not isinstance(value, str) or value.strip().lower() not in ("", *_KV_FORMS):
        raise ValueError(f"it must be {' or '.join(_KV_FORMS)}, or left out to store blocks as they are")
    return value.strip().lower()


def parse_folder(value: object) -> Path:
    """The absolute path of a folder, which need not be there yet."""
    if not isinstance(value, (str, Path)) or not str(value).strip():
        raise ValueError("it must be the path of a folder")
    try:
        path = Path(value).expanduser().absolute()
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return path  # opening the store tells the reason
    except (OSError, RuntimeError, ValueError) as exc:  # too long, nobody's home, a zero byte
        raise ValueError(f"it must be the path of a folder: {getattr(exc, 'strerror', None) or exc}") from None
    if not is_folder:
        raise ValueError("it must be the path of a folder, and this is a file")
    return path


def default_folder() -> Path:
    """A folder of this user's own, in memory where the machine has a tmpfs for that."""
    shared = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return shared / f"kvstore-{os.getuid()}"


def default_protocol() -> str:
    """``rdma`` where this machine has a device for it, else ``tcp``; the choice is logged."""
    protocol, reason = ("rdma", "an") if list_rdma_devices() else ("tcp", "no")
    logger.info("protocol is not given: using %s, as this machine has %s RDMA device", protocol, reason)
    return protocol


def default_metadata_server() -> str:
    """``P2PHANDSHAKE``, logged as all clients of a pool must agree on it."""
    logger.info("metadata_server is not given: using P2PHANDSHAKE, as every other client of the pool must")
    return "P2PHANDSHAKE"
