"""Starts and signals the programs of a recipe. Each program runs in a process group of its own, with its children."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvstore_backend.backend import KVStoreError

__all__ = ["Program", "StartFailed", "find_free_ports", "is_listening", "run_once"]

_STOP_SECONDS = 20.0
_LEAVE_SECONDS = 5.0
_POLL_SECONDS = 0.1
_LAST_LINES = 12


class StartFailed(KVStoreError):
    """Error: a program of the recipe did not start. The message has the last lines of the program's log."""


class Program:
    """One program of a recipe and its children, in a process group of their own. Their output goes to a log file.

    Args:
        name: name of the program, for messages and for the log file.
        command: the program and its arguments.
        environment: environment variables that are added to those of this process.
        folder: folder for the log file.
        is_ready: returns whether the program is ready; ``start`` calls it every 0.1 s.
        start_seconds: seconds for which ``start`` waits until the program is ready.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        is_ready: Callable[[], bool],
        start_seconds: float,
    ) -> None:
        self.name = name
        self._command = ["env", *(f"{key}={value}" for key, value in environment.items()), *command]
        self._log = folder / f"{name.replace(' ', '_')}.log"
        self._is_ready = is_ready
        self._start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the program, and wait until it is ready.

        Raises:
            StartFailed: another program has the port, or the program cannot be started, ended, or was not ready in
                time.
        """
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self._is_ready():  # a child of a killed program keeps its port until its memory is freed
            if time.monotonic() > deadline:
                raise StartFailed(
                    f"{self.name} cannot be started: another program listens at its port; end that program"
                )
            time.sleep(_POLL_SECONDS)
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as exc:
            raise StartFailed(f"{self.name} cannot be started: {exc.strerror}") from exc
        deadline = time.monotonic() + self._start_seconds
        while True:
            status = self._process.poll()
            if status is not None:
                raise StartFailed(f"{self.name} ended with status {status} before it was ready. {self._quote_log()}")
            if self._is_ready():
                return
            if time.monotonic() > deadline:
                raise StartFailed(f"{self.name} was not ready within {self._start_seconds:g} s. {self._quote_log()}")
            time.sleep(_POLL_SECONDS)

    @property
    def has_ended(self) -> bool:
        """Whether the program was started and has ended."""
        return self._process is not None and self._process.poll() is not None

    def kill(self) -> None:
        """Kill the program and its children, as in a crash."""
        self._send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def hang(self) -> None:
        """Suspend the program and its children until ``resume``, so that the program answers nothing."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the suspended program and its children run again."""
        self._send(signal.SIGCONT)

    def stop(self) -> None:
        """Ask the program to end, wait up to 20 s, and kill what still runs of the program and its children."""
        if self._process is None:
            return
        self.resume()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        finally:
            self.kill()  # also after a second Ctrl-C

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _quote_log(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return "\n".join([f"The end of {self._log}:", *lines])


def run_once(command: Sequence[str], folder: Path) -> None:
    """Run a command from the recipe's ``prepare`` in ``folder``, and wait until it has ended.

    Raises:
        StartFailed: the command cannot be started, or its exit status is not 0.
    """
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as exc:
        raise StartFailed(f"the command {command[0]!r} in prepare cannot be started: {exc.strerror}") from exc
    try:
        output = process.communicate()[0]
    except BaseException:  # this program is ended: end what the command has started, too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode:
        lines = output.decode(errors="replace").splitlines()[-_LAST_LINES:]
        text = f"the command {command[0]!r} in prepare ended with status {process.returncode}:"
        raise StartFailed("\n".join([text, *lines]))


def is_listening(port: int) -> bool:
    """Return whether a program accepts connections on this port of 127.0.0.1."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def find_free_ports(count: int) -> list[int]:
    """Return ``count`` ports on which nothing listens. Linux does not use these ports for outgoing connections."""
    with contextlib.ExitStack() as bound:
        ports: list[int] = []
        for port in random.sample(range(20000, 32000), 4000):
            if len(ports) == count:
                break
            with contextlib.suppress(OSError):
                bound.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
        return ports
