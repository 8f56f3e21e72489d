"""The list of tests that pass only at the second try (``scripts/test``, ``tests/conftest.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.mark.timing
def test_that_needs_a_fast_machine(): ...

def test_with_a_race(): ...

def test_that_fails_again():
    assert False
"""


def test_the_list_contains_each_test_that_passes_and_its_marker(tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = timing\n")
    log = tmp_path / "second-try.txt"
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "test_three.py"],
        cwd=tmp_path,
        env={**os.environ, "SECOND_TRY_LOG": str(log), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1, ended.stdout
    assert log.read_text() == "test_three.py::test_that_needs_a_fast_machine timing\ntest_three.py::test_with_a_race\n"
