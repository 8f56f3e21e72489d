"""KeptFigures: the last figures of each worker, so that the router's sums never fall where a worker dies or hangs.

Prometheus takes a count that falls for one that began anew, and would add all of it once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["KeptFigures"]

_Figures = Sequence[Any]


class KeptFigures:
    """Of the workers that live, the figures they told last; of those that died, their counts."""

    def __init__(self) -> None:
        self._last: dict[str, _Figures] = {}
        self._gone: _Figures = []

    def __repr__(self) -> str:
        return f"<KeptFigures of {list(self._last)} and those gone>"

    def note_figures(self, worker: str, figures: _Figures) -> None:
        """A worker has told its figures."""
        self._last[worker] = figures

    def remove_worker(self, worker: str) -> None:
        """A worker is gone; its counts, as far as they were told, stay."""
        figures = self._last.pop(worker, None)
        if figures is not None:
            from router.telemetry import add_counts  # a supervisor whose workers live needs no Prometheus

            self._gone = add_counts(self._gone, figures)

    def list_others(self, asker: str) -> list[_Figures]:
        """The figures of all others than ``asker``, those that are gone included."""
        others = [figures for worker, figures in self._last.items() if worker != asker]
        return [*others, self._gone] if self._gone else others
