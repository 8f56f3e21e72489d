"""Runs our modules and scripts in forked processes that have imported large packages already.

The import of torch and transformers takes 4 s of CPU time, and that of the router 1 s. Tests start hundreds of them.
"""

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
    """A process like ``subprocess.Popen`` of ``[python, "-m", module, ...]`` or ``[python, script, ...]``."""

    def __init__(
        self, argv: Sequence[str], outputs: tuple[Path, Path], env: Mapping[str, str], cwd: Path | None
    ) -> None:
        """
        Args:
            outputs: the files to which standard output and standard error are appended.
        """
        python, *words = argv
        assert python == sys.executable
        context = multiprocessing.get_context("forkserver")
        # Only tests that have imported torch start instances.
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
    """Run a command of ``ForkedProcess``, and capture both outputs, like ``subprocess.run``.

    Args:
        env: the whole environment; by default, that of this process.
        timeout: in seconds.

    Raises:
        subprocess.TimeoutExpired: the process took longer, and was killed.
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
    multiprocessing.current_process().daemon = False  # a program may start child processes
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
    sys.modules.pop(rest[0], None)  # runpy imports the module again, and would warn that it is imported
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
