"""Why a prompt took blocks from the pool, or none: for the log and the metrics."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["NOT_ASKED", "NO_POOL", "PoolUse", "Reason", "explain_no_load"]


class Reason(enum.Enum):
    """Why no token of a prompt came from the pool, as the label of a metric; ``HIT`` where some did."""

    HIT = "hit"
    SHORT = "short"
    OWN_CACHE = "own_cache"
    ABSENT = "absent"
    SLOW = "slow"
    """Computing the blocks is faster than loading them."""
    FAILED = "failed"
    NO_POOL = "no_pool"
    HANDED_OVER = "handed_over"
    ENDED = "ended"
    """The request ended before the pool had answered."""


@dataclass(frozen=True)
class PoolUse:
    """The reason, and a part of a sentence that explains it with its numbers."""

    reason: Reason
    text: str


NOT_ASKED = PoolUse(Reason.ENDED, "ended before the pool had answered")
NO_POOL = PoolUse(Reason.NO_POOL, "no pool; --kvcache-storage-backend is not given")


def explain_no_load(num_tokens: int, block_size: int) -> PoolUse:
    """Explain why no block is loaded for ``num_tokens``: the cache has all blocks that can be used."""
    if num_tokens < block_size:
        return PoolUse(Reason.SHORT, f"shorter than a block ({num_tokens} of {block_size} tokens)")
    if num_tokens == block_size:
        return PoolUse(
            Reason.SHORT, f"no more than one block ({block_size} tokens), whose last token is always computed"
        )
    return PoolUse(Reason.OWN_CACHE, f"own cache had all {(num_tokens - 1) // block_size} blocks")
