"""Lists the settings of FastDeploy that can change the bytes of a block, and those that cannot, with the reasons.

The lists have all arguments of FastDeploy 2.6's API server and ``EngineArgs``, arguments of newer versions, and the
variables in ``envs.py``. ``scripts/watch-fastdeploy`` reports missing names. An argument, or a variable ``FD_*`` or
``FLAGS_*``, that is in no list becomes part of the namespace: an unnecessary miss only costs time, but a false hit
gives a wrong answer.
"""

from __future__ import annotations

__all__ = [
    "CANNOT_CHANGE_KV",
    "CAN_CHANGE_KV",
    "IN_OTHER_FIELDS",
    "KV_VARIABLES",
    "NEUTRAL_VARIABLES",
    "VARIABLE_PREFIXES",
]

IN_OTHER_FIELDS = {
    "model": "model",
    "tensor_parallel_size": "tp_size",
    "block_size": "block_size",
}
"""Arguments of FastDeploy with a field of their own in ``Namespace`` -> the name of this field."""

_DECIDING = """
    model_config_name max_model_len task runner convert limit_mm_per_prompt mm_processor_kwargs enable_mm
    speculative_config dynamic_load_weight load_strategy rsync_config quantization graph_optimization_config
    plas_attention_config moe_gate_fp32 model_impl disable_custom_all_reduce enable_flashinfer_allreduce_fusion
    use_internode_ll_two_stage disable_sequence_parallel_moe enable_expert_parallel enable_eplb eplb_config
    routing_replay_config enable_chunked_moe chunked_moe_size load_choices enable_moe_scores_elementwise_fuse
    deploy_modality enable_mega_moe
"""

CAN_CHANGE_KV = frozenset(_DECIDING.split())
"""Arguments that can change the bytes of a block. They are part of the namespace."""

_REASONS = {
    "it affects only how requests arrive and responses leave; blocks are named by their tokens": """
        port host workers controller_port max_waiting_time max_concurrency enable_mm_output
        timeout_graceful_shutdown timeout api_key served_model_name tokenizer tokenizer_base_url
        reasoning_parser chat_template tool_call_parser tool_parser_plugin use_warmup config
        max_completion_tokens reasoning_max_tokens response_max_tokens min_completion_tokens input_max_tokens
        output_fallback output_fallback_plugin output_fallback_config
    """,
    "it only reports what happens": """
        metrics_port benchmark_metrics_config
    """,
    "it decides only on which devices, ports and processes the same computation runs": """
        engine_worker_queue_port cache_queue_port data_parallel_size local_data_parallel_id
        shutdown_comm_group_if_worker_idle ips splitwise_role cache_transfer_protocol pd_comm_port
        rdma_comm_ports router skip_port_check scheduler_name scheduler_max_size scheduler_ttl scheduler_host
        scheduler_port scheduler_db scheduler_password scheduler_topic scheduler_min_load_score
        scheduler_load_shards_num scheduler_sync_period scheduler_expire_period
        scheduler_release_load_expire_period scheduler_reader_parallel scheduler_writer_parallel
        scheduler_reader_batch_size scheduler_writer_batch_size
    """,
    "it takes effect after the last layer's KV was computed: on logits, sampling and what is returned": """
        override_pooler_config guided_decoding_backend guided_decoding_disable_any_whitespace enable_logprob
        enable_keep_sampling_mask max_logprobs logprobs_mode seed enable_early_stop early_stop_config
        lm_head_fp32 logits_processors enable_entropy
    """,
    "it decides only where weights and blocks are stored, how many fit and which of them stay": """
        max_encoder_cache max_processor_cache num_gpu_blocks_override gpu_memory_utilization kv_cache_ratio
        swap_space prealloc_dec_block_slot_num_threshold static_decode_blocks kvcache_storage_backend
        kvcache_storage_config write_policy write_through_threshold enable_prefix_caching
        enable_output_caching ep_prefill_use_worst_num_tokens
    """,
    "it decides only which tokens are computed together and when, which changes rounding as any other batch does": """
        max_num_seqs max_num_batched_tokens enable_chunked_prefill max_num_partial_prefills
        max_long_partial_prefills long_prefill_token_threshold disable_chunked_mm_input
        enable_overlap_schedule
    """,
    "it decides only how a checkpoint is fetched and read, and its content is in the namespace": """
        revision model_loader_extra_config
    """,
}

