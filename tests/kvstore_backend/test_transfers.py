"""Transfers: outcomes come in time, and blocks are released when no call can touch them."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from kvstore_backend.backend import Span, Status, StorageBackend, Value
from kvstore_backend.pool import BlockPool
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.transfers import DirectMemory, Event, Outcome, ReadLeading, Transfers, Window
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend
from kvstore_backend.wrappers.wrapper import Wrapper
from tests.faults.blocks import NAMESPACE, conversation, right_bytes
from tests.faults.held import Held
from tests.support.memory import Memory
from tests.support.waiting import wait_until
from tests.support.watched_store import WatchedStore

NBYTES = 256
NUM_BLOCKS = 12
HASHES = conversation(0, 4)
CLEARED = b"\0" * NBYTES


class KVMemory:
    """An engine's memory of blocks."""

    def __init__(self) -> None:
        self._memory = Memory(NUM_BLOCKS * NBYTES)
        self.direct = DirectMemory(self.values, self._clear)

    def values(self, blocks: Sequence[int]) -> list[Value]:
        return [[Span(self._memory.address + block * NBYTES, NBYTES)] for block in blocks]

    def write(self, block: int, content: bytes) -> None:
        self._memory.fill(content, block * NBYTES)

    def __getitem__(self, block: int) -> bytes:
        return self._memory.content[block * NBYTES : (block + 1) * NBYTES]

    def _clear(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.write(block, CLEARED)


@dataclass
class Listener:
    """Records the events of one transfer in their order."""

    events: list[Outcome | str] = field(default_factory=list)

    def on_end(self, outcome: Outcome) -> None:
        self.events.append(outcome)

    def on_release(self) -> None:
        self.events.append("released")

    @property
    def outcome(self) -> Outcome:
        """Wait for the outcome and return it."""
        wait_until(lambda: any(isinstance(event, Outcome) for event in self.events), "the outcome")
        return next(event for event in self.events if isinstance(event, Outcome))

    @property
    def is_released(self) -> bool:
        return "released" in self.events


@pytest.fixture
def store() -> Iterator[Held]:
    held = Held(CheckedBackend(MemoryStore(1 << 20)))
    yield held
    held.let_go()


@pytest.fixture
def pool(store: Held) -> Iterator[BlockPool]:
    guarded = GuardedBackend(lambda: store, Deadlines(lookup_seconds=30, transfer_seconds=0.1))
    assert guarded.wait_ready(30)
    opened = BlockPool(guarded, NAMESPACE)
    yield opened
    store.let_go()
    opened.close()


@pytest.fixture
def memory() -> KVMemory:
    return KVMemory()


@pytest.fixture
def transfers(pool: BlockPool, memory: KVMemory) -> Transfers:
    return Transfers(pool, memory.direct, lambda event: event())


def fill_pool(pool: BlockPool, hashes: Sequence[bytes]) -> None:
    sources = [Memory(right_bytes(block, NBYTES)) for block in hashes]
    assert all(pool.save(hashes, [source.value for source in sources]))


def test_a_load_that_ends_in_time_releases_its_blocks_at_once(
    pool: BlockPool, memory: KVMemory, transfers: Transfers
) -> None:
    fill_pool(pool, HASHES)
    listener = Listener()
    transfers.load(HASHES, [7, 3, 5, 0], listener.on_end, listener.on_release)
    outcome = listener.outcome
    assert (outcome.count, outcome.is_released) == (4, True)
    assert listener.events == ["released", outcome]
    assert [memory[block] for block in (7, 3, 5, 0)] == [right_bytes(block, NBYTES) for block in HASHES]


def test_a_load_counts_leading_blocks_and_clears_the_others(
    pool: BlockPool, memory: KVMemory, transfers: Transfers
) -> None:
    fill_pool(pool, [HASHES[0], HASHES[2]])
    listener = Listener()
    transfers.load(HASHES, [0, 1, 2, 3], listener.on_end, listener.on_release)
    assert (listener.outcome.count, listener.outcome.is_released) == (1, True)
    assert [memory[block] for block in range(4)] == [right_bytes(HASHES[0], NBYTES), CLEARED, CLEARED, CLEARED]


def test_a_save_that_ends_in_time_releases_its_blocks_at_once(
    pool: BlockPool, memory: KVMemory, transfers: Transfers
) -> None:
    for block, block_hash in enumerate(HASHES):
        memory.write(block, right_bytes(block_hash, NBYTES))
    listener = Listener()
    transfers.save(HASHES, [0, 1, 2, 3], listener.on_end, listener.on_release)
    outcome = listener.outcome
    assert (outcome.count, listener.events) == (4, ["released", outcome])
    assert pool.lookup(HASHES) == 4


class TestDeciding:
    """The engine's ``decide`` may read fewer blocks, or none."""

    def test_a_load_reads_as_many_leading_blocks_as_decide_requests(
        self, pool: BlockPool, memory: KVMemory, transfers: Transfers
    ) -> None:
        fill_pool(pool, HASHES)
        listener = Listener()
        transfers.load(
            HASHES, [0, 1, 2, 3], listener.on_end, listener.on_release, decide=lambda read_leading: read_leading(2)
        )
        assert listener.outcome.count == 2
        assert memory[1] == right_bytes(HASHES[1], NBYTES)
        assert memory[2] == b"\xee" * NBYTES

    def test_decide_may_read_no_block(self, memory: KVMemory, transfers: Transfers) -> None:
        listener = Listener()
        transfers.load(HASHES, [0, 1, 2, 3], listener.on_end, listener.on_release, decide=lambda _: 0)
        assert (listener.outcome.count, listener.is_released) == (0, True)
        assert memory[0] == b"\xee" * NBYTES

    def test_an_error_in_decide_loads_nothing_and_releases_the_blocks(
        self, transfers: Transfers, caplog: pytest.LogCaptureFixture
    ) -> None:
        def decide(read_leading: ReadLeading) -> int:
            raise RuntimeError("a lookup that fails")

        listener = Listener()
        transfers.load(HASHES, [0, 1, 2, 3], listener.on_end, listener.on_release, decide=decide)
        assert (listener.outcome.count, listener.is_released) == (0, True)
        assert "Loading 4 blocks failed; they will be computed" in caplog.text

    def test_decide_runs_on_the_thread_of_loads(self, pool: BlockPool, memory: KVMemory) -> None:
        started: list[str] = []
        transfers = Transfers(
            pool,
            memory.direct,
            lambda event: event(),
            start_thread=lambda: started.append(threading.current_thread().name),
        )
        names: list[str] = []

        def decide(read_leading: ReadLeading) -> int:
            names.append(threading.current_thread().name)
            return 0

        listener = Listener()
        transfers.load(HASHES[:1], [0], listener.on_end, listener.on_release, decide=decide)
        assert listener.outcome.count == 0
        assert names == started
        assert names[0].startswith("pool-load")


class TestLateCalls:
    """A transfer with a late call ends at its deadline; its blocks are released when the call has ended."""

    def test_a_late_load_ends_at_its_deadline_and_clears_its_blocks(
        self, pool: BlockPool, store: Held, memory: KVMemory, transfers: Transfers
    ) -> None:
        fill_pool(pool, HASHES)
        store.hold()
        listener = Listener()
        transfers.load(HASHES, [0, 1, 2, 3], listener.on_end, listener.on_release)
        assert (listener.outcome.count, listener.outcome.is_released) == (0, False)
        assert listener.events == [listener.outcome]
        store.let_go()
        wait_until(lambda: listener.is_released, "the release")
        assert listener.events == [listener.outcome, "released"]
        assert [memory[block] for block in range(4)] == [CLEARED] * 4, "cleared after the late read"

    def test_a_late_save_does_not_change_its_blocks(
        self, pool: BlockPool, store: Held, memory: KVMemory, transfers: Transfers
    ) -> None:
        for block, block_hash in enumerate(HASHES):
            memory.write(block, right_bytes(block_hash, NBYTES))
        store.hold()
        listener = Listener()
        transfers.save(HASHES, [0, 1, 2, 3], listener.on_end, listener.on_release)
        assert (listener.outcome.count, listener.outcome.is_released) == (0, False)
        time.sleep(0.05)
        assert not listener.is_released
        store.let_go()
        wait_until(lambda: listener.is_released, "the release")
        assert [memory[block] for block in range(4)] == [right_bytes(block, NBYTES) for block in HASHES]
        wait_until(lambda: pool.lookup(HASHES) == 4, "the blocks in the pool")

    def test_a_load_after_a_late_one_ends_at_once_and_releases_its_blocks(
        self, pool: BlockPool, store: Held, transfers: Transfers
    ) -> None:
        fill_pool(pool, HASHES)
        store.hold()
        late, later = Listener(), Listener()
        transfers.load(HASHES, [0, 1, 2, 3], late.on_end, late.on_release)
        assert not late.outcome.is_released
        begun = time.monotonic()
        transfers.load(HASHES, [4, 5, 6, 7], later.on_end, later.on_release, decide=lambda _: pool.lookup(HASHES))
        assert (later.outcome.count, later.outcome.is_released) == (0, True)
        assert time.monotonic() - begun < 5
        store.let_go()
        wait_until(lambda: late.is_released, "the release")

    def test_each_transfer_is_released_once(self, pool: BlockPool, store: Held, transfers: Transfers) -> None:
        fill_pool(pool, HASHES)
        store.hold()
        listeners = [Listener() for _ in range(4)]
        for number, listener in enumerate(listeners):
            start = transfers.load if number % 2 else transfers.save
            start(HASHES[:1], [number], listener.on_end, listener.on_release)
        assert [listener.outcome.count for listener in listeners[1::2]] == [0, 0]
        store.let_go()
        wait_until(lambda: all(listener.is_released for listener in listeners), "the releases")
        time.sleep(0.05)
        assert [listener.events.count("released") for listener in listeners] == [1] * 4


class Raising(MemoryStore):
    """Raises in each transfer, which is late until ``has_ended`` is set."""

    def __init__(self) -> None:
        super().__init__(1)
        self.num_late = 0
        self.has_ended = threading.Event()

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        self.num_late += 1
        raise RuntimeError("the thread of the call was lost")

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        return self.put(keys, targets)

    def count_late_calls(self) -> int:
        return self.num_late

    def wait_for_late_calls(self, seconds: float) -> bool:
        return self.has_ended.wait(seconds)


@pytest.mark.parametrize("call", ["load", "save"])
def test_the_block_of_a_late_call_that_raised_is_released_after_the_call(memory: KVMemory, call: str) -> None:
    store, listener = Raising(), Listener()
    transfers = Transfers(BlockPool(store, NAMESPACE), memory.direct, lambda event: event())
    getattr(transfers, call)(HASHES[:1], [0], listener.on_end, listener.on_release)
    assert (listener.outcome.count, listener.outcome.is_released) == (0, False)
    store.has_ended.set()
    wait_until(lambda: listener.is_released, "the release")


class Buffers:
    """Memory with staging buffers of two blocks."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self.set_aside: list[_Buffer] = []
        self.taken_back: list[_Buffer] = []
        self.free = [_Buffer(self), _Buffer(self)]

    def record_event(self) -> None:
        return None

    def open_incoming(self, blocks: Sequence[int], after: Event | None) -> Window:
        return self.free.pop(0).open(blocks)

    def open_outgoing(self, blocks: Sequence[int], after: Event | None) -> Window:
        window = self.free.pop(0).open(blocks)
        for i, block in enumerate(window.blocks):
            window.memory.fill(self._memory[block], i * NBYTES)
        return window

    def write(self, block: int, content: bytes) -> None:
        self._memory.write(block, content)


class _Buffer:
    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self.memory = Memory(2 * NBYTES)
        self.blocks: Sequence[int] = []

    def open(self, blocks: Sequence[int]) -> _Buffer:
        self.blocks = blocks[:2]
        return self

    @property
    def values(self) -> list[Value]:
        return [[Span(self.memory.address + i * NBYTES, NBYTES)] for i in range(len(self.blocks))]

    def deliver(self, count: int) -> None:
        for i, block in enumerate(self.blocks[:count]):
            self._buffers.write(block, self.memory.content[i * NBYTES : (i + 1) * NBYTES])

    def wait(self) -> None:
        pass

    def set_aside(self) -> bool:
        self._buffers.set_aside.append(self)
        self._buffers.free.append(_Buffer(self._buffers))
        return False

    def take_back(self) -> None:
        self._buffers.taken_back.append(self)
        self._buffers.free.append(self)


class TestBuffers:
    """A late call occupies a staging buffer, and the blocks are released with the outcome."""

    @pytest.fixture
    def buffers(self, memory: KVMemory) -> Buffers:
        return Buffers(memory)

    @pytest.fixture
    def transfers(self, pool: BlockPool, buffers: Buffers) -> Transfers:
        return Transfers(pool, buffers, lambda event: event())

    def test_blocks_pass_through_the_buffers_in_parts(
        self, pool: BlockPool, memory: KVMemory, transfers: Transfers
    ) -> None:
        for block in range(3):
            memory.write(block, right_bytes(HASHES[block], NBYTES))
        saved, loaded = Listener(), Listener()
        transfers.save(HASHES[:3], [0, 1, 2], saved.on_end, saved.on_release)
        assert saved.outcome.count == 3
        transfers.load(HASHES, [4, 5, 6, 7], loaded.on_end, loaded.on_release)
        assert loaded.outcome.count == 3
        assert [memory[block] for block in (4, 5, 6)] == [right_bytes(block, NBYTES) for block in HASHES[:3]]
        assert memory[7] == b"\xee" * NBYTES

    @pytest.mark.parametrize("call", ["load", "save"])
    def test_a_late_call_occupies_its_buffer_and_no_block(
        self, pool: BlockPool, store: Held, buffers: Buffers, transfers: Transfers, call: str
    ) -> None:
        if call == "load":
            fill_pool(pool, HASHES)
        store.hold()
        listener = Listener()
        getattr(transfers, call)(HASHES, [0, 1, 2, 3], listener.on_end, listener.on_release)
        assert (listener.outcome.count, listener.outcome.is_released) == (0, True)
        assert listener.events == ["released", listener.outcome]
        (late,) = buffers.set_aside
        assert late not in [*buffers.taken_back, *buffers.free]
        store.let_go()
        wait_until(lambda: late in buffers.taken_back, "the buffer to be taken back")
        assert len(buffers.taken_back) == len(set(map(id, buffers.taken_back))), "each once"

    def test_transfers_during_a_late_call_occupy_no_buffer(
        self, store: Held, buffers: Buffers, transfers: Transfers
    ) -> None:
        store.hold()
        late, *later = [Listener() for _ in range(5)]
        transfers.save(HASHES, [0, 1, 2, 3], late.on_end, late.on_release)
        assert late.outcome.count == 0
        for number, listener in enumerate(later):
            start = transfers.load if number % 2 else transfers.save
            start(HASHES, [4, 5, 6, 7], listener.on_end, listener.on_release)
        assert [listener.outcome.count for listener in later] == [0] * 4
        assert len(buffers.set_aside) == 1


class TestClosing:
    def test_close_waits_for_a_running_save_and_later_transfers_are_dropped(
        self, pool: BlockPool, store: Held, memory: KVMemory, transfers: Transfers
    ) -> None:
        fill_pool(pool, HASHES[:1])
        first, second = Listener(), Listener()
        store.hold()
        transfers.save(HASHES[1:2], [0], first.on_end, first.on_release)
        assert store.waiting.wait(30)
        store.let_go()
        transfers.close(30)
        assert first.outcome.count == 1
        transfers.save(HASHES[2:3], [1], second.on_end, second.on_release)
        transfers.load(HASHES[:1], [2], second.on_end, second.on_release)
        assert second.events == []
        assert pool.lookup(HASHES) == 0, "the pool is closed"

    def test_close_waits_for_saves_that_have_not_begun(self, transfers: Transfers) -> None:
        go_on, second = threading.Event(), Listener()

        def wait(_: Outcome) -> None:
            go_on.wait(30)

        transfers.save(HASHES[:1], [0], wait, lambda: None)
        transfers.save(HASHES[1:2], [1], second.on_end, second.on_release)
        threading.Timer(0.1, go_on.set).start()
        transfers.close(30)
        assert [each.count for each in second.events if isinstance(each, Outcome)] == [1]

    def test_a_save_that_hangs_does_not_delay_the_close(self, store: Held, transfers: Transfers) -> None:
        store.hold()
        listener = Listener()
        transfers.save(HASHES[:1], [0], listener.on_end, listener.on_release)
        begun = time.monotonic()
        transfers.close(0.1)
        assert time.monotonic() - begun < 10

    def test_the_callback_after_a_flush_is_called(self, transfers: Transfers) -> None:
        flushed = threading.Event()
        transfers.call_after_flush(flushed.set)
        assert flushed.wait(30)


class Erratic(Wrapper):
    """Delays some transfers beyond their deadline, before or after their bytes move."""

    def __init__(self, store: StorageBackend, chance: random.Random) -> None:
        super().__init__(store)
        self._chance = chance
        self.is_calm = False

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        return self._delay(lambda: super(Erratic, self).put(keys, values))

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        def get() -> list[Status]:
            for target in targets:  # as an interrupted transport may do
                for address, nbytes in target:
                    ctypes.memset(address, 0xFF, nbytes)
            return super(Erratic, self).get(keys, targets)

        return self._delay(get)

    def _delay(self, call: Callable[[], list[Status]]) -> list[Status]:
        if not self.is_calm and self._chance.random() < 0.3:
            time.sleep(self._chance.uniform(0, 0.1))
        answer = call()
        if not self.is_calm and self._chance.random() < 0.1:
            time.sleep(0.06)
        return answer


class TinyEngine:
    """Sequences that share a few blocks of memory; each block of a transfer has a reference until its release."""

    def __init__(self, pool: BlockPool, chance: random.Random) -> None:
        self.memory = KVMemory()
        self.expected: dict[int, bytes] = {}  # contents of blocks that a sequence has and no transfer uses
        self.references = [0] * NUM_BLOCKS
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.saved: list[list[bytes]] = []
        self.num_late = 0
        self._chance = chance
        self.transfers = Transfers(pool, self.memory.direct, self.posted.put)

    def run_posted(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self.posted.get_nowait()()

    def take(self, count: int) -> list[int]:
        """Take free blocks and overwrite them, as a new owner does."""
        free = [block for block, references in enumerate(self.references) if not references]
        blocks = self._chance.sample(free, min(count, len(free)))
        for block in blocks:
            self.references[block] = 1
            self.memory.write(block, b"\xaa" * NBYTES)
        return blocks

    def compute(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        for block, block_hash in zip(blocks, hashes, strict=False):
            self.expected[block] = right_bytes(block_hash, NBYTES)
            self.memory.write(block, self.expected[block])

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                self.expected.pop(block, None)

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.references[block] += 1

    def compute_and_save(self, hashes: list[bytes]) -> None:
        """Run a sequence that computes blocks, saves them and ends."""
        blocks = self.take(len(hashes))
        hashes = hashes[: len(blocks)]
        self.compute(blocks, hashes)
        self.hold(blocks)
        self.saved.append(hashes)
        self.transfers.save(hashes, blocks, self.note, lambda: self.release(blocks))
        self.release(blocks)

    def load_and_run(self, hashes: list[bytes]) -> None:
        """Start a sequence that loads blocks and computes those that were not loaded."""
        blocks = self.take(len(hashes))

        def on_end(outcome: Outcome) -> None:
            self.note(outcome)
            for block, block_hash in zip(blocks[: outcome.count], hashes, strict=False):
                self.expected[block] = right_bytes(block_hash, NBYTES)
            if outcome.is_released:
                self.compute(blocks[outcome.count :], hashes[outcome.count :])
                self.running.append(blocks)
            else:
                self.release(blocks)
                others = self.take(len(hashes))
                self.compute(others, hashes)
                self.running.append(others)

        self.hold(blocks)
        self.transfers.load(hashes[: len(blocks)], blocks, on_end, lambda: self.release(blocks))

    def note(self, outcome: Outcome) -> None:
        self.num_late += not outcome.is_released

    def check(self) -> None:
        """Assert that every block has its owner's bytes."""
        for block, content in self.expected.items():
            assert self.memory[block] == content, f"block {block} was changed by a late call"

    running: list[list[int]]


@pytest.mark.parametrize("seed", range(3))
def test_no_late_call_touches_a_block_that_was_given_to_another_sequence(seed: int) -> None:
    chance = random.Random(seed)
    sound = CheckedBackend(MemoryStore(1 << 20))
    # Two layers of delays, so that late puts also compute their checksums late.
    erratic = [Erratic(sound, random.Random(seed + 1))]
    erratic.append(Erratic(erratic[0], random.Random(seed + 2)))
    guarded = GuardedBackend(lambda: erratic[1], Deadlines(lookup_seconds=30, transfer_seconds=0.03))
    assert guarded.wait_ready(30)
    engine = TinyEngine(BlockPool(guarded, NAMESPACE), chance)
    engine.running = []
    conversations = [conversation(number, 4) for number in range(40)]
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        engine.run_posted()
        engine.check()
        (engine.compute_and_save if chance.random() < 0.5 else engine.load_and_run)(chance.choice(conversations))
        while len(engine.running) > 1:
            engine.release(engine.running.pop(0))
        time.sleep(0.005)
    for each in erratic:
        each.is_calm = True
    engine.release([block for blocks in engine.running for block in blocks])
    engine.running.clear()

    def is_idle() -> bool:
        engine.run_posted()
        engine.release([block for blocks in engine.running for block in blocks])
        engine.running.clear()
        return not any(engine.references)

    wait_until(is_idle, "the release of all blocks")
    assert engine.num_late > 0, "no call was late, so nothing was tested"
    for hashes in engine.saved:
        for block_hash in hashes:
            target = Memory(NBYTES)
            (status,) = sound.get([NAMESPACE.key(block_hash)], [target.value])
            assert status is Status.ABSENT or target.content == right_bytes(block_hash, NBYTES)
    assert sound.rejected == {}
    engine.transfers.close()


class TestWithoutAThread:
    """Transfers for which no thread can run, and the end of the threads."""

    @pytest.fixture
    def listener(self) -> Listener:
        return Listener()

    @pytest.mark.parametrize("begin", ["load", "save"])
    def test_a_transfer_without_a_thread_ends_at_once_and_releases_its_blocks(
        self, begin: str, transfers: Transfers, listener: Listener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            getattr(transfers, begin)(HASHES, [0, 1, 2, 3], listener.on_end, listener.on_release)
        assert listener.events == ["released", Outcome(0, 0.0, True)]

    @pytest.mark.parametrize("begin", ["load", "save"])
    def test_a_transfer_after_the_close_is_dropped(
        self, begin: str, transfers: Transfers, listener: Listener, caplog: pytest.LogCaptureFixture
    ) -> None:
        transfers.close()
        getattr(transfers, begin)(HASHES, [0, 1, 2, 3], listener.on_end, listener.on_release)
        assert not listener.events
        assert not caplog.messages

    @pytest.mark.parametrize("kind", ["load", "save"])
    def test_a_transfer_with_a_failing_device_ends_at_once_and_releases_its_blocks(
        self, pool: BlockPool, memory: KVMemory, listener: Listener, kind: str
    ) -> None:
        def fail() -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        failing = DirectMemory(memory.values, lambda blocks: None, fail)
        begin = getattr(Transfers(pool, failing, lambda event: event()), kind)
        begin(HASHES, [0, 1, 2, 3], listener.on_end, listener.on_release)
        assert listener.events == ["released", Outcome(0, 0.0, True)]

    def test_the_threads_end_at_the_close(self, pool: BlockPool, transfers: Transfers, listener: Listener) -> None:
        before = set(threading.enumerate())
        transfers.load(HASHES, [0, 1, 2, 3], listener.on_end, listener.on_release)
        transfers.save(HASHES, [0, 1, 2, 3], listener.on_end, listener.on_release)
        wait_until(lambda: len(listener.events) == 4, "the end of both")
        ours = {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("pool-")}
        assert {thread.name for thread in ours} == {"pool-load-0", "pool-save-0"}
        transfers.close()
        wait_until(lambda: not any(thread.is_alive() for thread in ours), "the end of the threads")
        assert not pool.is_ready

    def test_closing_a_second_time_does_nothing(self, transfers: Transfers) -> None:
        transfers.close()
        transfers.close()


def test_an_event_that_cannot_be_delivered_does_not_block_later_transfers(
    pool: BlockPool, memory: KVMemory, caplog: pytest.LogCaptureFixture
) -> None:
    posted: list[Callable[[], None]] = []

    def post(event: Callable[[], None]) -> None:
        posted.append(event)
        if len(posted) == 1:
            raise RuntimeError("the loop is closed")
        event()

    transfers, first, second = Transfers(pool, memory.direct, post), Listener(), Listener()
    transfers.load(HASHES, [0, 1, 2, 3], first.on_end, first.on_release)
    transfers.load(HASHES, [0, 1, 2, 3], second.on_end, second.on_release)
    assert second.outcome.is_released
    assert not first.events
    assert "the loop is closed" in caplog.text
    transfers.close()


@pytest.mark.parametrize("begin", ["load", "save"])
def test_transfers_of_one_direction_run_one_after_another(
    begin: str, pool: BlockPool, memory: KVMemory, store: Held
) -> None:
    running, most = [0], [0]
    get, put = store.get, store.put

    def count_running(move: Callable[..., list[Status]]) -> Callable[..., list[Status]]:
        def call(*arguments: object) -> list[Status]:
            running[0] += 1
            most[0] = max(most[0], running[0])
            time.sleep(0.01)  # another transfer has time to run
            running[0] -= 1
            return move(*arguments)

        return call

    store.get, store.put = count_running(get), count_running(put)  # type: ignore[method-assign]
    transfers = Transfers(pool, memory.direct, lambda event: event())
    listeners = [Listener() for _ in range(6)]
    for number, each in enumerate(listeners):
        getattr(transfers, begin)(conversation(number, 2), [2 * number, 2 * number + 1], each.on_end, each.on_release)
    assert all(each.outcome.is_released for each in listeners)
    assert most == [1]
    transfers.close()


def test_an_outcome_has_the_duration_of_the_transfer(transfers: Transfers, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 107.5])
    monkeypatch.setattr("kvstore_backend.transfers.time.monotonic", lambda: next(times, 107.5))
    listener = Listener()

    def read_none(read_leading: ReadLeading) -> int:
        return 0

    transfers.load(HASHES, [0, 1, 2, 3], listener.on_end, listener.on_release, decide=read_none)
    deadline = threading.Event()
    while not listener.events and not deadline.wait(0.01):
        pass
    outcome = listener.events[-1]
    assert isinstance(outcome, Outcome)
    assert (outcome.seconds, outcome.count) == (7.5, 0)


def test_a_save_passes_keep_seconds_to_the_store(memory: KVMemory) -> None:
    store = WatchedStore()
    transfers, pinned, saved = (
        Transfers(BlockPool(store, NAMESPACE), memory.direct, lambda event: event()),
        Listener(),
        Listener(),
    )
    transfers.save(HASHES, [0, 1, 2, 3], saved.on_end, saved.on_release)
    assert saved.outcome.count == 4
    assert not store.kept
    transfers.save(HASHES, [0, 1, 2, 3], pinned.on_end, pinned.on_release, keep_seconds=60.0)
    assert pinned.outcome.count == 4
    assert store.kept == [(4, 60.0)]
    transfers.close()


def test_blocks_are_removed_although_they_have_a_lease(memory: KVMemory) -> None:
    store = _Leased(MemoryStore(1 << 20))
    pool = BlockPool(store, NAMESPACE)
    transfers = Transfers(pool, memory.direct, lambda event: event())
    fill_pool(pool, HASHES)
    transfers.remove(HASHES[1:])
    wait_until(lambda: pool.lookup(HASHES) == 1, "the removal")
    transfers.close()


class _Leased(Wrapper):
    """A store in which every value has a lease, so that only a forced removal succeeds."""

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        return super().remove(keys, force=force) if force else [Status.FAILED] * len(keys)
