"""Plugin for FastDeploy: lets it use the pool, with ``FD_PLUGINS=kvstore`` and ``--kvcache-storage-backend mooncake``.

How FastDeploy loads the plugin: every process that imports FastDeploy loads the entry points of
``fastdeploy.tool_parser_plugins``. One of them, ``activate``, replaces ``mooncake.store.MooncakeDistributedStore`` by
``FastDeployClient``. FastDeploy's storage classes import the client by its name when an object of them is created, so
they use the new class. The plugin does not replace the storage classes, for three reasons: modules may have imported
them before the plugin is loaded; an import of them from the plugin would be circular; and there are two forms of them
(one class per rank, or one for the scheduler and one for the worker). Both forms use the same client. FastDeploy moves
all data through the client: ``register_buffer``, ``batch_put_from``, ``batch_get_into``, ``batch_is_exist``,
``put``/``get``/``is_exist`` (at its start), ``remove``, ``remove_all``.

FastDeploy's keys contain a version of the weights (not with its cache manager v1), the hash of a prefix, a rank and a
part (K, V, their scales). They do not contain model, dtype, tensor-parallel size and layout. The namespace adds these,
the version of FastDeploy and every setting that can change KV (``fastdeploy_settings.py``). The settings come from the
command line and environment of the engine (``fastdeploy_engine.py``), and the shapes from the command line of the
transfer process (``--cache_dtype --mp_num --num_layers --key_cache_shape ...``). With the cache manager v1 the engine
looks blocks up and its workers read them, so the shapes come from the engine too. The rank is not part of the
namespace, because FastDeploy looks up only the blocks of rank 0.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvstore_backend.backend import ConfigError, PoolUnavailable
from kvstore_backend.config import (
    PoolConfig,
    engine_variables,
    fastdeploy_plugins,
    find_checkpoint,
    read_model_folder,
)
from kvstore_backend.integrations.fastdeploy_engine import (
    Engine,
    Weights,
    find_capability,
    find_engine,
    find_version,
)
from kvstore_backend.integrations.fastdeploy_settings import (
    CANNOT_CHANGE_KV,
    IN_OTHER_FIELDS,
    KV_VARIABLES,
    NEUTRAL_VARIABLES,
    VARIABLE_PREFIXES,
)
from kvstore_backend.integrations.mooncake_client import PooledClient
from kvstore_backend.integrations.settings import (
    digest_settings,
    is_quantized,
    list_facts,
    read_json,
    read_settings,
)
from kvstore_backend.manifest import collect_facts
from kvstore_backend.namespace import Namespace, fingerprint_model, mark_changed_weights
from kvstore_backend.pool import BlockPool
from kvstore_backend.stores.mooncake_joining import replace_client

__all__ = ["FastDeployClient", "activate", "process_namespace"]

logger = logging.getLogger(__name__)

_PLUGIN = "kvstore"
# Defaults of FastDeploy's EngineArgs, for processes without FastDeploy's own parser.
_DEFAULTS = {"tensor_parallel_size": 1, "block_size": 64}
# The only method of speculation that adds layers to a block.
_DRAFTING = "mtp"
# Time for which a call may wait for a pool that fails. FastDeploy runs its tasks (each has a look-up and a copy) one
# after another. Prefill waits 60 s for a task that writes. Then it gives the request's blocks to other requests, and
# the task would copy their bytes (``wait_write_storage_task``). Decode waits without limit for a task that reads, and
# accepts no request meanwhile. Prefill waits 30 s for decode (``FD_PREFILL_WAIT_DECODE_RESOURCE_SECONDS``).
_HAND_OVER_SECONDS = 10.0
# A put that takes longer delays the tasks behind it. After 60 s they copy the blocks of other requests (see above).
_LONGEST_WRITE_SECONDS = 50.0
# Option that only a transfer process of FastDeploy has.
_SHAPE = "key_cache_shape"
# Settings of a model's encoders, in config.json.
_OTHER_INPUTS = {"vision_config", "visual", "audio_config"}
# First part of FastDeploy 2.6's keys, before the version of the weights.
_VERSIONED = "prefix"
# Part of the keys that FastDeploy's storage classes store when they are created, perhaps before the weights are loaded.
_WARM_UP = "warmup"


def activate() -> None:
    """Replace Mooncake's client by ``FastDeployClient`` if ``FD_PLUGINS`` names ``kvstore``. Called by FastDeploy.

    If ``FD_PLUGINS`` is not set, FastDeploy loads all plugins, but this plugin does nothing, because it would change
    the place where a cache is stored. If Mooncake's library cannot be loaded, the plugin logs an error.
    """
    if _PLUGIN not in fastdeploy_plugins():
        return
    try:
        replace_client(FastDeployClient)
    except PoolUnavailable as exc:
        logger.error("FD_PLUGINS names the plugin %s, but this plugin cannot be used: %s", _PLUGIN, exc)


class FastDeployClient(PooledClient):
    """Client of the pool that FastDeploy's storage classes use in place of ``MooncakeDistributedStore``."""

    def __init__(self) -> None:
        super().__init__()
        self._weights: Weights | None = None
        self._read_namespace: Callable[[], Namespace] | None = None  # None if the weights cannot change
        self._look_for_change: Callable[[], str] | None = None  # None after its call, and if the weights can change
        if _SHAPE in _parse_options(sys.argv):
            # The transfer process reads to memory that it uses for nothing else, and copies only blocks that were read.
            # While a late call writes to this memory, no read is successful. But a request has no limit for its read,
            # and if the network is away, a late call ends only when it is back.
            self._ends_reads_late = False
            self._longest_put = _LONGEST_WRITE_SECONDS
        self._mark = ""  # not empty if the weights' files changed while they were loaded

    def namespace(self) -> Namespace:
        engine = find_engine()
        may_change = bool(engine.arguments.get("dynamic_load_weight"))
        self._weights = Weights(_find_model(sys.argv, engine), may_change=may_change)
        weights = self._weights.read()
        namespace = process_namespace(sys.argv, engine)
        self._read_namespace = partial(process_namespace, [*sys.argv], engine) if may_change else None
        self._look_for_change = None if may_change else partial(_mark_changed_weights, engine)
        return namespace if weights is None else replace(namespace, weights_version=weights.text)

    def facts(self) -> dict[str, str]:
        engine = find_engine()
        model = _find_model(sys.argv, engine)
        checkpoint = fingerprint_model(model)
        known = collect_facts(model, f"FastDeploy {find_version()}", "FastDeploy", checkpoint=checkpoint)
        return {**known, **list_facts(_read_engine(engine, model), read_settings(engine.defaults))}

    def patience(self, config: PoolConfig) -> float:
        engine = find_engine()
        if not engine.hands_over_by_storage:
            return 0.0
        if config.async_write:
            raise ConfigError(
                "with FD_PD_TRANSFER_VIA_STORAGE=1 the decode instance reads blocks as soon as prefill reports them as "
                "written, but with async_write (KVSTORE_ASYNC_WRITE) they may not be stored yet; leave async_write out"
            )
        if engine.arguments.get("deploy_modality") != "text" and _takes_images(_find_model(sys.argv, engine)):
            raise ConfigError(
                "with FD_PD_TRANSFER_VIA_STORAGE=1 FastDeploy names the last, incomplete block of a prompt without its "
                "images, so a request could get the answer for another image; start the instances with "
                "--deploy-modality text, or without FD_PD_TRANSFER_VIA_STORAGE"
            )
        return _HAND_OVER_SECONDS

    def _find_pool(self, keys: Sequence[str] = ()) -> BlockPool | None:
        """Return the pool, moved to the namespace of the model's current weights; None if the weights are not known.

        The weights also count as not known if ``keys`` have another version of the weights than the model's folder. At
        the first call with keys of blocks, FastDeploy's worker has loaded the weights. So this method then checks
        whether the files have changed since the engine's process began.
        """
        pool = super()._find_pool(keys)
        weights = self._weights.read() if self._weights is not None else None
        if pool is None or weights is None:
            return None
        if any(key.startswith(_VERSIONED) and not key.startswith(f"{_VERSIONED}{weights.step}_") for key in keys[:1]):
            return None
        look = self._look_for_change
        if look is not None and keys and _WARM_UP not in keys[0]:
            self._mark, self._look_for_change = look(), None
        version = f"{weights.text} {self._mark}".strip()
        if pool.namespace.weights_version != version:
            model = pool.namespace.model
            if self._read_namespace is not None:
                try:
                    model = self._read_namespace().model
                except ConfigError as exc:
                    logger.warning("The model's new weights cannot be read yet, so the pool is not used: %s", exc)
                    return None
            logger.info("The model's weights have changed: %s", version)
            pool.move_to(replace(pool.namespace, model=model, weights_version=version))
        return pool


