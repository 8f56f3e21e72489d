"""Every dialect of configuration -> one ``PoolConfig``.

A value is taken from the first of these that has it: explicit values, a URL, a JSON file, the environment, a default.
Each settings class says, field by field, which environment variable carries it and what a valid value is; its
field names are the keys of the JSON file. For Mooncake both are FastDeploy's, so that its files and scripts work;
dialects.py reads those of others.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from kvstore_backend.backend import ConfigError
from kvstore_backend.config.dialects import MOONCAKES_NAMES, Said, is_url, read_file, read_url
from kvstore_backend.config.hints import instead

__all__ = [
    "FileSettings",
    "MemorySettings",
    "MooncakeSettings",
    "PoolConfig",
    "fastdeploy_plugins",
    "load_config",
    "named_model",
    "parse_size",
    "read_config",
    "set_native_cluster",
    "set_native_defaults",
]

logger = logging.getLogger(__name__)

_RDMA_DEVICES = Path("/sys/class/infiniband")
_SHARED_MEMORY = Path("/dev/shm")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|B|KB|MB|GB|TB|KIB|MIB|GIB|TIB)", re.IGNORECASE)
# Mooncake cannot allocate a smaller segment.
_MIN_SEGMENT = 16 << 20
_ETCD = "etcd://"
# As near as a typo, and nearer to ours than any other variable that Mooncake or its users define, but for one.
_NEAR = 0.85
_NEAR_OURS = 0.8  # of variables that begin with KVSTORE_: KVSTORE_SIZE; Kubernetes makes others of a service's name
_NOT_A_TYPO = "MOONCAKE_TE_META_DATA_SERVER"
# MC_LOG_LEVEL: Mooncake logs every step to stderr otherwise. MC_RPC_TIMEOUT_MS: a master that hangs costs 30 s a
# call otherwise. MC_STORE_CLIENT_SETUP_RETRIES: it tries 20 times otherwise, each as long as the time-out.
_NATIVE_DEFAULTS = {"MC_LOG_LEVEL": "ERROR", "MC_RPC_TIMEOUT_MS": "2000", "MC_STORE_CLIENT_SETUP_RETRIES": "3"}


def parse_size(value: object) -> int:
    """A number of bytes from a number or from text: ``1073741824``, ``"1GiB"`` (2**30), ``"1GB"`` (10**9).

    Raises:
        ValueError: what would be right, as the end of a sentence.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError('a size is a number of bytes, or text such as "4GiB" or "512MB"')
    unit = match[2].upper() or "B"
    return int(Fraction(match[1]) * (1024 if "I" in unit else 1000) ** "BKMGT".index(unit[0]))


def _positive_size(value: object) -> int:
    if (size := parse_size(value)) == 0:
        raise ValueError("it must be more than 0 bytes")
    return size


def _segment_size(value: object) -> int:
    if 0 < (size := parse_size(value)) < _MIN_SEGMENT:
        raise ValueError("Mooncake needs at least 16MiB, or 0 to contribute no memory to the pool")
    return size


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("it must be text")
    return value.strip()


def _address(value: object) -> str:
    host, colon, port = value.strip().rpartition(":") if isinstance(value, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536) or (
        not bracketed and re.search(r"[:/\s]", host)
    ):
        raise ValueError("it must be host:port, such as 127.0.0.1:15001")
    return f"{host}:{port}"


def _master(value: object) -> str:
    """One master's address, or ``etcd://`` and the addresses of the etcd servers that know which master leads."""
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str) and text.startswith(_ETCD):
        try:
            return _ETCD + ";".join(_address(each) for each in re.split("[;,]", text.removeprefix(_ETCD)))
        except ValueError:
            raise ValueError("after etcd:// it must be host:port, or several of them with ; between") from None
    return _address(text)


