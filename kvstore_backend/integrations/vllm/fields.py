"""Table of all settings of vLLM 0.32: which are part of the namespace, and why others are not. Imports nothing of vLLM.

``FIELDS`` has one entry for each class in the tree of ``VllmConfig``. A field is *counted* (part of the namespace),
*nested* (a class with its own entry), or *left out* for a reason: it cannot change the bytes of a block. A field is
counted in case of doubt, because an unnecessary miss only costs time, but a false hit gives wrong answers. A field of a
later version of vLLM that is not in the table, and each field of an unknown class, is counted if it is not at its
default.

A field that only changes the order of additions, and so the rounding, is left out, because batches change this order
from step to step too.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["FIELDS", "IGNORED_VARIABLES", "Kind", "classify", "collect_fields", "describe_config"]

# Reasons for which fields are left out.
_ROUNDING = "it only changes the order of additions, as batches do"
_STEPS = "it only decides which tokens are computed in which step"
_OUTPUT = "it only changes the use of hidden states and logits; the sampled tokens are in the block hashes"
_MEMORY = "it only decides where data is stored and how much of it, not its values"
_WIRES = "it only decides how processes find and call each other"
_WATCHED = "it only decides what is logged and measured"
_TOKENS = "it only decides how prompts become tokens and inputs, which are in the block hashes"
_NAMESPACE = "another field of Namespace contains it"
_STATES = "it concerns only models with recurrent states, and is part of their Namespace.layout"
_REFUSED = "the connector refuses the models and settings for which it can change bytes"
_DERIVED = "vLLM derives it from other settings"
_CHECKPOINT = "fingerprint_model contains the content of the files"
_DRAFTS = "it only decides how drafts are accepted, not their KV"
_EVENTS = "it only decides how other processes receive events"


class Kind(NamedTuple):
    """Names of the fields of one class in vLLM's configuration, separated by spaces."""

    counted: str = ""
    """Fields that are part of the namespace."""
    nested: str = ""
    """Fields that have a class as value; the class has an entry of its own in ``FIELDS``."""
    left_out: Mapping[str, str] = {}
    """Reason -> fields that are not part of the namespace for this reason."""


