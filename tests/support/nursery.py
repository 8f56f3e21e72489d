"""Runs a module or a script of ours as ``python`` does, in a process forked from one that has loaded what they need:
loading torch and transformers takes an instance 4 s of computing, and the router a second; the tests start hundreds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["ForkedProcess", "run_forked"]

PRELOADED = ("kvstore_backend.cli", "router.launch.worker", "router.register")
PRELOADED_WITH_TORCH = (*PRELOADED, "engine.api_server", "engine.serving.server")


class ForkedProcess:
    """As ``subprocess.Popen``, for a command that begins with ``[python, "-m", module]`` or ``[python, script]``."""

    def __init__(
        self, argv: Sequence[str], outputs: tuple[Path, Path], env: Mapping[str, str], cwd: Path | None
    ) -> None:
        """
        Args:
            outputs: the files of standard output and standard error, to which it appends.
        """
        python, *words = argv
        assert python == sys.executable
        context = multiprocessing.get_context("forkserver")
        # Tests that have loaded torch themselves are those that start instances.
        context.set_forkserver_preload(list(PRELOADED_WITH_TORCH if "torch" in sys.modules else PRELOADED))
        arguments = (words, outputs, dict(env), cwd or Path.cwd())
        self._process = context.Process(target=_run_program, args=arguments, daemon=True)
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


def run_forked(
    argv: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 100.0
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` with both outputs captured, for a command as ``ForkedProcess`` takes it.

    Args:
        env: all of its environment; without it, ours.
        timeout: in seconds.

    Raises:
        subprocess.TimeoutExpired: it took longer, and was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        process = ForkedProcess(argv, (output, errors), os.environ if env is None else env, None)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(argv, status, output.read_text(), errors.read_text())


def _run_program(words: Sequence[str], outputs: tuple[Path, Path], env: Mapping[str, str], cwd: Path) -> None:
    os.setsid()
    multiprocessing.current_process().daemon = False  # a program may start processes of its own
    for descriptor, path in enumerate(outputs, 1):
        with path.open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    dash_m, *rest = words
    if dash_m != "-m":
        sys.argv[:] = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
        return
    sys.argv[:] = rest
    sys.modules.pop(rest[0], None)  # runpy loads it anew, and warns where it finds it loaded
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
