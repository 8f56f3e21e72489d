"""Child processes of a test. Their output goes to a file, and they always end with the test.

Each child leads a process group, so that its own children end with it. For example, Debian's Chromium is a shell script
that waits for the browser, and would end without it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.nursery import ForkedProcess
from tests.support.waiting import wait_until

__all__ = ["Child", "child"]


class Child:
    """A running program; ``child`` starts it."""

    def __init__(
        self,
        argv: Sequence[str | Path],
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        *,
        is_forked: bool = False,
    ) -> None:
        """Start ``argv`` with stdout and stderr in ``log``; ``env`` is added to this process's environment.

        With ``is_forked``, one of our programs starts with its large packages already imported (``nursery``).
        """
        self.argv = [str(part) for part in argv]
        self.log = log
        self._process: subprocess.Popen[bytes] | ForkedProcess
        environ = {**os.environ, **(env or {})}
        with log.open("wb") as output:
            if is_forked:
                self._process = ForkedProcess(self.argv, (log, log), environ, cwd)
                return
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                cwd=cwd,
                start_new_session=True,
            )

    def __repr__(self) -> str:
        return f"Child({self.argv[0]}, pid={self.pid}, exit code={self._process.poll()})"

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while the program runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """The output so far, of stdout and stderr."""
        return self.log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], bool], what: str, deadline_s: float = 60.0) -> None:
        """Wait until ``condition`` is true. If the program ends first, fail with its output."""

        def ready_or_ended() -> bool:
            if condition():
                return True
            assert self.exit_code is None, f"{self} ended before {what}:\n{self.output}"
            return False

        wait_until(ready_or_ended, f"{what} of {self}", deadline_s)

    def wait(self, deadline_s: float = 60.0) -> int:
        """Wait until the program has ended; return its exit code."""
        return self._process.wait(deadline_s)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. After ``SIGSTOP``, wait until all threads have stopped."""
        self._process.send_signal(number)
        if number is signal.SIGSTOP:
            wait_until(self._is_stopped, "every thread to stop")

    def _is_stopped(self) -> bool:
        threads = Path(f"/proc/{self._process.pid}/task").iterdir()
        return all((thread / "stat").read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)

    def kill(self) -> None:
        """Kill the program, as a crash does, and wait for its end."""
        self._process.kill()
        self._process.wait()

    def stop(self, patience_s: float = 30.0) -> None:
        """End the program with SIGTERM, and after ``patience_s`` with SIGKILL."""
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def end_group(self) -> None:
        """Kill the remaining processes of the group, and wait until all have ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
            wait_until(lambda: not _list_living(self.pid), f"the end of all that {self} started")


@contextlib.contextmanager
def child(
    argv: Sequence[str | Path],
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    *,
    is_forked: bool = False,
) -> Iterator[Child]:
    """Yield a ``Child``. At the end of the block, end it and its own children."""
    running = Child(argv, log, env, cwd, is_forked=is_forked)
    try:
        yield running
    finally:
        running.stop()
        running.end_group()


def _list_living(group: int) -> list[int]:
    """Return the running processes of a group, without zombies."""
    living = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            state, _, leader = stat.read_text().rpartition(")")[2].split()[:3]
            if int(leader) == group and state not in "ZX":
                living.append(int(stat.parent.name))
    return living
