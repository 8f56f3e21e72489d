"""Instance: creates all parts of an instance from its arguments, and describes it for the router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import socket
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from fastapi import FastAPI

from engine.apis.completions import Completions, PairDialect
from engine.apis.messages import Messages
from engine.apis.response_store import ResponseStore
from engine.apis.responses import Responses
from engine.args import EngineArgs
from engine.core import EngineCore
from engine.disaggregation import (
    BlockMemory,
    HandoverReceiver,
    Transfer,
    TransferUnavailable,
    choose_protocol,
    list_protocols,
)
from engine.generation import BROKEN, Generations, SharedParts
from engine.model.checkpoint import check_length, choose_device, choose_dtype, load_model_config, load_tokenizer
from engine.model.memory_budget import choose_num_blocks
from engine.model.model_runner import ModelRunner
from engine.model.out_of_memory import LEAVE_ROOM_BESIDE, explain_out_of_memory
from engine.pool.background import in_background
from engine.pool.kv_codec import quantised_namespace
from engine.pool.staging import open_direct, stage_handovers
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.cache_events import CacheEvents
from engine.scheduling.scheduler import Scheduler
from engine.serving.control import Control
from engine.serving.registration import send_heartbeats
from engine.serving.surroundings import Surroundings
from engine.telemetry.kv_events import KvEventPublisher
from engine.telemetry.metrics import EngineMetrics
from engine.telemetry.tracing import open_tracer
from engine.telemetry.vllm_names import VllmNames
from kvcommon.addresses import find_own_address
from kvcommon.output import announce
from kvstore_backend import BlockPool, PoolConfig, open_pool
from kvstore_backend.config import MooncakeSettings, choose_rdma_devices, describe_url, read_protocol
from kvstore_backend.groups import Group
from kvstore_backend.manifest import Manifest

__all__ = ["Instance"]

log = logging.getLogger(__name__)

# Time after the last accepted heartbeat after which a router removes an instance.
_FORGOTTEN_SECONDS = 30.0


class Instance:
    """An instance with all its parts. The constructor creates the parts as the arguments say, and loads the model.

    Raises:
        ConfigError: the arguments or the checkpoint cannot be used.
    """

    def __init__(
        self,
        args: EngineArgs,
        around: Surroundings,
        connector: socket.socket,
        dialect: PairDialect | None = None,
    ) -> None:
        """Create all parts of the instance, and load the model.

        Args:
            args: the command line and the environment.
            around: the router, the pool and the checkpoint that ``args`` name.
            connector: the bound socket of the connector port, to which prefill instances connect for hand-overs of
                prompts. The instance owns the socket from now on.
            dialect: the dialect of requests to a pair, or None for FastDeploy's.
        """
        self.args = args
        self.start_id = secrets.token_hex(8)
        """A random id, by which the router distinguishes this process from earlier processes with the same address."""
        self._connector = connector
        self._dialect = dialect or PairDialect()
        self._registered_at = -math.inf
        self.router = around.router
        self._router_token = around.router_token
        self.kv_events = KvEventPublisher(args.kv_events) if args.kv_events else None
        runner, num_blocks = _load_model(args, around.checkpoint)
        self.metrics = EngineMetrics()
        self.tracer = open_tracer(args.trace_receiver) if args.trace_receiver else None
        pool = _open_pool(around.pool, runner, self.metrics) if around.pool else None
        cache_settings = _list_cache_settings(args, around.pool, num_blocks, runner.namespace.kv_dtype)
        self.metrics.describe_cache(cache_settings)
        if args.metrics_dialect == "vllm":
            vllms = {"num_gpu_blocks": num_blocks, **cache_settings}
            self.metrics.registry.register(VllmNames(self.metrics, args.served_model_name, vllms))
        events = CacheEvents(self.kv_events.publish) if self.kv_events else None
        scheduler = _make_scheduler(args, num_blocks, runner.groups.groups, events, has_pool=pool is not None)
        with explain_out_of_memory(f"the buffers of the pool; {LEAVE_ROOM_BESIDE}", any_failure=False):
            self.core = EngineCore(runner, scheduler, self.metrics, pool=pool, save_outputs=args.enable_output_caching)
        tokenizer = load_tokenizer(around.checkpoint)
        self._transfer_protocols = list(args.cache_transfer_protocol)
        self.memory = self._open_block_memory(runner, choose_rdma_devices(around.pool))
        self.receiver = HandoverReceiver(self.memory)
        self.generations = Generations(
            SharedParts(
                self.core, tokenizer, args.splitwise_role, args.block_size, self.receiver, self.memory, self.tracer
            )
        )
        self._changed = asyncio.Event()
        self.control = self._make_control(runner, around.pool)
        self.completions = Completions(
            self.generations,
            tokenizer,
            args.served_model_name,
            args.max_model_len,
            runner.vocab_size,
            runner.defaults,
            runner.eos_token_ids,
            self._dialect,
        )
        self._pool_url = describe_url(around.pool) if around.pool else ""
        self._runner, self._pool = runner, pool
        store = None if args.splitwise_role == "prefill" else ResponseStore()
        self.responses = Responses(self.completions, store)
        self.messages = Messages(self.completions)
        self.summary = (
            f"{args.splitwise_role} instance on port {args.port}: {args.served_model_name}, {runner.device}, "
            f"{runner.namespace.kv_dtype}, {num_blocks} KV blocks of {args.block_size} tokens, "
            f"pool: {args.kvcache_storage_backend or 'none'}"
        )

    def _make_control(self, runner: ModelRunner, pool: PoolConfig | None) -> Control:
        """Return the object for operator commands. It frees KV memory only if no network device has registered it."""
        store = pool.store if pool else None
        pool_protocol = store.protocol if isinstance(store, MooncakeSettings) else ""
        return Control(
            self.core,
            runner,
            self.generations,
            self._changed.set,
            has_dynamic_weights=self.args.dynamic_load_weight,
            frees_kv=runner.device.type != "cpu" or "rdma" not in (pool_protocol, *self._transfer_protocols),
        )

    def _open_block_memory(self, runner: ModelRunner, rdma_devices: str) -> BlockMemory | None:
        """Return the object for direct transfers of blocks; None if the role is mixed, or if it cannot be opened."""
        if self.args.splitwise_role == "mixed":
            return None
        try:
            protocol = choose_protocol(self.args.cache_transfer_protocol, read_protocol())
            self._transfer_protocols = list_protocols(self.args.cache_transfer_protocol, protocol)
            transfer = Transfer(self._own_address(), protocol, rdma_devices)
            if runner.device.type == "cpu":
                return BlockMemory(self.core, runner, transfer, open_direct(runner, transfer))
            incoming_bytes = self.args.handover_memory if self.args.splitwise_role == "decode" else 0
            with explain_out_of_memory(
                "the host memory of direct transfers; lower --handover-memory", any_failure=False
            ):
                memory = stage_handovers(runner, transfer, incoming_bytes)
            return BlockMemory(self.core, runner, transfer, memory, incoming_bytes // runner.shape.nbytes)
        except (TransferUnavailable, OSError) as exc:
            log.warning("Prompts are transferred only through the pool, not directly, because %s", exc)
            return None

    def describe_blocks(self) -> dict[str, Any]:
        """Return the response of GET /kvcache: namespace, state of the pool, and number of cached blocks."""
        manifest = Manifest((self._pool or self._runner).namespace.fields, self._runner.facts)
        state = None
        if (pool := self._pool) is not None:
            state = {"ready": pool.is_ready, "detail": pool.health().detail, "url": self._pool_url}
        return {
            "digest": manifest.digest,
            "manifest": manifest.to_json(),
            "pool": state,
            "cached_blocks": self.core.count_cached_blocks(),
        }

    def _own_address(self) -> str:
        """Return the address of this machine, as other instances reach it for hand-overs."""
        if self.args.host not in ("0.0.0.0", "::"):
            return self.args.host
        return find_own_address(self.router) if self.router else "127.0.0.1"

    @contextlib.asynccontextmanager
    async def run_lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Start the engine, the connector port and the heartbeat with the HTTP server, and stop them with it."""
        if self.kv_events:
            self.kv_events.start()
        self.core.start()
        await self.receiver.start_listening(self._connector)
        heartbeat = None
        if self.router:
            sending = send_heartbeats(
                self.router, self.registration_payload, self._changed, self._router_token, self.note_registration
            )
            heartbeat = asyncio.create_task(sending)
        if self.args.splitwise_role == "decode" and not self.router:
            log.warning(
                "This decode instance has no --router; it gets no requests until a router knows it, for "
                "example from a register file"
            )
        log.info("Ready: %s", self.summary)
        announce(f"engine.api_server: ready: {self.summary}")
        try:
            yield
        finally:
            if heartbeat:
                heartbeat.cancel()
            await self.receiver.stop_listening()
            await asyncio.to_thread(self.core.stop)
            if self.kv_events:
                self.kv_events.stop()
            if self.tracer is not None:
                await asyncio.to_thread(self.tracer.close)

    def note_registration(self) -> None:
        """Record that the router has accepted this instance's registration."""
        self._registered_at = time.monotonic()

    def find_obstacle(self) -> str:
        """Return one sentence: why the instance cannot serve requests, or why the router does not send any; else ""."""
        if not self.core.is_alive:
            return "the engine of this instance has failed; the instance's log says why"
        if self.control.is_broken:
            return BROKEN
        if self.control.is_paused:
            return "this instance is paused; resume it with POST /v1/resume"
        if self.router and time.monotonic() - self._registered_at > _FORGOTTEN_SECONDS:
            return f"this instance is not registered at the router {self.router}; the instance's log says why"
        return ""

    def registration_payload(self, host_ip: str) -> dict[str, Any]:
        """Return the body of the registration, in FastDeploy's format, without ``host_ip``, this machine's address."""
        args = self.args
        kv_events = self.kv_events.describe(host_ip, args.block_size) if self.kv_events else None
        rdma_ports = args.rdma_comm_ports.split(",") if args.rdma_comm_ports else None
        queue_port = args.engine_worker_queue_port
        return {
            "role": args.splitwise_role,
            "start_id": self.start_id,
            "max_num_seqs": args.max_num_seqs,
            "port": args.port,
            "metrics_port": args.metrics_port or args.port,
            "connector_port": self.receiver.port,
            # FastDeploy's Go router refuses null for an instance of a pair.
            **({"engine_worker_queue_port": queue_port} if queue_port else {}),
            "rdma_ports": rdma_ports,
            "device_ids": ["0"],
            "transfer_protocol": self._transfer_protocols,
            "tp_size": args.tensor_parallel_size,
            "is_paused": self.control.is_paused,
            "version": self.control.version,
            "connected_decodes": [],
            "cache_salt": True,  # says that this engine supports ``cache_salt``; FastDeploy's does not
            **({"kv_events": kv_events} if kv_events else {}),
            **self._dialect.registration,
        }


