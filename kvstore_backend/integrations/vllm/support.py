"""Checks which models and settings of vLLM the connector supports, and reads the groups of a model's layers."""

from __future__ import annotations

import collections
import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

from vllm import envs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupRole,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvstore_backend.backend import ConfigError
from kvstore_backend.groups import Group
from kvstore_backend.integrations.vllm.memory import GroupedMemory, KVMemory
from kvstore_backend.integrations.vllm.settings import list_foreign_weights

__all__ = [
    "check_support",
    "describe_groups",
    "find_memory",
    "list_specs",
    "require_recompute",
    "splits_media",
    "warn_of_few_states",
]

logger = logging.getLogger("vllm.kvstore")  # a child of vLLM's logger, with the same handlers and level

_HASHES = ("sha256", "sha256_cbor")
# Kinds of attention in which the KV of a token does not depend on later tokens. Classes that derive from these are
# refused, because they may differ.
_FULL = (FullAttentionSpec, MLAAttentionSpec)
_SPECS = (*_FULL, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)


def check_support(vllm_config: Any, kv_cache_config: Any) -> list[Group]:
    """Return a model's KV cache groups; raise ``ConfigError`` for a model or setting that is not supported."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError(
            "context parallelism is on, which divides the tokens of a block among ranks; KVStoreConnector does not "
            "support it, so leave --kv-transfer-config out"
        )
    is_ray = parallel.distributed_executor_backend == "ray"
    if is_ray and parallel.pipeline_parallel_size > 1 and not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND:
        raise ConfigError(
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND is 0, and vLLM's older Ray executor drops the reports of all pipeline "
            "stages except the last, so a load would never end; unset it, or use --distributed-executor-backend mp"
        )
    if cache.prefix_caching_hash_algo not in _HASHES:
        raise ConfigError(
            f"--prefix-caching-hash-algo is {cache.prefix_caching_hash_algo}; in a shared pool a hash collision gives "
            f"one user's KV to another user, so it must be {' or '.join(_HASHES)}"
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError("--calculate-kv-scales gives each instance different scales, so blocks cannot be shared")
    elsewhere = list_foreign_weights(vllm_config)
    if elsewhere and not vllm_config.kv_transfer_config.kv_connector_extra_config.get("weights_version"):
        raise ConfigError(
            f"with {elsewhere[0]} vLLM reads weights that are not in the model's folder, so this connector cannot "
            'compare them with those of other instances; set "weights_version" in kv_connector_extra_config to another '
            "text for each version of the weights"
        )
    if vllm_config.model_config.enable_sleep_mode:
        _require_safe_sleep(vllm_config)
    media = vllm_config.model_config.multimodal_config
    has_media = media is not None and not media.language_model_only
    if has_media and not media.mm_processor_cache_gb and not cache.enable_prefix_caching:
        raise ConfigError(
            "--no-enable-prefix-caching and --mm-processor-cache-gb 0 are both set; vLLM then numbers images instead "
            "of hashing them, so two instances can give the same block hash to different images, and one would load "
            "the KV of a wrong image; remove one of these two flags, or remove --kv-transfer-config"
        )
    specs = [list_specs(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    if not specs or not all(each and all(type(spec) in _SPECS for spec in each) for each in specs):
        kinds = ", ".join(dict.fromkeys(type(spec).__name__ for each in specs for spec in each)) or "nothing"
        raise ConfigError(
            f"this model stores its KV as {kinds}; KVStoreConnector supports full attention, MLA, sliding windows, "
            "chunked local attention and Mamba states, so leave --kv-transfer-config out"
        )
    for spec in itertools.chain.from_iterable(specs):
        _require_causal(vllm_config, spec)
    groups = [_read_group(each) for each in specs]
    if len(groups) > 1 or groups[0].kind != "full":
        _require_plain_groups(vllm_config, kv_cache_config, list(itertools.chain.from_iterable(specs)))
    return groups


def _require_safe_sleep(vllm_config: Any) -> None:
    """Raise ``ConfigError`` if vLLM's sleep mode could discard memory that a transfer still uses."""
    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:  # then vLLM does not wait until the connector needs no further steps
        raise ConfigError(
            "--enable-sleep-mode is on, and VLLM_ENABLE_V1_MULTIPROCESSING is 0 (the executor external_launcher sets "
            "it, too); vLLM then sleeps while blocks are being saved, and wrong KV would reach the pool; use only one "
            "of the two, or leave --kv-transfer-config out"
        )
    if vllm_config.kv_transfer_config.kv_connector_extra_config.get("memory") == "direct":
        raise ConfigError(
            '--enable-sleep-mode is on, and "memory" in kv_connector_extra_config is "direct"; when vLLM sleeps, it '
            'discards the memory that Mooncake uses; set "memory" to "staged", or leave --enable-sleep-mode out'
        )


