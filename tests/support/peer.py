"""A store in another process, which a test controls and may kill."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, cast

from kvstore_backend.backend import Health, Status, StorageBackend
from tests.support.memory import Memory

__all__ = ["Peer"]


class Peer:
    """A process that opens a store. It is killed at the end of the ``with`` block.

    ``call`` waits for the result of a call. ``begin`` does not, so a test can kill the process during the call.
    """

    def __init__(self, open_backend: Callable[[], StorageBackend]) -> None:
        """``open_backend`` must be picklable, such as ``functools.partial(FileStore, folder, 1000)``."""
        spawning = multiprocessing.get_context("spawn")
        self._mine, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_serve, args=(theirs, open_backend), daemon=True)
        self._process.start()
        theirs.close()
        assert self._mine.recv() == "open"

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._process.close()
        self._mine.close()

    def put(self, key: str, content: bytes) -> Status:
        """Put one value."""
        return cast(Status, self.call(_put, key, content))

    def get(self, key: str, nbytes: int) -> bytes | Status:
        """Return the stored bytes, or the status if they cannot be read."""
        return cast("bytes | Status", self.call(_get, key, nbytes))

    def exists(self, key: str) -> Status:
        """Return the status of a key."""
        return cast(Status, self.call(_exists, key))

    def remove(self, key: str) -> Status:
        """Remove one key."""
        return cast(Status, self.call(_remove, key))

    def health(self) -> Health:
        """Return the health of the store."""
        return cast(Health, self.call(StorageBackend.health))

    def call(self, function: Callable[..., object], *arguments: object) -> Any:
        """Return the result of ``function(backend, *arguments)`` in the process; ``function`` must be picklable."""
        self.begin(function, *arguments)
        return self._mine.recv()

    def begin(self, function: Callable[..., object], *arguments: object) -> None:
        """Start a call without waiting for its result."""
        self._mine.send((function, arguments))

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """Kill the process, as a crash does."""
        self._process.kill()
        self._process.join()

    def wait(self, deadline_s: float = 30.0) -> int | None:
        """Wait until the process has ended; return its exit code, negative for a signal."""
        self._process.join(deadline_s)
        return self._process.exitcode


def _serve(connection: Connection, open_backend: Callable[[], StorageBackend]) -> None:
    backend = open_backend()
    connection.send("open")
    while True:
        function, arguments = connection.recv()
        connection.send(function(backend, *arguments))


def _put(backend: StorageBackend, key: str, content: bytes) -> Status:
    source = Memory(content)
    return backend.put([key], [source.value])[0]


def _get(backend: StorageBackend, key: str, nbytes: int) -> bytes | Status:
    target = Memory(nbytes)
    (status,) = backend.get([key], [target.value])
    return target.content if status else status


def _exists(backend: StorageBackend, key: str) -> Status:
    return backend.exists([key])[0]


def _remove(backend: StorageBackend, key: str) -> Status:
    return backend.remove([key])[0]
