"""Groups of layers that read different parts of a prefix: computes the names of blocks, and which blocks a group needs.

Each group has its own blocks. A block of a group has the KV of the group's layers for ``block_size`` tokens. All groups
take their blocks from one ``BlockManager``. A sequence has one ``BlockTable`` for each group. The *place* of a block is
its index in the sequence, for example 2 for the third block. To resume is to continue a prompt after cached blocks;
``kvstore_backend/groups.py`` explains which of these blocks a group needs for that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from engine.scheduling.block_manager import BlockManager
from kvstore_backend.groups import Group, find_resume_point

__all__ = ["BlockGroups"]

_TAG = b"kvstore.group.v1"


class BlockGroups:
    """The groups of a model's layers.

    Args:
        groups: the groups. They have the same block size. If a group has full attention, it is the first group.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups)
        self.block_size = self.groups[0].block_size
        self.is_full = [group.kind for group in self.groups] == ["full"]
        """Whether all layers have full attention. Then there is one group, and it needs all blocks of a prefix."""
        self._tags = [f"{number} {group.name}".encode() for number, group in enumerate(self.groups)]

    def __len__(self) -> int:
        return len(self.groups)

    def name_block(self, number: int, block_hash: bytes) -> bytes:
        """Return the name of a block in the prefix cache and in the pool.

        Args:
            number: the index of the block's group. In group 0 the name is the block hash itself.
            block_hash: the hash of all tokens up to the end of the block.
        """
        if number == 0:
            return block_hash
        return hashlib.sha256(_TAG + block_hash + self._tags[number]).digest()

    def name_blocks(self, number: int, hashes: Sequence[bytes], places: range) -> Sequence[bytes]:
        """Return the names of group ``number``'s blocks at ``places``. ``hashes`` are those of the whole sequence."""
        chosen = hashes[places.start : places.stop]
        return chosen if number == 0 else [self.name_block(number, block_hash) for block_hash in chosen]

    def list_needed_blocks(self, number: int, first: int, last: int) -> range:
        """Return the indices of the blocks that group ``number`` needs to continue a prompt after ``last`` blocks.

        Indices below ``first`` are left out.
        """
        return range(min(last, max(first, self.groups[number].find_first_needed(last * self.block_size))), last)

    def count_held_blocks(self, num_tokens: int) -> int:
        """Return how many blocks of all groups a sequence must hold to continue after ``num_tokens`` tokens."""
        end = -(-num_tokens // self.block_size)
        return sum(end - group.find_first_needed(num_tokens) for group in self.groups)

    def list_held_blocks(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return the blocks that a sequence must hold to continue after ``num_tokens`` tokens.

        Returns:
            For each block, the index of its group and its index in the sequence, which orders the result. The last
            block of each group may be partly filled.
        """
        firsts = [group.find_first_needed(num_tokens) for group in self.groups]
        places = range(min(firsts), -(-num_tokens // self.block_size))
        return [(number, place) for place in places for number, first in enumerate(firsts) if place >= first]

    def match_prefix(self, blocks: BlockManager, hashes: Sequence[bytes], first: int = 0) -> int:
        """Return the largest number of leading blocks after which a sequence can resume with the prefix cache's blocks.

        Args:
            blocks: the block manager with the prefix cache.
            hashes: the block hashes of the sequence.
            first: number of leading blocks that the sequence has already.
        """
        if self.is_full:
            return blocks.match_prefix(hashes)

        def find_published(wanted: Sequence[tuple[int, int]]) -> list[bool]:
            return [blocks.has_contents(self.name_block(number, hashes[place])) for number, place in wanted]

        size = self.block_size
        resume = find_resume_point(self.groups, first * size, len(hashes) * size, find_published)
        return resume.num_tokens // size
