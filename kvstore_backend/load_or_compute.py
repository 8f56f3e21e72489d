"""Whether blocks that the pool has are worth loading: where the pool is slow, computing them is quicker.

Learned from the time that loads and steps took lately. Until enough is known, and now and then after that,
blocks are loaded. The reference engine and the vLLM connector decide by it for each request.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

__all__ = ["DECISIONS", "Decision", "LoadOrCompute"]

Decision = Literal["load", "compute"]

DECISIONS: tuple[Decision, ...] = ("load", "compute")
"""The possible decisions, as labels of a metric."""

# The quickest of so many loads counts: one that stalled says little about the pool, all of them say enough.
_NUM_LOADS = 4
# After so many decisions to compute a load is tried again: the pool may have recovered.
_TRY_AGAIN_AFTER = 15
# Steps count half when this many prompt tokens were computed after them.
_HALF_LIFE_TOKENS = 4096
# Expected to take less, a load is never skipped: there is nothing to win.
_NEGLIGIBLE_SECONDS = 0.05


class LoadOrCompute:
    """Compares loading with computing.

    ``record_load`` and ``decide`` are for the thread that loads, ``record_step`` for the one that computes; no
    lock is needed between the two, for neither minds a figure that is a step old.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._seconds_per_block: deque[float] = deque(maxlen=_NUM_LOADS)
        self._seconds_per_token: float | None = None
        self._times_skipped = 0

    def record_load(self, num_blocks: int, seconds: float) -> None:
        """``num_blocks`` arrived in so many seconds; where none did, ``GuardedBackend`` sees to it."""
        if num_blocks:
            self._seconds_per_block.append(seconds / num_blocks)

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """A step with chunks of prompts took so many seconds for ``num_tokens`` tokens."""
        latest = seconds / num_tokens
        known = latest if self._seconds_per_token is None else self._seconds_per_token
        self._seconds_per_token = known + (latest - known) * (1 - 0.5 ** (num_tokens / _HALF_LIFE_TOKENS))

    def decide(self, num_blocks: int, num_running: int) -> Decision:
        """Load ``num_blocks``, or compute their tokens, which would delay ``num_running`` others too."""
        if len(self._seconds_per_block) < _NUM_LOADS or self._seconds_per_token is None:
            return "load"
        load = num_blocks * min(self._seconds_per_block)
        # A load runs beside all computing; computing is in everybody's way.
        compute = num_blocks * self._block_size * self._seconds_per_token * (1 + num_running)
        if load <= max(compute, _NEGLIGIBLE_SECONDS) or self._times_skipped == _TRY_AGAIN_AFTER:
            self._times_skipped = 0
            return "load"
        self._times_skipped += 1
        return "compute"

    def __repr__(self) -> str:
        return f"<LoadOrCompute: {self}>"

    def __str__(self) -> str:
        load = f"{min(self._seconds_per_block) * 1e3:.2f}" if self._seconds_per_block else "?"
        compute = f"{self._seconds_per_token * self._block_size * 1e3:.2f}" if self._seconds_per_token else "?"
        return f"a block takes {load} ms to load, {compute} ms to compute"
