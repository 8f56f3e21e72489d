"""Lists the calls of the router's Python functions, so that tests can limit the calls of a request."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import router

__all__ = ["list_router_calls"]

_FOLDER = str(Path(router.__file__).parent)


def list_router_calls(work: Callable[[], object]) -> list[str]:
    """Return the names of the router's functions that ``work`` calls, in order."""
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
