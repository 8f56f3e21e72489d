"""Counters of one half (scheduler or worker) of the vLLM connector, by name. The counts of workers can be added."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from kvstore_backend.load_or_compute import Decision

__all__ = ["OUTCOMES", "Counts", "add_counts"]

OUTCOMES = ("ok", "absent", "failed", "dropped")
"""Possible outcomes of the look-up, load or save of a block.

``save ok``: the pool has the block now, from this save or an earlier one; ``save dropped``: the save was never begun.
"""


class Counts:
    """Counters of blocks, bytes and seconds in one namespace, such as ``load ok``, ``load bytes``, ``load seconds``.

    Several threads may call the methods.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add_operation(self, operation: str, seconds: float = 0.0, nbytes: int = 0, **blocks: int) -> None:
        """Count one operation: its seconds, its bytes, and its numbers of blocks by outcome, such as ``ok=3``.

        The operation is ``lookup``, ``load``, ``save`` or ``gather`` (blocks loaded from another sharding). To count
        the missing blocks of a group of layers, it is the name of the group.
        """
        with self._lock:
            for figure, number in (*blocks.items(), ("bytes", nbytes), ("seconds", seconds)):
                if number:
                    self._counts[f"{operation} {figure}"] += number  # type: ignore[assignment]

    def add_decision(self, decision: Decision) -> None:
        """Count a decision for a request with blocks in the pool: to load the blocks, or to compute them."""
        with self._lock:
            self._counts[f"decide {decision}"] += 1

    def pop_counts(self) -> dict[str, dict[str, float]]:
        """Return the counts since the last call, by namespace, and reset them; empty if nothing was counted."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return {self.namespace: dict(taken)} if taken else {}


def add_counts(
    one: Mapping[str, Mapping[str, float]], other: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return the sums of the counts in two results of ``Counts.pop_counts``."""
    total: dict[str, dict[str, float]] = {}
    for counts in (one, other):
        for namespace, numbers in counts.items():
            sums = total.setdefault(namespace, {})
            for name, number in numbers.items():
                sums[name] = sums.get(name, 0) + number
    return total
