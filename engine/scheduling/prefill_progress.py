"""Logs the progress of long prompts: without it, a prompt of several steps would log nothing for minutes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

from engine.scheduling.request import Sequence
from engine.scheduling.scheduler import Chunk

__all__ = ["EVERY_SECONDS", "PrefillProgress"]

log = logging.getLogger(__name__)

EVERY_SECONDS = 5.0


class PrefillProgress:
    """Logs for each sequence every ``EVERY_SECONDS`` how much of its prompt is computed; for the engine's thread.

    Args:
        clock: seconds since any fixed moment.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Each prompt's preemptions, when it began or was last logged, and how many tokens were computed then.
        self._told: WeakKeyDictionary[Sequence, tuple[int, float, int]] = WeakKeyDictionary()

    def record_chunk(self, chunk: Chunk, seconds: float) -> None:
        """Record that ``chunk`` was computed, in a step that took ``seconds``."""
        sequence = chunk.sequence
        if not sequence.is_prefilling:
            self._told.pop(sequence, None)
            return
        now, computed, total = self._clock(), sequence.num_computed, len(sequence.token_ids)
        begun = (sequence.num_preemptions, now - seconds, computed - chunk.num_tokens)
        preemptions, told_at, before = self._told.setdefault(sequence, begun)
        if preemptions < sequence.num_preemptions:
            self._told[sequence] = begun
            _, told_at, before = begun
        if now - told_at < EVERY_SECONDS:
            return
        self._told[sequence] = (sequence.num_preemptions, now, computed)
        log.info(
            "prefill of request %s: %d of %d tokens, ~%.0f s left",
            *(sequence.request.request_id, computed, total, (total - computed) * (now - told_at) / (computed - before)),
        )
