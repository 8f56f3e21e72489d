"""Measures the duration of steps: with the host's clock, or with events on a GPU.

On a GPU the host cannot measure a step, because vLLM only queues the step's work.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["DeviceClock", "HostClock", "Mark"]


class HostClock:
    """Clock that measures the steps of an engine on the host, where a step has ended when ``end`` is called.

    All calls come from the thread that runs the steps.
    """

    def __init__(self) -> None:
        self._begun = 0.0
        self._steps: list[tuple[int, float]] = []

    def begin(self) -> None:
        """Record the beginning of a step."""
        self._begun = time.monotonic()

    def end(self, num_tokens: int) -> None:
        """Record that all work of the step is queued. A step with ``num_tokens`` 0 is not measured."""
        if num_tokens:
            self._steps.append((num_tokens, time.monotonic() - self._begun))

    def take_steps(self) -> list[tuple[int, float]]:
        """Return the number of tokens and the seconds of each measured step that ended since the last call."""
        taken, self._steps = self._steps, []
        return taken


class Mark(Protocol):
    """Interface of an event that records when the GPU reaches it, such as ``torch.cuda.Event``."""

    def record(self) -> object:
        """Queue this event behind all work in the GPU's current stream."""

    def query(self) -> bool:
        """Return whether the GPU has ended the work before this event."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this event to ``end_event``."""


class DeviceClock:
    """Clock with the methods of ``HostClock`` that measures the steps of an engine on a GPU, by the GPU's own time.

    Args:
        make_mark: returns a new event of the GPU.
    """

    def __init__(self, make_mark: Callable[[], Mark]) -> None:
        self._make_mark = make_mark
        self._begun = make_mark()
        self._open: deque[tuple[int, Mark, Mark]] = deque()

    def begin(self) -> None:
        self._begun = self._make_mark()
        self._begun.record()

    def end(self, num_tokens: int) -> None:
        if num_tokens:
            ended = self._make_mark()
            ended.record()
            self._open.append((num_tokens, self._begun, ended))

    def take_steps(self) -> list[tuple[int, float]]:
        steps = []
        while self._open and self._open[0][2].query():
            num_tokens, begun, ended = self._open.popleft()
            steps.append((num_tokens, begun.elapsed_time(ended) / 1000))
        return steps
