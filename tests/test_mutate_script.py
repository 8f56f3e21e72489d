"""``scripts/mutate`` with its default arguments: the files in its table exist."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "mutate"
NAMESPACE: dict[str, Any] = runpy.run_path(str(SCRIPT))


def test_the_script_lists_a_sample_of_a_modules_mutations() -> None:
    command = [sys.executable, str(SCRIPT), "--list", "--count", "20", "kvstore_backend/wrappers/tiered.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("\n") == 20


def test_the_modules_and_tests_of_the_table_exist() -> None:
    table = NAMESPACE["DIRECT_TESTS"]
    named = {word for words in table.values() for word in words if word.startswith("tests/")} | table.keys()
    assert sorted(word for word in named if not (ROOT / word).exists()) == []


def test_a_module_without_an_entry_is_refused_in_one_sentence() -> None:
    ended = subprocess.run(
        [sys.executable, SCRIPT, "--list", "router/speed.py"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert "router/speed.py has no entry in the table DIRECT_TESTS of this script" in ended.stderr
