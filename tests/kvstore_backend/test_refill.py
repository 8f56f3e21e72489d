"""An instance stores blocks again that the pool lost at once, but not those that it evicted."""

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
    """An instance that has all blocks in its own cache, and saves them from its own memory."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._memory = {each: Memory(right_bytes(each, NBYTES)) for each in HASHES}
        for memory in self._memory.values():
            pool.register(memory.address, memory.nbytes)
        self.cached: list[bytes] = list(HASHES)
        self.offered: list[bytes] = []
        self.ended: list[Sequence[bytes]] = []
        self.times_withheld = 0

    def free_memory(self) -> None:
        """Unregister the memory."""
        for memory in self._memory.values():
            self._pool.unregister(memory.address, memory.nbytes)

    def list_saved_blocks(self, most: int) -> Sequence[bytes]:
        return self.cached[:most]

    def save_again(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        cached = [each for each in hashes if each in self.cached]
        self.offered += cached
        statuses = self._pool.save(cached, [self._memory[each].value for each in cached])
        return len(cached), sum(map(bool, statuses))

    def end_round(self, hashes: Sequence[bytes]) -> None:
        self.ended.append(hashes)

    def withhold_blocks(self) -> None:
        self.cached.clear()
        self.times_withheld += 1


class Full(Wrapper):
    """A store that refuses all puts while ``is_full``."""

    is_full = False

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        return [Status.FAILED] * len(keys) if self.is_full else super().put(keys, values)


class Setup:
    """A pool that has all blocks, and an instance that refills it."""

    def __init__(self) -> None:
        self.store = Full(MemoryStore(1 << 20))
        self.pool = BlockPool(CheckedBackend(self.store), NAMESPACE)
        self.instance = Instance(self.pool)
        self.instance.save_again(HASHES)
        self.instance.offered.clear()
        self.num_lookups = 0
        self.counted: list[int] = []
        self.refill = Refill(self.pool, self.instance, self.counted.append, period=0.002)
        self.wait_for_lookups()

    def wait_for_lookups(self, count: int = 2) -> None:
        """Wait for more lookups; the second of two begins after everything that happened before."""
        self.num_lookups = 0
        lookups = itertools.count()
        exists = self.store.exists

        def look_up_and_count(keys: Sequence[str]) -> list[Status]:
            self.num_lookups = next(lookups)
            return exists(keys)

        self.store.exists = look_up_and_count  # type: ignore[method-assign]
        wait_until(lambda: self.num_lookups >= count, "lookups")
        self.store.exists = exists  # type: ignore[method-assign]

    def clear(self) -> None:
        """Do the same as ``kvstore clear``."""
        self.mark()
        self.lose(HASHES)

    def mark(self, digest: str = NAMESPACE.digest) -> None:
        """Leave the mark of a clear."""
        leave_mark(CheckedBackend(self.store), digest)

    def lose(self, hashes: Sequence[bytes]) -> None:
        """Remove these blocks from the pool."""
        self.pool.remove_blocks(hashes)

    @property
    def num_stored(self) -> int:
        """The number of blocks that the pool has."""
        return self.pool.exists(HASHES).count(Status.OK)


@pytest.fixture
def setup() -> Iterator[Setup]:
    running = Setup()
    yield running
    running.refill.close()


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_blocks_that_were_lost_at_once_are_stored_again_with_the_right_bytes(setup: Setup, share: float) -> None:
    setup.lose(random.Random(7).sample(HASHES, int(share * len(HASHES))))
    wait_until(lambda: setup.num_stored == len(HASHES), "all blocks")
    for each in HASHES:
        target = Memory(NBYTES)
        assert setup.pool.get_blocks([each], [target.value]) == [Status.OK]
        assert target.content == right_bytes(each, NBYTES)
    wait_until(lambda: setup.instance.ended == [HASHES], "the end of the round")
    assert sum(setup.counted) == len(HASHES)


def test_blocks_are_stored_again_in_the_order_of_the_instance(setup: Setup) -> None:
    setup.lose(HASHES)
    wait_until(lambda: setup.instance.ended, "the end of the round")
    assert setup.instance.offered == HASHES


def test_blocks_that_are_evicted_gradually_are_not_stored_again(setup: Setup) -> None:
    for gone in range(0, len(HASHES), 15):
        setup.lose(HASHES[gone : gone + 15])
        setup.wait_for_lookups()
    assert setup.instance.offered == []


def test_a_full_pool_is_offered_one_batch_in_each_round_until_it_accepts_it(setup: Setup) -> None:
    setup.store.is_full = True
    setup.lose(HASHES)
    wait_until(lambda: len(setup.instance.ended) >= 3, "three rounds")
    assert setup.instance.offered[:96] == 3 * HASHES[:32]
    setup.store.is_full = False
    wait_until(lambda: setup.num_stored == len(HASHES), "all blocks")


def test_the_pause_between_rounds_doubles_up_to_a_limit_and_is_reset_after_a_calm_time(setup: Setup) -> None:
    refill = Refill(setup.pool, setup.instance, lambda _: None, period=100.0)
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


def test_only_blocks_that_are_still_cached_are_stored_again(setup: Setup) -> None:
    del setup.instance.cached[100:]
    setup.lose(HASHES)
    wait_until(lambda: setup.instance.ended, "the end of the round")
    assert setup.num_stored == 100


def test_failed_lookups_do_not_count_as_a_loss(setup: Setup) -> None:
    exists = setup.store.exists
    setup.store.exists = lambda keys: [Status.FAILED] * len(keys)  # type: ignore[method-assign]
    setup.wait_for_lookups()
    setup.store.exists = exists  # type: ignore[method-assign]
    setup.wait_for_lookups()
    assert setup.instance.offered == []


@pytest.mark.parametrize("digest", [NAMESPACE.digest, ALL])
def test_cleared_blocks_are_not_stored_again_and_blocks_saved_later_are(setup: Setup, digest: str) -> None:
    setup.mark(digest)
    setup.lose(HASHES)
    # 12 periods, as many as a minute has with periods of 5 s. Without a cached block there are no lookups.
    wait_until(lambda: setup.instance.times_withheld == 1, "the mark to be found")
    setup.instance.cached.append(HASHES[0])
    setup.wait_for_lookups(12)
    assert (setup.num_stored, setup.instance.offered) == (0, [])

    setup.instance.cached[:] = HASHES[:50]
    setup.instance.save_again(HASHES[:50])
    setup.wait_for_lookups(3)
    setup.lose(HASHES[:50])
    wait_until(lambda: setup.num_stored == 50, "the blocks that were saved later")
    assert setup.instance.times_withheld == 1


def test_the_mark_of_each_clear_is_found_and_a_lost_mark_is_not_a_clear(setup: Setup) -> None:
    for count in (1, 2):
        setup.clear()
        wait_until(lambda count=count: setup.instance.times_withheld == count, "the mark to be found")  # type: ignore[misc]
    setup.store.remove([mark_key(NAMESPACE.digest)])
    setup.instance.cached.append(HASHES[0])
    setup.wait_for_lookups(12)
    assert setup.instance.times_withheld == 2
    assert setup.num_stored == 0


def test_no_block_is_stored_again_while_the_mark_cannot_be_read(setup: Setup) -> None:
    get = setup.store.get
    setup.store.get = lambda keys, targets: [Status.FAILED] * len(keys)  # type: ignore[method-assign]
    setup.clear()
    setup.wait_for_lookups(12)
    assert setup.instance.offered == []
    setup.store.get = get  # type: ignore[method-assign]
    wait_until(lambda: setup.instance.times_withheld == 1, "the mark to be found")
    assert setup.num_stored == 0


def test_a_clear_during_a_round_ends_the_round(setup: Setup) -> None:
    save_again = setup.instance.save_again

    def clear_after_a_batch(hashes: Sequence[bytes]) -> tuple[int, int]:
        saved = save_again(hashes)
        setup.clear()
        return saved

    setup.instance.save_again = clear_after_a_batch  # type: ignore[method-assign]
    setup.lose(HASHES)
    wait_until(lambda: setup.instance.times_withheld == 1, "the mark to be found")
    wait_until(lambda: setup.instance.ended, "the end of the round")
    assert (setup.num_stored, len(setup.instance.offered)) == (0, 32)


def test_an_instance_finds_a_mark_from_before_its_start_once(setup: Setup) -> None:
    setup.clear()
    later = Instance(setup.pool)
    refill = Refill(setup.pool, later, setup.counted.append, period=0.002)
    try:
        wait_until(lambda: later.times_withheld == 1, "the mark to be found")
        setup.wait_for_lookups(12)
        assert later.times_withheld == 1
    finally:
        refill.close()


def test_a_clear_also_drops_the_copies_that_only_the_instance_has(setup: Setup) -> None:
    dropped: list[str] = []
    stack = setup.pool.stack
    answers = iter([False, True])
    stack.drop_own_copies = lambda prefix: dropped.append(prefix) or next(answers)  # type: ignore[method-assign,func-returns-value]
    setup.clear()
    wait_until(lambda: len(dropped) == 2, "a second try after one that failed")
    setup.instance.cached.append(HASHES[0])
    setup.wait_for_lookups(12)
    assert dropped == 2 * [NAMESPACE.prefix]


def test_always_the_same_quarter_of_the_blocks_is_looked_up(setup: Setup) -> None:
    # Mooncake does not evict blocks soon after a lookup. With lookups of all blocks, it could store no others.
    looked_up: set[str] = set()
    exists = setup.store.exists

    def look_up_and_record(keys: Sequence[str]) -> list[Status]:
        looked_up.update(key for key in keys if not key.startswith(MARK_PREFIX))
        return exists(keys)

    setup.store.exists = look_up_and_record  # type: ignore[method-assign]
    setup.wait_for_lookups(4)
    assert len(looked_up) == len(HASHES) // 4


def test_only_a_large_drop_of_the_found_share_is_a_loss() -> None:
    choices = random.Random(3)
    for _ in range(300):
        detector = LossDetector()
        usual = None
        for _ in range(20):
            num_asked = choices.randint(1, 256)
            found = choices.randint(0, num_asked)
            is_loss = detector.is_loss(found, num_asked)
            least = max(0.1, num_asked**-0.5)
            assert is_loss == (num_asked >= 8 and usual is not None and usual - found / num_asked > least)
            if num_asked >= 8 and not is_loss:
                usual = found / num_asked


def test_the_memory_is_unregistered_at_the_close() -> None:
    class Registering(Wrapper):
        """A store that counts the registered regions of memory."""

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
    wait_until(lambda: store.num_regions == 0, "the memory to be unregistered")
