"""Folder of Mooncake's SSD offload. An owner that joins the pool again must wait, or it loses the blocks in its folder.

A client that joins reports the blocks in its folder to the master. For 10 s after a client ended, the master still
lists the blocks as blocks of the ended client (Mooncake 0.3.13). During these 10 s the master ignores the report of the
new client, and then it forgets the blocks. So a new client waits before it joins.

Each process locks a file in the folder, its *mark*, and writes to it when it leaves the pool. A mark without a lock
belongs to an ended process, and says for how long the new client must wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from kvstore_backend.stores.file.ledger import BOOT_ID_FILE
from kvstore_backend.threads import after_fork

__all__ = ["DEFAULT_FOLDER", "SsdFolder"]

logger = logging.getLogger(__name__)

DEFAULT_FOLDER = "/data/file_storage"
"""Mooncake's own default folder."""
_PREFIX = "kvstore-owner-"
_LEFT = "left"
# After the end of a client, the master forgets its blocks: after --client_ttl (10 s by default), at its next check.
_FORGOTTEN_SECONDS = 12.0


class SsdFolder:
    """Shows other processes that this process uses an SSD folder, by a locked file in the folder (the mark).

    Several processes may use one folder. In a folder that is not writable there is no mark; Mooncake refuses such a
    folder.
    """

    def __init__(self, path: str) -> None:
        """Create this process's mark; wait until the master has forgotten the blocks of the folder's former processes.

        Args:
            path: the folder; empty for Mooncake's default folder.
        """
        folder = Path(path or DEFAULT_FOLDER)
        self._mark: BinaryIO | None = None
        after_fork(self)
        with contextlib.suppress(OSError):
            seconds = _remove_dead_marks(folder)
            handle, self._name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
            self._mark = os.fdopen(handle, "wb", buffering=0)
            fcntl.flock(self._mark, fcntl.LOCK_EX)
            if seconds > 0:
                logger.info(
                    "Another process has just used the SSD folder %s; this process joins the pool in %.0f s",
                    folder,
                    seconds,
                )
                time.sleep(seconds)

    def leave(self) -> None:
        """Write to this process's mark in the folder that the process leaves the pool now."""
        if self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.write(f"{_LEFT} {_boot_id()} {time.monotonic()}".encode())
            self._mark.close()
            self._mark = None

    def on_fork(self) -> None:
        """Close the mark in a forked child, because the lock lasts until all processes have closed the file."""
        if self._mark is not None:
            self._mark.close()
            self._mark = None

    def remove_mark(self) -> None:
        """Remove this process's mark from the folder, because the process could not join the pool."""
        if self._mark is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._name)
            self._mark.close()
            self._mark = None


def _remove_dead_marks(folder: Path) -> float:
    """Remove the marks of ended processes; return the seconds until the master forgets these processes' blocks."""
    seconds = 0.0
    for mark in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), mark.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            age = _seconds_since(file.read().decode(errors="replace"))
            mark.unlink()
            seconds = max(seconds, _FORGOTTEN_SECONDS - age)
    return seconds


def _seconds_since(mark: str) -> float:
    """Return the seconds since a process left the pool; 0 if it crashed or the machine was restarted.

    Args:
        mark: text of the process's mark. Its time is of the monotonic clock, which is the same in all processes until
            the machine is restarted, and which nobody can set.
    """
    left, _, left_at = mark.rpartition(" ")
    try:
        return max(0.0, time.monotonic() - float(left_at)) if left == f"{_LEFT} {_boot_id()}" else 0.0
    except ValueError:
        return 0.0


def _boot_id() -> str:
    return BOOT_ID_FILE.read_text().strip()
