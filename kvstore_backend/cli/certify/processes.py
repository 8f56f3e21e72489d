"""Starts the programs of a recipe in process groups of their own, and signals them."""

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
    """A program of the recipe did not start; the message has the last lines of its log."""


class Program:
    """One program with its children, in a process group of its own. Its output goes to a log file.

    Args:
        name: names the program in messages, and its log.
        is_ready: asks whether the program is ready; called every 0.1 s by ``start``.
        start_seconds: how long ``start`` waits.
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
            StartFailed: it ended, or was not ready in time.
        """
        self.begin()
        self.wait_ready()

    def begin(self) -> None:
        """Start the program without waiting.

        Raises:
            StartFailed: the system cannot start it, or another program has its port.
        """
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self._is_ready():  # a child of a killed program keeps its port until its memory is freed
            if time.monotonic() > deadline:
                raise StartFailed(f"{self.name} cannot be started: another program already answers in its place")
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

    def wait_ready(self) -> None:
        """Wait until the program is ready.

        Raises:
            StartFailed: it ended, or was not ready in time.
        """
        assert self._process is not None
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
        """Whether the program was started and is not running any more."""
        return self._process is not None and self._process.poll() is not None

    def kill(self) -> None:
        """End the whole group, as a crash does."""
        self._send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def hang(self) -> None:
        """Stop the whole group from running until ``resume``."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the group run again."""
        self._send(signal.SIGCONT)

    def stop(self) -> None:
        """Ask the program to end, and kill the group after 20 s."""
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
    """Run a command of ``prepare`` to its end.

    Raises:
        StartFailed: it cannot be started, or its exit status is not 0.
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
        raise StartFailed(f"prepare: {command[0]}: {exc.strerror}") from exc
    try:
        output = process.communicate()[0]
    except BaseException:  # this program is ended: end what the command has started, too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode:
        lines = output.decode(errors="replace").splitlines()[-_LAST_LINES:]
        raise StartFailed("\n".join([f"prepare: {command[0]} ended with status {process.returncode}:", *lines]))


def is_listening(port: int) -> bool:
    """Return whether a program accepts connections on this port of 127.0.0.1."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def find_free_ports(count: int) -> list[int]:
    """Return ports on which nothing listens, below those that Linux gives to outgoing connections."""
    with contextlib.ExitStack() as bound:
        ports: list[int] = []
        for port in random.sample(range(20000, 32000), 4000):
            if len(ports) == count:
                break
            with contextlib.suppress(OSError):
                bound.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
        return ports
