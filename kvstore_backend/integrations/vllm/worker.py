"""The half of the vLLM connector in a worker: moves blocks and reports the results; imports nothing from vLLM.

Ownership of blocks: ``messages.py``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from kvstore_backend.integrations.vllm.adapters import LoadedAdapters
from kvstore_backend.integrations.vllm.clock import HostClock, StepClock
from kvstore_backend.integrations.vllm.counts import Counts
from kvstore_backend.integrations.vllm.memory import GroupedMemory, KVMemory
from kvstore_backend.integrations.vllm.messages import Report, Transfer
from kvstore_backend.integrations.vllm.route import open_route
from kvstore_backend.pool import BlockPool
from kvstore_backend.resharding import PeerShardings, Run, ShardingFamily
from kvstore_backend.transfers import Outcome, ReadLeading, TransferMemory, Transfers

__all__ = ["Loaded", "WorkerHalf"]

logger = logging.getLogger(__name__)

# Maximum time that a step that answers a prefill waits for its saves; with a slower pool, decode computes missing
# blocks. A save that hangs ends earlier, at the pool's own deadlines.
_SAVE_WAIT_SECONDS = 5.0


@dataclass
class Loaded:
    """Loads that ended, by request.

    Attributes:
        requests: all of them.
        blocks: blocks that did not arrive, of requests that use the blocks before them.
        failed: requests that restart in other blocks, because a call that was given up may still write to theirs.
    """

    requests: set[str] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class WorkerHalf:
    """Loads and saves of one worker's blocks.

    Args:
        pool: the pool; ``close`` closes it.
        memory: the worker's KV memory.
        family: family of the pool's namespace; None: blocks of other shardings are not read.
        route: ``memory`` as transfers reach it; default: directly.
        clock: clock of the steps; default: the host's.

    Attributes:
        adapters: LoRA adapters that the engine has read; blocks are moved only for those with unchanged files.
    """

    def __init__(
        self,
        pool: BlockPool,
        memory: KVMemory | GroupedMemory,
        family: ShardingFamily | None = None,
        *,
        route: TransferMemory | None = None,
        clock: StepClock | None = None,
    ) -> None:
        self.namespace = pool.namespace
        self.family = family
        self.adapters = LoadedAdapters()
        self._peers = PeerShardings(pool, family) if family else None
        self._memory = memory
        self._pool = pool
        self._counts = Counts(pool.namespace.digest)
        self._lock = threading.Condition()  # guards the next three; notified of the end of saves
        self._saving: set[int] = set()
        self._loaded = Loaded()
        self._report = Report()
        self._clock = clock or HostClock()
        route = route or open_route("direct", memory, pool)
        self._transfers = Transfers(pool, route, self._run_with_lock, start_thread=memory.bind_thread)

    def begin_step(self) -> None:
        """Record the begin of a step of the engine."""
        self._clock.begin()

    def start_loads(self, loads: Iterable[Transfer]) -> None:
        """Begin to read; ``take_outcomes`` reports the end."""
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
                logger.exception("Loading %d blocks could not begin; they will be computed", len(load.blocks))
                with self._lock:
                    self._on_release(load)
                    self._on_load_end(load, Outcome(0, 0.0, True))

    def start_saves(self, saves: Iterable[Transfer]) -> None:
        """Begin to write blocks with complete contents."""
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
                logger.exception("Saving %d blocks could not begin", len(save.blocks))
                self._drop_save(save)

    def wait_for_saves(self, numbers: Iterable[int]) -> bool:
        """Wait until others can read the blocks of these saves; return False if it takes too long, or failed."""
        awaited, end = set(numbers), time.monotonic() + _SAVE_WAIT_SECONDS
        if not awaited:
            return True
        with self._lock:
            if not self._lock.wait_for(lambda: not awaited & self._saving, _SAVE_WAIT_SECONDS):
                logger.warning("Blocks took more than %g s to the pool; decode may not find them", _SAVE_WAIT_SECONDS)
                return False
        return self._pool.flush_writes(max(0.0, end - time.monotonic()))

    def end_step(self, num_tokens: int) -> None:
        """Record that all work of a step was begun; ``num_tokens`` is 0 if it has no parts of prompts.

        The scheduler receives the step's duration, and compares loads with it.
        """
        self._clock.end(num_tokens)

    def take_outcomes(self) -> tuple[Loaded, Report]:
        """Return the loads that ended since the last call, and the report to the scheduler; all of them are counted."""
        with self._lock:
            loaded, self._loaded = self._loaded, Loaded()
            report, self._report = self._report, Report()
        report.steps = self._clock.take_steps()
        report.adapters = {adapter: [digest] for adapter, digest in self.adapters.take_news().items()}
        return loaded, report

    def take_counts(self) -> dict[str, dict[str, float]]:
        """Return all counts since the last call."""
        return self._counts.pop_counts()

    def close(self) -> None:
        """Give running saves a short time, drop the rest, and leave the pool."""
        self._transfers.close()

    def _drop_save(self, save: Transfer) -> None:
        """Release the blocks of a save that has not begun."""
        self._counts.add_operation("save", dropped=len(save.blocks))
        with self._lock:
            self._saving.discard(save.number)
            self._report.ended[save.number] += 1

    def _run_with_lock(self, event: Callable[[], None]) -> None:
        with self._lock:
            event()

    def _read_run(self, load: Transfer, run: Run, read_leading: ReadLeading) -> int:
        """Read blocks, some of which come from another sharding; block sizes are equal, so names are equal too."""
        assert self._peers is not None, "the scheduler found blocks of another sharding without a family"
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
            # vLLM takes no single blocks back from a request of several groups: it restarts in others. A load without
            # blocks is of a request that did not get the blocks that it needs.
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
        # "ok" means that the pool has the block now; it had many before, so a number of bytes would be too large.
        missing = len(save.blocks) - outcome.count
        self._saving.discard(save.number)
        self._lock.notify_all()
        self._counts.add_operation("save", outcome.seconds, ok=outcome.count, failed=missing)

    def _on_release(self, transfer: Transfer) -> None:
        self._report.ended[transfer.number] += 1
