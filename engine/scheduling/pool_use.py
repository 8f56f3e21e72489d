"""The reason why a prompt got blocks from the pool, or got none; for the log and the metrics."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["NOT_ASKED", "NO_POOL", "PoolUse", "Reason", "explain_no_load"]


class Reason(enum.Enum):
    """Whether tokens of a prompt came from the pool, and if none, why. The values are labels of a metric."""

    HIT = "hit"
    """Some tokens came from the pool."""
    SHORT = "short"
    """The prompt has no full block before its last token."""
    OWN_CACHE = "own_cache"
    """The instance's own cache had all blocks."""
    ABSENT = "absent"
    """The pool did not have the blocks."""
    SLOW = "slow"
    """Computing the blocks is faster than loading them."""
    FAILED = "failed"
    """The look-up or the load failed."""
    NO_POOL = "no_pool"
    HANDED_OVER = "handed_over"
    """A prefill instance transferred the prompt directly."""
    ENDED = "ended"
    """The request ended before the pool answered."""


@dataclass(frozen=True)
class PoolUse:
    """Why a prompt got blocks from the pool, or got none: a reason, and a text for the log with numbers."""

    reason: Reason
    text: str


NOT_ASKED = PoolUse(Reason.ENDED, "the request ended before the pool had answered")
NO_POOL = PoolUse(Reason.NO_POOL, "no pool; --kvcache-storage-backend is not given")


def explain_no_load(num_tokens: int, block_size: int) -> PoolUse:
    """Explain why a sequence of ``num_tokens`` loads no block: it is too short, or the own cache has its blocks."""
    if num_tokens < block_size:
        return PoolUse(Reason.SHORT, f"shorter than a block ({num_tokens} of {block_size} tokens)")
    if num_tokens == block_size:
        return PoolUse(
            Reason.SHORT, f"not longer than a block ({block_size} tokens), and the last token is always computed"
        )
    return PoolUse(Reason.OWN_CACHE, f"own cache had all {(num_tokens - 1) // block_size} blocks")