CANNOT_CHANGE_KV = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Arguments that cannot change the bytes of a block -> the reason. They are not part of the namespace."""

VARIABLE_PREFIXES = ("FD_", "FLAGS_")
"""Prefixes of environment variables that are part of the namespace unless they are listed as neutral."""

_DECIDING_VARIABLES = """
    FD_CPU_USE_BF16 FD_CACHE_PARAMS FD_ATTENTION_BACKEND USE_DECODE_UNIFIED_ATTENTION FD_MOE_BACKEND
    FD_USE_BLACKWELL_GEMM FD_USE_BLOCK_WISE_CUDA_GRAPH FD_BLOCK_WISE_CUDA_GRAPH_SIZES FD_SUSPEND_ROUTING_REPLAY
    FD_NVFP4_LOAD_BLOCKSCALE_LEAVE FD_MOE_MXFP4_BACKEND FD_USE_MACHETE FD_USE_DEEP_GEMM FD_USE_PFCC_DEEP_EP
    FD_USE_AGGREGATE_SEND FD_FOR_TORCH_MODEL_FORMAT FD_ENABLE_MODEL_CACHE FD_ENABLE_MODEL_LOAD_CACHE
    FD_NVFP4_GEMM_BACKEND FD_ENABLE_E2W_TENSOR_CONVERT FD_HPU_CHUNK_SIZE FD_HPU_MEASUREMENT_MODE
    FD_XPU_MOE_FFN_QUANT_TYPE_MAP FD_XPU_ENABLE_MIXED_EP_MODE FD_CUSTOM_AR_MAX_SIZE_MB FD_DETERMINISTIC_MODE
    FD_DETERMINISTIC_SPLIT_KV_SIZE FD_MOE_PROB_IN_ADVANCE FD_ENABLE_RL FD_USE_PHI_FP8_QUANT FD_USE_PHI_MOE_TOPK
    FD_USE_PHI_MOE_PERMUTE FD_USE_PHI_RMSNORM FD_SiluAndMul_USE_PHI_SWIGLU FD_FP8_QUANT_WITH_POW2SCALE
    FD_NVFP4_MOE_BACKEND FD_MOE_QUANT_MULTI_PROCESS_GROUP_SIZE ENABLE_V1_KVCACHE_MANAGER USE_FLASH_MLA USE_TBO
    FD_DISPATCH_USE_FP4 FD_SKIP_IN_DETERMINISTIC FD_XPU_PROFILE_PREFILL FD_XPU_PROFILE_DECODE FD_XPU_PROFILE_ITERS
    FD_XPU_PROFILE_BATCH_SIZE FD_XPU_PROFILE_PREFILL_LEN FD_XPU_PROFILE_PREFIX_LEN FD_XPU_PROFILE_EXPERT_BALANCE
    XFT_MOE_FC_WINT8_TGEMM PER_TOKEN_QUANT_FP8_USE_FINEGRAINED_RANGE XPU_MPART_SIZE NVIDIA_TF32_OVERRIDE