def _metadata_server(value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    try:
        url = urlsplit(text)
        usable = text == "P2PHANDSHAKE" or bool(url.scheme and url.hostname and url.port != 0)
    except ValueError:  # a port that is no number, a bracket that is not closed
        usable = False
    if not usable:
        raise ValueError("it must be P2PHANDSHAKE, or a URL such as http://127.0.0.1:15002/metadata")
    return text


def _protocol(value: object) -> str:
    if not isinstance(value, str) or value.strip().lower() not in ("tcp", "rdma", "ascend"):
        raise ValueError("it must be tcp or rdma, or ascend where Mooncake was built for it")
    protocol = value.strip().lower()
    if protocol == "rdma" and not _has_rdma():
        raise ValueError("this machine has no RDMA device: say tcp, or leave it out")
    return protocol


def _devices(value: object) -> str:
    if (text := _text(value)).startswith("{"):
        raise ValueError("it must be names separated by commas; give each rank its own configuration instead")
    return text


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    on = {"true": True, "1": True, "on": True, "yes": True, "false": False, "0": False, "off": False, "no": False}
    if not isinstance(value, str) or value.strip().lower() not in on:
        raise ValueError("it must be true or false")
    return on[value.strip().lower()]


def _path(value: object) -> Path:
    if not isinstance(value, (str, Path)) or not str(value).strip():
        raise ValueError("it must be the path of a folder")
    try:
        path = Path(value).expanduser().absolute()
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return path  # who opens the store says what is the matter
    except (OSError, RuntimeError, ValueError) as exc:  # too long, nobody's home, a zero byte
        raise ValueError(f"it must be the path of a folder: {getattr(exc, 'strerror', None) or exc}") from None
    if not is_folder:
        raise ValueError("it must be the path of a folder, and this is a file")
    return path


def _default_path() -> Path:
    """A folder of this user's own, in memory where the machine has a tmpfs for that."""
    shared = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return shared / f"kvstore-{os.getuid()}"


def _default_protocol() -> str:
    protocol, reason = ("rdma", "an") if _has_rdma() else ("tcp", "no")
    logger.info("protocol is not given: using %s, as this machine has %s RDMA device", protocol, reason)
    return protocol


def _default_metadata_server() -> str:
    logger.info("metadata_server is not given: using P2PHANDSHAKE, as every other client of the pool must")
    return "P2PHANDSHAKE"


def _has_rdma() -> bool:
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())


def _read(variable: str, parse: Callable[[object], object]) -> dict[str, object]:
    """A field's metadata: ``variable`` carries it in the environment, ``parse`` checks it or raises ``ValueError``."""
    return {"variable": variable, "parse": parse}


@dataclass(frozen=True)
class MooncakeSettings:
    """How to join a Mooncake cluster.

    Attributes:
        master_server_addr: ``host:port`` of the master; with several masters ``etcd://host:port;host:port``, where the
            etcd servers are that know which of them leads.
        metadata_server: URL of the metadata server, or ``P2PHANDSHAKE`` to do without. Clients that differ in it
            cannot read each other's memory.
        local_hostname: by which the others reach this machine; empty: the address it reaches the master from.
        protocol: ``tcp``, ``rdma`` or ``ascend``.
        rdma_devices: names separated by commas; empty: Mooncake's choice.
        global_segment_size: bytes of this machine's memory given to the pool; 0 for none.
        local_buffer_size: bytes of Mooncake's own staging, which our calls do not need.
        cluster_id: of the masters behind etcd, as their ``--cluster_id`` says.
        enable_ssd_offload: let Mooncake keep on this machine's SSD what its memory has no room for; its master must
            run with ``--enable_offload=true``.
        ssd_offload_path: the folder for that.
    """

    backend: ClassVar[str] = "mooncake"

    master_server_addr: str = field(metadata=_read("MOONCAKE_MASTER_SERVER_ADDR", _master))
    metadata_server: str = field(
        default_factory=_default_metadata_server, metadata=_read("MOONCAKE_METADATA_SERVER", _metadata_server)
    )
    local_hostname: str = field(default="", metadata=_read("MOONCAKE_LOCAL_HOSTNAME", _text))
    protocol: str = field(default_factory=_default_protocol, metadata=_read("MOONCAKE_PROTOCOL", _protocol))
    rdma_devices: str = field(default="", metadata=_read("MOONCAKE_RDMA_DEVICES", _devices))
    global_segment_size: int = field(default=1 << 30, metadata=_read("MOONCAKE_GLOBAL_SEGMENT_SIZE", _segment_size))
    local_buffer_size: int = field(default=128 << 20, metadata=_read("MOONCAKE_LOCAL_BUFFER_SIZE", parse_size))
    cluster_id: str = field(default="mooncake_cluster", metadata=_read("MC_STORE_CLUSTER_ID", _text))
    enable_ssd_offload: bool = field(default=False, metadata=_read("MOONCAKE_ENABLE_SSD_OFFLOAD", _switch))
    ssd_offload_path: str = field(default="", metadata=_read("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", _text))

    @property
    def etcd_addresses(self) -> list[str]:
        """Where the etcd servers are that know the leading master; empty where one master is named."""
        listed = self.master_server_addr.startswith(_ETCD)
        return self.master_server_addr.removeprefix(_ETCD).split(";") if listed else []