def _takes_images(folder: str) -> bool:
    """Return whether a checkpoint is of a model that takes images, video or audio."""
    config = read_json(Path(folder, "config.json").read_text())
    return isinstance(config, Mapping) and not config.keys().isdisjoint(_OTHER_INPUTS)


def _mark_changed_weights(engine: Engine) -> str:
    """Return "" if the weights have not changed since the engine's process began, otherwise a unique text.

    Only models in folders are checked. FastDeploy itself downloads the files of other models.
    """
    version, age = "", time.monotonic() - engine.began
    draft = _find_drafting(engine.arguments.get("speculative_config"))
    models = [engine.arguments.get("model"), draft.get("model") if isinstance(draft, Mapping) else None]
    for folder in sorted({str(model) for model in models if model and Path(str(model)).is_dir()}):
        version = mark_changed_weights(version, folder, age)
    return version


def process_namespace(argv: Sequence[str], engine: Engine) -> Namespace:
    """Return the namespace of the blocks of a FastDeploy process.

    Args:
        argv: command line of the process: a transfer process, a worker, or the engine.
        engine: arguments and environment with which the engine was started.

    Raises:
        ConfigError: the command line names no model, the model is not the folder of a checkpoint, or a shape is
            invalid.
    """
    options = _parse_options(argv)
    folder = _find_model(argv, engine)
    model = digest_settings(fingerprint_model(folder), _read_engine(engine, folder))
    if _SHAPE in options:
        return _transfer_process_namespace(options, model)
    arguments = {**_DEFAULTS, **engine.arguments}
    return Namespace(
        model=model,
        # The model and the engine's settings determine the dtype and the shapes; a worker's command line lacks them.
        kv_dtype="",
        block_size=_parse_number(arguments, "block_size"),
        num_layers=0,
        num_kv_heads=0,
        head_size=0,
        layout=f"fastdeploy {find_version()} v1",
        tp_size=_parse_number(arguments, "tensor_parallel_size"),
    )


