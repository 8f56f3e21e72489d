"""Progress of long work, on standard error: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import IO, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["Tell", "show_progress"]

LINE_SECONDS = 5.0
"""Seconds between two lines, and before the first; shorter work writes nothing to a pipe."""


class Tell(Protocol):
    """Callback that receives how much is done, and a word or two for the current step."""

    def __call__(self, done: float, now: str = "") -> None: ...


@contextlib.contextmanager
def show_progress(title: str, total: float, file: IO[str] | None = None) -> Iterator[Tell]:
    """Show how much of ``total`` is done.

    Args:
        file: where to show it; standard error by default.
    """
    console = Console(file=file or sys.stderr, highlight=False)
    if not console.is_terminal:
        yield _Lines(title, total, console.file).tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(title, total=total)

        def tell(done: float, now: str = "") -> None:
            progress.update(task, completed=done, description=f"{title}: {now}" if now else title)

        yield tell


class _Lines:
    """Progress as one line every few seconds."""

    def __init__(self, title: str, total: float, file: IO[str]) -> None:
        self._title = title
        self._total = total
        self._file = file
        self._began = self._told = time.monotonic()

    def tell(self, done: float, now: str = "") -> None:
        clock = time.monotonic()
        if clock - self._told < LINE_SECONDS:
            return
        self._told = clock
        line = f"{self._title}: {now}, " if now else f"{self._title}: "
        line += f"{done / self._total if self._total else 1:.0%} after {clock - self._began:.0f} s"
        if 0 < done < self._total:
            line += f", some {(clock - self._began) * (self._total - done) / done:.0f} s left"
        print(line, file=self._file, flush=True)
