"""Logs the progress of long prompts, which may take many steps and minutes."""

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
    """Logs every ``EVERY_SECONDS`` for each sequence how many tokens of its prompt are computed.

    Call all methods on the engine's thread.

    Args:
        clock: returns the time in seconds, from any start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # For each sequence: its number of preemptions, the time of its last log line (or of its start), and the number
        # of tokens computed at that time.
        self._logged: WeakKeyDictionary[Sequence, tuple[int, float, int]] = WeakKeyDictionary()

    def record_chunk(self, chunk: Chunk, seconds: float) -> None:
        """Record that ``chunk`` was computed, in a step that took ``seconds``.

        Log the progress if the last log line for the sequence is older than ``EVERY_SECONDS``.
        """
        sequence = chunk.sequence
        if not sequence.is_prefilling:
            self._logged.pop(sequence, None)
            return
        now, computed, total = self._clock(), sequence.num_computed, len(sequence.token_ids)
        begun = (sequence.num_preemptions, now - seconds, computed - chunk.num_tokens)
        preemptions, logged_at, before = self._logged.setdefault(sequence, begun)
        if preemptions < sequence.num_preemptions:
            self._logged[sequence] = begun
            _, logged_at, before = begun
        if now - logged_at < EVERY_SECONDS:
            return
        self._logged[sequence] = (sequence.num_preemptions, now, computed)
        seconds_left = (total - computed) * (now - logged_at) / (computed - before)
        log.info(
            "prefill of request %s: %d of %d tokens, ~%.0f s left",
            *(sequence.request.request_id, computed, total, seconds_left),
        )
