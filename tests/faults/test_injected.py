"""With any fault of a store, its wrappers never return a wrong byte as ``OK``, never raise, and never wait forever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Literal

import hypothesis
import pytest
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from kvstore_backend.backend import Status, StorageBackend
from kvstore_backend.pool import BlockPool, count_leading
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend
from kvstore_backend.wrappers.metered import MeteredBackend
from kvstore_backend.wrappers.tiered import TieredBackend
from kvstore_backend.wrappers.write_behind import WriteBehindBackend
from tests.faults.blocks import NAMESPACE, conversation, right_bytes
from tests.faults.held import Held
from tests.faults.injector import Fault, FaultInjector
from tests.faults.mover import Mover
from tests.support.memory import Memory
from tests.support.waiting import wait_until

NBYTES = 300
# Short, because each example with a hanging call waits for this time. A slow correct call only counts as failed.
DEADLINES = Deadlines(lookup_seconds=0.05, transfer_seconds=0.05)
BLOCKS = conversation(0, 6)


def build_stack(store: StorageBackend, asynchronous: bool) -> StorageBackend:
    guarded = GuardedBackend(lambda: CheckedBackend(store), DEADLINES)
    assert guarded.wait_ready(30)
    metered = MeteredBackend(guarded, CollectorRegistry())
    return WriteBehindBackend(metered, retry_seconds=0.1, flush_seconds=0.1) if asynchronous else metered


def build_tiers(store: StorageBackend, asynchronous: bool) -> StorageBackend:
    return TieredBackend(MemoryStore(2 * NBYTES), build_stack(store, False), "back" if asynchronous else "through")


@contextmanager
def pool_over(injector: FaultInjector, wrap: Callable[[StorageBackend], StorageBackend]) -> Iterator[BlockPool]:
    pool = BlockPool(wrap(injector), NAMESPACE)
    try:
        yield pool
    finally:
        injector.go_on()
        assert pool.wait_for_late_calls(30)
        pool.close()


def save(pool: BlockPool, blocks: Sequence[bytes]) -> list[Status]:
    """Save blocks from memory that changes as soon as the call has returned."""
    sources = [Memory(right_bytes(block, NBYTES)) for block in blocks]
    statuses = pool.save(blocks, [source.value for source in sources])
    for source in sources:
        source.fill(b"\xdd" * NBYTES)
    return statuses


def check_load(pool: BlockPool, blocks: Sequence[bytes]) -> int:
    """Return the number of blocks that could be read; assert that all are right."""
    targets = [Memory(NBYTES) for _ in blocks]
    count = count_leading(pool.get_blocks(blocks, [target.value for target in targets]))
    assert [target.content for target in targets[:count]] == [right_bytes(block, NBYTES) for block in blocks[:count]]
    return count


some_blocks = st.lists(st.sampled_from(range(len(BLOCKS))), min_size=1, max_size=4, unique=True).map(
    lambda numbers: [BLOCKS[number] for number in sorted(numbers)]
)
steps = st.lists(st.tuples(st.sampled_from(["lookup", "load", "save"]), some_blocks), min_size=1, max_size=12)
no_hangs = st.lists(st.sampled_from([fault for fault in Fault if fault is not Fault.HANGS]), max_size=12)
any_faults = st.lists(st.sampled_from(Fault), max_size=8)


def run_step(pool: BlockPool, step: str, blocks: Sequence[bytes]) -> None:
    if step == "lookup":
        assert 0 <= pool.lookup(blocks) <= len(blocks)
    elif step == "load":
        check_load(pool, blocks)
    else:
        assert len(save(pool, blocks)) == len(blocks)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "write-behind"])
@pytest.mark.parametrize("wrap", [build_stack, build_tiers], ids=["one store", "two tiers"])
@hypothesis.settings(max_examples=60)
@hypothesis.given(faults=no_hangs, steps=steps)
def test_no_response_of_a_store_causes_a_wrong_byte_or_an_exception(
    wrap: Callable[[StorageBackend, bool], StorageBackend],
    asynchronous: bool,
    faults: list[Fault],
    steps: list[tuple[str, list[bytes]]],
) -> None:
    injector = FaultInjector(MemoryStore(1 << 20), faults)
    with pool_over(injector, lambda store: wrap(store, asynchronous)) as pool:
        for step, blocks in steps:
            run_step(pool, step, blocks)


@hypothesis.settings(max_examples=25)
@hypothesis.given(faults=any_faults, steps=steps)
def test_each_call_returns_while_the_store_hangs(faults: list[Fault], steps: list[tuple[str, list[bytes]]]) -> None:
    injector = FaultInjector(MemoryStore(1 << 20), [*faults, Fault.HANGS])
    # The test succeeds if all steps end while the calls hang.
    with pool_over(injector, lambda store: build_stack(store, False)) as pool:
        mover = Mover(pool, NBYTES)
        for step, blocks in steps:
            if step == "lookup":
                assert 0 <= pool.lookup(blocks) <= len(blocks)
            elif step == "load":
                loaded = mover.load(blocks)
                assert loaded == [right_bytes(block, NBYTES) for block in blocks[: len(loaded)]]
            else:
                assert 0 <= mover.save(blocks, [right_bytes(block, NBYTES) for block in blocks]) <= len(blocks)
        injector.go_on()
        wait_until(lambda: mover.num_held == 0, "all memory to be released")


@pytest.mark.parametrize("fault", [Fault.FLIPPED_BIT, Fault.SHORT_READ, Fault.STALE, Fault.FALSE_OK])
def test_a_wrong_value_is_a_miss_and_can_be_saved_again_after_its_removal(fault: Fault) -> None:
    injector = FaultInjector(MemoryStore(1 << 20))
    with pool_over(injector, lambda store: build_stack(store, False)) as pool:
        assert all(save(pool, BLOCKS))
        injector.faults = [fault, fault]
        assert check_load(pool, BLOCKS) == 0
        assert pool.lookup(BLOCKS) == 0
        assert all(save(pool, BLOCKS))
        injector.faults = [fault]
        assert check_load(pool, BLOCKS) == len(BLOCKS), "one lie is made good by reading again"


@pytest.mark.parametrize("fault", [Fault.FLIPPED_BIT, Fault.FALSE_OK])
def test_a_value_that_a_write_lost_or_damaged_is_a_miss(fault: Fault) -> None:
    injector = FaultInjector(MemoryStore(1 << 20), [Fault.NOTHING, fault])
    with pool_over(injector, lambda store: build_stack(store, False)) as pool:
        save(pool, BLOCKS)
        assert check_load(pool, BLOCKS) == 0


def test_a_hanging_load_returns_no_block_and_its_memory_is_released_after_its_end() -> None:
    injector = FaultInjector(MemoryStore(1 << 20))
    with pool_over(injector, lambda store: build_stack(store, False)) as pool:
        save(pool, BLOCKS)
        mover = Mover(pool, NBYTES)
        injector.faults = [Fault.HANGS]
        assert mover.load(BLOCKS[:1]) == []
        assert mover.num_held == 1
        assert not pool.wait_for_late_calls(0)
        assert not pool.is_ready
        injector.go_on()
        assert pool.wait_for_late_calls(30)
        wait_until(lambda: mover.num_held == 0, "the release")


def test_all_concurrent_calls_return_while_the_store_hangs() -> None:
    injector = FaultInjector(MemoryStore(1 << 20), [Fault.HANGS] * 50)
    targets = [[Memory(NBYTES) for _ in BLOCKS] for _ in range(30)]
    with pool_over(injector, lambda store: build_stack(store, False)) as pool:

        def load(memory: list[Memory]) -> None:
            pool.get_blocks(BLOCKS, [target.value for target in memory], wait=False)

        callers = [threading.Thread(target=load, args=(memory,)) for memory in targets]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(30)
        assert not any(caller.is_alive() for caller in callers)


class TestMemoryOfBlockingCalls:
    """After a call of ``BlockPool`` returns, the caller may reuse the memory, even if the call hangs in the store."""

    @pytest.fixture
    def held(self) -> Iterator[Held]:
        # Outside of the checks, so that a late put has not computed its checksum when its caller continues.
        backend = Held(CheckedBackend(MemoryStore(1 << 20)))
        yield backend
        backend.let_go()

    @pytest.fixture
    def pool(self, held: Held) -> Iterator[BlockPool]:
        guarded = GuardedBackend(lambda: held, Deadlines(lookup_seconds=30, transfer_seconds=0.05))
        assert guarded.wait_ready(30)
        with BlockPool(guarded, NAMESPACE) as opened:
            yield opened

    @pytest.mark.parametrize("call", ["save", "put_blocks"])
    def test_a_late_put_does_not_store_bytes_that_were_written_after_the_call(
        self, pool: BlockPool, held: Held, call: Literal["save", "put_blocks"]
    ) -> None:
        held.hold()
        sources = [Memory(right_bytes(block, NBYTES)) for block in BLOCKS]
        with ThreadPoolExecutor(1) as thread:
            saving = thread.submit(getattr(pool, call), BLOCKS, [source.value for source in sources])
            assert held.waiting.wait(30)
            wait_until(lambda: not pool.is_ready, "the deadline")
            assert not wait([saving], timeout=0.2).done, "the put may still read"
            held.let_go()
            assert saving.result(30) == [Status.FAILED] * len(BLOCKS)
        for source in sources:
            source.fill(b"\xdd" * NBYTES)
        wait_until(lambda: pool.is_ready, "the pool")
        assert check_load(pool, BLOCKS) == len(BLOCKS), "it was stored as it was, after its deadline"

    def test_a_late_get_writes_nothing_after_the_call(self, pool: BlockPool, held: Held) -> None:
        assert all(save(pool, BLOCKS))
        held.hold()
        targets = [Memory(NBYTES) for _ in BLOCKS]
        with ThreadPoolExecutor(1) as thread:
            loading = thread.submit(pool.get_blocks, BLOCKS, [target.value for target in targets])
            assert held.waiting.wait(30)
            wait_until(lambda: not pool.is_ready, "the deadline")
            assert not wait([loading], timeout=0.2).done, "the get may still write"
            held.let_go()
            answer = loading.result(30)
        assert answer == [Status.FAILED] * len(BLOCKS)
        for target in targets:
            target.fill(b"\xcc" * NBYTES)
        wait_until(lambda: pool.is_ready, "the pool")
        assert check_load(pool, BLOCKS) == len(BLOCKS)
        assert {target.content for target in targets} == {b"\xcc" * NBYTES}

    def test_a_look_up_does_not_wait_for_a_late_call(self, pool: BlockPool, held: Held) -> None:
        held.hold()
        source = Memory(NBYTES)
        with ThreadPoolExecutor(1) as thread:
            saving = thread.submit(pool.save, BLOCKS[:1], [source.value])
            wait_until(lambda: not pool.is_ready, "the deadline")
            assert pool.lookup(BLOCKS) == 0
            assert pool.exists(BLOCKS[:1]) == [Status.FAILED]
            assert not saving.done()
            held.let_go()
