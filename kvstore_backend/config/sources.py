"""Reads the configuration of a pool from all sources.

Each value is taken from the first source that has it: the caller's arguments, a URL, a JSON file, the environment, a
default. There is one exception: the variable ``MOONCAKE_PROTOCOL`` overrides ``protocol`` in a file, because all
machines of a cluster can share one file, but not every machine has RDMA.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from kvcommon.hints import suggest_name
from kvstore_backend.backend import ConfigError
from kvstore_backend.config.dialects import NATIVE_NAMES, ParsedConfig, is_url, read_file, read_url
from kvstore_backend.config.environment import read_protocol
from kvstore_backend.config.settings import (
    DEFAULT_TENANT,
    STORE_SETTINGS,
    FileSettings,
    MemorySettings,
    MooncakeSettings,
    PoolConfig,
    StoreSettings,
)
from kvstore_backend.config.values import MissingDeviceError, hide_password

__all__ = [
    "describe_override",
    "describe_unknown",
    "describe_url",
    "load_config",
    "names_pool",
    "names_protocol",
    "read_config",
]

logger = logging.getLogger(__name__)

# A variable counts as mistyped if its name is at least this similar to a name that we read. Other variables of Mooncake
# are less similar, except _NOT_A_TYPO.
_NEAR = 0.85
# The same for names that begin with KVSTORE_, such as KVSTORE_SIZE. Kubernetes creates KVSTORE_... variables, which are
# less similar, for a service with that name.
_NEAR_OURS = 0.8
_NOT_A_TYPO = "MOONCAKE_TE_META_DATA_SERVER"

_OPTIONS = {option.name: option for option in fields(PoolConfig) if option.metadata}


class _Source(NamedTuple):
    """Source of settings: a file, a URL, the environment or the caller's arguments."""

    values: Mapping[str, object]
    """Value of each setting that the source has, by the name of the setting."""
    place: Callable[[str], str]
    """Function: name of a setting -> text for messages that says where the source has the setting's value."""
    is_file: bool = False


