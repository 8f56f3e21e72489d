"""KeptFigures: the last metrics of each worker, so that the router's sums never decrease when a worker dies or hangs.

Prometheus regards a decreasing counter as restarted, and would add its whole value again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["KeptFigures"]

_Figures = Sequence[Any]


class KeptFigures:
    """Last metrics of live workers, plus counters of dead ones."""

    def __init__(self) -> None:
        self._last: dict[str, _Figures] = {}
        self._gone: _Figures = []

    def __repr__(self) -> str:
        return f"<KeptFigures of {list(self._last)} and those gone>"

    def note_figures(self, worker: str, figures: _Figures) -> None:
        """Store a worker's metrics."""
        self._last[worker] = figures

    def remove_worker(self, worker: str) -> None:
        """Remove a worker that is gone; its last known counters stay."""
        figures = self._last.pop(worker, None)
        if figures is not None:
            from router.telemetry import add_counts  # not needed while no worker dies

            self._gone = add_counts(self._gone, figures)

    def list_others(self, asker: str) -> list[_Figures]:
        """Return the metrics of all workers except ``asker``, including those that are gone."""
        others = [figures for worker, figures in self._last.items() if worker != asker]
        return [*others, self._gone] if self._gone else others
