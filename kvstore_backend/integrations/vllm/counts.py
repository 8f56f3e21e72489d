"""Counts of one half of the vLLM connector since the last read: small numbers by name, which add up."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from kvstore_backend.load_or_compute import Decision

__all__ = ["OUTCOMES", "Counts", "add_counts"]

OUTCOMES = ("ok", "absent", "failed", "dropped")
"""Possible outcomes for a block that is looked up, loaded or saved.

``save ok``: the pool has it now, from this save or from before; ``save dropped``: the save never began.
"""


class Counts:
    """Counters of one namespace, such as ``load ok`` (blocks), ``load bytes`` and ``load seconds``.

    Several threads may call it.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add_operation(self, operation: str, seconds: float = 0.0, nbytes: int = 0, **blocks: int) -> None:
        """Count one ``lookup``, ``load`` or ``save``: ``blocks`` by outcome, with bytes and time."""
        with self._lock:
            for figure, number in (*blocks.items(), ("bytes", nbytes), ("seconds", seconds)):
                if number:
                    self._counts[f"{operation} {figure}"] += number  # type: ignore[assignment]

    def add_decision(self, decision: Decision) -> None:
        """Count one decision for a request with blocks in the pool."""
        with self._lock:
            self._counts[f"decide {decision}"] += 1

    def pop_counts(self) -> dict[str, dict[str, float]]:
        """Return all counts since the last call, by namespace; empty if nothing was counted."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return {self.namespace: dict(taken)} if taken else {}


def add_counts(
    one: Mapping[str, Mapping[str, float]], other: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return the sum of both."""
    total: dict[str, dict[str, float]] = {}
    for counts in (one, other):
        for namespace, numbers in counts.items():
            of_it = total.setdefault(namespace, {})
            for name, number in numbers.items():
                of_it[name] = of_it.get(name, 0) + number
    return total
