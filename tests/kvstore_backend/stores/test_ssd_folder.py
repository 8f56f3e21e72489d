"""An owner waits for the master only if the last owner of the folder ended a short time ago."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvstore_backend.stores import ssd_folder
from kvstore_backend.stores.file.ledger import BOOT_ID_FILE
from kvstore_backend.stores.ssd_folder import SsdFolder
from tests.support.forking import in_forked_child
from tests.support.waiting import wait_until


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each wait until the master notices the end of an owner."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


def list_marks(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_an_unused_folder_is_opened_without_a_wait(tmp_path: Path, waits: list[float]) -> None:
    folder = SsdFolder(str(tmp_path))
    assert len(list_marks(tmp_path)) == 1
    folder.remove_mark()
    assert (list_marks(tmp_path), waits) == ([], [])


def test_the_next_owner_waits_after_an_owner_was_killed(tmp_path: Path, waits: list[float]) -> None:
    program = f"import os; from kvstore_backend.stores.ssd_folder import SsdFolder; SsdFolder({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", f"{program}; os._exit(9)"], check=False)
    (mark,) = list_marks(tmp_path)
    folder = SsdFolder(str(tmp_path))
    assert waits == [12.0]
    assert not mark.exists()
    folder.remove_mark()
    SsdFolder(str(tmp_path)).remove_mark()
    assert waits == [12.0]


@pytest.mark.parametrize(("age", "wait"), [(0, 12.0), (9, 3.0), (60, None)])
def test_the_next_owner_waits_for_a_fixed_time_after_an_owner_left(
    tmp_path: Path, waits: list[float], age: int, wait: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    SsdFolder(str(tmp_path)).leave()
    (mark,) = list_marks(tmp_path)
    now = time.monotonic() + age
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "time", lambda: 0.0)  # the wall clock is not used
    SsdFolder(str(tmp_path)).remove_mark()
    assert waits == ([] if wait is None else [pytest.approx(wait, abs=1.0)])
    assert not mark.exists()


@pytest.mark.parametrize("text", ["left", "left another-start-of-the-machine 1.0", "left {boot} soon", "", "x y z"])
def test_a_mark_without_a_valid_time_causes_the_full_wait(tmp_path: Path, waits: list[float], text: str) -> None:
    boot_id = BOOT_ID_FILE.read_text().strip()
    (tmp_path / "kvstore-owner-x").write_text(text.format(boot=boot_id))
    SsdFolder(str(tmp_path)).remove_mark()
    assert waits == [12.0]


def test_two_live_owners_use_one_folder_without_a_wait(tmp_path: Path, waits: list[float]) -> None:
    first, second = SsdFolder(str(tmp_path)), SsdFolder(str(tmp_path))
    assert len(list_marks(tmp_path)) == 2
    first.remove_mark()
    second.remove_mark()
    assert waits == []


def test_a_forked_child_does_not_hide_that_its_parent_has_left(tmp_path: Path) -> None:
    folder, (reading, writing) = SsdFolder(str(tmp_path)), os.pipe()

    def leave() -> None:
        os.read(reading, 1)
        folder.leave()

    def find_mark() -> str:
        os.write(writing, b"!")
        wait_until(lambda: ssd_folder._remove_dead_marks(tmp_path) > 0, "the mark of the parent", 10)
        return "found"

    leaving = threading.Thread(target=leave)
    leaving.start()
    assert in_forked_child(find_mark) == "found"
    leaving.join()
    os.close(reading)
    os.close(writing)


def test_a_forked_child_does_not_hide_that_its_parent_was_killed(tmp_path: Path, waits: list[float]) -> None:
    program = (
        "import os, sys; from kvstore_backend.stores.ssd_folder import SsdFolder; "
        f"folder, (reading, writing) = SsdFolder({str(tmp_path)!r}), os.pipe(); "
        "os.read(reading, 1) if os.fork() else os.write(writing, b'!') and sys.stdin.read(); os._exit(9)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as parent:
        os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
        SsdFolder(str(tmp_path)).remove_mark()
    assert waits == [12.0]


def test_a_missing_folder_raises_nothing_and_an_empty_path_is_the_default_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SsdFolder(str(tmp_path / "nowhere")).leave()
    monkeypatch.setattr(ssd_folder, "DEFAULT_FOLDER", str(tmp_path))
    folder = SsdFolder("")
    assert len(list_marks(tmp_path)) == 1
    folder.remove_mark()
