"""Each command in the README runs in these tests, in the tests named here, or in the CI."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.examples.readme import README, readme_blocks
from tests.examples.script import ROOT

RUN_ELSEWHERE = {
    "examples/cache_storage/run_pd_storage.sh": "test_conversation.py, with --keep",
    "examples/cache_storage/run_pd_storage.sh --keep": "test_conversation.py",
    "examples/cache_storage/run.sh": "test_scripts.py",
    "scripts/test\nscripts/check": ".ci/run",
}
ACTIVATE = ". .venv/bin/activate"  # in the text; tested here
CURL = "curl "  # tested in test_conversation.py


def test_each_command_of_the_readme_runs_in_a_test() -> None:
    blocks = readme_blocks("bash")
    assert {block for block in blocks if not block.startswith(CURL)} == set(RUN_ELSEWHERE)


def test_the_commands_in_the_text_exist_in_the_activated_environment() -> None:
    if not (ROOT / ".venv").exists():
        pytest.skip("this checkout has not been set up; scripts/test does that")
    assert f"`{ACTIVATE}`" in README.read_text()
    modules = set(re.findall(r"`(python -m [\w.]+)", README.read_text()))
    assert modules
    for command in (*modules, "kvrouter", "kvstore"):
        script = f"cd {ROOT} && {ACTIVATE} && {command} --help"
        ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert "usage:" in ended.stdout, ended


def test_the_ci_runs_the_command_of_the_readme() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert "scripts/test" in ci
    assert "scripts/check" in ci


def test_the_readme_is_short_and_has_the_figure_on_its_first_screen() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    first_screen = "\n".join(lines[:20])
    assert "1,243 ms" in first_screen
    assert all(f"](#{entry})" in first_screen for entry in ("try-it", "route", "operate"))


def test_the_readme_installs_the_router_without_torch() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (dependencies,) = re.findall(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert "fastapi" in dependencies
    assert "torch" not in dependencies


def test_the_files_in_the_readme_exist() -> None:
    named = re.findall(r"`((?:kvstore_backend|router|engine|examples|scripts)/[\w/.]*)`", README.read_text())
    assert named
    assert [name for name in named if not Path(ROOT / name).exists()] == []
