"""vLLM's KV connector over the pool; the flag ``--kv-transfer-config`` is enough to select it.

    {"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore_backend.integrations.vllm",
     "kv_role": "kv_both", "kv_connector_extra_config": {"pool": "mooncake://127.0.0.1:15001"}}

The extra configuration may contain ``pool``, a URL or the path of a JSON file in any dialect (by default the
environment decides, ``MOONCAKE_CONFIG_PATH`` first), ``weights_version``, for weights that are updated in place, and
``memory``, the route of blocks to and from the pool (``route.py``). ``kv_role`` may also be ``kv_producer`` (only
saves) or ``kv_consumer`` (only loads). ``prefill_wait_s`` is for an instance that receives a request at the same time
as a prefill instance: the time that a prompt waits for its next block to arrive in the pool.

This file translates the calls of vLLM 0.32's ``KVConnectorBase_V1`` to ``scheduler.py`` and ``worker.py``, which do the
work. vLLM makes one connector for its scheduler and one for each worker. Everything is asynchronous: a step waits
neither for a look-up nor for a transfer. The exception is the save of a request that a router has marked as prefill's
part (``scheduler.py``). On a GPU a step is only queued when its calls arrive here: transfers begin after an event that
is recorded then, on the stream of the step.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import vllm
from prometheus_client import Counter
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupRole,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvcommon.hints import suggest_name
from kvstore_backend.backend import ConfigError
from kvstore_backend.config import MemorySettings, MooncakeSettings, PoolConfig, read_config
from kvstore_backend.integrations.vllm.clock import DeviceClock, HostClock
from kvstore_backend.integrations.vllm.counts import OUTCOMES, add_counts
from kvstore_backend.integrations.vllm.groups import Group
from kvstore_backend.integrations.vllm.hybrid import HybridSchedulerHalf
from kvstore_backend.integrations.vllm.memory import GroupedMemory, KVMemory
from kvstore_backend.integrations.vllm.messages import Plan, Report
from kvstore_backend.integrations.vllm.route import choose_route, open_route, read_route
from kvstore_backend.integrations.vllm.scheduler import SchedulerHalf
from kvstore_backend.integrations.vllm.settings import collect_settings, find_checkpoint
from kvstore_backend.integrations.vllm.worker import Loaded, WorkerHalf
from kvstore_backend.load_or_compute import DECISIONS
from kvstore_backend.manifest import collect_facts
from kvstore_backend.namespace import Namespace, fingerprint_model
from kvstore_backend.pool import open_backend, open_pool
from kvstore_backend.resharding import ShardingFamily, find_family
from kvstore_backend.resharding.family import HEAD

__all__ = ["KVStoreConnector", "KVStoreMetrics", "KVStoreStats"]

logger = logging.getLogger("vllm.kvstore")  # a child of vLLM's logger, whose handlers and level it shares

_OPTIONS = ("memory", "pool", "prefill_wait_s", "weights_version")
_HASHES = ("sha256", "sha256_cbor")
# With these a token's KV depends on no later token. Classes derived from them are refused, because they may differ.
_FULL = (FullAttentionSpec, MLAAttentionSpec)
_SPECS = (*_FULL, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)
# Settings of ``CacheConfig`` that determine the bytes of recurrent states, in addition to the specs of their groups.
_STATE_FIELDS = (
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "use_replayssm",
    "replayssm_buffer_len",
    "use_kda_recoverssm",
)
# The minimum for Mooncake; a client that only looks up needs none.
_LOOKUP_BUFFER = 16 << 20


@dataclass
class _Plan(KVConnectorMetadata):  # type: ignore[misc]
    plan: Plan


@dataclass
class _Rank(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    namespace: Namespace
    family: ShardingFamily | None


@dataclass
class _Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        self.report.add_report(other.report)
        return self


@dataclass
class KVStoreStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last step: ``{namespace: {"load ok": blocks, "load bytes": ..., ...}}``."""

    data: dict[str, dict[str, float]] = field(default_factory=dict)

    def reset(self) -> None:
        """Drop all counts."""
        self.data = {}

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVStoreStats:
        """Return the sum of both."""
        return KVStoreStats(add_counts(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers for one line of vLLM's log."""
        return {
            f"{namespace[:8]} {name}": round(number, 3)
            for namespace, numbers in self.data.items()
            for name, number in sorted(numbers.items())
        }


class KVStoreMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Metrics ``vllm:kvstore_{blocks,bytes,seconds,load_or_compute}_total`` among vLLM's metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def counter(name: str, documentation: str, *labels: str) -> Any:
            return metric_types[Counter](
                name=f"vllm:kvstore_{name}", documentation=documentation, labelnames=[*labelnames, "namespace", *labels]
            )

        self._blocks = counter(
            "blocks",
            "Blocks looked up, loaded, gathered from another sharding, and saved, by outcome",
            "operation",
            "outcome",
        )
        self._missing = counter(
            "group_blocks_missing",
            "Blocks that one group of layers lacked of a prefix that full attention has, so that a hit was shorter",
            "group",
        )
        self._bytes = counter("bytes", "Bytes loaded", "operation")
        self._seconds = counter("seconds", "Seconds that calls to the pool took", "operation")
        self._decisions = counter(
            "load_or_compute", "Requests whose blocks the pool had, by what was expected to be quicker", "decision"
        )

    def observe(self, transfer_stats_data: dict[str, dict[str, float]], engine_idx: int = 0) -> None:
        """Add the counts of a ``KVStoreStats``."""
        for namespace, numbers in transfer_stats_data.items():
            labels = (*self.per_engine_labelvalues[engine_idx], namespace)
            for name, number in numbers.items():
                operation, figure = name.split()
                if figure in DECISIONS:
                    self._decisions.labels(*labels, figure).inc(number)
                elif figure == "missing":
                    self._missing.labels(*labels, operation).inc(number)
                elif figure in OUTCOMES:
                    self._blocks.labels(*labels, operation, figure).inc(number)
                else:
                    (self._bytes if figure == "bytes" else self._seconds).labels(*labels, operation).inc(number)


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Connector for both halves; ``role`` selects one.

    Raises:
        ConfigError: the configuration, or a setting of vLLM's, cannot be used with the pool.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._groups = _check_support(vllm_config, kv_cache_config)
        # The common case: then everything is as if there were no groups.
        self._is_plain = len(self._groups) == 1 and self._groups[0].kind == "full"
        self._config = _read_pool_config(self._kv_transfer_config.kv_connector_extra_config)
        self._route = read_route(self._kv_transfer_config.kv_connector_extra_config)
        prefill_wait_s = _read_prefill_wait(self._kv_transfer_config)
        self._loaded = Loaded()
        self._report = Report()
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            _require_recompute(self._kv_transfer_config)
            backend = open_backend(_lookup_only(self._config))
            options = {
                "loads": self._kv_transfer_config.is_kv_consumer,
                "saves": self._kv_transfer_config.is_kv_producer,
                "prefill_wait_s": prefill_wait_s,
            }
            if self._is_plain:
                self._scheduler = SchedulerHalf(backend, vllm_config.cache_config.block_size, **options)
            else:
                hash_size = kv_cache_config.hash_block_size
                self._scheduler = HybridSchedulerHalf(backend, self._groups, hash_size, **options)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is dropped only causes a later miss."""
        return False

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()

    def get_kv_connector_stats(self) -> KVStoreStats | None:
        half = self._scheduler or self._worker
        counts = half.take_counts() if half is not None else {}
        return KVStoreStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoreStats:
        return KVStoreStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVStoreMetrics:
        return KVStoreMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Calls in the scheduler's process

    def set_xfer_handshake_metadata(self, metadata: dict[int, _Rank]) -> None:
        ranks = [metadata[rank] for rank in sorted(metadata)]
        self._planner.learn_namespaces([rank.namespace for rank in ranks], ranks[0].family)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], _Rank]) -> None:
        # A block counts only if all ranks of all pipeline stages have their layers' part of it.
        self.set_xfer_handshake_metadata(dict(enumerate(metadata[rank] for rank in sorted(metadata))))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._planner.bind_blocks(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        matched = self._planner.matched_tokens(request, num_computed_tokens)
        return matched, bool(matched)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._planner.on_allocation(request, lambda: self._pick(blocks.get_block_ids()), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> _Plan:
        state = scheduler_output.kv_connector_block_state
        scheduled = scheduler_output.num_scheduled_tokens
        if not self._is_plain:
            self._planner.offer_states(state.boundary_state_offloads)
        return _Plan(self._planner.plan_step(scheduled, lambda request_id: self._pick(state.get_block_ids(request_id))))

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.kv_connector_worker_meta is not None:
            self._planner.on_report(connector_output.kv_connector_worker_meta.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._planner.on_request_end(request, self._pick(block_ids))
        return False, None  # blocks still to be saved are pinned, so vLLM may free its own references

    def has_pending_push_work(self) -> bool:
        """Return whether steps must continue for transfers that may end: only a step brings the workers' reports.

        A transfer that hangs does not count.
        """
        return self._scheduler is not None and self._scheduler.is_moving

    def reset_cache(self) -> bool | None:
        return self._scheduler.forget_blocks() if self._scheduler is not None else True

    # Calls in a worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        memory = _find_memory(self._kv_cache_config, self._is_plain, kv_caches)
        route = choose_route(self._route, memory, self._config)
        is_summed = route == "staged" or not memory.is_on_device
        namespace = _build_namespace(self._vllm_config, self._kv_cache_config, self._groups, memory, kv_caches)
        if not is_summed:  # clients that verify bytes must not find blocks without a checksum
            namespace = replace(namespace, layout=f"{namespace.layout} unverified")
        logger.info("KV blocks of this worker: %s, namespace %s", namespace, namespace.digest)
        logger.info("They lie on %s, and their route to the pool is %s", memory.tensors[0].device, route)
        # The host assembles blocks of another sharding.
        family = None
        if is_summed and not isinstance(memory, GroupedMemory):
            family = _find_family(self._vllm_config, namespace, memory)
        facts = _collect_facts(self._vllm_config)
        if not self._is_plain:
            facts = {"groups": _describe_groups(self._groups), **facts}
        pool = open_pool(self._config, namespace, facts=facts, is_summed=is_summed)
        clock = DeviceClock(memory.make_mark) if memory.is_on_device else HostClock()
        self._worker = WorkerHalf(pool, memory, family, route=open_route(route, memory, pool), clock=clock)
        if self._vllm_config.lora_config is not None:
            from vllm.lora.worker_manager import WorkerLoRAManager  # this import loads vLLM's layers

            self._worker.adapters.watch(WorkerLoRAManager)

    def get_handshake_metadata(self) -> _Rank | None:
        return _Rank(self._worker.namespace, self._worker.family) if self._worker is not None else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step; vLLM calls this first, before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._mover.start_loads(self._get_connector_metadata().plan.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return immediately: a request is scheduled only after its load."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing yet: blocks are saved complete, after the forward pass."""

    def wait_for_save(self) -> None:
        """Begin to save the blocks that the forward pass has filled; full blocks do not change, so no step waits.

        The exception is a prefill's answer: its receiver may send the request to a decode instance immediately, which
        must find the blocks.
        """
        plan = self._get_connector_metadata().plan
        self._mover.end_step(plan.num_tokens)
        self._mover.start_saves(plan.saves)
        self._mover.wait_for_saves(plan.awaited)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the loads that ended.

        vLLM makes four calls at the end of a step. This first one takes the outcomes for all four.

        vLLM reads the counts between these calls. They must cover everything that is reported: after the last report
        there may be no other step to report them.
        """
        self._loaded, self._report = self._mover.take_outcomes()
        return KVConnectorTransferResults(finished_recving=self._loaded.requests, failed_recving=self._loaded.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._loaded.blocks

    def build_connector_worker_meta(self) -> _Report | None:
        return None if self._report.is_empty else _Report(self._report)

    def _pick(self, block_ids: Any) -> Any:
        """Return the block ids as the scheduler's half takes them: those of the only group, or of each group."""
        return block_ids[0] if self._is_plain else block_ids

    @property
    def _planner(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a worker's connector was asked a question for the scheduler's"
        return self._scheduler

    @property
    def _mover(self) -> WorkerHalf:
        assert self._worker is not None, "register_kv_caches was not called"
        return self._worker


def _read_pool_config(extra: dict[str, Any]) -> PoolConfig:
    """Read the pool that ``kv_connector_extra_config`` or the environment names."""
    for name in extra:
        if name not in _OPTIONS:
            raise ConfigError(f'unknown key "{name}" in kv_connector_extra_config{suggest_name(name, _OPTIONS)}')
    config = read_config(extra.get("pool"))
    if config is None:
        raise ConfigError("the configuration says that there is no pool; leave --kv-transfer-config out")
    if isinstance(config.store, MemorySettings):
        raise ConfigError("a memory pool is one process's own, and vLLM has several: name a mooncake or a file pool")
    return config.require_plain("KVStoreConnector")


def _read_prefill_wait(transfer: Any) -> float:
    """Read how many seconds a prompt waits for a block from a prefill instance; 0, the default: not at all."""
    seconds = transfer.kv_connector_extra_config.get("prefill_wait_s", 0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ConfigError(
            f"prefill_wait_s in kv_connector_extra_config is {seconds!r}; it must be a number of seconds, 0 or more"
        )
    if seconds and not transfer.is_kv_consumer:
        raise ConfigError(
            f"prefill_wait_s is set, but kv_role is {transfer.kv_role}, which loads nothing from the pool"
        )
    return float(seconds)


def _lookup_only(config: PoolConfig) -> PoolConfig:
    """Return the same pool for the scheduler's process, which gives it no memory and moves no blocks."""
    store = config.store
    if isinstance(store, MooncakeSettings):
        store = replace(store, global_segment_size=0, local_buffer_size=_LOOKUP_BUFFER)
    return PoolConfig(store)


def _check_support(vllm_config: Any, kv_cache_config: Any) -> list[Group]:
    """Return the model's groups; refuse settings that this connector does not support, with one sentence."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            "--pipeline-parallel-size is more than 1; KVStoreConnector was not verified with vLLM's pipeline stages yet"
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError("context parallelism is on; KVStoreConnector shares blocks that hold all their tokens")
    if cache.prefix_caching_hash_algo not in _HASHES:
        raise ConfigError(
            f"--prefix-caching-hash-algo is {cache.prefix_caching_hash_algo}; in a shared pool a collision hands one "
            f"user's KV to another, so it must be {' or '.join(_HASHES)}"
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError("--calculate-kv-scales gives each instance scales of its own; blocks cannot be shared")
    specs = [_list_specs(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    if not specs or not all(each and all(type(spec) in _SPECS for spec in each) for each in specs):
        kinds = ", ".join(dict.fromkeys(type(spec).__name__ for each in specs for spec in each)) or "nothing"
        raise ConfigError(
            f"this model stores its KV as {kinds}; KVStoreConnector knows full attention, MLA, sliding windows, "
            "chunked local attention and Mamba states, so leave --kv-transfer-config out"
        )
    for spec in itertools.chain.from_iterable(specs):
        _require_causal(vllm_config, spec)
    groups = [_read_group(each) for each in specs]
    if len(groups) > 1 or groups[0].kind != "full":
        _require_plain_groups(vllm_config, kv_cache_config, list(itertools.chain.from_iterable(specs)))
    return groups


def _list_specs(spec: Any) -> list[Any]:
    """Return the specs of a group's layers.

    A worker's group may have one for each layer; vLLM gives the scheduler the first of them for the whole group.
    """
    return list(spec.kv_cache_specs.values()) if type(spec) is UniformTypeKVCacheSpecs else [spec]


def _read_group(specs: Sequence[Any]) -> Group:
    """Return the group of layers with these specs."""
    first = specs[0]
    kinds = {(type(spec) in _FULL, type(spec), _read_span(spec), spec.block_size) for spec in specs}
    if len({(is_full or kind, span, size) for is_full, kind, span, size in kinds}) > 1:
        names = ", ".join(sorted({type(spec).__name__ for spec in specs}))
        raise ConfigError(
            f"one group of layers stores its KV as {names} with different windows or block sizes; KVStoreConnector "
            "needs one kind in a group"
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
    """Refuse what is not known to be right for a model with several groups, or without full attention."""
    if getattr(vllm_config, "speculative_config", None) is not None:
        raise ConfigError(
            "speculative decoding is on, and this model's layers store their KV in several ways; KVStoreConnector "
            "supports the two only one at a time: add --disable-hybrid-kv-cache-manager, which treats windows as full "
            "attention (vLLM has no such setting for recurrent layers)"
        )
    if getattr(vllm_config.cache_config, "use_replayssm", False):
        raise ConfigError(
            "--use-replayssm is on; vLLM then keeps a part of the recurrent states outside of their blocks: leave it "
            "or --kv-transfer-config out"
        )
    # vLLM ends chunks of prompts at multiples of its smallest block; a longer block's state is then at another token.
    if any(type(spec) is MambaSpec and spec.block_size > min(each.block_size for each in specs) for spec in specs):
        raise ConfigError(
            "blocks of this model's recurrent layers have more tokens than those of its other layers; vLLM's states "
            "may then be at other tokens than their hashes say: leave --kv-transfer-config out"
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
            "this model's groups of layers store their KV in several dtypes, or several tokens as one; "
            "KVStoreConnector needs one dtype and a state for each token"
        )
    for group in kv_cache_config.kv_cache_groups:
        is_usual = group.enable_kv_transfer and not group.host_resident and not group.is_eagle_group
        if not is_usual or group.role is not KVCacheGroupRole.DEFAULT or not group.kv_cache_spec.prefix_cacheable:
            raise ConfigError(
                "vLLM marks a group of this model's layers as not for transfer; KVStoreConnector needs all of them"
            )


def _require_causal(vllm_config: Any, spec: Any) -> None:
    """Refuse models that compute a token's KV from later tokens.

    The KV of a common beginning then differs between prompts.
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
            "the KV of this model's tokens depends on later tokens, or vLLM supports no prefix caching for it; "
            "KVStoreConnector shares blocks of prompts that begin alike: leave --kv-transfer-config out"
        )
    # An operator may have switched prefix caching off, which does no harm. If vLLM switched it off, a prompt cannot
    # continue from existing KV. Then vLLM also computes prompts in one piece, or guarantees equal bits in all batches.
    in_pieces = vllm_config.scheduler_config.enable_chunked_prefill
    if not vllm_config.cache_config.enable_prefix_caching and (envs.VLLM_BATCH_INVARIANT or not in_pieces):
        raise ConfigError(
            "prefix caching is off, and so is chunked prefill or VLLM_BATCH_INVARIANT is set: vLLM does not continue "
            "prompts from KV that is there; switch --enable-prefix-caching on, or leave --kv-transfer-config out"
        )


def _require_recompute(transfer: Any) -> None:
    if transfer.kv_load_failure_policy != "recompute":
        logger.info(
            'kv_load_failure_policy is %r, which fails requests whose blocks were evicted meanwhile; using "recompute"',
            transfer.kv_load_failure_policy,
        )
        transfer.kv_load_failure_policy = "recompute"


def _find_memory(kv_cache_config: Any, is_plain: bool, kv_caches: dict[str, Any]) -> KVMemory | GroupedMemory:
    """Return the KV memory of a worker."""
    groups, num_blocks = kv_cache_config.kv_cache_groups, kv_cache_config.num_blocks
    if is_plain:
        if type(groups[0].kv_cache_spec) is UniformTypeKVCacheSpecs:
            return KVMemory(kv_caches, num_blocks, is_mixed=True)
        return KVMemory(kv_caches, num_blocks)
    owned = {name for group in groups for name in group.layer_names}
    # A layer that reads another layer's KV has the same tensor, and no blocks of its own.
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


def _describe_groups(groups: Sequence[Group]) -> str:
    """Return a line for operators, such as ``5 x sliding window 256, 1 x full attention``."""
    counted = collections.Counter(f"{group.name} (blocks of {group.block_size} tokens)" for group in groups)
    return ", ".join(f"{count} x {name}" for name, count in counted.items())


def _describe_layout(
    vllm_config: Any, kv_cache_config: Any, groups: Sequence[Group], memory: KVMemory | GroupedMemory
) -> str:
    """Return the part of a namespace's layout that depends on the groups and the pipeline stage."""
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    if not isinstance(memory, GroupedMemory) and num_stages == 1:
        return memory.layout
    layers = [sorted(group.layer_names) for group in kv_cache_config.kv_cache_groups]
    stage = ""
    if num_stages > 1:
        # The stage's layers, because a block has only their part.
        stage = f" stage {get_pp_group().rank_in_group} of {num_stages} {_digest(layers)}"
    if not isinstance(memory, GroupedMemory):
        return f"{memory.layout}{stage}"
    specs = [list(map(repr, _list_specs(group.kv_cache_spec))) for group in kv_cache_config.kv_cache_groups]
    layouts = [part.layout for part in memory.groups]
    states = [getattr(vllm_config.cache_config, name, None) for name in _STATE_FIELDS] if _has_states(groups) else []
    states += [repr(getattr(vllm_config, "mamba_config", None))] if _has_states(groups) else []
    return f"{len(groups)} groups {_digest([list(map(repr, groups)), layers, specs, layouts, states])}{stage}"


def _has_states(groups: Sequence[Group]) -> bool:
    return any(group.kind == "state" for group in groups)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, default=repr).encode()).hexdigest()[:32]


def _build_namespace(
    vllm_config: Any,
    kv_cache_config: Any,
    groups: Sequence[Group],
    memory: KVMemory | GroupedMemory,
    kv_caches: dict[str, Any],
) -> Namespace:
    """Build the namespace from everything that determines the blocks' bytes."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in _list_specs(group.kv_cache_spec)]
    spec = next((spec for spec in specs if type(spec) is not MambaSpec), None)
    is_plain = not isinstance(memory, GroupedMemory)
    layers = vllm_config.compilation_config.static_forward_context
    backends = {
        f"{layers[name].get_attn_backend().get_name()} {getattr(layers[name], 'isa', '')}".strip() for name in kv_caches
    }
    folder = find_checkpoint(model, vllm_config.load_config.download_dir)
    digest = hashlib.sha256(fingerprint_model(folder).encode())
    digest.update(json.dumps(_collect_settings(vllm_config), sort_keys=True).encode())
    return Namespace(
        model=digest.hexdigest()[:32],
        kv_dtype=f"{cache.cache_dtype} {getattr(spec, 'dtype', 'states')}".replace("torch.", ""),
        block_size=cache.block_size if is_plain else math.lcm(*(group.block_size for group in groups)),
        num_layers=memory.num_layers,
        num_kv_heads=getattr(spec, "num_kv_heads", 0),
        head_size=getattr(spec, "head_size", 0),
        # A backend arranges a block's bytes in its own way, which may change with the version.
        layout=f"vllm {vllm.__version__} {'+'.join(sorted(backends))} "
        f"{_describe_layout(vllm_config, kv_cache_config, groups, memory)}",
        weights_version=str(vllm_config.kv_transfer_config.kv_connector_extra_config.get("weights_version", "")),
        tp_size=parallel.tensor_parallel_size,
        tp_rank=get_tensor_model_parallel_rank(),
    )


def _find_family(vllm_config: Any, namespace: Namespace, memory: KVMemory) -> ShardingFamily | None:
    """Return the family for reads of other tensor-parallel sizes; none if the bytes of a head cannot be located."""
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


def _collect_facts(vllm_config: Any) -> dict[str, str]:
    """Collect the manifest's facts on the checkpoint, and on the settings that are part of ``Namespace.model``."""
    folder = find_checkpoint(vllm_config.model_config, vllm_config.load_config.download_dir)
    settings = {f"setting {name}": value for name, value in _collect_settings(vllm_config).items()}
    software = f"vLLM {vllm.__version__}"
    return collect_facts(folder, software, "vLLM", checkpoint=fingerprint_model(folder), **settings)


def _collect_settings(vllm_config: Any) -> dict[str, object]:
    return collect_settings(vllm_config, envs.environment_variables)
