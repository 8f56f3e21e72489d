"""KV connector that lets vLLM use the pool. The flag ``--kv-transfer-config`` selects and configures it::

    {"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore_backend.integrations.vllm",
     "kv_role": "kv_both", "kv_connector_extra_config": {"pool": "mooncake://127.0.0.1:15001"}}

``kv_role`` may also be ``kv_producer`` (only saves) or ``kv_consumer`` (only loads). The members of the extra
configuration, all optional:

- ``pool``: a URL, or the path of a JSON file in any dialect. Without it, the pool comes from the environment
  (``MOONCAKE_CONFIG_PATH``, ...).
- ``weights_version``: any text, which must change when the weights are updated in place.
- ``memory``: the route of blocks between vLLM's memory and the pool (``route.py``).
- ``prefill_wait_s``: for an instance that receives each request at the same time as a prefill instance: the seconds for
  which a prompt waits until its next block is in the pool.

This module passes the calls of vLLM 0.32's ``KVConnectorBase_V1`` to ``scheduler.py`` and ``worker.py``. vLLM creates
one connector for its scheduler and one for each worker. A step waits neither for a look-up nor for a transfer, except
for the saves of a request that is only prefill (``scheduler.py``). On a GPU, vLLM calls the connector when the work of
a step is queued, not when it has ended. So a transfer begins only after an event that is recorded on the step's stream.
"""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvcommon.hints import suggest_name
from kvstore_backend.backend import ConfigError
from kvstore_backend.config import MemorySettings, MooncakeSettings, PoolConfig, read_config
from kvstore_backend.integrations.vllm.clock import DeviceClock, HostClock
from kvstore_backend.integrations.vllm.hybrid import HybridSchedulerHalf
from kvstore_backend.integrations.vllm.memory import GroupedMemory
from kvstore_backend.integrations.vllm.messages import Plan, Report
from kvstore_backend.integrations.vllm.metrics import KVStoreMetrics, KVStoreStats
from kvstore_backend.integrations.vllm.namespace import build_namespace, collect_instance_facts, find_readable_family
from kvstore_backend.integrations.vllm.route import choose_route, open_route, read_route
from kvstore_backend.integrations.vllm.scheduler import SchedulerHalf
from kvstore_backend.integrations.vllm.support import (
    check_support,
    describe_groups,
    find_memory,
    require_recompute,
    splits_media,
    warn_of_few_states,
)
from kvstore_backend.integrations.vllm.worker import Loaded, WorkerHalf
from kvstore_backend.namespace import Namespace
from kvstore_backend.pool import open_backend, open_pool
from kvstore_backend.resharding import ShardingFamily

__all__ = ["KVStoreConnector", "KVStoreMetrics", "KVStoreStats"]

logger = logging.getLogger("vllm.kvstore")  # a child of vLLM's logger, with the same handlers and level