FIELDS: Mapping[str, Kind] = {
    "VllmConfig": Kind(
        "additional_config",
        "model_config cache_config parallel_config scheduler_config device_config load_config attention_config "
        "diffusion_config kernel_config lora_config speculative_config kv_transfer_config ec_transfer_config",
        {
            _MEMORY: "offload_config engram_config",
            _ROUNDING: "compilation_config optimization_level performance_mode",
            _OUTPUT: "aux_output_config watermark_config structured_outputs_config reasoning_config",
            _WATCHED: "observability_config logging_config profiler_config",
            _STATES: "mamba_config",
            _DERIVED: "quant_config",
            _EVENTS: "kv_events_config",
            "it only decides how many encoder outputs are cached": "ec_manager_config",
            "it only decides how weights arrive; weights_version is for weights that change": "weight_transfer_config",
            _WIRES: "instance_id shutdown_timeout",
        },
    ),
    "ModelConfig": Kind(
        "model_weights runner convert trust_remote_code dtype hf_config code_revision max_model_len quantization "
        "quantization_config disable_sliding_window hf_overrides model_class_overrides model_impl seed",
        "multimodal_config",
        {
            _CHECKPOINT: "model revision word_embeddings_untied_by_checkpoint",
            _TOKENS: "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init allowed_local_media_path "
            "allowed_media_domains enable_prompt_embeds io_processor_plugin renderer_num_workers",
            "hf_config is the result of it": "hf_text_config hf_config_path config_format",
            _DERIVED: "is_submodel_config spec_target_max_model_len allow_deprecated_quantization",
            _ROUNDING: "enforce_eager disable_cascade_attn",
            _OUTPUT: "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay "
            "logits_processors pooler_config",
            "only attention reads it, and generation_config attn_* is counted": "generation_config "
            "override_generation_config",
            _WIRES: "served_model_name hf_token",
            _MEMORY: "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
            "enable_nccl_comm_suspend enable_cumem_allocator",
        },
    ),
    "MultiModalConfig": Kind(
        "language_model_only media_io_kwargs mm_processor_kwargs mm_device_do_normalize mm_hasher_algorithm "
        "mm_encoder_only mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin video_pruning_rate video_pruning_method "
        "allow_missing_mm_embeddings",
        "",
        {
            _TOKENS: "limit_per_prompt enable_mm_embeds interleave_mm_strings",
            _MEMORY: "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb skip_mm_profiling "
            "mm_tensor_ipc mm_ipc_gpu_memory_gb",
            _ROUNDING: "mm_encoder_tp_mode",
        },
    ),
    "CacheConfig": Kind(
        "block_size prefix_match_unit cache_dtype sliding_window prefix_caching_hash_algo kv_cache_dtype_skip_layers "
        "kv_sharing_fast_prefill swa_bounded_replay",
        "",
        {
            _NAMESPACE: "kv_cache_layout",
            _DERIVED: "user_specified_block_size is_attention_free effective_attention_block_size kv_cache_size_tokens "
            "kv_cache_max_concurrency hash_block_size cache_hit_alignment_tokens _block_size_resolved",
            _MEMORY: "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks "
            "kv_cache_memory_bytes kv_offloading_size kv_offloading_backend mamba_page_size_padded "
            "skip_page_size_padded",
            "it only decides what the own cache retains": "enable_prefix_caching prefix_cache_retention_interval",
            _STATES: "mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode "
            "enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm use_kda_recoverssm",
        },
    ),
    "ParallelConfig": Kind(
        "all2all_backend worker_cls worker_extension_cls",
        "",
        {
            _NAMESPACE: "tensor_parallel_size pipeline_parallel_size",
            _REFUSED: "prefill_context_parallel_size decode_context_parallel_size "
            "dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate cp_kv_cache_interleave_size "
            "_allow_auto_resolve_cp_interleave_size",
            _DERIVED: "is_moe_model world_size rank",
            _ROUNDING: "enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling enable_eplb eplb_config "
            "expert_placement_strategy disable_custom_all_reduce enable_dbo ubatch_size dbo_decode_token_threshold "
            "dbo_prefill_token_threshold",
            _MEMORY: "enable_ep_weight_filter max_parallel_loading_workers enable_shm_tensor_arena numa_bind "
            "numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids placement_group ray_workers_use_nsight "
            "ray_runtime_env",
            _WIRES: "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local "
            "data_parallel_master_ip data_parallel_rpc_port dp_sync_interval data_parallel_master_port "
            "data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb enable_elastic_ep "
            "elastic_ep_max_dp_size disable_nccl_for_dp_synchronization distributed_executor_backend master_addr "
            "master_port node_rank nnodes distributed_timeout_seconds cpu_distributed_timeout_seconds "
            "_data_parallel_master_port_list _coord_store_port data_parallel_index _api_process_count "
            "_api_process_rank enable_fault_tolerance fault_tolerance_config",
        },
    ),
    # If a chunk of a prompt ends inside an image, a model with attention over the whole image reads only a part of it.
    "SchedulerConfig": Kind(
        "disable_chunked_mm_input",
        "",
        {
            _STEPS: "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs "
            "long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_queued_reqs "
            "max_num_queued_tokens enable_chunked_prefill max_num_encoder_input_tokens encoder_cache_size policy "
            "scheduler_cls disable_hybrid_kv_cache_manager scheduler_reserve_full_isl watermark "
            "prefill_schedule_interval async_scheduling stream_interval",
            _DERIVED: "runner_type is_multimodal_model",
        },
    ),
    "DeviceConfig": Kind("device_type", "", {_DERIVED: "device"}),
    "LoadConfig": Kind(
        "load_format model_loader_extra_config ignore_patterns",
        "",
        {
            _CHECKPOINT: "download_dir",
            _MEMORY: "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size "
            "device use_tqdm_on_load pt_load_map_location",
        },
    ),
    "AttentionConfig": Kind(
        "backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version use_trtllm_attention "
        "disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization indexer_kv_dtype "
        "indexer_sparse_logits hisparse_config use_non_causal sparse_mla_force_mqa",
        "",
        {
            _ROUNDING: "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
            "tq_max_kv_splits_for_cuda_graph flex_attn_block_m flex_attn_block_n flex_attn_q_block_size "
            "flex_attn_kv_block_size",
            _MEMORY: "sparse_mla_prefill_workspace_factor",
        },
    ),
    "DiffusionConfig": Kind("canvas_length max_denoising_steps"),
    "KernelConfig": Kind(
        "moe_backend sparse_indexer_topk_backend linear_backend linear_backend_per_quant",
        "",
        {
            _ROUNDING: "ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune",
            _MEMORY: "enable_cutedsl_warmup enable_jit_warmup",
        },
    ),
    "LoRAConfig": Kind(
        "lora_dtype target_modules enable_tower_connector_lora enable_mixed_moe_lora_format enable_moe_shared_loras",
        "",
        {
            _MEMORY: "max_lora_rank max_loras max_cpu_loras max_lora_cls_labels",
            _ROUNDING: "fully_sharded_loras specialize_active_lora",
            "the names of blocks contain the adapter of a request": "default_mm_loras",
        },
    ),
    "SpeculativeConfig": Kind(
        "method model quantization moe_backend attention_backend kv_cache_dtype max_model_len revision code_revision "
        "index_share_for_mtp_iteration use_heterogeneous_vocab parallel_drafting num_speculative_tokens "
        "draft_model_config draft_load_config",
        "",
        {
            _ROUNDING: "enforce_eager draft_tensor_parallel_size tensor_parallel_size",
            _DERIVED: "target_model_config target_parallel_config draft_parallel_config",
            _DRAFTS: "disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction "
            "prompt_lookup_max prompt_lookup_min num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth "
            "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob "
            "rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length "
            "enable_adaptive_verification draft_sample_method dspark_draft_topk",
        },
    ),
    "KVTransferConfig": Kind(
        "enable_permute_local_kv",
        "",
        {
            _WIRES: "kv_connector engine_id kv_buffer_device kv_role kv_port kv_connector_module_path",
            _NAMESPACE: "kv_connector_extra_config",  # weights_version; its other members control transfers
            "it only decides what happens if blocks do not arrive": "kv_load_failure_policy",
        },
    ),
    # This instance computes KV from the output of another instance's encoder.
    "ECTransferConfig": Kind(
        "ec_connector ec_connector_module_path mm_encoder_output_widths",
        "",
        {_WIRES: "engine_id ec_buffer_device ec_buffer_size ec_role ec_ip ec_port ec_connector_extra_config"},
    ),
}
"""Name of each class of vLLM's configuration -> its fields."""

