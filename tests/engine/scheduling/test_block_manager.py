"""Block accounting: a block in use keeps its contents while others are allocated, published, reused and released."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.scheduling.block_manager import BlockManager, NoFreeBlocks

NUM_BLOCKS = 6
HASHES = [bytes([i]) for i in range(8)]


class BlockAccounting(RuleBasedStateMachine):
    """Compares calls in any order with a simple model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS)
        self.references = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.published: dict[bytes, int] = {}
        self.idle: list[int] = []  # in the order of their reuse

    @property
    def held(self) -> list[int]:
        return [block for block, count in self.references.items() if count]

    @property
    def free(self) -> set[int]:
        return set(self.references) - set(self.held) - set(self.idle)

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        free = self.free
        available = len(free) + len(self.idle)
        if count > available:
            with pytest.raises(NoFreeBlocks):
                self.blocks.allocate_blocks(count)
            return
        allocated = self.blocks.allocate_blocks(count)
        # Free blocks without contents are used first, and then the oldest published blocks.
        from_idle = self.idle[: max(0, count - len(free))]
        assert set(allocated[: count - len(from_idle)]) <= free
        assert allocated[count - len(from_idle) :] == from_idle
        assert len(set(allocated)) == count
        self.published = {key: block for key, block in self.published.items() if block not in from_idle}
        self.idle = self.idle[len(from_idle) :]
        for block in allocated:
            self.references[block] = 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def hold_more(self, data: st.DataObject) -> None:
        more = data.draw(st.lists(st.sampled_from(self.held), unique=True))
        self.blocks.hold_blocks(more)
        for block in more:
            self.references[block] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = data.draw(st.lists(st.sampled_from(self.held), unique=True))
        self.blocks.release_blocks(table)
        for block in reversed(table):  # the end of a sequence is the least useful part, so it is reused first
            self.references[block] -= 1
            if not self.references[block] and block in self.published.values():
                self.idle.append(block)

    @rule(data=st.data())
    def release_a_free_block(self, data: st.DataObject) -> None:
        available_blocks = sorted(set(self.references) - set(self.held))
        if available_blocks:
            with pytest.raises(ValueError, match="released more often"):
                self.blocks.release_blocks([data.draw(st.sampled_from(available_blocks))])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), block_hash=st.sampled_from(HASHES))
    def publish(self, data: st.DataObject, block_hash: bytes) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.blocks.publish_block(block, block_hash)
        if block not in self.published.values():
            self.published.setdefault(block_hash, block)  # a hash keeps its first block

    @rule(data=st.data(), block_hash=st.sampled_from(HASHES))
    def publish_a_free_block(self, data: st.DataObject, block_hash: bytes) -> None:
        available_blocks = sorted(set(self.references) - set(self.held))
        if available_blocks:
            with pytest.raises(ValueError, match="cannot be added to the prefix cache"):
                self.blocks.publish_block(data.draw(st.sampled_from(available_blocks)), block_hash)

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def take_cached(self, data: st.DataObject) -> None:
        hashes = data.draw(st.lists(st.sampled_from(sorted(self.published)), unique=True))
        idle_before = self.blocks.num_idle(hashes)
        available_before = self.blocks.num_available
        taken = self.blocks.take_cached_blocks(hashes)
        assert taken == [self.published[block_hash] for block_hash in hashes]
        assert self.blocks.num_available == available_before - idle_before
        for block in taken:
            self.references[block] += 1
            if block in self.idle:
                self.idle.remove(block)

    @rule()
    def unpublish_all(self) -> None:
        assert self.blocks.unpublish_all() == len(self.published)
        self.published.clear()
        self.idle.clear()

    @rule(hashes=st.lists(st.sampled_from(HASHES)))
    def match(self, hashes: list[bytes]) -> None:
        leading = next((i for i, block_hash in enumerate(hashes) if block_hash not in self.published), len(hashes))
        assert self.blocks.match_prefix(hashes) == leading

    @invariant()
    def every_block_is_counted_once(self) -> None:
        assert len(self.held) + len(self.idle) + len(self.free) == NUM_BLOCKS
        assert self.blocks.num_available == len(self.idle) + len(self.free)
        assert self.blocks.num_cached_blocks == len(self.published)
        held, cached = len(self.held), len(self.published)
        assert repr(self.blocks) == f"<BlockManager {NUM_BLOCKS} blocks: {held} held, {cached} cached>"


TestBlockAccounting = BlockAccounting.TestCase
TestBlockAccounting.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_refused_allocation_changes_nothing() -> None:
    blocks = BlockManager(3)
    blocks.allocate_blocks(1)
    with pytest.raises(NoFreeBlocks, match="3 blocks are needed; 2 of 3 are available"):
        blocks.allocate_blocks(3)
    assert blocks.num_available == 2
    assert len(blocks.allocate_blocks(2)) == 2


def test_the_end_of_a_sequence_is_reused_before_its_beginning() -> None:
    blocks = BlockManager(3)
    table = blocks.allocate_blocks(3)
    for block, block_hash in zip(table, HASHES, strict=False):
        blocks.publish_block(block, block_hash)
    blocks.release_blocks(table)
    blocks.allocate_blocks(1)
    assert blocks.match_prefix(HASHES) == 2


def test_the_most_recently_used_block_is_reused_last() -> None:
    blocks = BlockManager(2)
    old, recent = blocks.allocate_blocks(2)
    blocks.publish_block(old, b"old")
    blocks.publish_block(recent, b"recent")
    blocks.release_blocks([old])
    blocks.release_blocks([recent])
    blocks.release_blocks(blocks.take_cached_blocks([b"old"]))  # now it is the most recently used one
    assert blocks.allocate_blocks(1) == [recent]
    assert blocks.match_prefix([b"old"]) == 1


def test_a_reused_block_is_not_found_by_its_old_hash() -> None:
    blocks = BlockManager(1)
    (block,) = blocks.allocate_blocks(1)
    blocks.publish_block(block, b"old")
    blocks.release_blocks([block])
    (block,) = blocks.allocate_blocks(1)
    blocks.publish_block(block, b"new")
    assert (blocks.match_prefix([b"old"]), blocks.match_prefix([b"new"])) == (0, 1)


def test_a_block_without_contents_is_reused_before_published_blocks() -> None:
    blocks = BlockManager(2)
    published, other = blocks.allocate_blocks(2)
    blocks.publish_block(published, b"published")
    blocks.release_blocks([published])
    blocks.release_blocks([other])
    assert blocks.allocate_blocks(1) == [other]
    assert blocks.match_prefix([b"published"]) == 1
