"""Large batches in parts: every block is moved correctly, and a dead pool gets no further calls."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence

import pytest

from kvstore_backend.backend import Span, Status, Value
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers import parts
from kvstore_backend.wrappers.checked import CheckedBackend
from tests.faults.blocks import NAMESPACE, conversation
from tests.support.memory import Memory
from tests.support.waiting import wait_until

COUNT, SIZE = 16, 1000
KEYS = [NAMESPACE.key(block_hash) for block_hash in conversation(0, COUNT)]


class Store(MemoryStore):
    """Records the number of keys of each call; may fail, raise, or wait."""

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.calls: list[int] = []
        self.is_dead = False
        self.raises_at = ""
        self.go = threading.Event()
        self.go.set()

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        self.calls.append(len(keys))
        if self.raises_at in keys:
            wait_until(lambda: len(self.calls) > 1, "another part")
            raise RuntimeError("a store that violates its contract")
        self.go.wait(30)
        return [Status.FAILED] * len(keys) if self.is_dead else super().get(keys, targets)

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        self.calls.append(len(keys))
        return super().put(keys, values)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use two threads and eight parts on any machine; a store counts as fast after its first batch."""
    monkeypatch.setattr(parts, "_PART_BYTES", SIZE)
    monkeypatch.setattr(parts, "_THREADS", 2)
    monkeypatch.setattr(parts, "_PARTS", 8)
    monkeypatch.setattr(parts, "_SLOW", 0.0)
    monkeypatch.setattr(parts, "_QUICK", 0.0)
    monkeypatch.setattr(parts, "_SHARED_BYTES", 0)