@dataclass(frozen=True)
class FileSettings:
    """A folder that processes of this machine share.

    Attributes:
        path: the folder, on a tmpfs (quick) or an SSD (large).
        size: bytes at which the least recently used blocks are evicted.
    """

    backend: ClassVar[str] = "file"

    path: Path = field(default_factory=_default_path, metadata=_read("KVSTORE_FILE_PATH", _path))
    size: int = field(default=1 << 30, metadata=_read("KVSTORE_FILE_SIZE", _positive_size))


@dataclass(frozen=True)
class MemorySettings:
    """This process's own memory, shared with nobody.

    Attributes:
        size: bytes at which the least recently used blocks are evicted.
    """

    backend: ClassVar[str] = "memory"

    size: int = field(default=1 << 30, metadata=_read("KVSTORE_MEMORY_SIZE", _positive_size))


def _fast(value: object) -> MemorySettings | FileSettings:
    """The settings a URL names."""
    try:
        said = read_url(value) if isinstance(value, str) else None
        if said is None or said.backend == "mooncake":
            raise ValueError("it must be a URL such as memory:?size=1GiB or file:///dev/shm/kvpool?size=4GiB")
        kind = _SETTINGS[said.backend]
        store = _settings(kind, [_said_source([*_names(kind)], said)])
    except ConfigError as exc:
        raise ValueError(str(exc)) from exc
    assert isinstance(store, (MemorySettings, FileSettings))
    return store


_Settings: TypeAlias = MooncakeSettings | FileSettings | MemorySettings
_SETTINGS: dict[str, type[_Settings]] = {
    kind.backend: kind for kind in (MooncakeSettings, FileSettings, MemorySettings)
}


@dataclass(frozen=True)
class PoolConfig:
    """Which store to open, and how. ``load_config`` made and checked it.

    Attributes:
        store: the store that is shared.
        async_write: save in the background, as MindIE's ``asyncWrite`` says; where there is a fast store, from that.
        fast: a smaller, quicker store of this machine's own before the shared one.
    """

    store: MooncakeSettings | FileSettings | MemorySettings
    async_write: bool = field(default=False, metadata=_read("KVSTORE_ASYNC_WRITE", _switch))
    fast: MemorySettings | FileSettings | None = field(default=None, metadata=_read("KVSTORE_FAST_TIER", _fast))

    @property
    def backend(self) -> str:
        """``mooncake``, ``file`` or ``memory``."""
        return self.store.backend


_OPTIONS = {option.name: option for option in fields(PoolConfig) if option.metadata}


class _Source(NamedTuple):
    """Values by field name, and how to tell an operator where one of them stands."""

    values: Mapping[str, object]
    place: Callable[[str], str]


