"""Counts the calls of Python functions in the router's code: a request's way is kept short by tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import router

__all__ = ["calls_in_router"]

_FOLDER = str(Path(router.__file__).parent)


def calls_in_router(work: Callable[[], object]) -> list[str]:
    """The names of the router's functions that ``work`` called, in their order."""
    called: list[str] = []

    def note_call(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_FOLDER):
            called.append(frame.f_code.co_name)

    sys.setprofile(note_call)
    try:
        work()
    finally:
        sys.setprofile(None)
    return called
