"""The reader of instances' KV events: an exact cache equals the publisher's. The sockets are ZeroMQ's own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from kvcommon.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    encode_sequence,
)
from router.fleet import kv_events
from router.fleet.kv_events import KvEventReader
from router.fleet.registration import Registration, Role
from router.fleet.registry import Registry
from router.policies import iterate_names, pack_tokens, seed_of
from router.policies.pool_aware import PoolAware
from tests.router.stand_in import LoopThread
from tests.support.kv_events import EventPublisher, event_publisher
from tests.support.waiting import wait_until

KEY = "127.0.0.1:8000"


class FollowedPublisher:
    """A publisher, and a reader of its events."""

    def __init__(self, thread: LoopThread, publisher: EventPublisher) -> None:
        self.publisher, self._thread = publisher, thread
        self.policy = PoolAware()
        self.registry = Registry(splitwise=False)
        self.reported: list[Any] = []
        self._task = thread.run(self._start())

    async def _start(self) -> asyncio.Task[None]:
        self.reader = KvEventReader(self.registry, {Role.MIXED: self.policy}, self.reported.append)
        host, _, port = KEY.rpartition(":")
        fields = {"role": "mixed", "host_ip": host, "port": port, "kv_events": self.publisher.fields}
        self.instance = self.registry.register(Registration.from_fields(fields), 0.0)
        return asyncio.ensure_future(self.reader.keep_reading())

    def wait_for(self, state: str) -> None:
        def is_reached() -> bool:
            self.publisher.answer_replays()
            return self.instance.cache_known == state

        wait_until(is_reached, f"the cache to be {state}")

    def wait_for_blocks(self) -> None:
        def is_reached() -> bool:
            self.publisher.answer_replays()
            return set(self.policy.caches.get(KEY, ())) == self.publisher.blocks

        wait_until(is_reached, "the publisher's blocks to be known")

    def remove(self) -> None:
        async def remove() -> None:
            self.registry.remove(self.instance)

        self._thread.run(remove())

    def stop(self) -> None:
        async def cancel() -> None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

        self._thread.run(cancel())


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    with event_publisher() as publisher:
        yield publisher


@pytest.fixture
def followed(thread: LoopThread, publisher: EventPublisher) -> Iterator[FollowedPublisher]:
    followed = FollowedPublisher(thread, publisher)
    followed.wait_for("exact")
    yield followed
    followed.stop()


def test_batches_from_before_the_routers_start_are_replayed(thread: LoopThread, publisher: EventPublisher) -> None:
    publisher.store(1, 2)
    publisher.publish(BlockRemoved([1]))
    followed = FollowedPublisher(thread, publisher)
    followed.wait_for("exact")
    assert set(followed.policy.caches[KEY]) == {2}
    followed.stop()


def test_a_cache_without_its_first_events_is_not_exact_until_it_is_cleared(
    thread: LoopThread, publisher: EventPublisher
) -> None:
    for block in range(5):
        publisher.store(block)
    del publisher.sent[0]
    followed = FollowedPublisher(thread, publisher)
    publisher.blocks.discard(0)
    followed.wait_for_blocks()
    assert followed.instance.cache_known == "degraded"
    publisher.publish(AllBlocksCleared())
    followed.wait_for("exact")
    followed.wait_for_blocks()
    followed.stop()


def test_a_lost_event_is_replayed(followed: FollowedPublisher) -> None:
    followed.publisher.store(1)
    followed.publisher.store(2, is_lost=True)
    followed.publisher.store(3)
    followed.wait_for_blocks()
    followed.wait_for("exact")


def test_the_loss_of_the_last_event_is_detected_after_a_pause(followed: FollowedPublisher) -> None:
    followed.publisher.store(1)
    followed.wait_for_blocks()
    followed.publisher.store(2, is_lost=True)
    followed.wait_for_blocks()


def test_a_lost_event_that_the_publisher_no_longer_has_makes_the_cache_degraded(followed: FollowedPublisher) -> None:
    followed.publisher.store(1)
    followed.wait_for_blocks()
    followed.publisher.store(2, is_lost=True)
    del followed.publisher.sent[1]
    followed.publisher.store(3)
    followed.wait_for("degraded")
    assert 2 not in followed.policy.caches[KEY]


def test_the_events_of_an_instance_with_too_many_blocks_are_ignored(
    followed: FollowedPublisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_events, "MAX_INSTANCE_BLOCKS", 100)
    followed.publisher.store(*range(101))
    wait_until(lambda: followed.instance.cache_known is None and not followed.policy.caches, "the end of the feed")
    assert "are ignored until it restarts: it has reported 101 blocks" in caplog.text
    assert followed.reader.find_cache(KEY) is None


def test_the_events_of_an_instance_with_too_many_blocks_are_read_again_after_a_restart(
    followed: FollowedPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_INSTANCE_BLOCKS", 100)
    followed.publisher.store(*range(101))
    wait_until(lambda: followed.instance.cache_known is None and not followed.policy.caches, "the end of the feed")
    followed.publisher.stop()
    followed.publisher.start()
    followed.publisher.store(1)
    followed.registry.events.lost_caches.emit(KEY)
    followed.wait_for_blocks()


def test_ten_thousand_events_at_once_are_all_applied(followed: FollowedPublisher) -> None:
    for block in range(10_000):
        followed.publisher.store(block)
    followed.wait_for_blocks()
    followed.wait_for("exact")


def test_a_batch_that_the_replay_drops_is_requested_again(thread: LoopThread, publisher: EventPublisher) -> None:
    """vLLM's socket for replays has a limit of 1,000 messages, and drops further ones."""
    for block in range(30):
        publisher.store(block)
    publisher.dropped = {5, *range(10, 20)}
    followed = FollowedPublisher(thread, publisher)
    followed.wait_for("exact")
    followed.wait_for_blocks()
    followed.stop()


