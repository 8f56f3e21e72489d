"""How long steps take: by the host's clock, or on a GPU by its events, as there a step has only been queued so far."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["DeviceClock", "HostClock", "Mark", "StepClock"]


class StepClock(Protocol):
    """Measures steps one after another; all calls come from the thread that runs them."""

    def begin(self) -> None:
        """Hear that a step begins."""

    def end(self, num_tokens: int) -> None:
        """Hear that all of the step's work has been queued, which computes so many tokens of prompts and others."""

    def take_steps(self) -> list[tuple[int, float]]:
        """Tokens and seconds of the steps that have ended since the last call, but of those without tokens."""


class HostClock:
    """For engines that compute on the host: a step has ended when it returns."""

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
    """A ``torch.cuda.Event`` that keeps the time."""

    def record(self) -> object:
        """Put it behind all work that the current stream has."""

    def query(self) -> bool:
        """Whether that work has ended."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this mark to the other."""


class DeviceClock:
    """For engines that queue their work: a step takes as long as the device is at it, however busy the host is.

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
