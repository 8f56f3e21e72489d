"""Blocks that the pool lost at once are put again by who still holds them; those that it evicted are not."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence

import pytest

from kvstore_backend.backend import Status, Value
from kvstore_backend.clear_marks import ALL, MARK_PREFIX, mark_key
from kvstore_backend.pool import BlockPool
from kvstore_backend.refill import _CALM_SECONDS, _MAX_PAUSE_SECONDS, LossDetector, Refill
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.wrapper import Wrapper
from tests.faults.blocks import NAMESPACE, conversation, right_bytes
from tests.support.clearing import leave_mark
from tests.support.memory import Memory
from tests.support.waiting import wait_until

NBYTES = 64
HASHES = conversation(0, 300)


class Instance:
    """An instance's cache that holds all blocks, and saves them from memory of its own."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._memory = {each: Memory(right_bytes(each, NBYTES)) for each in HASHES}
        for memory in self._memory.values():
            pool.register(memory.address, memory.nbytes)
        self.held: list[bytes] = list(HASHES)
        self.offered: list[bytes] = []
        self.ended: list[Sequence[bytes]] = []
        self.times_withheld = 0

    def free_memory(self) -> None:
        """Take the memory back from the pool."""
        for memory in self._memory.values():
            self._pool.unregister(memory.address, memory.nbytes)

    def list_saved_blocks(self, most: int) -> Sequence[bytes]:
        return self.held[:most]

    def save_again(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        held = [each for each in hashes if each in self.held]
        self.offered += held
        statuses = self._pool.save(held, [self._memory[each].value for each in held])
        return len(held), sum(map(bool, statuses))

    def end_round(self, hashes: Sequence[bytes]) -> None:
        self.ended.append(hashes)

    def withhold_blocks(self) -> None:
        self.held.clear()
        self.times_withheld += 1


class Full(Wrapper):
    """A store that takes nothing while it ``is_full``."""

    is_full = False

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        return [Status.FAILED] * len(keys) if self.is_full else super().put(keys, values)


class Watched:
    """A pool that has all blocks, and an instance that watches over them."""

    def __init__(self) -> None:
        self.store = Full(MemoryStore(1 << 20))
        self.pool = BlockPool(CheckedBackend(self.store), NAMESPACE)
        self.instance = Instance(self.pool)
        self.instance.save_again(HASHES)
        self.instance.offered.clear()
        self.times_asked = 0
        self.counted: list[int] = []
        self.refill = Refill(self.pool, self.instance, self.counted.append, period=0.002)
        self.wait_for_questions()

    def wait_for_questions(self, count: int = 2) -> None:
        """Until the pool has been asked so often more; two, and one was after all that happened before."""
        self.times_asked = 0
        asked = itertools.count()
        exists = self.store.exists

        def counting(keys: Sequence[str]) -> list[Status]:
            self.times_asked = next(asked)
            return exists(keys)

        self.store.exists = counting  # type: ignore[method-assign]
        wait_until(lambda: self.times_asked >= count, "questions")
        self.store.exists = exists  # type: ignore[method-assign]

    def clear(self) -> None:
        """What ``kvstore clear`` does."""
        self.mark()
        self.lose(HASHES)

    def mark(self, digest: str = NAMESPACE.digest) -> None:
        """Leave the mark of a clear."""
        leave_mark(CheckedBackend(self.store), digest)

    def lose(self, hashes: Sequence[bytes]) -> None:
        """Let the pool forget these blocks."""
        self.pool.remove_blocks(hashes)

    @property
    def num_there(self) -> int:
        """How many of the blocks the pool has."""
        return self.pool.exists(HASHES).count(Status.OK)


@pytest.fixture
def watched() -> Iterator[Watched]:
    running = Watched()
    yield running
    running.refill.close()


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_blocks_that_were_lost_at_once_are_there_again_with_the_right_bytes(watched: Watched, share: float) -> None:
    watched.lose(random.Random(7).sample(HASHES, int(share * len(HASHES))))
    wait_until(lambda: watched.num_there == len(HASHES), "all blocks")
    for each in HASHES:
        target = Memory(NBYTES)
        assert watched.pool.get_blocks([each], [target.value]) == [Status.OK]
        assert target.content == right_bytes(each, NBYTES)
    wait_until(lambda: watched.instance.ended == [HASHES], "the end of the round")
    assert sum(watched.counted) == len(HASHES)


def test_the_most_useful_blocks_are_put_first(watched: Watched) -> None:
    watched.lose(HASHES)
    wait_until(lambda: watched.instance.ended, "the end of the round")
    assert watched.instance.offered == HASHES


def test_blocks_that_are_evicted_little_by_little_are_left_alone(watched: Watched) -> None:
    for gone in range(0, len(HASHES), 15):
        watched.lose(HASHES[gone : gone + 15])
        watched.wait_for_questions()
    assert watched.instance.offered == []


def test_a_pool_that_refuses_is_offered_one_batch_at_a_time_until_it_takes_them(watched: Watched) -> None:
    watched.store.is_full = True
    watched.lose(HASHES)
    wait_until(lambda: len(watched.instance.ended) >= 3, "three rounds")
    assert watched.instance.offered[:96] == 3 * HASHES[:32]
    watched.store.is_full = False
    wait_until(lambda: watched.num_there == len(HASHES), "all blocks")


def test_the_pause_between_rounds_doubles_up_to_a_limit_and_is_short_again_after_a_calm(watched: Watched) -> None:
    refill = Refill(watched.pool, watched.instance, lambda _: None, period=100.0)
    try:
        pauses = []
        for calm in (10.0, 10.0, _CALM_SECONDS - 1.0, 10.0, _CALM_SECONDS + 1.0, 10.0):
            before = time.monotonic()
            refill._lengthen_pause(refill._not_before + calm)
            assert before + refill._pause <= refill._not_before <= time.monotonic() + refill._pause
            pauses.append(refill._pause)
    finally:
        refill.close()
    assert pauses == [200.0, 400.0, _MAX_PAUSE_SECONDS, _MAX_PAUSE_SECONDS, 100.0, 200.0]


def test_only_blocks_that_are_still_held_are_put(watched: Watched) -> None:
    del watched.instance.held[100:]
    watched.lose(HASHES)
    wait_until(lambda: watched.instance.ended, "the end of the round")
    assert watched.num_there == 100


def test_a_pool_that_cannot_answer_is_not_taken_for_one_that_lost_blocks(watched: Watched) -> None:
    exists = watched.store.exists
    watched.store.exists = lambda keys: [Status.FAILED] * len(keys)  # type: ignore[method-assign]
    watched.wait_for_questions()
    watched.store.exists = exists  # type: ignore[method-assign]
    watched.wait_for_questions()
    assert watched.instance.offered == []


@pytest.mark.parametrize("digest", [NAMESPACE.digest, ALL])
def test_what_an_operator_removes_stays_removed_and_what_is_held_afterwards_is_put_again(
    watched: Watched, digest: str
) -> None:
    watched.mark(digest)
    watched.lose(HASHES)
    # As many periods as a minute has where they take 5 s; without blocks the pool is not asked for any.
    wait_until(lambda: watched.instance.times_withheld == 1, "the mark to be found")
    watched.instance.held.append(HASHES[0])
    watched.wait_for_questions(12)
    assert (watched.num_there, watched.instance.offered) == (0, [])

    watched.instance.held[:] = HASHES[:50]
    watched.instance.save_again(HASHES[:50])
    watched.wait_for_questions(3)
    watched.lose(HASHES[:50])
    wait_until(lambda: watched.num_there == 50, "the blocks of afterwards")
    assert watched.instance.times_withheld == 1


def test_several_clears_are_as_many_marks_and_a_mark_that_is_lost_is_none(watched: Watched) -> None:
    for count in (1, 2):
        watched.clear()
        wait_until(lambda count=count: watched.instance.times_withheld == count, "the mark to be found")  # type: ignore[misc]
    watched.store.remove([mark_key(NAMESPACE.digest)])
    watched.instance.held.append(HASHES[0])
    watched.wait_for_questions(12)
    assert watched.instance.times_withheld == 2
    assert watched.num_there == 0


def test_a_mark_that_cannot_be_read_keeps_lost_blocks_waiting(watched: Watched) -> None:
    get = watched.store.get
    watched.store.get = lambda keys, targets: [Status.FAILED] * len(keys)  # type: ignore[method-assign]
    watched.clear()
    watched.wait_for_questions(12)
    assert watched.instance.offered == []
    watched.store.get = get  # type: ignore[method-assign]
    wait_until(lambda: watched.instance.times_withheld == 1, "the mark to be found")
    assert watched.num_there == 0


def test_a_clear_in_the_middle_of_a_round_ends_it(watched: Watched) -> None:
    save_again = watched.instance.save_again

    def clear_after_a_batch(hashes: Sequence[bytes]) -> tuple[int, int]:
        saved = save_again(hashes)
        watched.clear()
        return saved

    watched.instance.save_again = clear_after_a_batch  # type: ignore[method-assign]
    watched.lose(HASHES)
    wait_until(lambda: watched.instance.times_withheld == 1, "the mark to be found")
    wait_until(lambda: watched.instance.ended, "the end of the round")
    assert (watched.num_there, len(watched.instance.offered)) == (0, 32)


def test_a_mark_from_before_an_instance_joined_is_found_once(watched: Watched) -> None:
    watched.clear()
    later = Instance(watched.pool)
    refill = Refill(watched.pool, later, watched.counted.append, period=0.002)
    try:
        wait_until(lambda: later.times_withheld == 1, "the mark to be found")
        watched.wait_for_questions(12)
        assert later.times_withheld == 1
    finally:
        refill.close()


def test_copies_that_only_the_instance_has_are_dropped_with_the_pools(watched: Watched) -> None:
    dropped: list[str] = []
    stack = watched.pool.stack
    answers = iter([False, True])
    stack.drop_own_copies = lambda prefix: dropped.append(prefix) or next(answers)  # type: ignore[method-assign,func-returns-value]
    watched.clear()
    wait_until(lambda: len(dropped) == 2, "a second try after one that failed")
    watched.instance.held.append(HASHES[0])
    watched.wait_for_questions(12)
    assert dropped == 2 * [NAMESPACE.prefix]


def test_a_quarter_of_the_blocks_is_asked_for_and_always_the_same(watched: Watched) -> None:
    # Mooncake evicts nothing that was asked for lately: with all of them in use it could store nothing else.
    asked: set[str] = set()
    exists = watched.store.exists

    def noting(keys: Sequence[str]) -> list[Status]:
        asked.update(key for key in keys if not key.startswith(MARK_PREFIX))
        return exists(keys)

    watched.store.exists = noting  # type: ignore[method-assign]
    watched.wait_for_questions(4)
    assert len(asked) == len(HASHES) // 4


def test_any_drop_of_more_than_a_tenth_or_more_of_few_is_a_loss_until_it_is_made_good_and_no_rise_is() -> None:
    choices = random.Random(3)
    for _ in range(300):
        detector = LossDetector()
        usual = None
        for _ in range(20):
            asked = choices.randint(1, 256)
            found = choices.randint(0, asked)
            is_loss = detector.is_loss(found, asked)
            least = max(0.1, asked**-0.5)
            assert is_loss == (asked >= 8 and usual is not None and usual - found / asked > least)
            if asked >= 8 and not is_loss:
                usual = found / asked


def test_memory_is_given_back_at_the_end() -> None:
    class Registering(Wrapper):
        """A store that counts what memory is registered."""

        num_regions = 0

        def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
            self.num_regions += 1

        def unregister(self, address: int, nbytes: int) -> None:
            self.num_regions -= 1

    store = Registering(MemoryStore(1 << 20))
    pool = BlockPool(store, NAMESPACE)
    instance = Instance(pool)
    refill = Refill(pool, instance, lambda _: None, period=0.002)
    assert store.num_regions == len(HASHES) + 1
    refill.close()
    instance.free_memory()
    wait_until(lambda: store.num_regions == 0, "the memory to be given back")
