"""Wrong clocks in child processes: ``time.time`` of a Python program is ahead or behind, and a test can change it.

Only the time of day is wrong, because it differs between machines, and NTP sets it. Monotonic clocks are unchanged.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["SkewedClock"]

# Python imports a module of this name from PYTHONPATH before all other modules.
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
    """The clock of a program and of its child processes."""

    def __init__(self, folder: Path, seconds: float) -> None:
        """
        Args:
            folder: a folder that only this test uses.
            seconds: number of seconds that the clock is ahead.
        """
        folder.mkdir()
        self.env = {"PYTHONPATH": str(folder)}
        """The variables for the program's environment."""
        self._file = folder / "seconds"
        self.set_ahead(seconds)
        (folder / "sitecustomize.py").write_text(_MODULE)

    def set_ahead(self, seconds: float) -> None:
        """Change the number of seconds that the clock is ahead."""
        new = self._file.with_suffix(".new")
        new.write_text(str(seconds))
        new.replace(self._file)
