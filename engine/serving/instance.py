"""One instance: the parts that its arguments configure, and its registration at the router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import socket
import time
from collections.abc import AsyncIterator
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
from engine.generation import BROKEN, Generations
from engine.model.memory_budget import choose_num_blocks
from engine.model.model_runner import (
    ModelRunner,
    check_length,
    choose_device,
    choose_dtype,
    load_model_config,
    load_tokenizer,
)
from engine.model.out_of_memory import LEAVE_ROOM_BESIDE, told_if_too_large
from engine.pool.background import in_background
from engine.pool.kv_codec import quantised_namespace
from engine.pool.staging import open_direct, stage_handovers
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.scheduler import Scheduler
from engine.serving.control import Control
from engine.serving.registration import send_heartbeats
from engine.serving.surroundings import Surroundings
from engine.telemetry.metrics import EngineMetrics
from engine.telemetry.tracing import open_tracer
from kvcommon.addresses import find_own_address
from kvstore_backend import BlockPool, PoolConfig, open_pool
from kvstore_backend.config import MooncakeSettings, describe_url, named_protocol, named_rdma_devices
from kvstore_backend.manifest import Manifest

__all__ = ["Instance"]

log = logging.getLogger(__name__)

# The time after its last heartbeat when a router has forgotten an instance.
_FORGOTTEN_SECONDS = 30.0


class Instance:
    """All parts of one serving process, built from its arguments; the model is loaded here.

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
        """Take ownership of ``connector``, the bound socket that prefill instances connect to.

        ``dialect`` is the form of requests to a prefill/decode pair; None: FastDeploy's.
        """
        self.args = args
        self.start_id = secrets.token_hex(8)
        """An id by which the router distinguishes this process from earlier ones with the same address."""
        self._connector = connector
        self._dialect = dialect or PairDialect()
        self._registered_at = -math.inf
        self.router = around.router
        self._router_token = around.router_token
        runner, num_blocks = _load_model(args, around.checkpoint)
        self.metrics = EngineMetrics()
        self.tracer = open_tracer(args.trace_receiver) if args.trace_receiver else None
        pool = _open_pool(around.pool, runner, self.metrics) if around.pool else None
        self.metrics.describe_cache(_list_cache_settings(args, around.pool, num_blocks, runner.namespace.kv_dtype))
        scheduler = _make_scheduler(args, num_blocks, has_pool=pool is not None)
        with told_if_too_large(f"blocks on their way to the pool; {LEAVE_ROOM_BESIDE}", any_failure=False):
            self.core = EngineCore(runner, scheduler, self.metrics, pool=pool, save_outputs=args.enable_output_caching)
        tokenizer = load_tokenizer(around.checkpoint)
        self._transfer_protocols = list(args.cache_transfer_protocol)
        self.memory = self._open_block_memory(runner, named_rdma_devices(around.pool))
        self.receiver = HandoverReceiver(self.memory)
        self.generations = Generations(
            self.core, tokenizer, args.splitwise_role, args.block_size, self.receiver, self.memory, self.tracer
        )
        self._changed = asyncio.Event()
        pool_store = around.pool.store if around.pool else None
        pool_protocol = pool_store.protocol if isinstance(pool_store, MooncakeSettings) else ""
        self.control = Control(
            self.core,
            runner,
            self.generations,
            self._changed.set,
            has_dynamic_weights=args.dynamic_load_weight,
            frees_kv=runner.device.type != "cpu" or "rdma" not in (pool_protocol, *self._transfer_protocols),
        )
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

    def _open_block_memory(self, runner: ModelRunner, rdma_devices: str) -> BlockMemory | None:
        """Open the blocks that direct hand-overs read and write; None if hand-overs are off or impossible."""
        if self.args.splitwise_role == "mixed":
            return None
        try:
            protocol = choose_protocol(self.args.cache_transfer_protocol, named_protocol())
            self._transfer_protocols = list_protocols(self.args.cache_transfer_protocol, protocol)
            transfer = Transfer(self._own_address(), protocol, rdma_devices)
            if runner.device.type == "cpu":
                return BlockMemory(self.core, runner, transfer, open_direct(runner, transfer))
            lent_bytes = self.args.handover_memory if self.args.splitwise_role == "decode" else 0
            with told_if_too_large("the host memory of hand-overs; lower --handover-memory", any_failure=False):
                memory = stage_handovers(runner, transfer, lent_bytes)
            return BlockMemory(self.core, runner, transfer, memory, lent_bytes // runner.shape.nbytes)
        except (TransferUnavailable, OSError) as exc:
            log.warning("Prompts are handed over through the pool only, not directly: %s", exc)
            return None

    def describe_blocks(self) -> dict[str, Any]:
        """Describe the namespace of this instance's blocks, its pool, and how many blocks its own cache has."""
        manifest = Manifest((self._pool or self._runner).namespace.fields, self._runner.facts)
        state = None
        if (pool := self._pool) is not None:
            state = {"ready": pool.is_ready, "detail": pool.health().detail, "url": self._pool_url}
        told = {"digest": manifest.digest, "manifest": manifest.to_json(), "pool": state}
        return {**told, "cached_blocks": self.core.count_cached_blocks()}

    def _own_address(self) -> str:
        """Return this machine's address as the other side of a hand-over reaches it."""
        if self.args.host not in ("0.0.0.0", "::"):
            return self.args.host
        return find_own_address(self.router) if self.router else "127.0.0.1"

    @contextlib.asynccontextmanager
    async def run_lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Run engine, connector port and heartbeat as long as the server runs."""
        self.core.start()
        await self.receiver.start_listening(self._connector)
        heartbeat = None
        if self.router:
            sending = send_heartbeats(
                self.router, self.registration_payload, self._changed, self._router_token, self.note_registration
            )
            heartbeat = asyncio.create_task(sending)
        if self.args.splitwise_role == "decode" and not self.router:
            log.warning("This decode instance has no --router: no router sends it requests until it is registered")
        log.info("Ready: %s", self.summary)
        print(f"engine.api_server: ready: {self.summary}", flush=True)
        try:
            yield
        finally:
            if heartbeat:
                heartbeat.cancel()
            await self.receiver.stop_listening()
            await asyncio.to_thread(self.core.stop)
            if self.tracer is not None:
                await asyncio.to_thread(self.tracer.close)

    def note_registration(self) -> None:
        """Record that the router has accepted this instance's registration."""
        self._registered_at = time.monotonic()

    def find_obstacle(self) -> str:
        """Return in one sentence why no router sends requests here, or should; ``""`` if one does."""
        if not self.core.is_alive:
            return "the engine has failed; its log says why"
        if self.control.is_broken:
            return BROKEN
        if self.control.is_paused:
            return "it is paused; POST /v1/resume lets it answer again"
        if self.router and time.monotonic() - self._registered_at > _FORGOTTEN_SECONDS:
            return f"it is not registered at the router {self.router}; the log says why"
        return ""

    def registration_payload(self) -> dict[str, Any]:
        """Return this instance's description for the router (FastDeploy's registration)."""
        args = self.args
        rdma_ports = args.rdma_comm_ports.split(",") if args.rdma_comm_ports else None
        return {
            "role": args.splitwise_role,
            "start_id": self.start_id,
            "max_num_seqs": args.max_num_seqs,
            "port": args.port,
            "metrics_port": args.metrics_port or args.port,
            "connector_port": self.receiver.port,
            "engine_worker_queue_port": args.engine_worker_queue_port or None,
            "rdma_ports": rdma_ports,
            "device_ids": ["0"],
            "transfer_protocol": self._transfer_protocols,
            "tp_size": args.tensor_parallel_size,
            "is_paused": self.control.is_paused,
            "version": self.control.version,
            "connected_decodes": [],
            "cache_salt": True,  # distinguishes it from FastDeploy's instances, which have none
            **self._dialect.registration,
        }


def _load_model(args: EngineArgs, folder: str) -> tuple[ModelRunner, int]:
    """Load the model with its KV memory; return it and the number of KV blocks.

    Raises:
        ConfigError: the checkpoint cannot be used, or not with these arguments.
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
        # CUDA's libraries allocate memory for each thread. When this thread has ended, the next one, the engine's, gets
        # its memory.
        with ThreadPoolExecutor(1) as thread:
            num_blocks = thread.submit(_prepare_kv, args, runner).result()
    if args.retrieval:
        runner.enable_retrieval(args.retrieval, args.max_num_seqs, args.max_model_len)
        log.info("Sparse attention: %s", args.retrieval)
        if advice := args.retrieval.explain_block_size():
            log.warning("%s", advice)
    return runner, num_blocks


def _prepare_kv(args: EngineArgs, runner: ModelRunner) -> int:
    """Make the KV memory and try a step; return the number of KV blocks."""
    num_blocks = choose_num_blocks(args, runner)
    runner.allocate_kv(num_blocks)
    runner.try_out()
    return num_blocks


def _list_cache_settings(args: EngineArgs, pool: PoolConfig | None, num_blocks: int, dtype: str) -> dict[str, object]:
    """Return the settings of the KV cache, by FastDeploy's names."""
    named = args.kvcache_storage_backend
    if pool is not None and ":" in str(named):
        named = describe_url(pool)  # without the secret parts of the URL
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


def _make_scheduler(args: EngineArgs, num_blocks: int, *, has_pool: bool) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks),
        args.block_size,
        args.max_num_seqs,
        args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        prefix_caching=args.enable_prefix_caching,
        pool=has_pool,
    )


def _open_pool(config: PoolConfig, runner: ModelRunner, metrics: EngineMetrics) -> BlockPool:
    """Open the pool on threads with a lower priority than compute."""
    namespace = quantised_namespace(runner.namespace, config.kv)
    return in_background(partial(open_pool, config, namespace, metrics.registry, facts=runner.facts))