def _read_engine(engine: Engine, model: str) -> dict[str, str]:
    """Return the engine's arguments and variables that can change KV, with their values as text.

    With quantized weights or KV, the compute capability of the GPU is added, because it decides in which formats
    FastDeploy calculates: from 10.0 on, it rounds the scales of block-wise fp8 to powers of two.
    """
    arguments = {name: value for name, value in engine.arguments.items() if name not in CANNOT_CHANGE_KV}
    for name, find_effect in _EFFECTS.items():
        arguments[name] = find_effect(arguments.get(name))
    given = {name: value for name, value in arguments.items() if value is not None}
    known = engine_variables((*VARIABLE_PREFIXES, *KV_VARIABLES), engine.environ)
    variables = {name: text for name, text in known.items() if name not in NEUTRAL_VARIABLES}
    if is_quantized(model, arguments.get("quantization")) and (capability := find_capability()):
        variables["device capability"] = capability
    return read_settings({**given, **variables}, IN_OTHER_FIELDS)


def _find_drafting(value: object) -> object:
    """Return the settings of speculative decoding if its method adds KV of further layers to blocks; otherwise None.

    FastDeploy ignores the case of the method. The path of the draft model becomes absolute, so that it is not taken for
    a name, and its content counts.
    """
    settings = read_json(value)
    if not isinstance(settings, Mapping):
        return value
    method, model = str(settings.get("method")).lower(), settings.get("model")
    absolute = {"model": str(Path(model).absolute())} if isinstance(model, str) and Path(model).is_dir() else {}
    return {**settings, "method": method, **absolute} if method == _DRAFTING else None


