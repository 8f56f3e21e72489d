"""Child processes of a test, and their own children."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.support.nursery import run_forked
from tests.support.processes import child

# As Debian starts Chromium: a shell that waits for the program, and does not forward SIGTERM.
WRAPPER = ("sh", "-ec", 'sleep 600 & echo $!; wait "$!"')


@pytest.mark.parametrize("was_killed", [False, True])
def test_the_children_of_a_child_end_with_the_block(tmp_path: Path, was_killed: bool) -> None:
    with child(WRAPPER, tmp_path / "log") as wrapper:
        wrapper.wait_for(lambda: wrapper.output.endswith("\n"), "the program's pid")
        program = Path(f"/proc/{int(wrapper.output)}/stat")
        if was_killed:
            wrapper.kill()
        assert program.exists()
    assert not program.exists() or program.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_forked_child_has_its_own_arguments_environment_and_folder(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv[1:3], os.environ['WORD'], os.getcwd(), flush=True); os._exit(7)"
    argv = [sys.executable, "-m", "timeit", "-n1", "-r1", code]
    with child(argv, tmp_path / "log", {"WORD": "river"}, tmp_path, is_forked=True) as forked:
        assert forked.wait() == 7
    assert forked.output == f"['-n1', '-r1'] river {tmp_path}\n"


def test_the_outputs_of_a_forked_program_are_separate() -> None:
    code = "import os, sys; print('out', flush=True); print('err', file=sys.stderr, flush=True); os._exit(3)"
    ended = run_forked([sys.executable, "-m", "timeit", "-n1", "-r1", code], {})
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "out\n", "err\n")


def test_a_forked_child_ends_at_a_signal(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "timeit", "-n1", "-r1", "print('begun', flush=True); import time; time.sleep(600)"]
    with child(argv, tmp_path / "log", is_forked=True) as forked:
        forked.wait_for(lambda: "begun" in forked.output, "its start")
        assert forked.exit_code is None
    assert forked.exit_code == -signal.SIGTERM
