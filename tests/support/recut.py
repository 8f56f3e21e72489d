"""The KV of a model as one array, and its slices under any sharding, to compare with gathered blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore_backend.block_hash import extend_block_hashes, root_hash
from kvstore_backend.manifest import manifest_key
from kvstore_backend.namespace import Namespace
from kvstore_backend.pool import BlockPool
from tests.support.memory import Memory

__all__ = ["WholeKV", "leave_marker", "store_blocks"]


class WholeKV:
    """The KV of all heads at all tokens: ``[layer, kv, head, token, byte]``."""

    def __init__(self, array: NDArray[np.uint8], order: Sequence[int] = (0, 1, 2, 3, 4)) -> None:
        """``order``: the order of the axes of ``array`` in the memory of a block."""
        self.array = array
        self.order = tuple(order)

    @property
    def num_heads(self) -> int:
        return len(self.array[0, 0])

    def block(self, sharding: Namespace, index: int) -> bytes:
        """Return the bytes of a block at the rank of ``sharding``."""
        if sharding.tp_size <= self.num_heads:
            heads = list(np.array_split(np.arange(self.num_heads), sharding.tp_size)[sharding.tp_rank])
        else:
            heads = [np.repeat(np.arange(self.num_heads), sharding.tp_size // self.num_heads)[sharding.tp_rank]]
        tokens = slice(index * sharding.block_size, (index + 1) * sharding.block_size)
        return bytes(self.array[:, :, heads, tokens].transpose(self.order).tobytes())


def store_blocks(pool: BlockPool, whole: WholeKV, token_ids: Sequence[int]) -> list[bytes]:
    """Put all whole blocks of the pool's rank and its marker; return the hashes of the blocks."""
    sharding = pool.namespace
    hashes = extend_block_hashes([], token_ids, sharding.block_size, root_hash())
    memories = [Memory(whole.block(sharding, index)) for index in range(len(hashes))]
    assert all(pool.put_blocks(hashes, [memory.value for memory in memories]))
    leave_marker(pool)
    return hashes


def leave_marker(pool: BlockPool) -> None:
    """Put the marker that shows other instances that the namespace is in use."""
    marker = Memory(b"{}")
    assert pool.stack.put([manifest_key(pool.namespace.digest)], [marker.value])[0]
