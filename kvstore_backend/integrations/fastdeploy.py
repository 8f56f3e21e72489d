"""FastDeploy joins the pool by ``FD_PLUGINS=kvstore`` beside ``--kvcache-storage-backend mooncake``, without a patch.

The seam. Every process that imports FastDeploy loads the entry points of ``fastdeploy.tool_parser_plugins``; ours,
``activate``, puts ``FastDeployClient`` in the place of ``mooncake.store.MooncakeDistributedStore``, which FastDeploy's
storage classes import only when they are built. It does not replace those classes: they are bound by name in modules
that may have been imported before the plugin is loaded, importing them from the plugin would be a circle, and they have
two shapes already (one class per rank; or a scheduler's and a worker's, in two processes), where the client below both
has one. All of FastDeploy's calls that reach data go through it: ``register_buffer``, ``batch_put_from``,
``batch_get_into``, ``batch_is_exist``, ``put``/``get``/``is_exist`` (its warm-up), ``remove``, ``remove_all``.

FastDeploy's keys name a version of the weights, a prefix's hash, a rank and a part (K, V, their scales), but no model,
dtype, tensor-parallel size or layout. The namespace adds these from the command line of the process: the transfer
process's where there is one (``--model_path --cache_dtype --mp_num --num_layers --key_cache_shape ...``), else the part
that the engine's and the worker's command lines have in common: these two have to agree, as one looks blocks up and the
other reads them. The rank is not part of it, as the scheduler asks for the blocks of rank 0.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstore_backend.backend import ConfigError, PoolUnavailable
from kvstore_backend.config import fastdeploy_plugins, find_checkpoint, named_model
from kvstore_backend.integrations.mooncake_client import PooledClient
from kvstore_backend.manifest import collect_facts
from kvstore_backend.namespace import Namespace, fingerprint_model
from kvstore_backend.stores.mooncake import replace_client

__all__ = ["FastDeployClient", "activate", "process_namespace"]

logger = logging.getLogger(__name__)

_PLUGIN = "kvstore"
# As FastDeploy's EngineArgs have them; the transfer process is told everything.
_DEFAULTS = {"tensor_parallel_size": "1", "block_size": "64", "dtype": "bfloat16", "quantization": ""}
# Settings that add layers to the model's own in a block.
_SPECULATIVE = ("method", "model", "num_extra_cache_layer", "num_speculative_tokens")


def activate() -> None:
    """Put our client in the place of Mooncake's, if ``FD_PLUGINS`` names ``kvstore``; FastDeploy calls this.

    FastDeploy loads all plugins where ``FD_PLUGINS`` is not set, and this one changes where a cache lives: so it wants
    to be named. Where Mooncake's library cannot be loaded it says so and leaves everything as it is.
    """
    if _PLUGIN not in fastdeploy_plugins():
        return
    try:
        replace_client(FastDeployClient)
    except PoolUnavailable as exc:
        logger.error("FD_PLUGINS names %s, but: %s", _PLUGIN, exc)


class FastDeployClient(PooledClient):
    """``MooncakeDistributedStore`` as FastDeploy's storage classes use it, in the namespace of this process."""

    def namespace(self) -> Namespace:
        return process_namespace(sys.argv)

    def facts(self) -> dict[str, str]:
        return collect_facts(_find_model(_parse_options(sys.argv)), "FastDeploy", "FastDeploy")


def process_namespace(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Namespace:
    """The namespace of the blocks that a process of FastDeploy with this command line holds.

    Args:
        argv: of the transfer process, a worker, or the engine.
        environ: where ``KVSTORE_MODEL`` names the model of processes that are not told it; not given, the process's.

    Raises:
        ConfigError: the model is not named, or is no folder of a checkpoint; or a shape is none.
    """
    options = _parse_options(argv)
    fingerprint = fingerprint_model(_find_model(options, environ))
    if "key_cache_shape" in options:
        return _transfer_process_namespace(options, fingerprint)
    options = {**_DEFAULTS, **options}
    return Namespace(
        model=fingerprint,
        kv_dtype=f"{options['dtype']} {_normalize_quantization(options['quantization'])}".strip(),
        block_size=_parse_number(options, "block_size"),
        # By the model; a worker's command line does not say them.
        num_layers=0,
        num_kv_heads=0,
        head_size=0,
        layout=f"fastdeploy v1 {_speculative_settings(options)}".strip(),
        tp_size=_parse_number(options, "tensor_parallel_size"),
    )


def _find_model(options: Mapping[str, str], environ: Mapping[str, str] | None = None) -> str:
    """The folder of the checkpoint that a process with these options serves.

    Raises:
        ConfigError: the model is not named, or is no folder here.
    """
    model = options.get("model_path") or options.get("model") or named_model(environ)
    if not model:
        raise ConfigError(
            "this version of FastDeploy does not tell its transfer process which model it serves, and without that "
            "models would read each other's blocks: set KVSTORE_MODEL to the model's folder"
        )
    try:
        model = find_checkpoint(model, environ)
    except ConfigError as exc:
        raise ConfigError(f"{exc}, or set KVSTORE_MODEL to it") from None
    if not Path(model).is_dir():
        raise ConfigError(f"the model {model!r} is no folder here: set KVSTORE_MODEL to where its checkpoint lies")
    return model


def _transfer_process_namespace(options: Mapping[str, str], fingerprint: str) -> Namespace:
    """``--key_cache_shape`` is ``blocks,heads,block_size,head_dim``, of one layer and rank."""
    shape = options["key_cache_shape"].split(",")
    if len(shape) != 4 or not all(size.strip().isdigit() for size in shape):
        raise ConfigError(f"--key_cache_shape is {options['key_cache_shape']!r}; four numbers are known here")
    _, heads, block_size, head_size = map(int, shape)
    value_shape = options.get("value_cache_shape", "").partition(",")[2]
    return Namespace(
        model=fingerprint,
        kv_dtype=f"{options.get('cache_dtype', 'bfloat16')} {options.get('default_dtype', '')}".strip(),
        block_size=block_size,
        num_layers=_parse_number(options, "num_layers"),
        num_kv_heads=heads,
        head_size=head_size,
        layout=f"fastdeploy layer,head,token,dim value={value_shape} {_speculative_settings(options)}".strip(),
        tp_size=_parse_number(options, "mp_num"),
    )


def _parse_options(argv: Sequence[str]) -> dict[str, str]:
    """The values of ``--name value`` and ``--name=value``, names with underscores; the last of a name counts."""
    options: dict[str, str] = {}
    for word, after in zip(argv, [*argv[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options[name.replace("-", "_")] = value if equals else "" if after.startswith("--") else after
    return options


def _parse_number(options: Mapping[str, str], name: str) -> int:
    try:
        return int(options.get(name, "1"))
    except ValueError:
        raise ConfigError(f"--{name} is {options[name]!r}; it must be a number") from None


def _normalize_quantization(text: str) -> str:
    """The engine is told a name or JSON, its worker always JSON: one text for both."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, dict) and set(value) == {"quantization"}:
        value = value["quantization"]
    return "" if not value else value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _speculative_settings(options: Mapping[str, str]) -> str:
    """The settings in ``--speculative_config`` that decide which layers a block holds."""
    try:
        settings = json.loads(options.get("speculative_config") or "{}")
    except ValueError:
        return options["speculative_config"]
    if not isinstance(settings, dict):
        return ""
    kept = {name: settings[name] for name in _SPECULATIVE if settings.get(name)}
    return json.dumps(kept, sort_keys=True) if kept else ""
