"""``scripts/test-gpu`` where there is no GPU: one sentence, or all of it with the stand-in."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PARTS: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "test-gpu"))["PARTS"]


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "KVSTORE_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "test-gpu", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    ended = run_script("rates")
    assert ended.returncode == 1
    assert "sees no CUDA device; --stand-in tries the script out without one" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_part_that_is_not_there_is_named_with_those_that_are() -> None:
    ended = run_script("speed")
    assert ended.returncode == 2
    assert "there is no part 'speed'; there are suite, equality," in ended.stderr


@pytest.mark.skipif("TRY_GPU_SCRIPT" not in os.environ, reason="takes 10 s of a processor: TRY_GPU_SCRIPT=1 runs it")
def test_the_stand_in_runs_a_part_and_appends_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "gpu.md"
    log.write_text("## Before\n")
    ended = run_script("--stand-in", "--log", str(log), "rates")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = log.read_text()
    assert said.startswith("## Before\n")
    assert "the stand-in on a CPU; figures say nothing; Python 3." in said
    assert "| rates | loads and saves beside copies of pinned memory | passed |" in said
    assert "| load " in said
    assert "| save " in said


@pytest.mark.parametrize(("name", "part"), PARTS.items())
def test_each_part_names_files_that_are_there_and_is_on_the_page(name: str, part: Any) -> None:
    named = [word for word in (*part.arguments, part.script) if "/" in word]
    assert named
    assert all((ROOT / path).exists() for path in named)
    assert f"| `{name}` |" in (ROOT / "docs" / "gpu.md").read_text()