def _load_model(args: EngineArgs, folder: str) -> tuple[ModelRunner, int]:
    """Load the model and allocate the KV memory.

    Returns:
        The runner, and the number of KV blocks.

    Raises:
        ConfigError: the checkpoint cannot be used with these arguments.
    """
    config = load_model_config(folder)
    check_length(folder, config, args.max_model_len)
    device = choose_device(args.device)
    runner = ModelRunner(
        folder,
        config,
        device,
        choose_dtype(args.dtype, config),
        args.block_size,
        has_dynamic_weights=args.dynamic_load_weight,
    )
    if device == "cpu":
        num_blocks = _prepare_kv(args, runner)
    else:
        # On a thread of its own, because CUDA's libraries allocate memory for each thread. When this thread has ended,
        # the engine's thread gets its memory.
        with ThreadPoolExecutor(1) as thread:
            num_blocks = thread.submit(_prepare_kv, args, runner).result()
    if args.retrieval:
        runner.enable_retrieval(args.retrieval, args.max_num_seqs, args.max_model_len)
        log.info("Sparse attention: %s", args.retrieval)
        if advice := args.retrieval.explain_block_size():
            log.warning("%s", advice)
    return runner, num_blocks


def _prepare_kv(args: EngineArgs, runner: ModelRunner) -> int:
    """Allocate the KV memory and check that the model runs; return the number of KV blocks."""
    num_blocks = choose_num_blocks(args, runner)
    runner.allocate_kv(num_blocks)
    runner.try_out()
    return num_blocks


