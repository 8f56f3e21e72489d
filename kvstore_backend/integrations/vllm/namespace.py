"""Builds the namespace of a worker's blocks, finds the shardings that it can read, and collects facts for operators."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vllm
from vllm import envs
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MambaSpec

from kvstore_backend.groups import Group
from kvstore_backend.integrations.vllm.memory import GroupedMemory, KVMemory
from kvstore_backend.integrations.vllm.settings import (
    collect_settings,
    find_configuration,
    fingerprint_checkpoint,
    is_quantized,
    list_foreign_weights,
)
from kvstore_backend.integrations.vllm.support import list_specs
from kvstore_backend.manifest import collect_facts
from kvstore_backend.namespace import Namespace, mark_changed_weights
from kvstore_backend.resharding import ShardingFamily, find_family
from kvstore_backend.resharding.family import HEAD

__all__ = ["build_namespace", "collect_instance_facts", "find_readable_family"]

logger = logging.getLogger("vllm.kvstore")  # a child of vLLM's logger, with the same handlers and level

# Settings of ``CacheConfig`` that can change the bytes of recurrent states, in addition to the specs of their groups.
_STATE_FIELDS = (
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "use_replayssm",
    "replayssm_buffer_len",
    "use_kda_recoverssm",
)


def _describe_layout(
    vllm_config: Any, kv_cache_config: Any, groups: Sequence[Group], memory: KVMemory | GroupedMemory
) -> str:
    """Return the part of ``Namespace.layout`` that describes KV memory, groups of layers and pipeline stage."""
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    if not isinstance(memory, GroupedMemory) and num_stages == 1:
        return memory.layout
    layers = [sorted(group.layer_names) for group in kv_cache_config.kv_cache_groups]
    stage = ""
    if num_stages > 1:
        # A block contains only the layers of this stage.
        stage = f" stage {get_pp_group().rank_in_group} of {num_stages} {_digest(layers)}"
    if not isinstance(memory, GroupedMemory):
        return f"{memory.layout}{stage}"
    specs = [list(map(repr, list_specs(group.kv_cache_spec))) for group in kv_cache_config.kv_cache_groups]
    layouts = [part.layout for part in memory.groups]
    states = [getattr(vllm_config.cache_config, name, None) for name in _STATE_FIELDS] if _has_states(groups) else []
    states += [repr(getattr(vllm_config, "mamba_config", None))] if _has_states(groups) else []
    return f"{len(groups)} groups {_digest([list(map(repr, groups)), layers, specs, layouts, states])}{stage}"


def _has_states(groups: Sequence[Group]) -> bool:
    return any(group.kind == "state" for group in groups)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, default=repr).encode()).hexdigest()[:32]


def build_namespace(
    vllm_config: Any,
    kv_cache_config: Any,
    groups: Sequence[Group],
    memory: KVMemory | GroupedMemory,
    kv_caches: dict[str, Any],
) -> Namespace:
    """Return the namespace of a vLLM worker's blocks: everything that can change the bytes of the blocks.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's groups of layers, and its number of blocks.
        groups: the groups of layers, as ``check_support`` returns them.
        memory: the worker's KV memory.
        kv_caches: vLLM's tensor for each layer, by the layer's name.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in list_specs(group.kv_cache_spec)]
    spec = next((spec for spec in specs if type(spec) is not MambaSpec), None)
    is_plain = not isinstance(memory, GroupedMemory)
    layers = vllm_config.compilation_config.static_forward_context
    backends = {
        f"{layers[name].get_attn_backend().get_name()} {getattr(layers[name], 'isa', '')}".strip() for name in kv_caches
    }
    digest = hashlib.sha256(fingerprint_checkpoint(model, vllm_config).encode())
    digest.update(json.dumps(_collect_settings(vllm_config), sort_keys=True).encode())
    version = str(vllm_config.kv_transfer_config.kv_connector_extra_config.get("weights_version", ""))
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    for name in {each.model: each for each in (model, draft) if each is not None}:
        # vLLM itself downloads the files of other models; weights_version stands for weights that are elsewhere.
        if Path(name).is_dir() and not list_foreign_weights(vllm_config):
            version = mark_changed_weights(version, name)
    return Namespace(
        model=digest.hexdigest()[:32],
        kv_dtype=f"{cache.cache_dtype} {getattr(spec, 'dtype', 'states')}".replace("torch.", ""),
        block_size=cache.block_size if is_plain else math.lcm(*(group.block_size for group in groups)),
        num_layers=memory.num_layers,
        num_kv_heads=getattr(spec, "num_kv_heads", 0),
        head_size=getattr(spec, "head_size", 0),
        # Each attention backend has its own order of a block's bytes, which may change with vLLM's version.
        layout=f"vllm {vllm.__version__} {'+'.join(sorted(backends))} "
        f"{_describe_layout(vllm_config, kv_cache_config, groups, memory)}",
        weights_version=version,
        tp_size=parallel.tensor_parallel_size,
        tp_rank=get_tensor_model_parallel_rank(),
    )


def find_readable_family(vllm_config: Any, namespace: Namespace, memory: KVMemory) -> ShardingFamily | None:
    """Return the shardings of which a worker can read blocks; None if it can read only its own sharding."""
    model = vllm_config.model_config
    heads = dict(memory.axes).get(HEAD)
    is_staged = vllm_config.parallel_config.pipeline_parallel_size > 1
    if model.use_mla or vllm_config.speculative_config is not None or heads != namespace.num_kv_heads or is_staged:
        logger.info("Blocks are shared with instances of the same tensor-parallel size only")
        return None
    prefix = namespace.layout.removesuffix(memory.layout)
    return find_family(
        namespace,
        model.get_total_num_kv_heads(),
        memory.axes,
        layout_of=lambda count: f"{prefix}{memory.layout_of(count)}",
    )


def collect_instance_facts(vllm_config: Any) -> dict[str, str]:
    """Return facts for the manifest: about the checkpoint, and the settings that are part of ``Namespace.model``."""
    model = vllm_config.model_config
    place = None if list_foreign_weights(vllm_config) else vllm_config.load_config.download_dir
    folder = find_configuration(model, place)
    settings = {f"setting {name}": value for name, value in _collect_settings(vllm_config).items()}
    software = f"vLLM {vllm.__version__}"
    return collect_facts(folder, software, "vLLM", checkpoint=fingerprint_checkpoint(model, vllm_config), **settings)


def _collect_settings(vllm_config: Any) -> dict[str, object]:
    settings = collect_settings(vllm_config, envs.environment_variables)
    # GPUs differ in which formats of few bits they calculate with, and in the meaning of fp8 bytes (AMD's MI300).
    if is_quantized(vllm_config) and (capability := current_platform.get_device_capability()) is not None:
        settings["device capability"] = capability.as_version_str()
    # Images are processed, and models that vLLM itself does not have are computed, by transformers.
    model = vllm_config.model_config
    if model.multimodal_config is not None or model.architecture.startswith("Transformers"):
        settings["transformers"] = importlib.metadata.version("transformers")
    return settings
