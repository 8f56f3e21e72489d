"""An engine without HTTP: a test submits prompts and gets tokens."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from engine.core import EngineCore, Listener
from engine.model.checkpoint import load_model_config
from engine.model.model_runner import ModelRunner
from engine.pool.kv_codec import quantised_namespace
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.cache_events import CacheEvents
from engine.scheduling.cache_hints import CacheHint
from engine.scheduling.request import Request, SamplingParams, TokenOutput
from engine.scheduling.request import Sequence as EngineSequence
from engine.scheduling.retrieval_config import RetrievalConfig
from engine.scheduling.scheduler import Scheduler
from engine.telemetry.metrics import EngineMetrics
from kvstore_backend import BlockPool, StorageBackend
from kvstore_backend.transfers import DirectMemory
from kvstore_backend.wrappers.guarded import GuardedBackend
from tests.support.device import TORCH_DEVICE
from tests.support.waiting import wait_until

__all__ = ["Engine", "SubmittedRequest"]

_DEADLINE_SECONDS = 60.0


class SubmittedRequest:
    """One request in the engine, and its outputs."""

    def __init__(self, sequence: EngineSequence) -> None:
        self.sequence = sequence
        self.times_saved = 0
        self.saved = threading.Event()
        self._outputs: queue.SimpleQueue[TokenOutput] = queue.SimpleQueue()
        self._received: list[TokenOutput] = []

    @property
    def listener(self) -> Listener:
        return Listener(self._outputs.put, self._on_saved)

    def next(self) -> TokenOutput:
        output = self._outputs.get(timeout=_DEADLINE_SECONDS)
        self._received.append(output)
        return output

    def wait(self) -> list[int]:
        """Wait for the end of the request; return all its tokens."""
        while not (self._received and self._received[-1].finish_reason):
            self.next()
        return [output.token_id for output in self._received if output.token_id is not None]

    @property
    def finish_reason(self) -> str | None:
        return self._received[-1].finish_reason

    def _on_saved(self) -> None:
        self.times_saved += 1
        self.saved.set()


class Engine:
    """An ``EngineCore`` of a checkpoint. Small blocks and budgets make prompts cross the boundaries of both."""

    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_num_seqs: int = 4,
        budget: int = 24,
        max_model_len: int | None = None,
        store: StorageBackend | None = None,
        open_store: Callable[[], StorageBackend] | None = None,
        save_outputs: bool = False,
        wait_for_pool: bool = True,
        start: bool = True,
        retrieval: RetrievalConfig | None = None,
        kv: str = "",
        has_dynamic_weights: bool = False,
        events: CacheEvents | None = None,
    ) -> None:
        self.block_size = block_size
        self.runner = ModelRunner(
            str(folder),
            load_model_config(str(folder)),
            TORCH_DEVICE,
            torch.float32,
            block_size,
            has_dynamic_weights=has_dynamic_weights,
        )
        self.runner.allocate_kv(num_blocks)
        if retrieval:
            self.runner.enable_retrieval(retrieval, max_num_seqs, num_blocks * block_size)
        self.blocks = BlockManager(num_blocks, events)
        self.scheduler = Scheduler(
            self.blocks,
            block_size,
            max_num_seqs,
            budget,
            max_model_len=max_model_len or num_blocks * block_size // 4 // len(self.runner.groups.members),
            prefix_caching=True,
            pool=bool(store or open_store),
            groups=self.runner.groups.groups,
        )
        self.metrics = EngineMetrics()
        backend = GuardedBackend(open_store) if open_store else store
        self.core = EngineCore(
            self.runner,
            self.scheduler,
            self.metrics,
            pool=BlockPool(backend, quantised_namespace(self.runner.namespace, kv)) if backend else None,
            save_outputs=save_outputs,
        )
        self._names = map(str, itertools.count())
        if start:
            self.core.start()
        if backend and wait_for_pool:
            self.wait_for_pool()

    @property
    def late_calls_hold_blocks(self) -> bool:
        """Whether late calls hold blocks: they do if the pool accesses KV memory directly, without staging buffers."""
        assert self.core._connector
        return isinstance(self.core._connector._transfers._memory, DirectMemory)

    def wait_for_pool(self) -> None:
        wait_until(lambda: self.metric("kvstore_pool_open"), "joining the pool", _DEADLINE_SECONDS)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def begin(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        salt: str = "",
        hints: tuple[CacheHint, ...] = (),
        **params: Any,
    ) -> SubmittedRequest:
        """Submit a prompt. Sampling is greedy unless ``params`` change it."""
        sampling = SamplingParams(max_tokens, **{"temperature": 0.0, **params})
        request = Request(next(self._names), tuple(prompt), sampling, salt, hints=hints)
        sequence = EngineSequence(request, self.block_size)
        submitted = SubmittedRequest(sequence)
        self.core.submit(sequence, submitted.listener)
        return submitted

    def begin_at_once(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **more: Any
    ) -> list[SubmittedRequest]:
        """Submit prompts so that the engine has all of them before its next step, even if this thread is slow."""
        are_submitted = threading.Event()
        self.core.call(are_submitted.wait)
        submitted = [self.begin(prompt, max_tokens, **more) for prompt in prompts]
        are_submitted.set()
        return submitted

    def answer(self, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> SubmittedRequest:
        """Submit a prompt, and wait until it has ended and all its blocks are saved."""
        submitted = self.begin(prompt, max_tokens, **more)
        submitted.wait()
        assert submitted.saved.wait(_DEADLINE_SECONDS)
        return submitted

    def wait_until_idle(self) -> None:
        """Wait until no request holds a block: none waits, loads, runs or is being saved."""
        wait_until(
            lambda: self.blocks.num_available == self.blocks.num_blocks and not self.scheduler.waiting,
            f"all blocks to come back: {self.scheduler}",
            _DEADLINE_SECONDS,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.core.stop()