_IGNORED = """
CUDA_HOME CUDA_VISIBLE_DEVICES FORCE_COLOR LD_LIBRARY_PATH LOCAL_RANK MAX_JOBS MOONCAKE_PREFERRED_SEGMENT
MOONCAKE_REQUESTER_LOCAL_HOSTNAME NO_COLOR NVCC_THREADS S3_ACCESS_KEY_ID S3_ENDPOINT_URL S3_SECRET_ACCESS_KEY
VERBOSE VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_ALLOW_RUNTIME_LORA_UPDATING
VLLM_API_KEY VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL
VLLM_CACHE_ROOT VLLM_CONFIGURE_LOGGING VLLM_CONFIG_ROOT VLLM_CPU_KVCACHE_SPACE VLLM_CPU_NUM_OF_RESERVED_CPU
VLLM_CPU_OMP_THREADS_BIND VLLM_CUDART_SO_PATH VLLM_DEBUG_DUMP_PATH VLLM_DEBUG_LOG_API_SERVER_RESPONSE
VLLM_DISABLE_COMPILE_CACHE VLLM_DOCKER_BUILD_CONTEXT VLLM_DO_NOT_TRACK VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT
VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT
VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_HOST_IP
VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_IMAGE_FETCH_TIMEOUT VLLM_IMAGE_TAG VLLM_KEEP_ALIVE_ON_ENGINE_DEATH
VLLM_KV_CACHE_LAYOUT VLLM_LOGGING_COLOR VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX
VLLM_LOGGING_STREAM VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_STATS_INTERVAL VLLM_LOOPBACK_IP
VLLM_LORA_RESOLVER_CACHE_DIR VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_NCCL_SO_PATH VLLM_NIXL_SIDE_CHANNEL_HOST
VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_NO_USAGE_STATS VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_P2P_SIDE_CHANNEL_HOST
VLLM_P2P_SIDE_CHANNEL_PORT VLLM_PORT VLLM_PROCESS_NAME_PREFIX VLLM_RAY_BUNDLE_INDICES VLLM_RAY_PER_WORKER_GPUS
VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_RPC_BASE_PATH VLLM_SERVER_DEV_MODE VLLM_SKIP_P2P_CHECK VLLM_TARGET_DEVICE
VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER VLLM_USE_PRECOMPILED VLLM_WORKER_MULTIPROC_METHOD
VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
"""
IGNORED_VARIABLES = frozenset(_IGNORED.split())
"""Environment variables that vLLM reads and that cannot change bytes. Every other variable is counted if it is set."""

