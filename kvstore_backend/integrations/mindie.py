"""MindIE's server configuration, read and checked as MindIE's own server does before it joins a pool.

MindIE joins by its ``config.json`` alone: ``BackendConfig.kvPoolConfig`` names a backend and the file that describes
it, and each model must run with the prefix cache plugin, on which pooling stands::

    {"BackendConfig": {
        "npuDeviceIds": [[0, 1, 2, 3]],
        "kvPoolConfig": {"backend": "mooncake", "configPath": "mooncake.json", "asyncWrite": false},
        "ModelDeployConfig": {"ModelConfig": [{"plugin_params": "{\\"plugin_type\\":\\"prefix_cache\\"}"}]}}}

Its server would tell of a mistake only after its weights are loaded, so this is for finding it before. The rules are
those of MindIE's documentation (KV cache pooling, prefix cache) and of ``mempool/mooncake_mempool.py`` in its source;
MindIE itself needs Ascend cards and has not been run here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore_backend.backend import ConfigError, StorageBackend
from kvstore_backend.config import MooncakeSettings, PoolConfig, load_config, read_config
from kvstore_backend.pool import open_backend

__all__ = ["MindieServer", "is_server_config", "read_server"]

_PLUGIN = "prefix_cache"
_PROTOCOL = "ascend"
# MindIE wants these in the pool's file, and has no defaults for them.
_REQUIRED_KEYS = ("local_hostname", "metadata_server", "master_server_address")


@dataclass(frozen=True)
class MindieServer:
    """A server's pool and cards, by its configuration.

    Attributes:
        path: the server's ``config.json``.
        pool: the pool it joins; None: pooling is off.
        cards: cards that this server's instances use, 0 where it does not say. All servers of a pool are linked.
    """

    path: Path
    pool: PoolConfig | None
    cards: int

    def open_pool(self, protocol: str = "") -> StorageBackend:
        """Open the pool, as the file says, or by another ``protocol``: where there are no Ascend cards, ``tcp``.

        Raises:
            ConfigError: pooling is off.
            PoolUnavailable: nobody answers there, or Mooncake was not built for the protocol.
        """
        if self.pool is None:
            raise ConfigError(f'"BackendConfig.kvPoolConfig" in {self.path} says that there is no pool')
        explicit = {"protocol": protocol or None}
        config = load_config(self.pool.backend, explicit=explicit, config_path=self.path, environ={})
        return open_backend(config, background=False)


def is_server_config(path: str | Path) -> bool:
    """Whether this file is a MindIE server's ``config.json``, not one that describes a pool alone."""
    try:
        values = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and "BackendConfig" in values


def read_server(path: str | Path) -> MindieServer:
    """Read and check a server's ``config.json`` and the file it names.

    Raises:
        ConfigError: MindIE's server would not start with it, or would start without its pool: one sentence.
    """
    path = Path(path)
    if not is_server_config(path):
        raise ConfigError(f'{path} is no configuration of a MindIE server: that is JSON with a "BackendConfig"')
    backend: dict[str, Any] = json.loads(path.read_bytes())["BackendConfig"]
    if not isinstance(backend, dict):
        raise ConfigError(f'"BackendConfig" in {path} is {backend!r}; it must be an object')
    # Its rules for kvPoolConfig and the pool's file are those of every dialect.
    pool = read_config(path, environ={}) if backend.get("kvPoolConfig") else None
    if pool is not None:
        _check_models(backend, path)
        if isinstance(pool.store, MooncakeSettings):
            _check_mooncake(pool.store, path.parent / backend["kvPoolConfig"]["configPath"])
    return MindieServer(path, pool, _count_cards(backend, path))


def _check_models(backend: dict[str, Any], path: Path) -> None:
    """Pooling is a second tier of the prefix cache, so every model must have that."""
    models = list(_list_models(backend))
    if not models:
        raise ConfigError(f'"BackendConfig.ModelDeployConfig.ModelConfig" in {path} names no model')
    for i, model in enumerate(models):
        where = f'"plugin_params" of ModelConfig[{i}] in {path}'
        text = model.get("plugin_params")
        try:
            params = json.loads(text) if isinstance(text, str) else None
        except ValueError as exc:
            raise ConfigError(f"{where} is not JSON in a string: {exc}") from exc
        kinds = str(params.get("plugin_type", "")).split(",") if isinstance(params, dict) else []
        if _PLUGIN not in [kind.strip() for kind in kinds]:
            raise ConfigError(
                f"{where} is {text!r}; a pool needs the prefix cache: "
                'say "{\\"plugin_type\\":\\"prefix_cache\\"}", beside other plugins with a comma'
            )


def _list_models(backend: dict[str, Any]) -> Iterator[dict[str, Any]]:
    deployed = backend.get("ModelDeployConfig")
    listed = deployed.get("ModelConfig") if isinstance(deployed, dict) else None
    for model in listed if isinstance(listed, list) else [listed]:
        if isinstance(model, dict):
            yield model


def _check_mooncake(settings: MooncakeSettings, file: Path) -> None:
    values = json.loads(file.read_bytes())
    for name in _REQUIRED_KEYS:
        if not str(values.get(name, "")).strip():
            raise ConfigError(f'"{name}" is not in {file}, and MindIE has no default for it')
    if settings.protocol != _PROTOCOL:
        raise ConfigError(f'"protocol" in {file} is {settings.protocol!r}; MindIE takes {_PROTOCOL!r} only')


def _count_cards(backend: dict[str, Any], path: Path) -> int:
    """Cards of all instances: ``npuDeviceIds`` has a list of ids for each."""
    listed = backend.get("npuDeviceIds", [])
    if not isinstance(listed, list) or not all(isinstance(ids, list) for ids in listed):
        raise ConfigError(f'"npuDeviceIds" in {path} is {listed!r}; it must be a list of card ids for each instance')
    return sum(map(len, listed))