def test_a_cache_is_not_exact_while_the_replay_lacks_batches(followed: FollowedPublisher) -> None:
    publisher, set_exact, wrong = followed.publisher, followed.policy.set_exact, list[set[Any]]()

    def record(key: str, *, is_exact: bool) -> None:
        if is_exact and set(followed.policy.caches[KEY]) != publisher.blocks:
            wrong.append(set(followed.policy.caches[KEY]))
        set_exact(key, is_exact=is_exact)

    followed.policy.set_exact = record  # type: ignore[method-assign]
    publisher.store(1)
    followed.wait_for_blocks()
    publisher.dropped = {2, 3}  # the socket for replays drops these, but sends the end
    publisher.store(2, is_lost=True)
    publisher.store(3, is_lost=True)
    publisher.store(4)
    followed.wait_for("degraded")
    followed.wait_for_blocks()
    followed.wait_for("exact")
    assert wrong == []


def test_a_cache_is_not_exact_before_the_replay_that_a_new_connection_needs(
    thread: LoopThread, followed: FollowedPublisher
) -> None:
    feed = followed.reader._feeds[KEY]

    async def connect_during_replay() -> bool:
        feed._set_exact(False)
        feed._wake.set()
        feed._set_exact(True)
        return feed.cache.is_exact

    assert not thread.run(connect_during_replay())
    followed.wait_for("exact")


def test_other_work_runs_between_large_batches(followed: FollowedPublisher) -> None:
    feed, order = followed.reader._feeds[KEY], list[Any]()
    apply = feed._apply

    def apply_and_record(number: int, *args: Any) -> None:
        order.append(number)
        asyncio.get_running_loop().call_soon(order.append, "other work")
        apply(number, *args)

    feed._apply = apply_and_record  # type: ignore[assignment, method-assign]
    for block in range(5):
        followed.publisher.publish(BlockStored([block], None, [70_000] * 100_000, 100_000))
    followed.wait_for_blocks()
    wait_until(lambda: len(order) == 10, "the other work to run")
    assert order == [each for number in range(5) for each in (number, "other work")]


def test_the_next_batch_of_another_process_is_not_applied_to_the_blocks_of_the_last_one(
    thread: LoopThread, followed: FollowedPublisher
) -> None:
    publisher, feed = followed.publisher, followed.reader._feeds[KEY]
    for block in range(3):
        publisher.store(block)
    followed.wait_for_blocks()
    publisher.stop()
    followed.wait_for("degraded")

    async def read_before_the_event_of_the_connection() -> None:
        publisher.start()
        for block in range(100, 103):
            publisher.store(block, is_lost=True)
        publisher.store(103, is_lost=True)

        def is_received() -> bool:
            publisher.socket.send_multipart([b"", encode_sequence(3), publisher.sent[3]])
            return bool(feed._socket.poll(0))

        wait_until(is_received, "the batch to arrive")
        feed.read_batches()

    thread.run(read_before_the_event_of_the_connection())
    followed.wait_for("exact")
    assert set(followed.policy.caches[KEY]) == publisher.blocks


def test_unread_batches_of_a_process_that_ended_are_not_applied_to_the_blocks_of_the_next_one(
    thread: LoopThread, followed: FollowedPublisher
) -> None:
    publisher, feed = followed.publisher, followed.reader._feeds[KEY]
    for block in range(3):
        publisher.store(block)
    followed.wait_for_blocks()

    async def receive_unread() -> None:
        feed._is_behind = True
        publisher.store(3)
        wait_until(lambda: feed._socket.poll(0), "the batch to arrive")

    thread.run(receive_unread())
    publisher.stop()
    followed.wait_for("degraded")
    publisher.start()
    for block in range(100, 103):
        publisher.store(block, is_lost=True)
    followed.wait_for("exact")

    async def read_all() -> None:
        while feed._socket.poll(0):
            await asyncio.sleep(0)

    thread.run(read_all())
    assert set(followed.policy.caches[KEY]) == publisher.blocks


def test_a_batch_that_no_replay_has_is_lost(thread: LoopThread, publisher: EventPublisher) -> None:
    for block in range(30):
        publisher.store(block)
    for number in (5, *range(10, 20)):
        del publisher.sent[number]
        publisher.blocks.discard(number)
    followed = FollowedPublisher(thread, publisher)
    followed.wait_for_blocks()
    assert followed.instance.cache_known == "degraded"
    followed.stop()


