"""Runs a module as ``python -m`` does, in a process forked from one that has loaded what instances need: loading torch
and transformers takes each instance 4 s of computing, and the tests start some thirty."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["ForkedProcess"]

PRELOADED = "engine.api_server"


class ForkedProcess:
    """As ``subprocess.Popen``, for a command that begins with ``[python, "-m", module]``."""

    def __init__(self, argv: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path | None) -> None:
        python, dash_m, *words = argv
        assert (python, dash_m) == (sys.executable, "-m")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOADED])
        arguments = (words, log, dict(env), cwd or Path.cwd())
        self._process = context.Process(target=_run_module, args=arguments, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run_module(words: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path) -> None:
    os.setsid()
    with log.open("ab") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = words
    sys.modules.pop(words[0], None)  # runpy loads it anew, and warns where it finds it loaded
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
