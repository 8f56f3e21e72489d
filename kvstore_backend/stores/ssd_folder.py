"""The folder of Mooncake's SSD offload, and whether its last owner has left it or died.

A client that joins tells the master what its folder holds. The master takes no notice while it still lists those blocks
as another client's, and drops them when it has missed that client for 10 s (Mooncake 0.3.13): so an owner that died and
is back sooner loses all that is on its disk. Who finds the mark of a dead owner has to wait for so long.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
import time
from pathlib import Path

__all__ = ["DEFAULT_FOLDER", "SsdFolder"]

logger = logging.getLogger(__name__)

DEFAULT_FOLDER = "/data/file_storage"
"""Mooncake's own, where none is named."""
_PREFIX = "kvstore-owner-"
# The master's --client_ttl, 10 s by default, and the second after which it looks again.
_MISSED_SECONDS = 12.0


class SsdFolder:
    """A mark in the folder, locked for as long as this process lives, that says that it is in use.

    Several processes may use one folder. One that cannot be written is left alone: Mooncake refuses it.
    """

    def __init__(self, path: str) -> None:
        """Wait, where a process died that used the folder, until the master has missed it; then leave a mark.

        Args:
            path: the folder; empty: Mooncake's own choice.
        """
        path = path or DEFAULT_FOLDER
        self._mark: int | None = None
        self._name = ""
        with contextlib.suppress(OSError):
            if _remove_dead_marks(Path(path)):
                logger.info("The last owner of %s has died; joining in %g s", path, _MISSED_SECONDS)
                time.sleep(_MISSED_SECONDS)
            self._mark, self._name = tempfile.mkstemp(prefix=_PREFIX, dir=path)
            fcntl.flock(self._mark, fcntl.LOCK_EX)

    def leave(self) -> None:
        """Take the mark away: the master has been told that nobody offers this folder's blocks any more."""
        if self._mark is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._name)
            os.close(self._mark)
            self._mark = None


def _remove_dead_marks(folder: Path) -> bool:
    """Remove the marks of processes that are gone; whether there were any."""
    is_found = False
    for mark in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), mark.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mark.unlink()
            is_found = True
    return is_found
