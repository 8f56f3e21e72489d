"""Half of the vLLM connector in a worker: moves blocks and reports the results. Imports nothing from vLLM.

``messages.py`` has the rule for the ownership of blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from kvstore_backend.integrations.vllm.adapters import LoadedAdapters
from kvstore_backend.integrations.vllm.clock import DeviceClock, HostClock
from kvstore_backend.integrations.vllm.counts import Counts
from kvstore_backend.integrations.vllm.memory import GroupedMemory, KVMemory
from kvstore_backend.integrations.vllm.messages import Report, Transfer
from kvstore_backend.integrations.vllm.route import open_route
from kvstore_backend.pool import BlockPool
from kvstore_backend.resharding import PeerShardings, Run, ShardingFamily
from kvstore_backend.transfers import Outcome, ReadLeading, TransferMemory, Transfers

__all__ = ["Loaded", "WorkerHalf"]

logger = logging.getLogger(__name__)

# Maximum time for which the last step of a prefill request waits for its saves. With a slower pool, decode computes the
# missing blocks. A save that hangs ends earlier, at the pool's own deadlines.
_SAVE_WAIT_SECONDS = 5.0


@dataclass
class Loaded:
    """Requests and blocks of the loads that ended in one step.

    Attributes:
        requests: ids of all requests with loads that ended.
        blocks: ids of the blocks that did not arrive, for requests that can use the leading blocks that arrived.
        failed: ids of requests that must restart in other blocks, because a call that missed its deadline may still
            write to their blocks, or because the leading blocks are not useful alone (a model with several groups).
    """

    requests: set[str] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class WorkerHalf:
    """Loads and saves the blocks of one worker.

    Args:
        pool: the pool; ``close`` closes it.
        memory: the worker's KV memory.
        family: family of shardings that are read, or None if only blocks of the own sharding are read.
        route: object with which transfers reach ``memory``, or None for the direct route.
        clock: clock that measures the steps, or None for the host's clock.

    Attributes:
        adapters: LoRA adapters that vLLM has read. Blocks of an adapter are moved only if its files have not changed.
    """

    def __init__(
        self,
        pool: BlockPool,
        memory: KVMemory | GroupedMemory,
        family: ShardingFamily | None = None,
        *,
        route: TransferMemory | None = None,
        clock: HostClock | DeviceClock | None = None,
    ) -> None:
        self.namespace = pool.namespace
        self.family = family
        self.adapters = LoadedAdapters()
        self._peers = PeerShardings(pool, family) if family else None
        self._memory = memory
        self._pool = pool
        self._counts = Counts(pool.namespace.digest)
        self._lock = threading.Condition()  # guards the next three attributes; notified when a save ends
        self._saving: set[int] = set()
        self._loaded = Loaded()
        self._report = Report()
        self._clock: HostClock | DeviceClock = clock or HostClock()
        route = route or open_route("direct", memory, pool)
        self._transfers = Transfers(pool, route, self._run_with_lock, start_thread=memory.bind_thread)

    def begin_step(self) -> None:
        """Record the beginning of a step of the engine, to measure the step."""
        self._clock.begin()

    def start_loads(self, loads: Iterable[Transfer]) -> None:
        """Begin to load blocks; ``take_outcomes`` reports the end of each load."""
        for load in loads:
            try:
                self._transfers.load(
                    load.names,
                    load.blocks,
                    partial(self._on_load_end, load),
                    partial(self._on_release, load),
                    decide=partial(self._read_run, load, load.run) if load.run else None,
                )
            except Exception:
                logger.exception("Loading %d blocks could not be started; they will be computed", len(load.blocks))
                with self._lock:
                    self._on_release(load)
                    self._on_load_end(load, Outcome(0, 0.0, True))

    def start_saves(self, saves: Iterable[Transfer]) -> None:
        """Begin to save full blocks; ``take_outcomes`` reports the end of each save."""
        for save in saves:
            if save.adapter is not None and not self.adapters.is_unchanged(save.adapter):
                self._drop_save(save)
                continue
            with self._lock:
                self._saving.add(save.number)
            try:
                self._transfers.save(
                    save.names, save.blocks, partial(self._on_save_end, save), partial(self._on_release, save)
                )
            except Exception:
                logger.exception("Saving %d blocks could not be started", len(save.blocks))
                self._drop_save(save)

    def wait_for_saves(self, numbers: Iterable[int]) -> bool:
        """Wait until other clients can read the blocks of the saves ``numbers``; False after ``_SAVE_WAIT_SECONDS``."""
        awaited, end = set(numbers), time.monotonic() + _SAVE_WAIT_SECONDS
        if not awaited:
            return True
        with self._lock:
            if not self._lock.wait_for(lambda: not awaited & self._saving, _SAVE_WAIT_SECONDS):
                logger.warning(
                    "Saving the blocks of a prompt took more than %g s; the decode instance may not find them",
                    _SAVE_WAIT_SECONDS,
                )
                return False
        return self._pool.flush_writes(max(0.0, end - time.monotonic()))

    def end_step(self, num_tokens: int) -> None:
        """Record that all work of a step was queued. The scheduler learns from this how fast prompts are computed.

        ``num_tokens`` is the number of tokens in the step. It is 0 if the step computes no prompt tokens; such a step
        is not measured.
        """
        self._clock.end(num_tokens)

    def take_outcomes(self) -> tuple[Loaded, Report]:
        """Return the loads that ended since the last call, and the report to the scheduler.

        ``take_counts`` includes all transfers that are reported here.
        """
        with self._lock:
            loaded, self._loaded = self._loaded, Loaded()
            report, self._report = self._report, Report()
        report.steps = self._clock.take_steps()
        report.adapters = {adapter: [digest] for adapter, digest in self.adapters.take_digests().items()}
        return loaded, report

    def take_counts(self) -> dict[str, dict[str, float]]:
        """Return the counts of blocks, bytes and seconds since the last call, by namespace."""
        return self._counts.pop_counts()

    def close(self) -> None:
        """Wait a short time for running saves, drop the saves that have not begun, and close the pool."""
        self._transfers.close()

    def _drop_save(self, save: Transfer) -> None:
        """Count a save that has not begun as dropped, and report its end, so that the scheduler unpins its blocks."""
        self._counts.add_operation("save", dropped=len(save.blocks))
        with self._lock:
            self._saving.discard(save.number)
            self._report.ended[save.number] += 1

    def _run_with_lock(self, event: Callable[[], None]) -> None:
        with self._lock:
            event()

    def _read_run(self, load: Transfer, run: Run, read_leading: ReadLeading) -> int:
        """Read the blocks of ``load``, some of them from the sharding in ``run``; return how many were read.

        Both shardings have the same block size, so blocks have the same names in both.
        """
        assert self._peers is not None, "the scheduler planned a load that this worker cannot do"
        return read_leading(len(load.blocks), self._peers.reader_of(run, load.names, 0, load.names))

    def _on_load_end(self, load: Transfer, outcome: Outcome) -> None:
        if load.adapter is not None and not self.adapters.is_unchanged(load.adapter):
            outcome = replace(outcome, count=0)  # the engine may read other weights for the rest of the prompt
        missing = load.blocks[outcome.count :]
        nbytes = self._memory.count_bytes(load.blocks[: outcome.count])
        self._counts.add_operation("load", outcome.seconds, nbytes, ok=outcome.count, failed=len(missing))
        num_units = load.num_units if load.num_units and not missing else outcome.count
        self._report.loads.append((num_units, outcome.seconds))
        if load.run:
            self._counts.add_operation("gather", ok=load.run.count_foreign(outcome.count))
        self._loaded.requests.add(load.request_id)
        if load.num_units:
            # In a model with several groups vLLM cannot use a part of the blocks, so the request restarts in other
            # blocks. A load without blocks belongs to a request to which vLLM gave too few blocks.
            if missing or not load.blocks:
                self._report.short.add(load.request_id)
                self._loaded.failed.add(load.request_id)
            return
        if missing:
            self._report.short.add(load.request_id)
        if outcome.is_released:
            self._loaded.blocks.update(missing)
        else:
            self._loaded.failed.add(load.request_id)

    def _on_save_end(self, save: Transfer, outcome: Outcome) -> None:
        # "ok" means that the pool has the block now. It may have had the block before, so bytes are not counted.
        missing = len(save.blocks) - outcome.count
        self._saving.discard(save.number)
        if not missing:
            self._report.saved[save.number] += 1
        self._lock.notify_all()
        self._counts.add_operation("save", outcome.seconds, ok=outcome.count, failed=missing)

    def _on_release(self, transfer: Transfer) -> None:
        self._report.ended[transfer.number] += 1
