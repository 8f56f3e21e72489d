"""Decision whether to load the pool's blocks: with a slow pool, computing them is quicker.

It is based on the recent durations of loads and steps. Until enough is known, and at intervals after that, blocks are
loaded. The reference engine and the vLLM connector use it for each request.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

__all__ = ["DECISIONS", "Decision", "LoadOrCompute"]

Decision = Literal["load", "compute"]

DECISIONS: tuple[Decision, ...] = ("load", "compute")
"""Possible decisions, as labels of a metric."""

# The quickest of the last four loads counts: one slow load says little about the pool, four say enough.
_NUM_LOADS = 4
# Number of decisions to compute after which a load is tried again: the pool may have recovered.
_TRY_AGAIN_AFTER = 15
# The weight of a step is halved when this many prompt tokens were computed after it.
_HALF_LIFE_TOKENS = 4096
# Loads that are expected to be shorter are never skipped: computing would save no time.
_NEGLIGIBLE_SECONDS = 0.05


class LoadOrCompute:
    """Comparison of loading with computing.

    The loading thread calls ``record_load`` and ``decide``, the computing thread ``record_step``. They need no lock,
    because a measurement that is one step old is good enough for both.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._seconds_per_block: deque[float] = deque(maxlen=_NUM_LOADS)
        self._seconds_per_token: float | None = None
        self._times_skipped = 0

    def record_load(self, num_blocks: int, seconds: float) -> None:
        """Record that ``num_blocks`` arrived in ``seconds``.

        A load without blocks is ignored: ``GuardedBackend`` handles it.
        """
        if num_blocks:
            self._seconds_per_block.append(seconds / num_blocks)

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Record that a step with chunks of prompts took ``seconds`` for ``num_tokens`` tokens."""
        latest = seconds / num_tokens
        known = latest if self._seconds_per_token is None else self._seconds_per_token
        self._seconds_per_token = known + (latest - known) * (1 - 0.5 ** (num_tokens / _HALF_LIFE_TOKENS))

    def decide(self, num_blocks: int, num_running: int) -> Decision:
        """Decide to load ``num_blocks``, or to compute their tokens.

        Computing them would also delay ``num_running`` other requests.
        """
        if len(self._seconds_per_block) < _NUM_LOADS or self._seconds_per_token is None:
            return "load"
        load = num_blocks * min(self._seconds_per_block)
        # A load runs concurrently with computing, but computing delays all other requests.
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
