"""Output that cannot be written ends a program with one sentence, or silently; a server goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

PROGRAM = """
import sys
from kvcommon.output import announce, run_program
def main():
    {}
    return 3
sys.exit(run_program("program", main))
"""
PRINTS = 'print("text")'
ENDS = "print('usage'); sys.exit(0)"


def run(statement: str, output: IO[str] | int) -> tuple[int, str]:
    """The exit status and the standard error of a program with this statement."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(statement)],
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("statement", [PRINTS, 'print("text", flush=True)', ENDS])
def test_a_full_disk_is_one_sentence(statement: str) -> None:
    with Path("/dev/full").open("w") as full:
        assert run(statement, full) == (
            1,
            "program: the output could not be written completely: No space left on device\n",
        )


@pytest.mark.parametrize("statement", [PRINTS, 'print("text", flush=True)', ENDS])
def test_a_pipe_that_nobody_reads_ends_the_program_silently(statement: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        assert run(statement, pipe) == (1, "")


def test_an_output_that_can_be_written_does_not_change_the_exit_status() -> None:
    assert run(PRINTS, subprocess.DEVNULL) == (3, "")
    assert run(ENDS, subprocess.DEVNULL) == (0, "")


def test_a_closed_output_is_no_failure() -> None:
    assert run("sys.stdout = None; announce('text')", subprocess.DEVNULL) == (3, "")


def test_other_errors_are_raised() -> None:
    assert "FileNotFoundError" in run("open('/nonexistent')", subprocess.DEVNULL)[1]


def test_an_announcement_that_cannot_be_written_does_not_stop_a_server() -> None:
    with Path("/dev/full").open("w") as full:
        assert run("announce('ready'); announce('stopping')", full) == (3, "")