def _list_cache_settings(args: EngineArgs, pool: PoolConfig | None, num_blocks: int, dtype: str) -> dict[str, object]:
    """Return the settings of the KV cache with FastDeploy's names, for a metric."""
    named = args.kvcache_storage_backend
    if pool is not None and ":" in str(named):
        named = describe_url(pool)  # leaves out secret parts of the URL
    return {
        "block_size": args.block_size,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "num_gpu_blocks_override": args.num_gpu_blocks_override,
        "total_block_num": num_blocks,
        "cache_dtype": dtype,
        "enable_prefix_caching": args.enable_prefix_caching,
        "enable_output_caching": args.enable_output_caching,
        "kvcache_storage_backend": named,
        "cache_transfer_protocol": ",".join(args.cache_transfer_protocol),
        "rdma_comm_ports": args.rdma_comm_ports,
    }


def _make_scheduler(
    args: EngineArgs, num_blocks: int, groups: Sequence[Group], events: CacheEvents | None, *, has_pool: bool
) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, events),
        args.block_size,
        args.max_num_seqs,
        args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        prefix_caching=args.enable_prefix_caching,
        pool=has_pool,
        groups=groups,
    )


def _open_pool(config: PoolConfig, runner: ModelRunner, metrics: EngineMetrics) -> BlockPool:
    """Open the pool. The pool's threads get a lower priority than the threads that compute."""
    namespace = quantised_namespace(runner.namespace, config.kv)
    return in_background(partial(open_pool, config, namespace, metrics.registry, facts=runner.facts))
