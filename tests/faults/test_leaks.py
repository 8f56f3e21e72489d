"""After a failure of any call of a store, all resources are released: blocks, buffers, memory, threads."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from prometheus_client import CollectorRegistry

from kvstore_backend.backend import HEADROOM_BYTES, Span, Status, StorageBackend
from kvstore_backend.config import MemorySettings, PoolConfig
from kvstore_backend.pool import BlockPool, open_backend
from kvstore_backend.resharding.gather import _Buffers
from kvstore_backend.staging import KVTensors, StagedMemory, StandInDevice, Step, Stream
from kvstore_backend.staging.ring import Ring
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.transfers import DirectMemory, Event, Outcome, TransferMemory, Transfers
from kvstore_backend.wrappers import guarded
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend
from kvstore_backend.wrappers.tiered import TieredBackend
from kvstore_backend.wrappers.write_behind import WriteBehindBackend
from tests.faults.blocks import NAMESPACE, conversation
from tests.faults.nth_call import How, NthCall
from tests.support.memory import Memory
from tests.support.strict_registration import StrictStore
from tests.support.waiting import wait_until

BLOCKS, NBYTES = 6, 64
HASHES = conversation(0, BLOCKS)
# More than the number of calls in each of these tests.
MANY = 1000


@pytest.fixture(autouse=True)
def _brief_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "_FIRST_PAUSE_SECONDS", 0.005)
    monkeypatch.setattr(guarded, "_MAX_PAUSE_SECONDS", 0.005)


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Assert that the numbers of our threads and of open files do not grow."""
    before, files = pool_threads(), os.listdir("/proc/self/fd")
    yield
    gc.collect()
    wait_until(lambda: pool_threads() <= before, "the end of all threads", 30)
    assert len(os.listdir("/proc/self/fd")) <= len(files)


def pool_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(("pool-", "staging"))}


class Bench:
    """A stack over stores of which one call fails."""

    def __init__(self, number: int, how: How) -> None:
        self.strict = StrictStore(MemoryStore(1 << 20))
        self.store = NthCall(self.strict, number, how)
        deadline = 0.05 if how == "hangs" else 60.0
        self.deadlines = Deadlines(deadline, deadline, register_seconds=deadline)

    def guard(self, store: StorageBackend | None = None) -> GuardedBackend:
        checked = CheckedBackend(store or self.store)
        guard = GuardedBackend(lambda: checked, self.deadlines)
        assert guard.wait_ready(30)
        return guard


def for_each_call(how: How, run: Callable[[Bench], None]) -> None:
    """Call ``run`` once for each of its calls of the store, with a failure of this call."""
    sound = Bench(MANY, "raises")  # a long deadline, so that a busy machine has no effect
    run(sound)
    assert 4 < sound.store.count < MANY
    for number in range(sound.store.count):
        bench = Bench(number, how)
        run(bench)
        assert bench.store.is_closed


HOW = pytest.mark.parametrize("how", ["raises", "hangs"])


def direct(memory: Memory, _: BlockPool) -> TransferMemory:
    return DirectMemory(
        lambda blocks: [(Span(memory.address + block * NBYTES, NBYTES),) for block in blocks], lambda blocks: None
    )


def staged(_: Memory, pool: BlockPool) -> TransferMemory:
    return StagedMemory(
        KVTensors([torch.zeros(BLOCKS, NBYTES, dtype=torch.uint8)], BLOCKS),
        pool,
        buffer_bytes=2 * (NBYTES + HEADROOM_BYTES),
    )


@HOW
@pytest.mark.parametrize("open_memory", [direct, staged])
def test_each_block_of_a_transfer_is_released_once(
    how: How, open_memory: Callable[[Memory, BlockPool], TransferMemory]
) -> None:
    def run(bench: Bench) -> None:
        memory, ended = Memory(BLOCKS * NBYTES), Counter[str]()
        pool = BlockPool(bench.guard(), NAMESPACE)
        pool.register(memory.address, memory.nbytes)
        window = open_memory(memory, pool)
        transfers = Transfers(pool, window, lambda callback: callback())

        def on_end(outcome: Outcome) -> None:
            ended["end"] += 1

        def on_release() -> None:
            ended["release"] += 1

        for number, name in enumerate(("save", "load", "load"), 1):
            getattr(transfers, name)(HASHES, range(BLOCKS), on_end, on_release)
            wait_until(lambda number=number: ended["end"] == number, "the end of a transfer")  # type: ignore[misc]
        bench.store.let_go()
        wait_until(lambda: ended["release"] == 3, "all blocks to be released")
        assert pool.wait_for_late_calls(30)
        for ring in rings_of(window):
            wait_until(lambda ring=ring: len(ring._free) == 2, "all buffers to be free")  # type: ignore[misc]
            ring.close()
        pool.unregister(memory.address, memory.nbytes)
        guard = pool.stack
        assert isinstance(guard, GuardedBackend)
        assert guard.wait_ready(30)
        wait_until(lambda: len(bench.strict.registered.regions) <= 1, "all but the headers' to be unregistered")
        transfers.close()
        wait_until(lambda: bench.store.is_closed, "the store to be closed")
        assert ended == {"end": 3, "release": 3}

    for_each_call(how, run)


def rings_of(memory: TransferMemory) -> list[Ring]:
    return [memory._incoming.ring, memory._outgoing.ring] if isinstance(memory, StagedMemory) else []


def behind(bench: Bench) -> StorageBackend:
    return WriteBehindBackend(bench.guard(), arena_bytes=1 << 12, retry_seconds=0.02, flush_seconds=0.1)


def tiered_through(bench: Bench) -> StorageBackend:
    return TieredBackend(bench.guard(MemoryStore(1 << 20)), bench.guard())


