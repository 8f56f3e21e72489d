"""Duration of steps: from the host's clock, or from events on a GPU, where a step is only queued when it returns."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["DeviceClock", "HostClock", "Mark", "StepClock"]


class StepClock(Protocol):
    """Clock for steps, one after another; all calls come from the thread that runs them."""

    def begin(self) -> None:
        """Record the begin of a step."""

    def end(self, num_tokens: int) -> None:
        """Record that the step's work is queued; ``num_tokens`` is 0 if the step does not count."""

    def take_steps(self) -> list[tuple[int, float]]:
        """Return tokens and seconds of the steps that ended since the last call, without steps of 0 tokens."""


class HostClock:
    """Clock for engines that compute on the host: a step has ended when it returns."""

    def __init__(self) -> None:
        self._begun = 0.0
        self._steps: list[tuple[int, float]] = []

    def begin(self) -> None:
        self._begun = time.monotonic()

    def end(self, num_tokens: int) -> None:
        if num_tokens:
            self._steps.append((num_tokens, time.monotonic() - self._begun))

    def take_steps(self) -> list[tuple[int, float]]:
        taken, self._steps = self._steps, []
        return taken


class Mark(Protocol):
    """Protocol of a ``torch.cuda.Event`` with timing."""

    def record(self) -> object:
        """Queue this mark after all work of the current stream."""

    def query(self) -> bool:
        """Return whether that work has ended."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this mark to ``end_event``."""


class DeviceClock:
    """Clock for engines that queue their work: measures the time on the device, however busy the host is.

    Args:
        make_mark: makes an event of the device.
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
