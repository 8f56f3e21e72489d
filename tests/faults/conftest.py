from __future__ import annotations

import pytest

from tests.faults.report import REPORTS, table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if REPORTS:
        terminalreporter.section("what faults of the pool did to requests")
        for line in table():
            terminalreporter.write_line(line)