def tiered_fast(bench: Bench) -> StorageBackend:
    return TieredBackend(bench.guard(), bench.guard(MemoryStore(1 << 20)))


def tiered_back(bench: Bench) -> StorageBackend:
    return TieredBackend(bench.guard(MemoryStore(1 << 20)), bench.guard(), "back")


def alone(bench: Bench) -> StorageBackend:
    return bench.guard()


@HOW
@pytest.mark.parametrize("open_stack", [alone, behind, tiered_through, tiered_fast, tiered_back])
def test_memory_headers_and_late_calls_are_released(how: How, open_stack: Callable[[Bench], StorageBackend]) -> None:
    def run(bench: Bench) -> None:
        memory, keys = Memory(BLOCKS * NBYTES), [NAMESPACE.key(each) for each in HASHES]
        values = [(Span(memory.address + i * NBYTES, NBYTES),) for i in range(BLOCKS)]
        stack = open_stack(bench)
        stack.register(memory.address, memory.nbytes)
        stack.put(keys, values)
        stack.flush_writes(0.3)
        stack.exists(keys)
        stack.get(keys, values)
        stack.remove(keys[:1])
        bench.store.let_go()
        assert stack.wait_for_late_calls(30)
        stack.unregister(memory.address, memory.nbytes)
        writer = stack if isinstance(stack, WriteBehindBackend) else getattr(stack, "write_behind", None)
        if writer is not None:
            stack.flush_writes(30)
            wait_until(lambda: writer.queued_bytes == 0, "the arena to be empty")
            assert writer.queued_blocks == 0
        stack.close()

    for_each_call(how, run)


@HOW
def test_memory_for_gathering_is_released(how: How) -> None:
    def run(bench: Bench) -> None:
        guard = bench.guard()
        buffers = _Buffers(guard)
        for nbytes in (100, 20 << 20):
            buffer = buffers.take(nbytes)
            statuses = guard.get([NAMESPACE.key(HASHES[0])], [(Span(buffer.ctypes.data + 128, 64),)])
            buffers.give_back(buffer, maybe_late=Status.FAILED in statuses)
            bench.store.let_go()
            wait_until(lambda: len(buffers._free) == 1, "the buffer to be back")
            assert guard.wait_ready(30)
        guard.close()

    for_each_call(how, run)


class NthDevice(StandInDevice):
    """The host as a device whose n-th allocation, opening of a stream or queueing of a copy raises an exception."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.count = number, 0

    def _go_wrong(self) -> None:
        self.count += 1
        if self.count - 1 == self.number:
            raise MemoryError("the device has no room")

    def open_stream(self) -> Stream:
        self._go_wrong()
        stream = super().open_stream()
        queue = stream.queue

        def queue_or_fail(steps: Sequence[Step], after: Event | None) -> Event:
            self._go_wrong()
            return queue(steps, after)

        stream.queue = queue_or_fail  # type: ignore[method-assign]
        return stream

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._go_wrong()
        return super().allocate(nbytes)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        self._go_wrong()
        return super().allocate_host(nbytes)


def test_buffers_are_released_after_a_failure_of_any_call_of_the_device(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")  # a log record of an exception would hold references to its frames
    number = count = 0
    while number <= count:
        device = NthDevice(number)
        move_blocks_by(device)
        number, count = number + 1, max(count, device.count)
    assert number > 12


def move_blocks_by(device: NthDevice) -> None:
    """Save and load if memory can be staged; then assert that all buffers are free."""
    strict, ended = StrictStore(MemoryStore(1 << 20)), list[int]()
    pool = BlockPool(strict, NAMESPACE)
    kv = KVTensors([torch.zeros(BLOCKS, NBYTES, dtype=torch.uint8)], BLOCKS)
    try:
        memory = StagedMemory(kv, pool, device=device, buffer_bytes=2 * (NBYTES + HEADROOM_BYTES))
    except MemoryError:
        assert not strict.registered.regions
        return
    transfers = Transfers(pool, memory, lambda callback: callback())
    for number, name in enumerate(("save", "load"), 1):
        getattr(transfers, name)(
            HASHES, range(BLOCKS), lambda outcome: ended.append(outcome.count), lambda: ended.append(-1)
        )
        wait_until(lambda number=number: len(ended) == 2 * number, "the end of a transfer")  # type: ignore[misc]
    assert [len(ring._free) for ring in rings_of(memory)] == [2, 2]
    transfers.close()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("has_fast", [False, True])
def test_after_a_failed_opening_of_a_stack_no_store_is_open(
    monkeypatch: pytest.MonkeyPatch, is_async: bool, has_fast: bool
) -> None:
    opened: list[NthCall] = []

    def open_counted(config: PoolConfig) -> NthCall:
        opened.append(NthCall(MemoryStore(1 << 20)))
        return opened[-1]

    def refuse(*_: object) -> None:
        raise RuntimeError("there is no room for this")

    monkeypatch.setattr("kvstore_backend.pool.open_store", open_counted)
    fast = MemorySettings(1 << 20) if has_fast else None
    config, registry = PoolConfig(MemorySettings(1 << 20), async_write=is_async, fast=fast), CollectorRegistry()
    open_backend(config, registry, background=False).close()
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        open_backend(config, registry, background=False)
    with pytest.raises(RuntimeError, match="no room for this"):
        open_backend(config, background=False, on_open=refuse)
    monkeypatch.setattr("kvstore_backend.pool.GuardedBackend", refuse)
    with pytest.raises(RuntimeError, match="no room for this"):
        open_backend(config, background=False)
    assert len(opened) >= 4
    assert all(store.is_closed for store in opened)
