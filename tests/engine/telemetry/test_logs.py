"""Each instance has a log file of its own, where the guides look for it, and it does not grow for ever."""

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
    """Starts processes that log, live on, and all work in one folder."""
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
def test_an_instance_that_is_told_nothing_logs_where_the_guides_look(
    start: Start, tmp_path: Path, role: str, folder: str
) -> None:
    process = start(role, 52700, "hello")
    assert f"engine.api_server: the log is {folder}/api_server.log\n" in process.output
    assert "hello" in (tmp_path / folder / "api_server.log").read_text()


def test_the_folder_that_is_named_is_taken(start: Start, tmp_path: Path) -> None:
    assert "the log is here/api_server.log" in start("prefill", 1, named="here").output
    assert not list(tmp_path.glob("log*"))


def test_two_that_are_told_nothing_never_share_a_file(start: Start, tmp_path: Path) -> None:
    for role, port in (("mixed", 1), ("mixed", 2), ("prefill", 3), ("prefill", 4)):
        start(role, port, f"of {port}")
    files = sorted(tmp_path.glob("log_*/api_server.log"))
    assert [file.parent.name for file in files] == ["log_1", "log_2", "log_prefill", "log_prefill_4"]
    assert [file.read_text().count(" of ") for file in files] == [1] * 4


def test_the_folder_of_one_that_was_killed_is_taken_again(start: Start) -> None:
    start("prefill", 3).kill()
    assert "the log is log_prefill/api_server.log" in start("prefill", 4).output


def test_two_that_are_told_the_same_folder_are_warned_and_lose_nothing(start: Start, tmp_path: Path) -> None:
    first = start("mixed", 1, named="log")
    second = start("mixed", 2, "of the second", named="log")
    assert "another process" not in first.output
    assert "another process also writes to log/api_server.log; give each instance its own folder" in second.output
    assert "of the second" in (tmp_path / "log" / "api_server.log").read_text()


def test_a_log_that_is_full_goes_on_in_another_file_and_old_ones_go(start: Start, tmp_path: Path) -> None:
    start("mixed", 1, *(f"line {number:4}" for number in range(400)))
    names = sorted(file.name for file in (tmp_path / "log_1").iterdir())
    assert names == ["api_server.log", *(f"api_server.log.{number}" for number in (1, 2, 3, 4))]
    wait_until(lambda: "line  399" in (tmp_path / "log_1" / "api_server.log").read_text(), "the last line")
    assert all((tmp_path / "log_1" / name).stat().st_size <= 2000 for name in names)


def test_what_concerns_the_pool_is_where_fastdeploys_scripts_look_for_it_as_well(start: Start, tmp_path: Path) -> None:
    start("mixed", 1, "news", "request finished: storage_cache_token_num=128 of r1")
    pool, everything = ((tmp_path / "log_1" / f"{name}.log").read_text() for name in ("cache_storage", "api_server"))
    assert "storage_cache_token_num=128 of r1" in pool
    assert "the pool is reached" in pool
    assert "news" not in pool
    assert set(pool.splitlines()) < set(everything.splitlines())


def test_a_person_debugging_is_told_more(start: Start, tmp_path: Path) -> None:
    start("mixed", 1, "news")
    start("mixed", 2, "news", level="debug")
    start("mixed", 3, "news", level="warn")
    plain, debug, warn = ((tmp_path / f"log_{port}" / "api_server.log").read_text() for port in (1, 2, 3))
    assert ("news" in plain, "a detail of ours" in plain) == (True, False)
    assert ("news" in debug, "a detail of ours" in debug, "a library" in debug) == (True, True, False)
    assert warn == ""
