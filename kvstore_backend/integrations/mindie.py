"""Reads and checks the configuration of a MindIE server, by the rules of MindIE's own server.

MindIE's ``config.json`` configures the pool: ``BackendConfig.kvPoolConfig`` has the name of a backend and a file with
the backend's settings. Each model must run with the prefix cache plugin, which uses the pool::

    {"BackendConfig": {
        "npuDeviceIds": [[0, 1, 2, 3]],
        "kvPoolConfig": {"backend": "mooncake", "configPath": "/path/mooncake.json", "asyncWrite": false},
        "ModelDeployConfig": {"ModelConfig": [{"plugin_params": "{\\"plugin_type\\":\\"prefix_cache\\"}"}]}}}

MindIE's server reports a mistake only after it has loaded the weights; this module finds the mistake without MindIE.
The rules are from MindIE's documentation (KV cache pooling, prefix cache) and ``mempool/mooncake_mempool.py`` in its
source. MindIE itself needs Ascend cards and was not run for this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvstore_backend.backend import ConfigError
from kvstore_backend.config import PoolConfig, parse_mindie_pool, read_config

__all__ = ["MindieServer", "Mistake", "find_mistakes", "is_server_config", "read_server"]

_PLUGIN = "prefix_cache"
_BACKEND = "mooncake"
# Keys that the pool's file must have, because MindIE has no defaults for them.
_REQUIRED_KEYS = ("local_hostname", "master_server_address")
# Keys that the pool's file must have with exactly these values.
_REQUIRED_VALUES: dict[str, object] = {
    "metadata_server": "P2PHANDSHAKE",
    "protocol": "ascend",
    "use_ascend_direct": True,
}
# MindIE's rule for a size that is text.
_SIZE = re.compile(r"\s*[0-9]+(\.[0-9]+)?\s*([TGMK]?B)?\s*", re.IGNORECASE)


class Mistake(NamedTuple):
    """Mistake in the configuration of a MindIE server: a sentence, and whether the server cannot join its pool."""

    text: str
    is_fatal: bool = True


@dataclass(frozen=True)
class MindieServer:
    """Pool, cards and model of a MindIE server, from its configuration.

    Attributes:
        path: the server's ``config.json``.
        pool: configuration of the pool that the server joins, or None if pooling is off.
        cards: number of cards of the server's instances; 0 if the file has no card ids.
        model: folder with the weights of the first model, or None if the file does not name a folder.
        cards_per_model: number of cards among which the first model is divided (its ``worldSize``).
    """

    path: Path
    pool: PoolConfig | None
    cards: int
    model: Path | None = None
    cards_per_model: int = 1


def is_server_config(path: str | Path) -> bool:
    """Return whether ``path`` is the ``config.json`` of a MindIE server: JSON with a ``BackendConfig``."""
    try:
        values = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and "BackendConfig" in values


def read_server(path: str | Path) -> MindieServer:
    """Read and check the ``config.json`` of a MindIE server, and the file with the pool's settings that it names.

    Raises:
        ConfigError: with these files MindIE's server would not start, or would start without its pool; the message is
            one sentence.
    """
    path = Path(path)
    if fatal := next((mistake for mistake in find_mistakes(path) if mistake.is_fatal), None):
        raise ConfigError(fatal.text)
    backend = _load_backend(path)
    has_pool = parse_mindie_pool(backend.get("kvPoolConfig") or {}, "").get("backend")
    pool = read_config(path, environ={}) if has_pool else None
    model = next(_list_models(backend), {})
    weights, world_size = model.get("modelWeightPath"), model.get("worldSize")
    return MindieServer(
        path,
        pool,
        sum(map(len, backend.get("npuDeviceIds", []))),
        Path(weights) if isinstance(weights, str) and weights else None,
        world_size if isinstance(world_size, int) and world_size > 0 else 1,
    )


def find_mistakes(path: str | Path) -> Iterator[Mistake]:
    """Yield the mistakes in the ``config.json`` of a MindIE server, and in the file with the pool's settings."""
    path = Path(path)
    try:
        backend = _load_backend(path)
        where = f'"BackendConfig.kvPoolConfig" in {path}'
        pool = parse_mindie_pool(backend.get("kvPoolConfig") or {}, where)
    except ConfigError as exc:
        yield Mistake(str(exc))
        return
    yield from _check_cards(backend, path)
    if not pool.get("backend", ""):
        return
    yield from _check_models(backend, path)
    if pool["backend"] != _BACKEND:
        yield Mistake(
            f'{where} has "backend": {pool["backend"]!r}; it must be {_BACKEND}, the only backend of MindIE that this '
            'project can read and check, or "" for no pool'
        )
        return
    yield from _check_pool(pool, where, path)


