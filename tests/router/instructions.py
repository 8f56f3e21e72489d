"""Counts bytecode instructions: a measure of cost that does not depend on the load of the machine.

A function written in C counts as one instruction; ``stalls.py`` measures its time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["InstructionCount", "count_instructions"]


class InstructionCount:
    """Counts the instructions of the calling thread in a ``with`` statement, except those of its own function."""

    def __init__(self) -> None:
        self.instructions = 0
        self._before: Any = None

    def __enter__(self) -> InstructionCount:
        self._before = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _on_call(self, frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._on_event

    def _on_event(self, frame: FrameType, event: str, _: object) -> Any:
        self.instructions += event == "opcode"
        return self._on_event


def count_instructions(work: Callable[[], object]) -> int:
    """Return the number of instructions of ``work``."""
    with InstructionCount() as count:
        work()
    return count.instructions
