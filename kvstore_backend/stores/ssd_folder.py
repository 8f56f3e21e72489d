"""Folder of Mooncake's SSD offload, and the time when its last owner left it.

A client that joins reports the blocks in its folder to the master. The master ignores that while it still lists them as
another client's, and drops them when it has missed that client for 10 s (Mooncake 0.3.13), whether that client crashed
or left in order: an owner that returns earlier loses everything on its disk. So it waits before it joins.
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

__all__ = ["DEFAULT_FOLDER", "SsdFolder"]

logger = logging.getLogger(__name__)

DEFAULT_FOLDER = "/data/file_storage"
"""Mooncake's own default folder."""
_PREFIX = "kvstore-owner-"
_LEFT = "left"
# The master's --client_ttl, 10 s by default, and about one second until its next check.
_MISSED_SECONDS = 12.0


class SsdFolder:
    """Mark in the folder that is locked as long as this process lives.

    Several processes may use one folder. A folder that cannot be written is not changed: Mooncake refuses it.
    """

    def __init__(self, path: str) -> None:
        """Leave a mark, and wait until the master has missed the process that used the folder last.

        Args:
            path: the folder; empty: Mooncake's own choice.
        """
        folder = Path(path or DEFAULT_FOLDER)
        self._mark: BinaryIO | None = None
        with contextlib.suppress(OSError):
            seconds = _take_dead_marks(folder)
            handle, self._name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
            self._mark = os.fdopen(handle, "wb", buffering=0)
            fcntl.flock(self._mark, fcntl.LOCK_EX)
            if seconds > 0:
                logger.info("Another process used %s just now; joining the pool in %.0f s", folder, seconds)
                time.sleep(seconds)

    def leave(self) -> None:
        """Record that this process, which has been in the pool, leaves it now."""
        if self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.write(f"{_LEFT} {_boot_id()} {time.monotonic()}".encode())
            self._mark.close()
            self._mark = None

    def give_up(self) -> None:
        """Remove the mark: this process could not join the pool."""
        if self._mark is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._name)
            self._mark.close()
            self._mark = None


def _take_dead_marks(folder: Path) -> float:
    """Remove the marks of ended processes; return for how many seconds the master may still list one of them."""
    seconds = 0.0
    for mark in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), mark.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            age = _seconds_since(file.read().decode(errors="replace"))
            mark.unlink()
            seconds = max(seconds, _MISSED_SECONDS - age)
    return seconds


def _seconds_since(mark: str) -> float:
    """Return the seconds since the owner of a mark left; 0 if that is not known: a crash, or a restart of the machine.

    It uses a clock that is never set, and that is the same in all processes until the next start of the machine.
    """
    left, _, left_at = mark.rpartition(" ")
    try:
        return max(0.0, time.monotonic() - float(left_at)) if left == f"{_LEFT} {_boot_id()}" else 0.0
    except ValueError:
        return 0.0


def _boot_id() -> str:
    return BOOT_ID_FILE.read_text().strip()
