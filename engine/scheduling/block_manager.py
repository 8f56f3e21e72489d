"""The block manager: counts the references of KV blocks, and has the prefix cache, a map from block hash to block.

A block is only an index here; no tensors are used. A block is in one of three states::

    held      its reference count is above 0: a sequence, load, save or reservation uses it
    idle      its reference count is 0, and it is published: a sequence may take it, or its contents are overwritten
    free      its reference count is 0, and it is not published

A block is *published* if the prefix cache has its contents under a block hash. A block hash depends on all tokens up to
the end of the block. So the longest cached prefix of a sequence is found by looking up its hashes one after the other,
until one is missing. If new blocks are needed, free blocks are used first, then the idle blocks that were used least
recently.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from engine.scheduling.cache_events import CacheEvents

__all__ = ["BlockManager", "NoFreeBlocks"]


class NoFreeBlocks(Exception):
    """Raised if more blocks are requested than are idle or free."""


class BlockManager:
    """Allocates blocks, counts their references, and has the prefix cache.

    A published block is in the prefix cache under its hash. An idle block is published and has no references.

    ``allocate_blocks`` and ``take_cached_blocks`` give the caller one reference for each block, and ``hold_blocks``
    gives one more. The caller releases each reference once, by ``release_blocks``. The contents of a published block
    must not be changed.

    Args:
        num_blocks: the number of blocks of the KV memory.
        events: gets an event for each block that is removed from the prefix cache, or None. The scheduler
            reports the blocks that are published, because it knows their tokens.
    """

    def __init__(self, num_blocks: int, events: CacheEvents | None = None) -> None:
        self.num_blocks = num_blocks
        self.events = events
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._withheld: set[int] = set()
        # All blocks without references, in the order in which they are allocated: the free blocks, then the idle ones,
        # least recently used first.
        self._unused: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks))

    @property
    def num_available(self) -> int:
        """Number of blocks that can be allocated now: those that are idle or free."""
        return len(self._unused)

    @property
    def num_free(self) -> int:
        """Number of free blocks. Any thread may read this."""
        return sum(self._hash_of[block] is None for block in list(self._unused))

    @property
    def num_cached_blocks(self) -> int:
        """Number of published blocks."""
        return len(self._block_of)

    def num_references(self, block: int) -> int:
        """Return the reference count of ``block``."""
        return self._references[block]

    def match_prefix(self, hashes: Sequence[bytes]) -> int:
        """Return the number of leading ``hashes`` that are in the prefix cache."""
        for count, block_hash in enumerate(hashes):
            if block_hash not in self._block_of:
                return count
        return len(hashes)

    def has_contents(self, block_hash: bytes) -> bool:
        """Return whether a block is published under this hash."""
        return block_hash in self._block_of

    def find_block(self, block_hash: bytes) -> int | None:
        """Return the block that is published under this hash, or None."""
        return self._block_of.get(block_hash)

    def withhold_published_blocks(self) -> None:
        """Mark all published blocks as withheld: they are not saved to the pool until they are allocated again."""
        self._withheld.update(self._block_of.values())

    def is_withheld(self, block: int) -> bool:
        """Return whether ``block`` must not be saved, because an operator cleared the pool after it was published."""
        return block in self._withheld

    def iterate_hashes(self) -> Iterator[bytes]:
        """Yield the hashes of all published blocks: first idle blocks, most recently used first, then held blocks."""
        for block in reversed(self._unused):
            if (block_hash := self._hash_of[block]) is not None:
                yield block_hash
        for block_hash, block in self._block_of.items():
            if self._references[block]:
                yield block_hash

    def use_in_order(self, hashes: Sequence[bytes]) -> None:
        """Mark the idle blocks of ``hashes`` as recently used; the block of the first hash is the most recent one."""
        for block_hash in reversed(hashes):
            block = self._block_of.get(block_hash)
            if block is not None and block in self._unused:
                self._unused.move_to_end(block)

    def num_idle(self, hashes: Sequence[bytes]) -> int:
        """Return the number of idle blocks under ``hashes``, all of which must be published.

        ``take_cached_blocks(hashes)`` would reduce ``num_available`` by this number.
        """
        return sum(self._references[self._block_of[block_hash]] == 0 for block_hash in hashes)

    def take_cached_blocks(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks under ``hashes``, all of which must be published, and add one reference to each."""
        blocks = [self._block_of[block_hash] for block_hash in hashes]
        self.hold_blocks(blocks)
        return blocks

    def allocate_blocks(self, count: int) -> list[int]:
        """Return ``count`` blocks with undefined contents and one reference each.

        If there are not enough free blocks, evict the contents of idle blocks.

        Raises:
            NoFreeBlocks: fewer than ``count`` blocks are available. No block was changed.
        """
        if count > len(self._unused):
            raise NoFreeBlocks(f"{count} blocks are needed; {len(self._unused)} of {self.num_blocks} are available")
        blocks = []
        for _ in range(count):
            block, _ = self._unused.popitem(last=False)
            self._unpublish(block)
            self._withheld.discard(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def hold_blocks(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block."""
        for block in blocks:
            if self._references[block] == 0:
                del self._unused[block]
            self._references[block] += 1

    def release_blocks(self, blocks: Sequence[int]) -> None:
        """Release one reference of each block.

        Args:
            blocks: blocks in the order of their sequence. The last block is evicted first, because later blocks of a
                prefix cannot be used without the earlier ones.
        """
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise ValueError(f"block {block} is released more often than it was acquired")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._unused[block] = None
                if self._hash_of[block] is None:
                    self._unused.move_to_end(block, last=False)

    def publish_block(self, block: int, block_hash: bytes) -> bool:
        """Publish a held block under its hash. All tokens of the block must have KV.

        Returns:
            False if the hash already has a block, or the block already has a hash; then nothing is changed.
        """
        if self._references[block] <= 0:
            raise ValueError(f"block {block} cannot be added to the prefix cache: its reference count is 0")
        if block_hash in self._block_of or self._hash_of[block] is not None:
            return False
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def unpublish_blocks(self, hashes: Sequence[bytes]) -> None:
        """Remove from the prefix cache those blocks under ``hashes`` that are published.

        The references on the blocks do not change.
        """
        for block_hash in hashes:
            if (block := self._block_of.get(block_hash)) is not None:
                self._unpublish(block)

    def unpublish_all(self) -> int:
        """Remove all blocks from the prefix cache, and return how many there were. References do not change."""
        count = len(self._block_of)
        self._block_of.clear()
        self._hash_of = [None] * self.num_blocks
        if self.events:
            self.events.record_clear()
        return count

    def _unpublish(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None
            if self.events:
                self.events.record_removed_block(block_hash)

    def __repr__(self) -> str:
        held = self.num_blocks - len(self._unused)
        return f"<BlockManager {self.num_blocks} blocks: {held} held, {self.num_cached_blocks} cached>"
