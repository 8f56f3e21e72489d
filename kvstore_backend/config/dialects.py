"""Reads the configuration of a pool in each dialect, and translates the dialect's names of settings.

- FastDeploy's JSON: has the same names as ``settings.py``.
- Mooncake's JSON, for vLLM, SGLang, LMCache and MindIE: has the names ``master_server_address`` and ``device_name``; a
  size of ``"1GB"`` means 2**30 bytes.
- MindIE's server configuration: its ``kvPoolConfig`` (an object, or JSON in a string) has the name of a backend, and
  the path of a file of Mooncake's JSON. If the name is empty, the pool is off.
- A URL: ``mooncake://host:15001?protocol=tcp``, ``etcd://host:2379;host:2379?cluster_id=c`` (Mooncake's masters behind
  etcd; also ``redis://`` and ``k8s://``), ``file:///dev/shm/kvpool?size=4GiB``, ``memory:?size=1GiB``.

This module only translates names. ``values.py`` checks values, and ``sources.py`` selects the source of each value.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from kvcommon.hints import suggest_name
from kvstore_backend.backend import ConfigError
from kvstore_backend.config.values import hide_password

__all__ = ["FOREIGN_KEYS", "NATIVE_NAMES", "ParsedConfig", "is_url", "parse_mindie_pool", "read_file", "read_url"]

logger = logging.getLogger(__name__)

NATIVE_NAMES = {"master_server_address": "master_server_addr", "device_name": "rdma_devices"}
"""Names of settings in Mooncake's JSON -> names of the same settings in FastDeploy and ``settings.py``."""

FOREIGN_KEYS = {
    **dict.fromkeys(("mode", "enable_offload", "metadata_backend"), "vLLM"),
    **dict.fromkeys(("preferred_segment", "prefer_alloc_in_same_node", "staging_buffer_size"), "vLLM-Ascend"),
    **dict.fromkeys(("use_ascend_direct", "ascend_direct_transport"), "MindIE"),
    **dict.fromkeys(("master_metrics_port", "check_server", "client_server_address", "extra_backend_tag"), "SGLang"),
    "standalone_storage": "SGLang",
    **dict.fromkeys(("transfer_timeout", "storage_root_dir", "mooncake_prefer_local_alloc"), "LMCache"),
    "mooncake_page_first_multi_buffer": "LMCache",
}
"""Keys that an engine adds to Mooncake's JSON for its own use -> name of the engine. This package ignores them."""

_LOOSE_SIZE = re.compile(r"(\d+(?:\.\d+)?\s*[KMGT])B?", re.IGNORECASE)
_MINDIE_KEYS = ("backend", "configPath", "asyncWrite")
_HA_SCHEMES = ("etcd", "redis", "k8s")
_SCHEMES = {**dict.fromkeys(("mooncake", *_HA_SCHEMES), "mooncake"), "file": "file", "memory": "memory"}


@dataclass(frozen=True)
class ParsedConfig:
    """Settings from a file or a URL, with values that are not checked yet.

    Attributes:
        backend: ``mooncake``, ``file`` or ``memory``; empty if the pool is turned off.
        values: value of each setting, by the name of the setting in ``settings.py``. Unknown names are included.
        places: for each setting, text for messages that says where its value is written.
        where: the file or URL, as text for messages.
    """

    backend: str
    values: Mapping[str, object]
    places: Mapping[str, str]
    where: str