@pytest.mark.parametrize("num_batches", [0, 1, 3, 5])
def test_another_process_is_detected_after_any_number_of_batches(followed: FollowedPublisher, num_batches: int) -> None:
    for block in range(3):
        followed.publisher.store(block)
    followed.wait_for_blocks()
    followed.publisher.stop()
    followed.wait_for("degraded")
    followed.publisher.start()
    for block in range(100, 100 + num_batches):
        followed.publisher.store(block)
    followed.wait_for("exact")
    followed.wait_for_blocks()


def test_events_of_other_media_and_damaged_events_do_not_change_the_known_blocks(followed: FollowedPublisher) -> None:
    followed.publisher.store(1)
    followed.publisher.publish(BlockStored([7], None, [], 64, medium="POOL"))
    followed.publisher.blocks.discard(7)
    followed.wait_for_blocks()
    followed.publisher.socket.send_multipart([b"", encode_sequence(2), b"\xc1"])
    followed.wait_for("degraded")
    assert set(followed.policy.caches[KEY]) == {1}


@pytest.mark.parametrize("kind", ["sliding_window", "mamba"])
def test_the_blocks_of_a_group_that_needs_only_some_are_ignored(followed: FollowedPublisher, kind: str) -> None:
    publisher = followed.publisher
    publisher.publish(BlockStored([7, 9], None, [], 64, group_idx=0, kv_cache_spec_kind=kind))
    followed.wait_for("degraded")
    publisher.publish(BlockStored([1, 2], None, [], 64, group_idx=1, kv_cache_spec_kind="full_attention"))
    publisher.publish(BlockRemoved([7], group_idx=0), BlockRemoved([1], group_idx=0), BlockRemoved([2], group_idx=1))
    publisher.blocks = {1}
    followed.wait_for_blocks()
    assert followed.instance.cache_known == "degraded"


def test_a_block_is_removed_although_the_removal_of_a_copy_is_lost(followed: FollowedPublisher) -> None:
    publisher = followed.publisher
    publisher.publish(*2 * [BlockStored([1], None, [], 64)])
    followed.wait_for_blocks()
    publisher.publish(BlockRemoved([1]), is_lost=True)
    del publisher.sent[1]
    publisher.publish(BlockRemoved([1]))
    followed.wait_for("degraded")
    followed.wait_for_blocks()


def test_blocks_of_pairs_of_tokens_are_known_exactly(
    followed: FollowedPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    event = BlockStored([1], None, [(5, 6), (6, 7)], 2)  # type: ignore[list-item]
    followed.publisher.publish(event)
    followed.publisher.blocks.add(1)
    followed.wait_for_blocks()
    assert followed.instance.cache_known == "exact"
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_a_salt_that_equals_the_name_of_the_adapter_is_a_salt(followed: FollowedPublisher) -> None:
    keys = [["same", "same"], ["same"]]
    followed.publisher.publish(BlockStored([1, 2], None, [5, 6], 1, lora_name="same", extra_keys=keys))
    followed.wait_for_blocks()
    cache = followed.policy.caches[KEY]
    list(cache.name_blocks())
    tokens = pack_tokens([5, 6])
    assert [cache.count_named(iterate_names(tokens, 1, seed_of("same", salt))) for salt in ("", "same")] == [0, 2]


def test_tokens_of_other_blocks_than_those_of_the_event_are_not_stored(followed: FollowedPublisher) -> None:
    followed.publisher.publish(BlockStored([1, 2, 3, 4, 5], None, [70_000] * 5000, 4))
    followed.wait_for_blocks()
    (run,) = set(followed.policy.caches[KEY]._run_of.values())
    assert run.unnamed == [(0, 5, pack_tokens([70_000] * 20))]


def test_the_cache_of_a_removed_instance_is_removed(followed: FollowedPublisher) -> None:
    followed.remove()
    wait_until(lambda: KEY not in followed.policy.caches, "the removal of its cache")


@pytest.mark.parametrize("seed", range(5))
def test_an_exact_cache_equals_the_publishers_after_any_losses(followed: FollowedPublisher, seed: int) -> None:
    chance = random.Random(seed)
    publisher = followed.publisher
    for step in range(60):
        number = chance.random()
        if number < 0.03:
            publisher.stop()
            publisher.start()
        elif number < 0.06:
            publisher.publish(AllBlocksCleared())
        elif number < 0.3 and publisher.blocks:
            publisher.publish(BlockRemoved([chance.choice(sorted(publisher.blocks))]), is_lost=chance.random() < 0.2)
        else:
            publisher.store(step, is_lost=chance.random() < 0.2)
        publisher.answer_replays()
    followed.wait_for_blocks()
    followed.wait_for("exact")


def test_the_events_of_an_instance_are_read_again_after_an_error(followed: FollowedPublisher) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("an error in the router")

    followed.policy.caches[KEY].store_blocks = fail  # type: ignore[assignment, method-assign]
    followed.publisher.store(1)
    followed.wait_for_blocks()
    followed.wait_for("exact")
