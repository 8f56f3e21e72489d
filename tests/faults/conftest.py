from __future__ import annotations

import pytest

from tests.faults.report import REPORTS, STARTS, starts_table, table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if REPORTS:
        terminalreporter.section("what faults of the pool did to requests")
        for line in table():
            terminalreporter.write_line(line)
    if STARTS:
        terminalreporter.section("starts right after another process was killed")
        for line in starts_table():
            terminalreporter.write_line(line)