def _load_backend(path: Path) -> dict[str, Any]:
    """Return ``BackendConfig`` of a server's ``config.json``; raise ``ConfigError`` if there is no such object."""
    if not is_server_config(path):
        raise ConfigError(f'{path} is not a configuration of a MindIE server, which is JSON with a "BackendConfig"')
    backend = json.loads(path.read_bytes())["BackendConfig"]
    if not isinstance(backend, dict):
        raise ConfigError(f'"BackendConfig" in {path} is {backend!r}; it must be an object')
    return backend


def _check_models(backend: dict[str, Any], path: Path) -> Iterator[Mistake]:
    """Check that every model has the prefix cache plugin, which reads and writes the pool; yield the mistakes."""
    models = list(_list_models(backend))
    if not models:
        yield Mistake(f'"BackendConfig.ModelDeployConfig.ModelConfig" in {path} names no model')
    for i, model in enumerate(models):
        where = f'"plugin_params" of ModelConfig[{i}] in {path}'
        text = model.get("plugin_params")
        try:
            params = json.loads(text) if isinstance(text, str) else None
        except ValueError as exc:
            yield Mistake(f"{where} is a string that is not valid JSON: {exc}")
            continue
        kinds = str(params.get("plugin_type", "")).split(",") if isinstance(params, dict) else []
        if _PLUGIN not in [kind.strip() for kind in kinds]:
            yield Mistake(
                f"{where} is {text!r}; a pool needs the prefix cache: "
                'write "{\\"plugin_type\\":\\"prefix_cache\\"}", after other plugins and a comma'
            )


def _list_models(backend: dict[str, Any]) -> Iterator[dict[str, Any]]:
    deployed = backend.get("ModelDeployConfig")
    listed = deployed.get("ModelConfig") if isinstance(deployed, dict) else None
    for model in listed if isinstance(listed, list) else [listed]:
        if isinstance(model, dict):
            yield model


def _check_pool(pool: dict[str, Any], where: str, path: Path) -> Iterator[Mistake]:
    """Check the file with the pool's settings by the rules of ``read_config`` and of MindIE; yield the mistakes."""
    config_path = pool.get("configPath", "")
    if config_path and not Path(config_path).is_absolute():
        whole = str((path.parent / config_path).absolute())
        yield Mistake(
            f'{where} has "configPath": {config_path!r}, a relative path: MindIE searches it in the folder '
            f"in which its server is started, and this command in the folder of the configuration; write {whole!r}",
            is_fatal=False,
        )
    try:
        values = json.loads((path.parent / config_path).read_bytes()) if config_path else None
    except (OSError, ValueError, RecursionError):
        values = None  # ``read_config`` below reports the error
    own = list(_check_values(values, path.parent / config_path)) if isinstance(values, dict) else []
    yield from own
    if not own:
        try:
            read_config(path, environ={})
        except ConfigError as exc:
            yield Mistake(str(exc))


def _check_values(values: dict[str, Any], file: Path) -> Iterator[Mistake]:
    for name in _REQUIRED_KEYS:
        if not str(values.get(name, "")).strip():
            yield Mistake(f'"{name}" is not in {file}, and MindIE has no default for it')
    for name, required in _REQUIRED_VALUES.items():
        remedy = f"write {json.dumps(name)}: {json.dumps(required)}"
        if name not in values:
            yield Mistake(f'"{name}" is not in {file}, and MindIE needs it: {remedy}')
        elif values[name] != required or type(values[name]) is not type(required):
            yield Mistake(f'"{name}" in {file} is {values[name]!r}; MindIE accepts only {required!r}: {remedy}')
    size, buffer = values.get("global_segment_size"), values.get("local_buffer_size")
    if isinstance(size, str) and not _SIZE.fullmatch(size):
        yield Mistake(f'"global_segment_size" in {file} is {size!r}; MindIE knows only B, KB, MB, GB and TB, as in 4GB')
    if isinstance(buffer, str):
        yield Mistake(f'"local_buffer_size" in {file} is {buffer!r}; MindIE accepts only a number of bytes: 1073741824')


def _check_cards(backend: dict[str, Any], path: Path) -> Iterator[Mistake]:
    """Yield a mistake if ``npuDeviceIds`` does not consist of one list of card ids for each instance."""
    listed = backend.get("npuDeviceIds", [])
    if not isinstance(listed, list) or not all(isinstance(ids, list) for ids in listed):
        yield Mistake(f'"npuDeviceIds" in {path} is {listed!r}; it must be a list of card ids for each instance')
