"""The router compiled by mypyc, as wheels have it, passes the tests of its data plane."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Those in which most of the compiled modules work together.
TESTS = ("test_pair.py", "test_relay.py", "test_streams.py", "test_selection.py", "test_prefix_index.py")


@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler, without which wheels are plain Python")
def test_the_compiled_data_plane_behaves_as_its_sources_say(tmp_path: Path) -> None:
    for name in ("router", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    environment = {**os.environ, "MYPYC_OPT_LEVEL": "0", "PYTHONPATH": str(tmp_path)}
    run(["setup.py", "-q", "build_ext", "--inplace"], tmp_path, environment)
    shown = run(["-c", "import router.proxy; print(router.proxy.__file__)"], tmp_path, environment)
    assert shown.strip().endswith(".so")
    run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/router/{test}" for test in TESTS)],
        tmp_path,
        environment,
    )


def run(command: list[str], where: Path, environment: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, *command], cwd=where, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
