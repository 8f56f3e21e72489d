"""Owners of KV blocks: reference counts, a prefix cache by chained hash, least-recently-used reuse.

It uses no tensors: a block is a number. A block is in one of three states::

    held      reference count > 0: some sequence, load or save uses it
    idle      count 0, but its contents are published under a hash: may be used again, or overwritten
    free      count 0 and nothing published

Because a hash is chained over all tokens before it, the map hash -> block *is* the prefix tree: looking up a sequence's
hashes until one is missing is the walk from the root.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

__all__ = ["BlockManager", "NoFreeBlocks"]


class NoFreeBlocks(Exception):
    """More blocks were requested than are idle or free."""


class BlockManager:
    """Allocates ``num_blocks`` blocks.

    Ownership: ``allocate_blocks`` and ``take_cached_blocks`` give the caller one reference for each block;
    ``hold_blocks`` gives one more; exactly one ``release_blocks`` releases each reference. A published block's contents
    must not be written any more.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._withheld: set[int] = set()
        # All blocks with no reference, in the order of their reuse: free ones first, then idle, oldest first.
        self._unused: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks))

    @property
    def num_available(self) -> int:
        """Number of blocks that ``allocate_blocks`` could return now."""
        return len(self._unused)

    @property
    def num_free(self) -> int:
        """Number of free blocks. From any thread."""
        return sum(self._hash_of[block] is None for block in list(self._unused))

    @property
    def num_cached_blocks(self) -> int:
        """Number of published blocks."""
        return len(self._block_of)

    def num_references(self, block: int) -> int:
        """Return how many sequences, loads, saves and reservations hold ``block``."""
        return self._references[block]

    def match_prefix(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading hashes are published here."""
        for count, block_hash in enumerate(hashes):
            if block_hash not in self._block_of:
                return count
        return len(hashes)

    def has_contents(self, block_hash: bytes) -> bool:
        """Whether a block with these contents is published."""
        return block_hash in self._block_of

    def find_block(self, block_hash: bytes) -> int | None:
        """Return the block that is published under this hash."""
        return self._block_of.get(block_hash)

    def withhold_published(self) -> None:
        """Mark all published blocks as withheld (``is_withheld``), until each is allocated again."""
        self._withheld.update(self._block_of.values())

    def is_withheld(self, block: int) -> bool:
        """Whether the contents of ``block`` must not be saved: they were here when an operator cleared the pool."""
        return block in self._withheld

    def iterate_hashes(self) -> Iterator[bytes]:
        """Yield the hashes of idle blocks, the most recently used first, then of blocks that are held."""
        for block in reversed(self._unused):
            if (block_hash := self._hash_of[block]) is not None:
                yield block_hash
        for block_hash, block in self._block_of.items():
            if self._references[block]:
                yield block_hash

    def use_in_order(self, hashes: Sequence[bytes]) -> None:
        """Move the idle blocks of these hashes to the end of the reuse order; the first of them is reused last."""
        for block_hash in reversed(hashes):
            block = self._block_of.get(block_hash)
            if block is not None and block in self._unused:
                self._unused.move_to_end(block)

    def num_idle(self, hashes: Sequence[bytes]) -> int:
        """Return how many of these published hashes' blocks are idle: taking them makes them unavailable."""
        return sum(self._references[self._block_of[block_hash]] == 0 for block_hash in hashes)

    def take_cached_blocks(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks published under ``hashes`` (each must be), with a reference on each."""
        blocks = [self._block_of[block_hash] for block_hash in hashes]
        self.hold_blocks(blocks)
        return blocks

    def allocate_blocks(self, count: int) -> list[int]:
        """Return ``count`` blocks with undefined contents and one reference each; the oldest idle ones lose theirs.

        Raises:
            NoFreeBlocks: there are not enough; nothing changed.
        """
        if count > len(self._unused):
            raise NoFreeBlocks(f"{count} blocks wanted, {len(self._unused)} of {self.num_blocks} available")
        blocks = []
        for _ in range(count):
            block, _ = self._unused.popitem(last=False)
            self._unpublish(block)
            self._withheld.discard(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def hold_blocks(self, blocks: Sequence[int]) -> None:
        """Add one reference on each block."""
        for block in blocks:
            if self._references[block] == 0:
                del self._unused[block]
            self._references[block] += 1

    def release_blocks(self, blocks: Sequence[int]) -> None:
        """Release one reference on each block, in a sequence's order.

        The last block goes to the front of the reuse order: later blocks of a prefix are useless without its beginning,
        so the tail is reused first.
        """
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise ValueError(f"block {block} is released more often than it was held")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._unused[block] = None
                if self._hash_of[block] is None:
                    self._unused.move_to_end(block, last=False)

    def publish_block(self, block: int, block_hash: bytes) -> None:
        """Publish a held, completely written block under its hash; if the hash has a block already, that one stays."""
        if self._references[block] <= 0:
            raise ValueError(f"block {block} is published but held by nobody")
        if block_hash not in self._block_of and self._hash_of[block] is None:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def unpublish_blocks(self, hashes: Sequence[bytes]) -> None:
        """Forget these contents, if they are published; sequences that hold the blocks keep their references."""
        for block_hash in hashes:
            if (block := self._block_of.get(block_hash)) is not None:
                self._unpublish(block)

    def unpublish_all(self) -> int:
        """Forget all contents, so that no hash is found any more; references stay. Return how many there were."""
        count = len(self._block_of)
        self._block_of.clear()
        self._hash_of = [None] * self.num_blocks
        return count

    def _unpublish(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None

    def __repr__(self) -> str:
        held = self.num_blocks - len(self._unused)
        return f"<BlockManager {self.num_blocks} blocks: {held} held, {self.num_cached_blocks} cached>"
