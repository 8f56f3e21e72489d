"""Log files: each instance has its own file in the folder of FastDeploy's guides, and its size is limited."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.processes import Child, child
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
SCRIPT = """
import logging, sys, time
from pathlib import Path
from engine.telemetry import logs
named, role, port, level, *lines = sys.argv[1:]
logs._MAX_FILE_BYTES = 2000
logs.set_up(Path(named) if named else None, role, int(port), level)
log = logging.getLogger("engine.core")
log.debug("a detail of ours")
logging.getLogger("asyncio").debug("a detail of a library")
for line in lines:
    log.info(line)
    if "storage" in line:
        logging.getLogger("kvstore_backend.pool").info("the pool is reached")
print("written", flush=True)
time.sleep(600)
"""
Start = Callable[..., Child]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a process, which logs and keeps running. All processes have one folder."""
    with ExitStack() as processes:

        def start_one(
            role: str = "mixed", port: int = 8000, *lines: str, named: str = "", level: str = "info"
        ) -> Child:
            argv = [sys.executable, "-c", SCRIPT, named, role, str(port), level, *lines]
            output = tmp_path / f"output-{len(list(tmp_path.glob('output-*')))}"
            process = processes.enter_context(child(argv, output, {"PYTHONPATH": str(ROOT)}, cwd=tmp_path))
            process.wait_for(lambda: "written" in process.output, "set up")
            return process

        yield start_one


@pytest.mark.parametrize(
    ("role", "folder"), [("mixed", "log_52700"), ("prefill", "log_prefill"), ("decode", "log_decode")]
)
def test_the_default_folder_is_that_of_fastdeploys_guides(start: Start, tmp_path: Path, role: str, folder: str) -> None:
    process = start(role, 52700, "hello")
    assert f"engine.api_server: the log is {folder}/api_server.log\n" in process.output
    assert "hello" in (tmp_path / folder / "api_server.log").read_text()


def test_a_given_folder_is_used(start: Start, tmp_path: Path) -> None:
    assert "the log is here/api_server.log" in start("prefill", 1, named="here").output
    assert not list(tmp_path.glob("log*"))


def test_two_instances_with_defaults_never_share_a_file(start: Start, tmp_path: Path) -> None:
    for role, port in (("mixed", 1), ("mixed", 2), ("prefill", 3), ("prefill", 4)):
        start(role, port, f"of {port}")
    files = sorted(tmp_path.glob("log_*/api_server.log"))
    assert [file.parent.name for file in files] == ["log_1", "log_2", "log_prefill", "log_prefill_4"]
    assert [file.read_text().count(" of ") for file in files] == [1] * 4


def test_the_folder_of_a_killed_instance_is_used_again(start: Start) -> None:
    start("prefill", 3).kill()
    assert "the log is log_prefill/api_server.log" in start("prefill", 4).output


def test_two_instances_with_the_same_folder_get_a_warning_and_lose_no_lines(start: Start, tmp_path: Path) -> None:
    first = start("mixed", 1, named="log")
    second = start("mixed", 2, "of the second", named="log")
    assert "another process" not in first.output
    assert "another process also writes to log/api_server.log; give each instance its own folder" in second.output
    assert "of the second" in (tmp_path / "log" / "api_server.log").read_text()


def test_a_full_log_continues_in_a_new_file_and_old_files_are_removed(start: Start, tmp_path: Path) -> None:
    start("mixed", 1, *(f"line {number:4}" for number in range(400)))
    names = sorted(file.name for file in (tmp_path / "log_1").iterdir())
    assert names == ["api_server.log", *(f"api_server.log.{number}" for number in (1, 2, 3, 4))]
    wait_until(lambda: "line  399" in (tmp_path / "log_1" / "api_server.log").read_text(), "the last line")
    assert all((tmp_path / "log_1" / name).stat().st_size <= 2000 for name in names)


def test_lines_about_the_pool_are_also_in_the_file_that_fastdeploys_scripts_read(start: Start, tmp_path: Path) -> None:
    start("mixed", 1, "news", "request finished: storage_cache_token_num=128 of r1")
    pool, everything = ((tmp_path / "log_1" / f"{name}.log").read_text() for name in ("cache_storage", "api_server"))
    assert "storage_cache_token_num=128 of r1" in pool
    assert "the pool is reached" in pool
    assert "news" not in pool
    assert set(pool.splitlines()) < set(everything.splitlines())


def test_the_log_level_selects_the_lines(start: Start, tmp_path: Path) -> None:
    start("mixed", 1, "news")
    start("mixed", 2, "news", level="debug")
    start("mixed", 3, "news", level="warn")
    plain, debug, warn = ((tmp_path / f"log_{port}" / "api_server.log").read_text() for port in (1, 2, 3))
    assert ("news" in plain, "a detail of ours" in plain) == (True, False)
    assert ("news" in debug, "a detail of ours" in debug, "a library" in debug) == (True, True, False)
    assert warn == ""
