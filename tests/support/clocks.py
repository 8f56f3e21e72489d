"""Clocks of child processes that go wrong: a Python program whose ``time.time`` is ahead or behind, and is set anew.

Only the time of day is changed, which is what differs between machines, and what NTP sets; monotonic clocks are not.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["SkewedClock"]

# Python loads a module of this name, found by PYTHONPATH, before all others.
_MODULE = """
import time
from pathlib import Path

_FILE = Path(__file__).with_name("seconds")
_time, _time_ns = time.time, time.time_ns


def _read():
    return float(_FILE.read_text())


time.time = lambda: _time() + _read()
time.time_ns = lambda: _time_ns() + int(_read() * 1e9)
"""


class SkewedClock:
    """The clock of one program and of all that it starts."""

    def __init__(self, folder: Path, seconds: float) -> None:
        """
        Args:
            folder: of the test's own.
            seconds: how far it is ahead.
        """
        folder.mkdir()
        self.env = {"PYTHONPATH": str(folder)}
        """For the program's environment."""
        self._file = folder / "seconds"
        self.set_ahead(seconds)
        (folder / "sitecustomize.py").write_text(_MODULE)

    def set_ahead(self, seconds: float) -> None:
        """Set it anew."""
        new = self._file.with_suffix(".new")
        new.write_text(str(seconds))
        new.replace(self._file)