def list_specs(spec: Any) -> list[Any]:
    """Return the specs (vLLM's descriptions of KV) of a group's layers.

    In a worker, a group may have one spec for each layer. In the scheduler, vLLM uses the first spec for all layers.
    """
    return list(spec.kv_cache_specs.values()) if type(spec) is UniformTypeKVCacheSpecs else [spec]


def _read_group(specs: Sequence[Any]) -> Group:
    """Return the KV cache group of layers with ``specs``, vLLM's descriptions of the layers' KV."""
    first = specs[0]
    kinds = {(type(spec) in _FULL, type(spec), _read_span(spec), spec.block_size) for spec in specs}
    if len({(is_full or kind, span, size) for is_full, kind, span, size in kinds}) > 1:
        names = ", ".join(sorted({type(spec).__name__ for spec in specs}))
        raise ConfigError(
            f"one group of layers stores its KV as {names} with different windows or block sizes; KVStoreConnector "
            "needs the same type, window and block size in all layers of a group"
        )
    if type(first) in _FULL:
        return Group("full", first.block_size)
    if type(first) is MambaSpec:
        return Group("state", first.block_size)
    return Group("window" if type(first) is SlidingWindowSpec else "chunk", first.block_size, _read_span(first))


def _read_span(spec: Any) -> int:
    if type(spec) is SlidingWindowSpec:
        return int(spec.sliding_window)
    return int(spec.attention_chunk_size) if type(spec) is ChunkedLocalAttentionSpec else 0


def _require_plain_groups(vllm_config: Any, kv_cache_config: Any, specs: Sequence[Any]) -> None:
    """Check a model with several groups, or without full attention; raise ``ConfigError`` if it is not supported."""
    if getattr(vllm_config, "speculative_config", None) is not None:
        raise ConfigError(
            "speculative decoding is on, and this model's layers store their KV in several ways; KVStoreConnector does "
            "not support both together; add --disable-hybrid-kv-cache-manager, which treats windows as full attention "
            "(vLLM has no such setting for recurrent layers)"
        )
    if getattr(vllm_config.cache_config, "use_replayssm", False):
        raise ConfigError(
            "--use-replayssm is on; vLLM then stores a part of the recurrent states outside their blocks; leave it "
            "or --kv-transfer-config out"
        )
    # vLLM ends chunks of prompts at multiples of its smallest block size. The state of a longer block may then belong
    # to another token than the end of the block.
    if any(type(spec) is MambaSpec and spec.block_size > min(each.block_size for each in specs) for spec in specs):
        raise ConfigError(
            "blocks of this model's recurrent layers have more tokens than those of its other layers; vLLM's states "
            "may then belong to other tokens than their hashes; leave --kv-transfer-config out"
        )
    if any(getattr(spec, "mamba_cache_mode", "align") != "align" for spec in specs):
        raise ConfigError(
            "vLLM stores this model's recurrent states only for the last token; KVStoreConnector needs states at block "
            "boundaries, so add --enable-prefix-caching (mamba_cache_mode align)"
        )
    attention = [spec for spec in specs if type(spec) is not MambaSpec]
    odd = (
        len({(spec.dtype, spec.kv_quant_mode) for spec in attention}) > 1,
        any(spec.tokens_per_state != 1 for spec in attention),
        any(getattr(spec, "extra_retained_tokens", 0) for spec in specs),
        any(getattr(spec, "num_speculative_blocks", 0) for spec in specs),
    )
    if any(odd):
        raise ConfigError(
            "this model's groups of layers store their KV in several dtypes, or one KV entry for several tokens; "
            "KVStoreConnector needs one dtype, and one entry for each token"
        )
    for group in kv_cache_config.kv_cache_groups:
        is_usual = group.enable_kv_transfer and not group.host_resident and not group.is_eagle_group
        if not is_usual or group.role is not KVCacheGroupRole.DEFAULT or not group.kv_cache_spec.prefix_cacheable:
            raise ConfigError(
                "vLLM excludes one group of this model's layers from transfers, but KVStoreConnector needs all groups; "
                "leave --kv-transfer-config out"
            )


