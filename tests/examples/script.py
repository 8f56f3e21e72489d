"""Runs the example scripts as a user does: in this checkout, at their fixed ports."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "cache_storage"
CHOICES = (
    "ENGINE",
    "ROUTER",
    "MODEL_NAME",
    "MAX_MODEL_LEN",
    "MOONCAKE_PROTOCOL",
    "MOONCAKE_CONFIG_PATH",
    "FD_DEBUG",
    "FD_MODEL_CACHE",
    "FD_PLUGINS",
)


def script_environment(**variables: str) -> dict[str, str]:
    """Return the environment without the variables that the scripts read."""
    return {name: value for name, value in os.environ.items() if name not in CHOICES} | variables


def loopback_only() -> list[str]:
    """Return the command prefix for a network with only loopback; empty if this is not allowed here."""
    command = ["unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up && exec "$0" "$@"']
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run([*command, "true"], stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return command
    return []


def complaint(name: str, *arguments: str, **environment: str) -> str:
    """Return the message of a script that refuses to start."""
    ended = subprocess.run(
        [EXAMPLES / name, *arguments],
        env=script_environment(**environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    return ended.stderr


class Script:
    """A running example script, in its own process group, like a foreground job of a terminal."""

    def __init__(self, name: str, *arguments: str, under: Sequence[str] = (), **environment: str) -> None:
        self.process = subprocess.Popen(
            [*under, EXAMPLES / name, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env=script_environment(**environment),
            start_new_session=True,
        )
        self.output = ""
        self.started: set[tuple[int, int]] = set()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.output += line
                self.started |= descendants(self.process.pid)

    def wait_for(self, text: str, deadline: float) -> None:
        """Wait until the script has printed ``text``; fail with its output if it ends or takes longer."""

        def printed() -> bool:
            assert text in self.output or self.process.poll() is None, f"it ended:\n{self.output}"
            return text in self.output

        wait_until(printed, f"the script to print {text!r}", deadline)

    def end(self, deadline: float) -> int:
        """Wait for the end of the script; return its exit status."""
        self.started |= descendants(self.process.pid)
        status = self.process.wait(deadline)
        self._reader.join(deadline)
        return status

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C."""
        self.started |= descendants(self.process.pid)
        os.killpg(self.process.pid, signal.SIGINT)

    def left_behind(self) -> list[str]:
        """Return the command lines of child processes that still run. A killed process needs a moment to end."""

        def remaining() -> list[str]:
            return [command_line(pid) for pid, started_at in self.started if stat(pid)[1:] == (started_at,)]

        with contextlib.suppress(AssertionError):
            wait_until(lambda: not remaining(), "what was killed to be gone", 10)
        return remaining()


def descendants(pid: int) -> set[tuple[int, int]]:
    """Return the descendants of ``pid`` as process ids and start times, because ids are reused."""
    children: dict[int, list[tuple[int, int]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (found := stat(int(entry.name))):
            children.setdefault(found[0], []).append((int(entry.name), found[1]))
    family: set[tuple[int, int]] = set()
    todo = [pid]
    while todo:
        born = children.get(todo.pop(), [])
        family |= set(born)
        todo += [child for child, _ in born]
    return family


def stat(pid: int) -> tuple[int, int] | tuple[()]:
    """Return the parent and the start time of a process; an empty tuple if it does not exist."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[1]), int(fields[19])
    return ()


def command_line(pid: int) -> str:
    """Return the command line of a process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return f"process {pid}"


@contextlib.contextmanager
def running(name: str, *arguments: str, under: Sequence[str] = (), **environment: str) -> Iterator[Script]:
    """Run a script, and interrupt it at the end. ``under`` is a command prefix."""
    script = Script(name, *arguments, under=under, **environment)
    try:
        yield script
    finally:
        if script.process.poll() is None:
            script.interrupt()
        script.end(60)
