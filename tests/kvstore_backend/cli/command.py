"""Runs ``kvstore`` as a user does: in its own process, without settings from the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import NamedTuple

from tests.support.nursery import run_forked

__all__ = ["Diagnosis", "Result", "doctor", "kvstore"]


# Variables that a process reads only at its start, so that a forked process would ignore them.
READ_AT_START = {"LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH"}


class Result(NamedTuple):
    """The result of a command."""

    status: int
    output: str
    errors: str


class Diagnosis(NamedTuple):
    """The findings of doctor."""

    status: int
    findings: list[dict[str, str]]

    @property
    def failures(self) -> dict[str, str]:
        """The cause and the remedy of each failure, by subject."""
        return {each["subject"]: f"{each['text']} -> {each['remedy']}" for each in self.of("fail")}

    def of(self, level: str) -> list[dict[str, str]]:
        """The findings of one level."""
        return [each for each in self.findings if each["level"] == level]


def kvstore(*arguments: object, **environment: str) -> Result:
    """Run ``kvstore ARGUMENTS`` with ``environment`` added; assert that it wrote no traceback."""
    prefixes = ("MOONCAKE_", "KVSTORE_", "MC_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    command = [sys.executable, "-m", "kvstore_backend.cli", *map(str, arguments)]
    if environment.keys() & READ_AT_START:
        env = inherited | environment
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    else:
        ended = run_forked(command, inherited | environment)
    assert "Traceback" not in ended.stdout + ended.stderr, ended.stderr
    return Result(ended.returncode, ended.stdout, ended.stderr)


def doctor(*arguments: object, **environment: str) -> Diagnosis:
    """Run ``kvstore doctor`` and return its findings."""
    ended = kvstore("doctor", "--json", *arguments, **environment)
    report = json.loads(ended.output)
    assert report["usable"] == (ended.status == 0)
    return Diagnosis(ended.status, report["findings"])
