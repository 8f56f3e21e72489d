"""Children of a test, and what they start."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import child

# As Debian starts Chromium: a shell that waits for the program, and does not hand SIGTERM on.
WRAPPER = ("sh", "-ec", 'sleep 600 & echo $!; wait "$!"')


def test_what_a_child_started_ends_with_it(tmp_path: Path) -> None:
    with child(WRAPPER, tmp_path / "log") as wrapper:
        wrapper.wait_for(lambda: wrapper.output.endswith("\n"), "the program's pid")
        program = Path(f"/proc/{int(wrapper.output)}/stat")
        assert program.exists()
    assert not program.exists() or program.read_text().rpartition(")")[2].split()[0] == "Z"


def test_what_outlives_a_child_that_was_killed_ends_when_the_block_is_left(tmp_path: Path) -> None:
    with child(WRAPPER, tmp_path / "log") as wrapper:
        wrapper.wait_for(lambda: wrapper.output.endswith("\n"), "the program's pid")
        program = Path(f"/proc/{int(wrapper.output)}/stat")
        wrapper.kill()
        assert program.exists()
    assert not program.exists() or program.read_text().rpartition(")")[2].split()[0] == "Z"