def load_config(
    backend: str,
    *,
    explicit: Mapping[str, object] | None = None,
    config_path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> PoolConfig:
    """Return the configuration of a pool with the given backend.

    Each value comes from ``explicit``, else from the URL, else from the file, else from the environment, else it is the
    default.

    Args:
        backend: ``mooncake``, ``file`` or ``memory``; or the URL of a pool.
        explicit: values by the names of the backend's settings; ``None`` counts as not given.
        config_path: a JSON file in any dialect, or None for the file in the variable ``MOONCAKE_CONFIG_PATH``. For
            ``file`` and ``memory`` that file is used only if it describes a store of this type.
        environ: the environment, or None for this process's own. An empty variable counts as not given.

    Raises:
        ConfigError: a value cannot be used; the message is one sentence with the key or variable, the value, and a
            valid value.
    """
    parsed_url = read_url(backend) if is_url(backend) else None
    kind = STORE_SETTINGS.get(parsed_url.backend if parsed_url else backend)
    if kind is None:
        raise ConfigError(f"storage backend {backend!r} is not known{suggest_name(backend, STORE_SETTINGS)}")
    environ = os.environ if environ is None else environ
    names = [*_field_names(kind), *_OPTIONS]
    file = _file_source(kind, names, config_path, environ, is_named=parsed_url is None)
    environment = _environment_source(kind, environ)
    overriding = _overriding_source(file, environment)
    sources = [
        _explicit_source(names, explicit or {}),
        *([_parsed_source(names, parsed_url)] if parsed_url else []),
        overriding,
        file,
        environment,
    ]
    if _first_source(sources, "protocol") is overriding and (sentence := _describe_override(file, environ)):
        _log_once(sentence)
    options = {
        name: _parse_value(option, source)
        for name, option in _OPTIONS.items()
        if (source := _first_source(sources, name)) is not None
    }
    if kind is MooncakeSettings and (folder := _find_folder(sources)) is not None:
        return PoolConfig(_fill_settings(FileSettings, [folder]), **options)
    return PoolConfig(_fill_settings(kind, sources), **options)


def _find_folder(sources: Sequence[_Source]) -> _Source | None:
    """Return the settings of a pool in a folder if the master's address is ``file:///...``; otherwise None.

    Some engines can configure a pool only by the address of a Mooncake master.
    """
    source = _first_source(sources, "master_server_addr")
    address = source.values["master_server_addr"] if source is not None else None
    if not isinstance(address, str) or not address.startswith("file:"):
        return None
    return _parsed_source(_field_names(FileSettings), read_url(address))


def read_config(source: str | Path | None = None, *, environ: Mapping[str, str] | None = None) -> PoolConfig | None:
    """Read the configuration of a pool; return ``None`` if the file turns the pool off.

    Args:
        source: the URL of a pool, or the path of a JSON file in any dialect, or None to read the environment.
        environ: the environment, or None for this process's own. An empty variable counts as not given.

    Raises:
        ConfigError: a value cannot be used, or neither ``source`` nor the environment configures a pool.
    """
    environ = os.environ if environ is None else environ
    if source is not None and is_url(str(source)):
        return load_config(str(source), environ=environ)
    path, named_by = (source, "") if source is not None else _file_of_environment(environ)
    if path is not None:
        backend = read_file(path, named_by).backend
        return load_config(backend, config_path=path, environ=environ) if backend else None
    if kind := _find_kind(environ):
        return load_config(kind.backend, environ=environ)
    raise ConfigError(
        "no pool is configured; give a configuration file or a URL such as mooncake://127.0.0.1:15001, "
        "or set MOONCAKE_CONFIG_PATH or MOONCAKE_MASTER_SERVER_ADDR"
    )


def names_pool(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the environment configures a pool, or names a configuration file, which may turn the pool off."""
    environ = os.environ if environ is None else environ
    return _file_of_environment(environ)[0] is not None or _find_kind(environ) is not None


def _find_kind(environ: Mapping[str, str]) -> type[StoreSettings] | None:
    """Return the settings class of the first store for which the environment has a variable; None if it has none."""
    for kind in STORE_SETTINGS.values():
        if any(environ.get(setting.metadata["variable"]) for setting in fields(kind)):
            return kind
    return None


def describe_url(config: PoolConfig) -> str:
    """Return the URL of a pool, which another process can give to ``read_config`` to open the same pool."""
    match config.store:
        case MooncakeSettings() as store:
            scheme = "" if store.ha_backend else "mooncake://"
            named = {"metadata_server": store.metadata_server, "protocol": store.protocol}
            if store.ha_backend:
                named["cluster_id"] = store.cluster_id
            if store.tenant_id != DEFAULT_TENANT:
                named["tenant_id"] = store.tenant_id
            return f"{scheme}{store.master_server_addr}?{urlencode(named)}"
        case FileSettings() as store:
            return f"file://{quote(str(store.path))}?size={store.size}"
        case MemorySettings() as store:
            return f"memory:?size={store.size}"


def describe_override(source: str | Path | None = None, *, environ: Mapping[str, str] | None = None) -> str:
    """Return a sentence for the operator if ``MOONCAKE_PROTOCOL`` overrides the protocol in a file; else "".

    The arguments, which name the file, are those of ``read_config``.
    """
    environ = os.environ if environ is None else environ
    if (parsed := _read_named_file(source, environ)) is None:
        return ""
    return _describe_override(_Source(parsed.values, parsed.places.__getitem__, is_file=True), environ)


def describe_unknown(source: str | Path | None = None, *, environ: Mapping[str, str] | None = None) -> str:
    """Return a sentence for the operator with the unknown keys of a file, which are ignored; "" if there are none.

    The arguments, which name the file, are those of ``read_config``.
    """
    parsed = _read_named_file(source, os.environ if environ is None else environ)
    return (
        "" if parsed is None else _describe_unknown([*_field_names(STORE_SETTINGS[parsed.backend]), *_OPTIONS], parsed)
    )


def _read_named_file(source: str | Path | None, environ: Mapping[str, str]) -> ParsedConfig | None:
    """Read the file that ``source`` or the environment names; return None if they name a URL or nothing."""
    path = source if source is not None else _file_of_environment(environ)[0]
    return None if path is None or is_url(str(path)) else read_file(path)


def names_protocol(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the environment sets the pool's protocol, by ``MOONCAKE_PROTOCOL`` or in the file of the pool."""
    environ = os.environ if environ is None else environ
    path, named_by = _file_of_environment(environ)
    return bool(read_protocol(environ)) or (path is not None and "protocol" in read_file(path, named_by).values)


def _overriding_source(file: _Source, environment: _Source) -> _Source:
    """Return the environment's protocol as a source, to override the file's; empty if file or environment has none."""
    both = {"protocol"} & file.values.keys() & environment.values.keys()
    return _Source({name: environment.values[name] for name in both}, environment.place)


def _describe_override(file: _Source, environ: Mapping[str, str]) -> str:
    """Return a sentence if a file and ``MOONCAKE_PROTOCOL`` have different protocols; otherwise ""."""
    written, named = file.values.get("protocol"), read_protocol(environ)
    if written is None or not named or str(written).strip().lower() == named:
        return ""
    return f"MOONCAKE_PROTOCOL={named} overrides {file.place('protocol')}, which is {written}"


@cache
def _log_once(sentence: str) -> None:
    logger.warning("%s", sentence)


def _fill_settings(kind: type[StoreSettings], sources: Sequence[_Source]) -> StoreSettings:
    """Create settings of class ``kind``, each value from the first source that has it."""
    values: dict[str, Any] = {}
    for setting in fields(kind):
        source = _first_source(sources, setting.name)
        if source is not None:
            values[setting.name] = _parse_value(setting, source)
        elif setting.default is MISSING and setting.default_factory is MISSING:
            raise ConfigError(
                f"{setting.name} is not given: set {setting.metadata['variable']}, "
                f'or "{setting.name}" in the file that MOONCAKE_CONFIG_PATH names'
            )
    return kind(**values)


def _first_source(sources: Sequence[_Source], name: str) -> _Source | None:
    return next((source for source in sources if name in source.values), None)


def _field_names(kind: type[StoreSettings]) -> list[str]:
    return [setting.name for setting in fields(kind)]


def _explicit_source(names: Sequence[str], explicit: Mapping[str, object]) -> _Source:
    given = {name: value for name, value in explicit.items() if value is not None}
    _check_names(names, given, "")
    return _Source(given, lambda name: name)


def _parsed_source(names: Sequence[str], parsed: ParsedConfig) -> _Source:
    _check_names(names, parsed.values, parsed.where)
    return _Source(parsed.values, parsed.places.__getitem__)


def _file_source(
    kind: type[StoreSettings],
    names: Sequence[str],
    config_path: str | Path | None,
    environ: Mapping[str, str],
    *,
    is_named: bool,
) -> _Source:
    """Return the values in the JSON file that the caller or the environment names.

    The result is empty without a file, or if the file that the environment names is for another backend.

    Args:
        is_named: whether the caller requested the backend by its name, not by a URL.
    """
    named_by = ""
    if config_path is None and (is_named or kind is MooncakeSettings):
        config_path, named_by = _file_of_environment(environ)
    if config_path is None:
        return _Source({}, str)
    parsed = read_file(config_path, named_by)
    if named_by and kind is not MooncakeSettings and parsed.backend != kind.backend:
        return _Source({}, str)  # the variable is mainly for Mooncake
    if not parsed.backend:
        raise ConfigError(
            f'the configuration turns the pool off ("backend": ""{parsed.where}), but {kind.backend} was requested'
        )
    if unknown := _describe_unknown(names, parsed):
        _log_once(unknown)
    known = {name: value for name, value in parsed.values.items() if name in names}
    return _Source(known, parsed.places.__getitem__, is_file=True)


def _file_of_environment(environ: Mapping[str, str]) -> tuple[str | None, str]:
    return environ.get("MOONCAKE_CONFIG_PATH") or None, " (named by MOONCAKE_CONFIG_PATH)"


def _environment_source(kind: type[StoreSettings], environ: Mapping[str, str]) -> _Source:
    """Return the values in the environment; raise ``ConfigError`` for a variable that is probably mistyped."""
    settings = [*fields(kind), *_OPTIONS.values()]
    variables: dict[str, str] = {setting.name: setting.metadata["variable"] for setting in settings}
    ours = [*variables.values(), "MOONCAKE_CONFIG_PATH"]
    for name in environ:
        strange = name.startswith(("MOONCAKE_", "KVSTORE_")) and name not in ours and name != _NOT_A_TYPO
        how_near = _NEAR_OURS if name.startswith("KVSTORE_") else _NEAR
        if strange and (near := difflib.get_close_matches(name, ours, 1, how_near)):
            raise ConfigError(f"environment variable {name} is not known; did you mean {near[0]}?")
    for setting in settings:
        if not environ.get(variables[setting.name]) and environ.get(setting.metadata["also"]):
            variables[setting.name] = setting.metadata["also"]
    given = {name: environ[variable] for name, variable in variables.items() if environ.get(variable)}
    return _Source(given, variables.__getitem__)


def _check_names(names: Sequence[str], values: Mapping[str, object], where: str) -> None:
    for name in values:
        if name not in names:
            near = _nearest_name(name, names)
            raise ConfigError(f'unknown key "{name}"{where}{suggest_name(name, [near] if near else names)}')


def _describe_unknown(names: Sequence[str], parsed: ParsedConfig) -> str:
    """Return a sentence with the unknown keys of a file, each with a similar known key; "" if there are none.

    Unknown keys are not an error, because FastDeploy and Mooncake also ignore them: a key may be a comment, or a
    setting of other software.
    """
    unknown = []
    for name in parsed.values:
        if name not in names:
            near = _nearest_name(name, names)
            unknown.append(f'"{name}" (did you mean {near}?)' if near else f'"{name}"')
    return f"unknown keys{parsed.where}, which are not used: {', '.join(unknown)}" if unknown else ""


def _nearest_name(name: str, names: Sequence[str]) -> str:
    """Return the most similar name of a setting, ours or Mooncake's; "" if no name is similar."""
    aliases = [alias for alias, meant in NATIVE_NAMES.items() if meant in names]
    return next(iter(difflib.get_close_matches(name, [*names, *aliases], 1)), "")


def _parse_value(setting: Field[Any], source: _Source) -> Any:
    value = source.values[setting.name]
    parse = setting.metadata["parse"] or _parse_store_url
    try:
        return parse(value)
    except ValueError as exc:
        is_overridable = isinstance(exc, MissingDeviceError) and source.is_file
        remedy = ", or set MOONCAKE_PROTOCOL=tcp, which overrides the file" if is_overridable else ""
        raise ConfigError(f"{source.place(setting.name)} is {hide_password(value)!r}; {exc}{remedy}") from None


def _parse_store_url(value: object) -> MemorySettings | FileSettings:
    """Return the settings of the store with this URL: a folder, or this process's memory."""
    try:
        parsed = read_url(value) if isinstance(value, str) else None
        if parsed is None or parsed.backend == "mooncake":
            raise ValueError("the value must be a URL such as memory:?size=1GiB or file:///dev/shm/kvpool?size=4GiB")
        kind = STORE_SETTINGS[parsed.backend]
        store = _fill_settings(kind, [_parsed_source(_field_names(kind), parsed)])
    except ConfigError as exc:
        raise ValueError(str(exc)) from exc
    assert isinstance(store, (MemorySettings, FileSettings))
    return store