def is_url(text: str) -> bool:
    """Return whether ``text`` is a URL, and not the path of a file or the name of a backend."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text) is not None


def read_url(url: str) -> ParsedConfig:
    """Read the settings in a pool's URL.

    Raises:
        ConfigError: the scheme of the URL is not known, or a part of the URL is missing, wrong or given twice.
    """
    shown = hide_password(url)
    where = f" in {shown}"
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
        values = _refuse_duplicates(query)
    except ValueError as exc:
        raise ConfigError(f"{shown!r} is not a URL of a pool: {exc}") from None
    if parts.fragment:
        raise ConfigError(f"{shown!r} has a part after #, which is not allowed; in a path, write %23 for #")
    backend = _SCHEMES.get(parts.scheme)
    if backend is None:
        raise ConfigError(f"{shown!r} has the unknown scheme {parts.scheme!r}{suggest_name(parts.scheme, _SCHEMES)}")
    query_settings = _translate_names(values, where, binary_sizes=False)
    place = f"{shown!r}: its address"
    if backend == "mooncake":
        is_lease = parts.scheme == "k8s"
        if not parts.netloc or (parts.path.strip("/") and not is_lease):
            raise ConfigError(
                f"{shown!r} must have the form {parts.scheme}://host:port or {parts.scheme}://host:port?SETTINGS"
            )
        address = parts.netloc + (parts.path if is_lease else "")
        own = {"master_server_addr": f"{parts.scheme}://{address}" if parts.scheme in _HA_SCHEMES else address}
    elif backend == "file":
        if parts.netloc or not parts.path.startswith("/"):
            raise ConfigError(
                f"{shown!r} must have an absolute path after three slashes, such as file:///dev/shm/kvpool"
            )
        own = {"path": unquote(parts.path)}
    else:
        if parts.netloc or parts.path:
            raise ConfigError(f"{shown!r} must be memory:, or memory:?size=1GiB")
        own = {}
    if twice := sorted(own.keys() & query_settings.values.keys()):
        raise ConfigError(f"{shown!r} has {twice[0]} twice")
    places = {**dict.fromkeys(own, place), **query_settings.places}
    return ParsedConfig(backend, {**own, **query_settings.values}, places, where)


def read_file(path: str | Path, named_by: str = "") -> ParsedConfig:
    """Read the settings of a pool from a JSON file in any dialect.

    Args:
        path: the file.
        named_by: the variable or file that has the path, for messages: ``" (named by MOONCAKE_CONFIG_PATH)"``.

    Raises:
        ConfigError: the file cannot be read, is not a JSON object, or has two values for one setting.
    """
    values = _load_json_object(Path(path), named_by)
    pool = values.get("kvPoolConfig")
    where = f'"kvPoolConfig" in {path}'
    if pool is None and isinstance(values.get("BackendConfig"), dict):
        pool, where = values["BackendConfig"].get("kvPoolConfig"), f'"BackendConfig.kvPoolConfig" in {path}'
        pool = "" if pool is None else pool  # a server without pool
    if pool is not None:
        return _read_mindie_pool(pool, where, Path(path).parent)
    return _translate_names(
        values, f" in {path}", binary_sizes=not values.keys().isdisjoint(NATIVE_NAMES | FOREIGN_KEYS)
    )


def parse_mindie_pool(pool: object, where: str) -> dict[str, Any]:
    """Return the members of MindIE's ``kvPoolConfig``, which is an object, or a string with the object as JSON.

    An empty string has no members.

    Raises:
        ConfigError: the value is neither an object nor such a string, or has a member that MindIE does not know.
    """
    if isinstance(pool, str):
        try:
            members = json.loads(pool, object_pairs_hook=_refuse_duplicates) if pool.strip() else {}
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"{where} is {pool!r}, a string that is not valid JSON: {exc}") from None
    else:
        members = pool
    if not isinstance(members, dict):
        raise ConfigError(f"{where} is {pool!r}; it must be an object with the keys {', '.join(_MINDIE_KEYS)}")
    for name in members:
        if name not in _MINDIE_KEYS:
            raise ConfigError(f'unknown key "{name}" in {where}{suggest_name(name, _MINDIE_KEYS)}')
    if not isinstance(members.get("configPath", ""), str):
        raise ConfigError(f'{where} has "configPath": {members["configPath"]!r}; it must be the path of a file')
    return members


def _read_mindie_pool(value: object, where: str, folder: Path) -> ParsedConfig:
    """Read the settings in MindIE's ``kvPoolConfig`` and in the file that it names."""
    pool = parse_mindie_pool(value, where)
    backend, config_path = pool.get("backend", ""), pool.get("configPath", "")
    if backend not in ("", *_SCHEMES.values()):
        raise ConfigError(f'{where} has "backend": {backend!r}; it must be mooncake, file, memory, or "" for no pool')
    values: dict[str, object] = {}
    places: dict[str, str] = {}
    whole = f" in {where}"
    if backend and config_path:
        file = folder / config_path
        content = _load_json_object(file, f" (named by {where})")
        whole = f" in {file}"
        parsed = _translate_names(content, whole, binary_sizes=True)
        values, places = dict(parsed.values), dict(parsed.places)
    elif backend == "mooncake":
        raise ConfigError(
            f'{where} has no "configPath"; with "backend": "mooncake" it must name a file with the master\'s address'
        )
    if "asyncWrite" in pool:
        values["async_write"], places["async_write"] = pool["asyncWrite"], f"asyncWrite of {where}"
    return ParsedConfig(backend, values, places, whole)


def _load_json_object(path: Path, named_by: str) -> dict[str, Any]:
    name = f"configuration file {str(path)!r}{named_by}"
    try:
        values = json.loads(path.read_bytes(), object_pairs_hook=_refuse_duplicates)
    except FileNotFoundError:
        raise ConfigError(f"{name} does not exist") from None
    except OSError as exc:
        raise ConfigError(f"{name} cannot be read: {exc.strerror}") from exc
    except (json.JSONDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{name} is not JSON: {exc}") from exc
    except ValueError as exc:
        raise ConfigError(f"{name} cannot be used: {exc}") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deep") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{name} must contain one JSON object")
    return values


def _refuse_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object, or of a URL's query; raise ``ValueError`` if a name occurs twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return members


def _translate_names(values: Mapping[str, object], where: str, *, binary_sizes: bool) -> ParsedConfig:
    """Return the values of a dialect by the names in ``settings.py``. Keys only for another engine are omitted.

    Args:
        values: the values, by the dialect's names.
        where: names the file in messages.
        binary_sizes: whether "1GB" means 2**30 bytes in this dialect.
    """
    ours: dict[str, object] = {}
    places: dict[str, str] = {}
    for key, value in values.items():
        if key in FOREIGN_KEYS:
            logger.info('The key "%s"%s is only for %s and is ignored', key, where, FOREIGN_KEYS[key])
            continue
        name = NATIVE_NAMES.get(key, key)
        if name in ours:
            raise ConfigError(f'{places[name]} and "{key}"{where} are the same setting; remove one of them')
        ours[name] = _read_as_binary(value) if binary_sizes else value
        places[name] = f'"{key}"{where}'
    return ParsedConfig(_infer_backend(ours), ours, places, where)


def _infer_backend(values: Mapping[str, object]) -> str:
    """Return the backend to which settings with these names belong."""
    return "file" if "path" in values else "memory" if "size" in values else "mooncake"


def _read_as_binary(value: object) -> object:
    """Return ``"1GiB"`` for ``"1GB"`` and ``"1g"``, as Mooncake interprets sizes; return other values unchanged."""
    match = _LOOSE_SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    return f"{match[1]}iB" if match else value
