"""Decides whether an instance loads blocks from the pool or computes them: computing is faster if the pool is slow.

The decision is based on the durations of recent loads and steps. Until enough durations are known, the decision is to
load. If computing is faster, the decision is still to load from time to time, to measure the pool again. The reference
engine and the vLLM connector decide for each request.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

__all__ = ["DECISIONS", "Decision", "LoadOrCompute"]

Decision = Literal["load", "compute"]

DECISIONS: tuple[Decision, ...] = ("load", "compute")
"""All decisions, as labels of a metric."""

# The estimate uses the fastest of the last _NUM_LOADS loads, because a single load may be slow by chance.
_NUM_LOADS = 4
# After this number of decisions to compute, a load is tried again, because the pool may have become faster.
_TRY_AGAIN_AFTER = 15
# The weight of a step is halved when this number of prompt tokens was computed after it.
_HALF_LIFE_TOKENS = 4096
# A load that is expected to take less time is always made, because computing would save too little time.
_NEGLIGIBLE_SECONDS = 0.05


class LoadOrCompute:
    """Decides whether to load or to compute the blocks of a request, from the durations of recent loads and steps.

    The loading thread calls ``record_load`` and ``decide``, and the computing thread calls ``record_step``. The methods
    need no lock: ``decide`` may miss the newest measurement, which changes little.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._seconds_per_block: deque[float] = deque(maxlen=_NUM_LOADS)
        self._seconds_per_token: float | None = None
        self._times_skipped = 0

    def record_load(self, num_blocks: int, seconds: float) -> None:
        """Record that a load brought ``num_blocks`` blocks in ``seconds``. A load without blocks is ignored."""
        if num_blocks:
            self._seconds_per_block.append(seconds / num_blocks)

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Record that a step of the engine computed ``num_tokens`` tokens of prompts in ``seconds``."""
        latest = seconds / num_tokens
        known = latest if self._seconds_per_token is None else self._seconds_per_token
        self._seconds_per_token = known + (latest - known) * (1 - 0.5 ** (num_tokens / _HALF_LIFE_TOKENS))

    def decide(self, num_blocks: int, num_running: int) -> Decision:
        """Decide whether to load ``num_blocks`` blocks or to compute their KV.

        Args:
            num_blocks: number of blocks that the pool has.
            num_running: number of other running requests, which computing would delay.
        """
        if len(self._seconds_per_block) < _NUM_LOADS or self._seconds_per_token is None:
            return "load"
        load = num_blocks * min(self._seconds_per_block)
        # Loading does not delay other requests, but computing delays all of them.
        compute = num_blocks * self._block_size * self._seconds_per_token * (1 + num_running)
        if load <= max(compute, _NEGLIGIBLE_SECONDS) or self._times_skipped == _TRY_AGAIN_AFTER:
            self._times_skipped = 0
            return "load"
        self._times_skipped += 1
        return "compute"

    def __repr__(self) -> str:
        load = f"{min(self._seconds_per_block) * 1e3:.2f}" if self._seconds_per_block else "?"
        compute = f"{self._seconds_per_token * self._block_size * 1e3:.2f}" if self._seconds_per_token else "?"
        return f"a block takes {load} ms to load, {compute} ms to compute"
