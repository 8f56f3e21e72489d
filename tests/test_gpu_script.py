"""``scripts/test-gpu`` on a machine without a GPU, and the plan on ``docs/gpu.md`` for a machine with one."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "test-gpu"))
PARTS: dict[str, Any] = SCRIPT["PARTS"]
PAGE = (ROOT / "docs" / "gpu.md").read_text()


def run_script(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "KVSTORE_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **more}
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "test-gpu", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_without_a_gpu_the_script_prints_one_sentence() -> None:
    ended = run_script("rates")
    assert ended.returncode == 1
    assert "sees no CUDA device; --stand-in runs the script without one" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_an_unknown_part_is_refused_with_the_names_of_all_parts() -> None:
    ended = run_script("speed")
    assert ended.returncode == 2
    assert "there is no part 'speed'; there are waits, sdpa," in ended.stderr


def test_a_part_without_a_package_that_it_needs_prints_one_sentence_also_without_git(tmp_path: Path) -> None:
    (tmp_path / "mooncake.py").write_text("raise ModuleNotFoundError(\"No module named 'mooncake'\")")
    ended = run_script("--stand-in", "--log", str(tmp_path / "logs"), "pool", PATH="", PYTHONPATH=str(tmp_path))
    assert ended.returncode == 1
    sentence = f"the part pool cannot run: {sys.executable}: ModuleNotFoundError: No module named 'mooncake'\n"
    assert (tmp_path / "logs" / "pool.log").read_text() == sentence
    report = (tmp_path / "logs" / "gpu.md").read_text()
    assert "; commit unknown. `scripts/test-gpu pool`" in report
    assert sentence in report
    assert ended.stderr == ""


def make_wheel(folder: Path, name: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-99-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "")
        wheel.writestr(f"{name}-99.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 99\n")
        wheel.writestr(f"{name}-99.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-99.dist-info/RECORD", "")


def test_only_missing_packages_of_a_pack_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kvstore_probe", "orjson"):
        make_wheel(tmp_path, name)
    install = SCRIPT["install_packages"]
    monkeypatch.setitem(install.__globals__, "ROOT", tmp_path / "checkout")
    site, _ = install(sys.executable, tmp_path)
    assert [path.name for path in site.iterdir() if not path.name.endswith("-info")] == ["kvstore_probe"]


def test_the_report_says_of_a_killed_part_that_it_took_too_long(tmp_path: Path) -> None:
    log = SCRIPT["Log"](tmp_path, ["rates"], "here")
    log.path_of("rates").write_text("")
    log.add("rates", -9, 100)  # timeout kills its group, and so itself
    assert "| **took too long** |" in (tmp_path / "gpu.md").read_text()


def test_a_log_that_cannot_be_a_folder_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for option in ("--log", "--pack", "--packages"):
        ended = run_script(option, str(tmp_path / "file"), "rates")
        assert ended.returncode == 2
        assert f"{option} {tmp_path / 'file'}: " in ended.stderr
        assert "Traceback" not in ended.stderr


@pytest.mark.skipif("TRY_GPU_SCRIPT" not in os.environ, reason="takes 10 s of a processor: TRY_GPU_SCRIPT=1 runs it")
def test_the_stand_in_runs_a_part_and_appends_to_the_log(tmp_path: Path) -> None:
    (tmp_path / "gpu.md").write_text("## Before\n")
    ended = run_script("--stand-in", "--log", str(tmp_path), "rates")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = (tmp_path / "gpu.md").read_text()
    assert report.startswith("## Before\n")
    assert "the stand-in on a CPU; its figures are meaningless; Python 3." in report
    assert "| rates | rates of loads and saves, compared with copies of pinned memory | passed |" in report
    assert "| load " in report
    assert (tmp_path / "rates.log").read_text().count("| save ") == 3


@pytest.mark.parametrize(("name", "part"), PARTS.items())
def test_the_files_of_each_part_exist_and_the_page_has_its_time_limit(name: str, part: Any) -> None:
    paths = [f"tests/{path}" for path in part.tests]
    paths += [f"benchmarks/{part.benchmark}.py"] if part.benchmark else []
    paths += [part.script] if part.script else []
    assert paths
    assert all((ROOT / path).exists() for path in paths)
    assert part.seconds <= SCRIPT["MAX_SECONDS"]
    assert f"| `{name}` | {part.seconds} |" in PAGE


def test_the_commands_of_the_plan_run_the_parts_in_their_order_within_ten_minutes_each() -> None:
    """Each part loads torch twice before its time begins."""
    plan = PAGE[PAGE.index("### Thirty minutes") : PAGE.index("## What each part shows")]
    commands = [line.split() for line in re.findall(r'^scripts/test-gpu .*"\$OUT" (.*)$', plan, re.MULTILINE)]
    planned = [name for names in commands for name in names]
    assert len(commands) == 3
    assert planned == list(PARTS)[: len(planned)]
    assert all(sum(PARTS[name].seconds + 15 for name in names) <= 600 for names in commands)


def test_the_imports_of_a_part_are_found_before_it_runs() -> None:
    assert "tests.engine.model.test_models" in SCRIPT["imports_of"](PARTS["suite"])
    assert "tests.kvstore_backend.staging.test_cuda" in SCRIPT["imports_of"](PARTS["waits"])