def load_config(
    backend: str,
    *,
    explicit: Mapping[str, object] | None = None,
    config_path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> PoolConfig:
    """The configuration of ``backend``: each value from ``explicit``, else file, else environment, else a default.

    Args:
        backend: ``mooncake``, ``file`` or ``memory``; or a URL that names one of them and says more of it.
        explicit: values by the field names of the backend's settings; ``None`` values count as not given.
        config_path: a JSON file in any dialect; not given, the one that ``MOONCAKE_CONFIG_PATH`` names, for ``file``
            and ``memory`` if it describes such a store.
        environ: the environment; not given, the process's own. An empty variable counts as not given.

    Raises:
        ConfigError: one sentence naming the value, file key or variable at fault and what would be right.
    """
    said = [read_url(backend)] if is_url(backend) else []
    kind = _SETTINGS.get(said[0].backend if said else backend)
    if kind is None:
        raise ConfigError(f"storage backend {backend!r} is not known{instead(backend, _SETTINGS)}")
    environ = os.environ if environ is None else environ
    names = [*_names(kind), *_OPTIONS]
    sources = [
        _explicit_source(names, explicit or {}),
        *(_said_source(names, each) for each in said),
        _file_source(kind, names, config_path, environ, is_named=not said),
        _environment_source(kind, environ),
    ]
    options = {
        name: _parsed(option, source)
        for name, option in _OPTIONS.items()
        if (source := _first(sources, name)) is not None
    }
    return PoolConfig(_settings(kind, sources), **options)


def read_config(source: str | Path | None = None, *, environ: Mapping[str, str] | None = None) -> PoolConfig | None:
    """The configuration that ``source`` describes, whatever it is; ``None`` where it says that there is no pool.

    Args:
        source: a URL, or the path of a JSON file in any dialect; not given: the environment decides.
        environ: as in ``load_config``.

    Raises:
        ConfigError: as ``load_config``; also where neither ``source`` nor the environment names a pool.
    """
    environ = os.environ if environ is None else environ
    if source is not None and is_url(str(source)):
        return load_config(str(source), environ=environ)
    path, named_by = (source, "") if source is not None else _named_file(environ)
    if path is not None:
        backend = read_file(path, named_by).backend
        return load_config(backend, config_path=path, environ=environ) if backend else None
    for kind in _SETTINGS.values():
        if any(environ.get(setting.metadata["variable"]) for setting in fields(kind)):
            return load_config(kind.backend, environ=environ)
    raise ConfigError(
        "no pool is configured: give a configuration file or a URL such as mooncake://127.0.0.1:15001, "
        "or set MOONCAKE_CONFIG_PATH or MOONCAKE_MASTER_SERVER_ADDR"
    )


def fastdeploy_plugins(environ: Mapping[str, str] | None = None) -> list[str]:
    """The plugins that ``FD_PLUGINS`` names; FastDeploy loads all that are installed where it is not set."""
    named = (os.environ if environ is None else environ).get("FD_PLUGINS", "")
    return [name.strip() for name in named.split(",") if name.strip()]


def named_model(environ: Mapping[str, str] | None = None) -> str:
    """The checkpoint's folder by ``KVSTORE_MODEL``, for processes of engines that are not told it; empty: not set."""
    return (os.environ if environ is None else environ).get("KVSTORE_MODEL", "")


def set_native_defaults() -> None:
    """Set what Mooncake's native library reads from the process's environment, where nobody else has.

    Called before it is imported.
    """
    for variable, value in _NATIVE_DEFAULTS.items():
        os.environ.setdefault(variable, value)


def set_native_cluster(settings: MooncakeSettings) -> None:
    """Tell Mooncake's native library which cluster's leader to ask etcd for; it reads that when it joins."""
    os.environ["MC_STORE_CLUSTER_ID"] = settings.cluster_id


def _settings(kind: type[_Settings], sources: Sequence[_Source]) -> _Settings:
    """Settings made of the first source that has each value."""
    values: dict[str, Any] = {}
    for setting in fields(kind):
        source = _first(sources, setting.name)
        if source is not None:
            values[setting.name] = _parsed(setting, source)
        elif setting.default is MISSING and setting.default_factory is MISSING:
            raise ConfigError(
                f"{setting.name} is not given: set {setting.metadata['variable']}, "
                f'or "{setting.name}" in the file that MOONCAKE_CONFIG_PATH names'
            )
    return kind(**values)


def _first(sources: Sequence[_Source], name: str) -> _Source | None:
    return next((source for source in sources if name in source.values), None)


def _names(kind: type[_Settings]) -> list[str]:
    return [setting.name for setting in fields(kind)]


def _explicit_source(names: Sequence[str], explicit: Mapping[str, object]) -> _Source:
    given = {name: value for name, value in explicit.items() if value is not None}
    _check_names(names, given, "")
    return _Source(given, lambda name: name)


def _said_source(names: Sequence[str], said: Said) -> _Source:
    _check_names(names, said.values, said.where)
    return _Source(said.values, said.places.__getitem__)


def _file_source(
    kind: type[_Settings],
    names: Sequence[str],
    config_path: str | Path | None,
    environ: Mapping[str, str],
    *,
    is_named: bool,
) -> _Source:
    """The JSON file's values; none where no file is named, or the environment names one of another backend.

    Args:
        is_named: the backend was asked for by its name, not by a URL that says where it is.
    """
    named_by = ""
    if config_path is None and (is_named or kind is MooncakeSettings):
        config_path, named_by = _named_file(environ)
    if config_path is None:
        return _Source({}, str)
    said = read_file(config_path, named_by)
    if named_by and kind is not MooncakeSettings and said.backend != kind.backend:
        return _Source({}, str)  # it is Mooncake's variable, first of all
    if not said.backend:
        raise ConfigError(f'there is to be no pool ("backend": ""{said.where}), but {kind.backend} is asked for')
    return _said_source(names, said)


def _named_file(environ: Mapping[str, str]) -> tuple[str | None, str]:
    return environ.get("MOONCAKE_CONFIG_PATH") or None, " (named by MOONCAKE_CONFIG_PATH)"


def _environment_source(kind: type[_Settings], environ: Mapping[str, str]) -> _Source:
    """The environment's values; a variable that is nearly one of ours is refused, as its value would be lost."""
    settings = [*fields(kind), *_OPTIONS.values()]
    variables: dict[str, str] = {setting.name: setting.metadata["variable"] for setting in settings}
    ours = [*variables.values(), "MOONCAKE_CONFIG_PATH"]
    for name in environ:
        strange = name.startswith(("MOONCAKE_", "KVSTORE_")) and name not in ours and name != _NOT_A_TYPO
        how_near = _NEAR_OURS if name.startswith("KVSTORE_") else _NEAR
        if strange and (near := difflib.get_close_matches(name, ours, 1, how_near)):
            raise ConfigError(f"environment variable {name} is not known; did you mean {near[0]}?")
    given = {name: environ[variable] for name, variable in variables.items() if environ.get(variable)}
    return _Source(given, variables.__getitem__)


def _check_names(names: Sequence[str], values: Mapping[str, object], where: str) -> None:
    aliases = [alias for alias, name in MOONCAKES_NAMES.items() if name in names]
    for name in values:
        if name not in names:
            near = difflib.get_close_matches(name, [*names, *aliases], 1)
            raise ConfigError(f'unknown key "{name}"{where}{instead(name, near or names)}')


def _parsed(setting: Field[Any], source: _Source) -> Any:
    value = source.values[setting.name]
    try:
        return setting.metadata["parse"](value)
    except ValueError as exc:
        raise ConfigError(f"{source.place(setting.name)} is {value!r}; {exc}") from None
