"""Progress of long work."""

from __future__ import annotations

import io

import pytest

from kvstore_backend.cli import report
from kvstore_backend.cli.doctor import try_pool
from kvstore_backend.cli.report import show_progress
from kvstore_backend.config import MemorySettings, PoolConfig


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pipe = 100.0, io.StringIO()
    monkeypatch.setattr("kvstore_backend.cli.report.time.monotonic", lambda: clock)
    with show_progress("bench", 8, pipe) as update:
        for done in range(1, 9):
            clock += 2
            update(done, "put")
    assert pipe.getvalue().splitlines() == [
        "bench: put, 38% after 6 s, about 10 s left",
        "bench: put, 75% after 12 s, about 4 s left",
    ]


def test_short_work_writes_nothing_to_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("bench", 2) as update:
        update(1)
        update(2)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_a_bar_and_clears_it_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = _Terminal()
    with show_progress("bench", 4, terminal) as update:
        update(2, "put")
    shown = terminal.getvalue()
    assert "bench: put" in shown
    assert "50%" in shown
    assert shown.endswith("\x1b[2K"), "the line is cleared"


def test_a_trial_writes_its_progress_to_standard_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "LINE_SECONDS", 0.0)
    store = MemorySettings(size=1 << 20)
    assert [each.level for each in try_pool(PoolConfig(store))] == ["ok"]
    assert capfd.readouterr().err.startswith("trial: ")