@pytest.fixture(params=[0.0, 1e99], ids=["fast", "slow"])
def is_fast(small_parts: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(parts, "_QUICK", request.param)
    return bool(request.param == 0.0)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def checked(store: Store) -> CheckedBackend:
    """A backend that has measured the store with a large batch."""
    checked = CheckedBackend(store)
    whole = Memory(COUNT * SIZE)
    names = [f"earlier {i}" for i in range(COUNT)]
    assert all(checked.put(names, cut(whole)))
    assert all(checked.get(names, cut(whole)))
    store.calls.clear()
    return checked


def cut(memory: Memory) -> list[Value]:
    return [(Span(memory.address + i * SIZE, SIZE),) for i in range(COUNT)]


def test_every_block_that_is_not_damaged_is_read(is_fast: bool, checked: CheckedBackend, store: Store) -> None:
    source, target = Memory(secrets.token_bytes(COUNT * SIZE)), Memory(COUNT * SIZE)
    assert checked.put(KEYS, cut(source)) == [Status.OK] * COUNT
    store.remove([KEYS[3], KEYS[9]])
    damaged = Memory(128 + SIZE)
    assert store.put(KEYS[3:4], [damaged.value]) == [Status.OK]
    expected = [Status.OK] * COUNT
    expected[3] = expected[9] = Status.ABSENT
    assert checked.get(KEYS, cut(target)) == expected
    for i in (0, 1, 2, *range(4, 9), *range(10, COUNT)):
        assert target.content[i * SIZE : (i + 1) * SIZE] == source.content[i * SIZE : (i + 1) * SIZE]
    assert store.exists(KEYS[3:4]) == [Status.ABSENT], "the damaged block was removed"


def test_a_fast_store_gets_parts_and_a_slow_store_gets_the_whole_batch(
    is_fast: bool, checked: CheckedBackend, store: Store
) -> None:
    memory = Memory(COUNT * SIZE)
    checked.put(KEYS, cut(memory))
    checked.get(KEYS, cut(memory))
    assert store.calls == ([2] * 16 if is_fast else [COUNT] * 2)


def test_a_small_batch_is_one_part(monkeypatch: pytest.MonkeyPatch, checked: CheckedBackend, store: Store) -> None:
    monkeypatch.setattr(parts, "_PART_BYTES", COUNT * SIZE)
    memory = Memory(COUNT * SIZE)
    assert all(checked.put(KEYS, cut(memory)))
    assert checked.put([], []) == []
    assert store.calls == [COUNT, 0]


def test_parts_have_about_the_same_size() -> None:
    sizes = [100, 100, 5000, 100, 100, 4000, 100, 1, 1]
    nbytes, found = parts._cut_batch([(Span(1, size),) for size in sizes])
    assert nbytes == sum(sizes)
    assert [sizes[part] for part in found] == [[100, 100, 5000], [100, 100, 4000], [100, 1, 1]]


def test_a_dead_pool_gets_no_calls_for_further_parts(checked: CheckedBackend, store: Store) -> None:
    store.is_dead = True
    memory = Memory(COUNT * SIZE)
    assert checked.get(KEYS, cut(memory)) == [Status.FAILED] * COUNT
    assert len(store.calls) <= 3


def test_an_exception_is_raised_after_all_parts_have_ended(checked: CheckedBackend, store: Store) -> None:
    store.raises_at = KEYS[0]
    store.go.clear()
    ended = threading.Event()
    memory = Memory(COUNT * SIZE)

    def get() -> None:
        with pytest.raises(RuntimeError, match="violates its contract"):
            checked.get(KEYS, cut(memory))
        ended.set()

    caller = threading.Thread(target=get)
    caller.start()
    assert not ended.wait(0.1)
    store.go.set()
    caller.join(30)
    assert ended.is_set()


def test_a_call_succeeds_while_other_calls_use_all_helpers(checked: CheckedBackend, store: Store) -> None:
    memory = Memory(COUNT * SIZE)
    assert all(checked.put(KEYS, cut(memory)))
    busy = threading.Event()
    for _ in range(8):
        checked._incoming._helpers.submit(lambda: busy.wait(30))
    try:
        assert all(checked.get(KEYS, cut(memory)))
    finally:
        busy.set()


class TestMove:
    """``Parts`` alone, with steps that record their parts and threads."""

    @pytest.fixture
    def steps(self) -> Steps:
        return Steps()

    def move(self, parts_: parts.Parts, steps: Steps, count: int = COUNT, size: int = SIZE) -> list[tuple[int, int]]:
        """Move a batch and return its parts."""
        steps.moved.clear()
        parts_.move([(Span(1, size),)] * count, [Status.OK] * count, steps.hash, steps.move)
        return sorted((part.start, part.stop) for part in steps.moved)

    @pytest.mark.parametrize("hashes_first", [True, False])
    def test_each_part_is_hashed_before_or_after_its_move(self, steps: Steps, hashes_first: bool) -> None:
        once = parts.Parts(hashes_first=hashes_first)
        for _ in range(2):
            self.move(once, steps)
        first, last = ("hash", "move") if hashes_first else ("move", "hash")
        for name in (first, last):
            assert sorted(each for step, part in steps.log if step == name for each in range(*part)) == sorted(
                [*range(COUNT)] * 2
            )
        half = [(step, part) for step, part in steps.log[-16:] if part == (0, 2)]
        assert half == [(first, (0, 2)), (last, (0, 2))]

    def test_a_store_gets_parts_after_a_fast_batch_until_a_slow_batch(
        self, steps: Steps, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        some = parts.Parts(hashes_first=True)
        assert self.move(some, steps) == [(0, COUNT)]
        assert len(self.move(some, steps)) == 8
        assert len(self.move(some, steps)) == 8
        monkeypatch.setattr(parts, "_SLOW", 1e99)
        assert len(self.move(some, steps)) == 8, "the speed of a batch is known afterwards"
        assert self.move(some, steps) == [(0, COUNT)]

    def test_only_the_time_of_moves_shows_the_speed(self, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        monkeypatch.setattr("kvstore_backend.wrappers.parts.time.perf_counter", lambda: now[0])
        monkeypatch.setattr(parts, "_QUICK", COUNT * SIZE / 2.0)  # the whole batch in two seconds
        for seconds, number in ((3.0, 1), (1.0, 8)):
            some = parts.Parts(hashes_first=False)
            steps.on_move = lambda seconds=seconds: now.__setitem__(0, now[0] + seconds)  # type: ignore[misc]
            steps.on_hash = lambda: now.__setitem__(0, now[0] + 100.0)
            self.move(some, steps)
            assert len(self.move(some, steps)) == number

    def test_two_threads_share_the_parts(self, steps: Steps) -> None:
        some, together = parts.Parts(hashes_first=True), threading.Barrier(2)
        self.move(some, steps)
        steps.on_move = lambda: together.wait(30)
        self.move(some, steps)
        assert len({thread for thread, _ in steps.threads if thread != threading.get_ident()}) == 1
        assert threading.get_ident() in {thread for thread, _ in steps.threads}

    @pytest.mark.parametrize(("size", "threads"), [(SIZE, 2), (SIZE - 1, 1)])
    def test_several_parts_are_hashed_if_values_are_large(
        self, steps: Steps, monkeypatch: pytest.MonkeyPatch, size: int, threads: int
    ) -> None:
        monkeypatch.setattr(parts, "_QUICK", 1e99)
        monkeypatch.setattr(parts, "_SHARED_BYTES", SIZE)
        hashed = [part for step, part in self.run_and_log(steps, size) if step == "hash"]
        assert len(hashed) == (8 if threads == 2 else 1)

    def run_and_log(self, steps: Steps, size: int) -> list[tuple[str, tuple[int, int]]]:
        assert self.move(parts.Parts(hashes_first=True), steps, size=size) == [(0, COUNT)], "the move is one part"
        return steps.log

    def test_a_machine_with_one_processor_has_one_part(self, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parts, "_THREADS", 1)
        some = parts.Parts(hashes_first=True)
        assert [self.move(some, steps) for _ in range(3)] == [[(0, COUNT)]] * 3
        assert {thread for thread, _ in steps.threads} == {threading.get_ident()}

    @pytest.mark.parametrize(("nbytes", "number"), [(2 * SIZE - 1, 1), (2 * SIZE, 2), (3 * SIZE, 3), (99 * SIZE, 8)])
    def test_a_part_has_a_minimum_size(self, nbytes: int, number: int) -> None:
        total, found = parts._cut_batch([(Span(1, 1),)] * nbytes)
        assert (total, len(found)) == (nbytes, number)
        assert [part.start for part in found[1:]] == [part.stop for part in found[:-1]]
        assert (found[0].start, found[-1].stop) == (0, nbytes)
        sizes = [part.stop - part.start for part in found]
        assert max(sizes) - min(sizes) <= 2


class Steps:
    """Records the two steps of a batch."""

    def __init__(self) -> None:
        self.log: list[tuple[str, tuple[int, int]]] = []
        self.moved: list[slice] = []
        self.threads: list[tuple[int, str]] = []
        self.on_move: Callable[[], object] = lambda: None
        self.on_hash: Callable[[], object] = lambda: None

    def hash(self, part: slice) -> None:
        self.threads.append((threading.get_ident(), "hash"))
        self.log.append(("hash", (part.start, part.stop)))
        self.on_hash()

    def move(self, part: slice) -> None:
        self.threads.append((threading.get_ident(), "move"))
        self.log.append(("move", (part.start, part.stop)))
        self.moved.append(part)
        self.on_move()


def test_the_size_of_a_value_is_the_sum_of_its_pieces() -> None:
    assert parts.count_bytes([Span(1, 7)]) == 7
    assert parts.count_bytes([Span(1, 7), Span(100, 0), Span(50, 5)]) == 12
