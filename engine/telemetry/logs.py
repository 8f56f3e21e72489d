"""Sets up the log files of an instance.

All lines go to ``api_server.log`` in the instance's folder. Lines about the pool also go to ``cache_storage.log`` in
the same folder, where FastDeploy's scripts look for them. Warnings and errors also go to the console.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler, WatchedFileHandler
from pathlib import Path

from kvcommon.output import announce

__all__ = ["set_up"]

log = logging.getLogger(__name__)

_FORMAT = "%(levelname)-8s %(asctime)s %(process)d %(name)s] %(message)s"
# Each of the two files, with its four older files, takes at most half a gigabyte.
_MAX_FILE_BYTES = 100_000_000
_FILES_KEPT = 4


def set_up(named: Path | None, role: str, port: int, level: str) -> None:
    """Set up logging to files, and print the path of the log on standard output.

    Args:
        named: the folder of the files, or None for the folder in FastDeploy's guides, which is ``log_prefill`` or
            ``log_decode`` by the role, and ``log_PORT`` for the role mixed. If another running process uses the folder
            of the role, it is ``log_ROLE_PORT``.
        role: the role of the instance.
        port: the port of the instance.
        level: the lowest level to log.

    Raises:
        OSError: the folder or a file cannot be created.
    """
    folder, is_own = _take_folder([named] if named else _list_folders(role, port))
    path = folder / "api_server.log"
    console = logging.StreamHandler()
    console.setLevel(logging.WARNING)
    pool_file = _open_file(folder / "cache_storage.log", is_own=is_own, is_awaited=True)
    pool_file.addFilter(_concerns_pool)
    handlers = [_open_file(path, is_own=is_own), pool_file, console]
    # Debug lines of libraries are not useful here.
    others = "INFO" if level == "debug" else level.upper()
    logging.basicConfig(level=others, format=_FORMAT, handlers=handlers, force=True)
    for name in ("engine", "kvstore_backend"):
        logging.getLogger(name).setLevel(level.upper())
    # These libraries would log a line for each heartbeat and each health probe.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
    announce(f"engine.api_server: the log is {path}")
    if not is_own:
        log.warning("another process also writes to %s; give each instance its own folder with FD_LOG_DIR", path)


def _open_file(path: Path, *, is_own: bool, is_awaited: bool = False) -> logging.Handler:
    """Return the handler for a log file.

    Args:
        path: the file.
        is_own: whether only this process writes to the file, so that the handler may rotate it.
        is_awaited: whether the file is created with its first line; otherwise it is created now.
    """
    if is_own:
        return RotatingFileHandler(path, maxBytes=_MAX_FILE_BYTES, backupCount=_FILES_KEPT, delay=is_awaited)
    return WatchedFileHandler(path, delay=is_awaited)  # opens the file again after the other process has rotated it


def _concerns_pool(record: logging.LogRecord) -> bool:
    """Return whether a line is from the package of the pool, or says how many tokens a request got from the pool."""
    return record.name.startswith("kvstore_backend") or "storage_cache_token_num" in str(record.msg)


def _list_folders(role: str, port: int) -> list[Path]:
    """Return the default folders for log files, the preferred one first."""
    return [Path(f"log_{port}")] if role == "mixed" else [Path(f"log_{role}"), Path(f"log_{role}_{port}")]


def _take_folder(folders: Sequence[Path]) -> tuple[Path, bool]:
    """Create, lock and return the first folder that no other running process uses.

    The lock ends with this process.

    Returns:
        The folder and True. If other processes use all folders: the last folder and False.
    """
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(descriptor)
                continue
            # Some network file systems have no locks. Then other processes are not noticed.
        return folder, True
    return folders[-1], False