_OPTIONS = ("memory", "pool", "prefill_wait_s", "weights_version")
# Value of ``medium`` in the KV events of blocks that are stored in the pool.
_MEDIUM = "POOL"
# Mooncake's minimum for a client's own buffer. A client that only looks up does not use the buffer.
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


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """KV connector that vLLM creates in its scheduler and in each worker; ``role`` says in which.

    Raises:
        ConfigError: the connector's configuration, or a setting of vLLM, cannot be used with the pool.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._groups = check_support(vllm_config, kv_cache_config)
        # The model has one group, with full attention; blocks then have no group index.
        self._is_plain = len(self._groups) == 1 and self._groups[0].kind == "full"
        self._config = _read_pool_config(self._kv_transfer_config.kv_connector_extra_config)
        self._route = read_route(self._kv_transfer_config.kv_connector_extra_config)
        prefill_wait_s = _read_prefill_wait(self._kv_transfer_config)
        self._loaded = Loaded()
        self._report = Report()
        self._has_saved = False  # whether the saves of this step were begun
        self._saves_unasked = False  # whether vLLM may not call wait_for_save in this worker
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            require_recompute(self._kv_transfer_config)
            backend = open_backend(_lookup_only(self._config))
            options = {
                "loads": self._kv_transfer_config.is_kv_consumer,
                "saves": self._kv_transfer_config.is_kv_producer,
                "prefill_wait_s": prefill_wait_s,
                "skips_media": splits_media(vllm_config),
            }
            if self._is_plain:
                events = vllm_config.kv_events_config
                options["reports_stored"] = events is not None and events.enable_kv_cache_events
                drafts = vllm_config.speculative_config  # for several groups, support.py refuses speculative decoding
                options["drops_last"] = drafts is not None and drafts.use_eagle_block_drop()
                options["num_rewritten"] = max(0, vllm_config.num_prefill_lookahead_tokens - 1)
                self._scheduler = SchedulerHalf(backend, vllm_config.cache_config.block_size, **options)
            else:
                if options["saves"]:
                    warn_of_few_states(kv_cache_config, self._groups)
                hash_size = kv_cache_config.hash_block_size
                self._scheduler = HybridSchedulerHalf(backend, self._groups, hash_size, **options)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether each save must succeed: False, because a save that is dropped only causes a later miss."""
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

    # Methods that vLLM calls in the scheduler's process.

    def set_xfer_handshake_metadata(self, metadata: dict[int, _Rank]) -> None:
        ranks = [metadata[rank] for rank in sorted(metadata)]
        self._planner.learn_namespaces([rank.namespace for rank in ranks], ranks[0].family)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], _Rank]) -> None:
        # A block is a hit only if the pool has the parts of all ranks in all pipeline stages.
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

    def take_events(self) -> list[BlockStored]:
        """Return KV events for the blocks that were stored in the pool, which vLLM publishes with its own events.

        The events have no tokens, because vLLM's own events for the same hashes have them.
        """
        return [
            BlockStored(
                block_hashes=[maybe_convert_block_hash(block_hash) for block_hash in stored.block_hashes],
                parent_block_hash=maybe_convert_block_hash(stored.parent) if stored.parent is not None else None,
                token_ids=[],
                block_size=self._vllm_config.cache_config.block_size,
                lora_id=None,
                medium=_MEDIUM,
                lora_name=None,
            )
            for stored in self._planner.take_stored()
        ]

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._planner.on_request_end(request, self._pick(block_ids))
        return False, None  # blocks that are being saved are pinned, so vLLM may release its own references

    def has_pending_push_work(self) -> bool:
        """Return whether vLLM must make further steps: this connector reports the end of a transfer only in a step.

        A transfer that hangs needs no steps.
        """
        return self._scheduler is not None and self._scheduler.is_moving

    def reset_cache(self) -> bool | None:
        return self._scheduler.forget_blocks() if self._scheduler is not None else True

    # Methods that vLLM calls in a worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        memory = find_memory(self._kv_cache_config, self._is_plain, kv_caches)
        route = choose_route(self._route, memory, self._config)
        is_summed = route == "staged" or not memory.is_on_device
        namespace = build_namespace(self._vllm_config, self._kv_cache_config, self._groups, memory, kv_caches)
        if not is_summed:  # blocks without checksums have another namespace, because other clients cannot check them
            namespace = replace(namespace, layout=f"{namespace.layout} unverified")
        logger.info("This worker's KV blocks have the namespace %s with the digest %s", namespace, namespace.digest)
        path = "through host buffers (staged)" if route == "staged" else "without host buffers (direct)"
        logger.info("The KV blocks are on %s; they pass to the pool %s", memory.tensors[0].device, path)
        # Blocks of another sharding are gathered by the host, which must be able to read and write the memory.
        family = None
        if is_summed and not isinstance(memory, GroupedMemory):
            family = find_readable_family(self._vllm_config, namespace, memory)
        facts = collect_instance_facts(self._vllm_config)
        if not self._is_plain:
            facts = {"groups": describe_groups(self._groups), **facts}
        pool = open_pool(self._config, namespace, facts=facts, is_summed=is_summed)
        clock = DeviceClock(memory.make_mark) if memory.is_on_device else HostClock()
        self._worker = WorkerHalf(pool, memory, family, route=open_route(route, memory, pool), clock=clock)
        if self._vllm_config.speculative_config is not None:
            # vLLM's V1 model runner then calls wait_for_save after the draft model, so only in the last pipeline stage.
            self._saves_unasked = not get_pp_group().is_last_rank
        if self._vllm_config.lora_config is not None:
            from vllm.lora.worker_manager import WorkerLoRAManager  # this import loads vLLM's layers

            self._worker.adapters.watch(WorkerLoRAManager)

    def get_handshake_metadata(self) -> _Rank | None:
        return _Rank(self._worker.namespace, self._worker.family) if self._worker is not None else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step in a worker. vLLM calls this before all other methods of the step."""
        super().bind_connector_metadata(connector_metadata)
        self._has_saved = False
        if self._worker is not None:
            self._worker.begin_step()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._mover.start_loads(self._get_connector_metadata().plan.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return immediately, because vLLM schedules a request only after the load of its blocks has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing, because blocks are saved after the forward pass."""

    def wait_for_save(self) -> None:
        """Begin to save the blocks that are full after this step's forward pass.

        The saves need not end before the next step, because full blocks do not change. Only for a prefill request, this
        method waits until the blocks are in the pool, because a decode instance looks them up after the response. A
        second call in the same step does nothing.
        """
        if self._has_saved:
            return
        self._has_saved = True
        plan = self._get_connector_metadata().plan
        self._mover.end_step(plan.num_tokens)
        self._mover.start_saves(plan.saves)
        self._mover.wait_for_saves(plan.awaited)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests with loads that ended or failed.

        vLLM calls four methods at the end of a step. This method is the first one, and collects the outcomes for all
        four. vLLM reads the counts after this call, and possibly no further step follows, so the counts must include
        all transfers that are reported in this step. The forward pass was queued before this call.
        """
        if self._saves_unasked:
            self.wait_for_save()
        self._loaded, self._report = self._mover.take_outcomes()
        return KVConnectorTransferResults(finished_recving=self._loaded.requests, failed_recving=self._loaded.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._loaded.blocks

    def build_connector_worker_meta(self) -> _Report | None:
        return None if self._report.is_empty else _Report(self._report)

    def _pick(self, block_ids: Any) -> Any:
        """Return vLLM's block ids as the scheduler's half needs them: a list, or for several groups a list for each."""
        return block_ids[0] if self._is_plain else block_ids

    @property
    def _planner(self) -> SchedulerHalf:
        assert self._scheduler is not None, "vLLM called a method for the scheduler on a worker's connector"
        return self._scheduler

    @property
    def _mover(self) -> WorkerHalf:
        assert self._worker is not None, "register_kv_caches was not called"
        return self._worker


with contextlib.suppress(ValueError):  # the name is registered already
    # vLLM's MultiConnector looks up by name which connector has counted the figures for log and metrics.
    KVConnectorFactory.register_connector(KVStoreConnector.__name__, __name__, KVStoreConnector.__name__)


def _read_pool_config(extra: dict[str, Any]) -> PoolConfig:
    """Read the configuration of the pool from ``kv_connector_extra_config`` or the environment."""
    for name in extra:
        if name not in _OPTIONS:
            raise ConfigError(f'unknown key "{name}" in kv_connector_extra_config{suggest_name(name, _OPTIONS)}')
    config = read_config(extra.get("pool"))
    if config is None:
        raise ConfigError("the pool's configuration file turns the pool off; leave --kv-transfer-config out")
    if isinstance(config.store, MemorySettings):
        raise ConfigError("a memory pool belongs to one process, but vLLM has several; use a mooncake or a file pool")
    return config.require_plain("KVStoreConnector")


def _read_prefill_wait(transfer: Any) -> float:
    """Read ``prefill_wait_s``: the seconds for which a prompt waits for a prefill instance (default 0, no wait)."""
    seconds = transfer.kv_connector_extra_config.get("prefill_wait_s", 0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ConfigError(
            f"prefill_wait_s in kv_connector_extra_config is {seconds!r}; it must be a number of seconds, 0 or more"
        )
    if seconds and not transfer.is_kv_consumer:
        raise ConfigError(
            f"prefill_wait_s is set, but an instance with kv_role {transfer.kv_role} loads nothing from the "
            "pool; remove prefill_wait_s, or use another kv_role"
        )
    return float(seconds)


def _lookup_only(config: PoolConfig) -> PoolConfig:
    """Return ``config`` for the scheduler's process, which gives no memory to the pool and moves no blocks."""
    store = config.store
    if isinstance(store, MooncakeSettings):
        store = replace(store, global_segment_size=0, local_buffer_size=_LOOKUP_BUFFER)
    return PoolConfig(store)
