"""A real redis-server that a test may kill, stop and restart. It stores nothing on disk."""

from __future__ import annotations

import shutil
import signal
import socket
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.processes import Child

__all__ = ["RedisServer", "needs_redis"]

needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")


class RedisServer:
    """A server that always has the same port."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process: Child | None = None

    def start(self) -> None:
        """Start the server, without data, and wait until it responds."""
        argv: list[str | Path] = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self._process = Child([*argv, "--dir", self._folder], self._folder / "redis.log")
        self._process.wait_for(self._answers, "its start")

    def _answers(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        """Kill the server, as a crash does. Its port then refuses connections."""
        assert self._process is not None
        self._process.kill()

    def hang(self) -> None:
        """Stop the server: its port accepts connections, but it does not respond."""
        assert self._process is not None
        self._process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the server continue after ``hang``."""
        assert self._process is not None
        self._process.signal(signal.SIGCONT)