"""

KV_VARIABLES = frozenset(_DECIDING_VARIABLES.split())
"""Environment variables that can change the bytes of a block. Their values are part of the namespace."""

_VARIABLE_REASONS = {
    "it only reports what happens": """
        FD_LOG_DIR FD_LOG_LEVEL FD_DEBUG FD_LOG_REQUESTS FD_LOG_REQUESTS_LEVEL FD_LOG_MAX_LEN FD_TRACE
        FD_LOG_BACKUP_COUNT TRACES_ENABLE FD_SERVICE_NAME FD_HOST_NAME TRACES_EXPORTER EXPORTER_OTLP_ENDPOINT
        EXPORTER_OTLP_HEADERS FD_JOB_ID FD_CONSOLE_SCHEDULER_METRICS FD_CONSOLE_DECODE_LOG_INTERVAL
        FD_LLGUIDANCE_LOG_LEVEL DO_NOT_TRACK FD_USAGE_STATS_SERVER FD_USAGE_SOURCE
        FD_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS FD_OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE
        FD_DETERMINISTIC_LOG_MODE FD_GCU_ATTN_MONITOR FD_ENABLE_OBJGRAPH_DEBUG FD_BLOCK_WISE_DEBUG
        FD_DEFAULT_METRIC_LABEL_VALUES FD_XPU_PROFILER_TRACING
    """,
    "it decides only how a checkpoint is fetched and read, and its content is in the namespace": """
        FD_MODEL_SOURCE FD_MODEL_CACHE FD_USE_FASTSAFETENSOR FD_BUILDING_ARCS FD_TRITON_KERNEL_CACHE_DIR
        FD_CONFIG_ROOT FD_USE_GDR_CHECKPOINT_TRANSFER
    """,
    "it takes effect after the last layer's KV was computed: on logits, sampling and what is returned": """
        FD_MAX_STOP_SEQS_NUM FD_STOP_SEQS_MAX_LEN FD_STOP_TOKEN_IDS_MAX_LEN FD_SAMPLING_CLASS
        FD_FILL_BITMASK_BATCH FD_GUIDANCE_DISABLE_ADDITIONAL FD_ENABLE_TOP_P_ONE_OPT
        FD_LIMIT_THINKING_CONTENT_TRUNCATE_STR
    """,
    "it affects only how requests arrive and responses leave; blocks are named by their tokens": """
        FD_USE_HF_TOKENIZER FD_SUPPORT_MAX_CONNECTIONS FD_ENABLE_INTERNAL_ADAPTER FD_ENABLE_RETURN_TEXT
        FD_API_KEY FD_ENABLE_ASYNC_LLM FD_USE_GET_SAVE_OUTPUT_V1 FD_ENABLE_REQUEST_DISCONNECT_STOP_INFERENCE
        ENCODE_FEATURE_BOS_AK ENCODE_FEATURE_BOS_SK ENCODE_FEATURE_ENDPOINT ZMQ_SEND_BATCH_DATA
        FD_DEALER_CONNECTIONS FD_REQUEST_WAIT_TIMEOUT
    """,
    "it decides only on which devices, ports and processes the same computation runs": """
        CUDA_VISIBLE_DEVICES FD_ZMQ_SNDHWM FD_PD_CHANGEABLE FD_PLUGINS FD_TP_GROUP_GID_OFFSET
        FD_ENABLE_MULTI_API_SERVER FD_ZMQ_RECV_REQUEST_SERVER_PORT FD_ZMQ_SEND_RESPONSE_SERVER_PORT
        FD_ZMQ_RECV_REQUEST_SERVER_PORTS FD_ZMQ_SEND_RESPONSE_SERVER_PORTS FD_ZMQ_CONTROL_CMD_SERVER_PORTS
        FD_CACHE_PROC_EXIT_TIMEOUT FD_CACHE_PROC_ERROR_COUNT FD_ENGINE_TASK_QUEUE_WITH_SHM
        FD_ENABLE_PD_RDMA_EAGER_CONNECT FMQ_CONFIG_JSON FD_TOKEN_PROCESSOR_HEALTH_TIMEOUT
        FD_WORKER_ALIVE_TIMEOUT FD_PD_TRANSFER_VIA_STORAGE FD_USE_KVCACHE_LOCK FD_ENABLE_V1_UPDATE_WEIGHTS
        FLAGS_selected_gpus FLAGS_use_pd_disaggregation FLAGS_use_pd_disaggregation_per_chunk
        FLAGS_fmt_write_cache_completed_signal FLAGS_enable_async_fast_gc
    """,
    "it decides only where weights and blocks are stored, how many fit and which of them stay": """
        FD_DISABLED_RECOVER FD_ENC_DEC_BLOCK_NUM FD_ENABLE_CACHE_TASK FD_ENABLE_SWAP_SPACE_CLEARING
        FD_AS_ONLY_FLUSH FILE_BACKEND_STORAGE_DIR FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST
        FD_ILUVATAR_KVCACHE_MEM FD_METAX_KVCACHE_MEM FLAGS_allocator_strategy
        FLAGS_fraction_of_gpu_memory_to_use
    """,
    "it decides only which tokens are computed together and when, which changes rounding as any other batch does": """
        ENABLE_V1_KVCACHE_SCHEDULER FD_ENABLE_MAX_PREFILL FD_DISABLE_CHUNKED_PREFILL
        FD_EP_BATCHED_TOKEN_TIMEOUT FD_EP_MAX_PREFETCH_TASK_NUM PREFILL_CONTINUOUS_REQUEST_DECODE_RESOURCES
        FD_ENABLE_PDL FD_PREFILL_PREPARE_REQ_THREAD_NUM FD_PREFILL_WAIT_DECODE_RESOURCE_SECONDS
        FD_INIT_NEW_TOKEN_RATIO FD_MIN_NEW_TOKEN_RATIO FD_NEW_TOKEN_RATIO_DECAY FD_CLIP_MAX_NEW_TOKENS
        FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL
        FD_RESERVE_DECAY_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL
        FD_RESERVE_MIN_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL FD_USE_NEW_TOKEN_RATIO_RESERVE
        FD_PD_REORDER FD_OFFLINE_PERF_TEST_FOR_PD FD_DECODE_PREALLOC_BLOCK_TIMEOUT FD_MAX_INFLIGHT_PREFILL
    """,
}

NEUTRAL_VARIABLES = {name: reason for reason, names in _VARIABLE_REASONS.items() for name in names.split()}
"""Environment variables that cannot change the bytes of a block -> the reason. They are not part of the namespace."""