def _find_compilation(value: object) -> object:
    """Return the settings of ``graph_optimization_config`` that can change the bytes of KV; None if there are none.

    Settings of CUDA graphs cannot change them: the same kernels run with and without a graph.
    """
    settings = read_json(value)
    if not isinstance(settings, Mapping):
        return value
    return {name: each for name, each in settings.items() if "cuda" not in name} or None


# Arguments of which only a part can change KV -> a function that returns this part, or None if there is none.
_EFFECTS = {"speculative_config": _find_drafting, "graph_optimization_config": _find_compilation}


def _find_model(argv: Sequence[str], engine: Engine) -> str:
    """Return the folder of the checkpoint that the FastDeploy process with the command line ``argv`` serves.

    Raises:
        ConfigError: the command lines name no model, or the model is not a folder on this machine.
    """
    argument = _parse_options(argv).get("model_path") or str(engine.arguments.get("model") or "")
    named = read_model_folder(engine.environ)
    if not argument and not named:
        raise ConfigError(
            "FastDeploy's command line has no --model, so different models could read each other's blocks; set "
            "KVSTORE_MODEL to the model's folder"
        )
    try:
        model = find_checkpoint(argument or named, engine.environ, str(engine.arguments.get("revision") or ""))
    except ConfigError as exc:
        if not named:
            raise ConfigError(f"{exc}, or set KVSTORE_MODEL to that folder") from None
        model = named
    if not Path(model).is_dir():
        raise ConfigError(
            f"the model {model!r} is not a folder on this machine; set KVSTORE_MODEL to the folder of its checkpoint"
        )
    return model


def _transfer_process_namespace(options: Mapping[str, str], model: str) -> Namespace:
    """Return the namespace of the blocks that a transfer process of FastDeploy moves, from its command line.

    The option ``--key_cache_shape`` has the form ``blocks,heads,block_size,head_dim``, for one layer of one rank.
    """
    shape = options[_SHAPE].split(",")
    if len(shape) != 4 or not all(size.strip().isdigit() for size in shape):
        raise ConfigError(f"--key_cache_shape is {options[_SHAPE]!r}; it must be four numbers separated by commas")
    _, heads, block_size, head_size = map(int, shape)
    value_shape = options.get("value_cache_shape", "").partition(",")[2]
    return Namespace(
        model=model,
        kv_dtype=f"{options.get('cache_dtype', 'bfloat16')} {options.get('default_dtype', '')}".strip(),
        block_size=block_size,
        num_layers=_parse_number(options, "num_layers"),
        num_kv_heads=heads,
        head_size=head_size,
        layout=f"fastdeploy {find_version()} layer,head,token,dim value={value_shape}",
        tp_size=_parse_number(options, "mp_num"),
    )


def _parse_options(argv: Sequence[str]) -> dict[str, str]:
    """Parse options ``--name value`` and ``--name=value``; return the last value by name, with underscores in names."""
    options: dict[str, str] = {}
    for word, after in zip(argv, [*argv[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options[name.replace("-", "_")] = value if equals else "" if after.startswith("--") else after
    return options


def _parse_number(options: Mapping[str, Any], name: str) -> int:
    try:
        return int(options.get(name, 1))
    except ValueError:
        raise ConfigError(f"--{name} is {options[name]!r}; it must be a whole number") from None