# Prefixes for the names of settings, of classes for which the prefix is not the class's name.
_SHORT = {"ModelConfig": ""}
# Members of config.json with its origin and the version of transformers, which change no bytes.
_NOISE = frozenset({"_name_or_path", "name_or_path", "transformers_version"})


def classify(kind: str, name: str) -> str:
    """Return what ``FIELDS`` says about a field.

    Args:
        kind: name of the class that has the field.
        name: name of the field.

    Returns:
        ``"counted"`` if the field is a part of the namespace, ``"nested"`` if its value is an object whose fields
        ``FIELDS`` describes, the reason why it is no part of the namespace, or ``""`` if ``FIELDS`` does not have it.
    """
    fields = FIELDS.get(kind, Kind())
    for verdict, names in (("counted", fields.counted), ("nested", fields.nested), *fields.left_out.items()):
        if name in names.split():
            return verdict
    return ""


def collect_fields(config: Any, special: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return all counted fields of a configuration that are not at their defaults, by name.

    Args:
        config: vLLM's ``VllmConfig``, a tree of dataclasses.
        special: values for some fields, by ``<class>.<field>``, which replace the fields' own values, or None for a
            field that is not counted.

    Returns:
        Values that JSON can represent, by ``<class>.<field>``.
    """
    return dict(_walk(config, special or {}))


def _walk(config: Any, special: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    kind = type(config).__name__
    prefix = _SHORT.get(kind, f"{kind}.")
    for field in dataclasses.fields(config):
        verdict, value = classify(kind, field.name), getattr(config, field.name, None)
        if verdict == "nested":
            if dataclasses.is_dataclass(value):
                yield from _walk(value, special)
        elif verdict in ("counted", ""):
            path, described = f"{kind}.{field.name}", _describe(value)
            if path in special:
                if special[path] is not None:
                    yield f"{prefix}{field.name}", special[path]
            elif described != _describe(_find_default(field)):
                yield f"{prefix}{field.name}", described


def _find_default(field: dataclasses.Field[Any]) -> object:
    """Return the default of a dataclass field, or a value that no field can have if the field has no default."""
    if field.default_factory is not dataclasses.MISSING:
        try:
            return field.default_factory()
        except Exception as exc:
            return f"none: {exc!r}"
    # Pydantic's Field is in the place of the default, and contains it.
    default = field.default
    factory = getattr(default, "default_factory", None)
    return factory() if factory is not None else getattr(default, "default", default)


def _describe(value: Any) -> object:
    """Return a value that JSON can represent. Equal values have equal results, except objects of unknown classes."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _describe(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_describe(each) for each in value), key=repr)
    if isinstance(value, list | tuple):
        return [_describe(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _describe(getattr(value, field.name, None)) for field in dataclasses.fields(value)}
        return {"": type(value).__name__, **fields}
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else repr(value)


def describe_config(config: Any) -> object:
    """Return a digest of a model's configuration as transformers has it, without folder, origin and version."""
    read = getattr(config, "to_dict", None)
    if read is None:
        return _describe(config)
    text = json.dumps(_drop_noise(_describe(read())), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _drop_noise(value: object) -> object:
    if isinstance(value, dict):
        return {key: _drop_noise(each) for key, each in value.items() if key not in _NOISE}
    return [_drop_noise(each) for each in value] if isinstance(value, list) else value
