"""Runs ``kvstore`` as a user does: a process of its own, in an environment that chooses nothing for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import NamedTuple

from tests.support.nursery import run_forked

__all__ = ["Diagnosis", "Ended", "doctor", "kvstore"]


# A process that is forked has begun long ago.
READ_AT_START = {"LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH"}


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    output: str
    errors: str


class Diagnosis(NamedTuple):
    """What doctor said."""

    status: int
    findings: list[dict[str, str]]

    @property
    def failures(self) -> dict[str, str]:
        """Subject -> what is wrong and what to do, of all that failed."""
        return {each["subject"]: f"{each['text']} -> {each['remedy']}" for each in self.of("fail")}

    def of(self, level: str) -> list[dict[str, str]]:
        """The findings of one level."""
        return [each for each in self.findings if each["level"] == level]


def kvstore(*arguments: object, **environment: str) -> Ended:
    """``kvstore ARGUMENTS`` with ``environment`` added; what it wrote must not be a traceback."""
    chosen = ("MOONCAKE_", "KVSTORE_", "MC_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(chosen)}
    command = [sys.executable, "-m", "kvstore_backend.cli", *map(str, arguments)]
    if environment.keys() & READ_AT_START:
        env = inherited | environment
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    else:
        ended = run_forked(command, inherited | environment)
    assert "Traceback" not in ended.stdout + ended.stderr, ended.stderr
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def doctor(*arguments: object, **environment: str) -> Diagnosis:
    """What ``kvstore doctor`` finds."""
    ended = kvstore("doctor", "--json", *arguments, **environment)
    report = json.loads(ended.output)
    assert report["usable"] == (ended.status == 0)
    return Diagnosis(ended.status, report["findings"])