def _require_causal(vllm_config: Any, spec: Any) -> None:
    """Raise ``ConfigError`` for a model that computes the KV of a token from later tokens.

    In such a model, prompts with a common prefix have different KV for the prefix.
    """
    model, attention = vllm_config.model_config, vllm_config.attention_config
    flags = (
        getattr(spec, "non_causal", False),
        getattr(spec, "non_causal_multi_token_decode", False),
        attention.use_non_causal,
        model.is_diffusion,
        not model.is_prefix_caching_supported,
    )
    if any(flags):
        raise ConfigError(
            "the KV of a token depends on later tokens in this model, or vLLM supports no prefix caching for the "
            "model, so prompts with equal prefixes cannot share blocks; leave --kv-transfer-config out"
        )
    # Prefix caching may be off because the operator does not need it; the pool works then. But if vLLM itself switched
    # it off, a prompt cannot continue from cached KV. In this case chunked prefill is off too, or
    # VLLM_BATCH_INVARIANT is set.
    in_pieces = vllm_config.scheduler_config.enable_chunked_prefill
    if not vllm_config.cache_config.enable_prefix_caching and (envs.VLLM_BATCH_INVARIANT or not in_pieces):
        raise ConfigError(
            "prefix caching is off, and also chunked prefill is off or VLLM_BATCH_INVARIANT is set; vLLM then does not "
            "continue prompts from cached KV; use --enable-prefix-caching, or leave --kv-transfer-config out (for MLA "
            "on a CPU without AMX vLLM itself switches both off)"
        )


def require_recompute(transfer: Any) -> None:
    """Change vLLM's ``kv_load_failure_policy`` to "recompute" if it has another value, and log the change."""
    if transfer.kv_load_failure_policy != "recompute":
        logger.info(
            'kv_load_failure_policy is %r, which fails a request if a block was evicted; using "recompute" instead',
            transfer.kv_load_failure_policy,
        )
        transfer.kv_load_failure_policy = "recompute"


def splits_media(vllm_config: Any) -> bool:
    """Return whether the KV of an image depends on where vLLM cuts a prompt into chunks; if so, log a warning.

    This is so in models in which each token of an image reads the whole image, if a chunk may end inside an image.
    """
    scheduler = vllm_config.scheduler_config
    if not vllm_config.model_config.is_mm_prefix_lm or not scheduler.enable_chunked_prefill:
        return False
    if not scheduler.disable_chunked_mm_input:
        logger.warning(
            "Prompts with images do not use the pool, because the KV of an image depends on where chunks of a prompt "
            "end in this model; add --disable-chunked-mm-input"
        )
    return not scheduler.disable_chunked_mm_input


def warn_of_few_states(kv_cache_config: Any, groups: Sequence[Group]) -> None:
    """Log a warning if vLLM keeps recurrent states only at the ends of prompts, as it does by default."""
    if kv_cache_config.prefix_cache_retention_interval == 0 and any(group.kind == "state" for group in groups):
        logger.warning(
            "vLLM keeps few of this model's recurrent states, so a prompt that shares only its beginning with another "
            "may find none in the pool; with --prefix-cache-retention-interval %d vLLM also keeps the state at the end "
            "of each chunk of a prompt; a multiple of this number keeps fewer states",
            math.lcm(*(group.block_size for group in groups)),
        )


def find_memory(kv_cache_config: Any, is_plain: bool, kv_caches: dict[str, Any]) -> KVMemory | GroupedMemory:
    """Return the description of a worker's KV memory. ``is_plain``: there is one group of layers, with full attention.

    Raises:
        ConfigError: the groups of layers do not match the memory.
    """
    groups, num_blocks = kv_cache_config.kv_cache_groups, kv_cache_config.num_blocks
    if is_plain:
        if type(groups[0].kv_cache_spec) is UniformTypeKVCacheSpecs:
            return KVMemory(kv_caches, num_blocks, is_mixed=True)
        return KVMemory(kv_caches, num_blocks)
    owned = {name for group in groups for name in group.layer_names}
    # A layer that uses the KV of another layer has the same tensor, and is in no group.
    places = {tensor.data_ptr() for name, tensor in kv_caches.items() if name in owned}
    unknown = [name for name, tensor in kv_caches.items() if name not in owned and tensor.data_ptr() not in places]
    lacking = sorted(owned - kv_caches.keys())
    if unknown or lacking or not all(group.layer_names for group in groups):
        raise ConfigError(
            f"vLLM's groups of layers do not match this worker's KV memory ({(unknown + lacking)[:3]}, or a group has "
            "no layer in this pipeline stage); KVStoreConnector needs each group in each worker"
        )
    return GroupedMemory(
        [
            KVMemory({name: kv_caches[name] for name in group.layer_names if name in owned}, num_blocks, is_mixed=True)
            for group in groups
        ]
    )


def describe_groups(groups: Sequence[Group]) -> str:
    """Return the groups as text, such as ``5 x sliding window 256 (blocks of 16 tokens), 1 x full attention (...)``."""
    counted = collections.Counter(f"{group.name} (blocks of {group.block_size} tokens)" for group in groups)
    return ", ".join(f"{count} x {name}" for name, count in counted.items())
