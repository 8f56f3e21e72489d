"""Log files of an instance: ``api_server.log`` in its own folder; warnings and errors also to the console.

Lines about the pool also go to ``cache_storage.log`` next to it, where FastDeploy's scripts look for them.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler, WatchedFileHandler
from pathlib import Path

__all__ = ["set_up"]

log = logging.getLogger(__name__)

_FORMAT = "%(levelname)-8s %(asctime)s %(process)d %(name)s] %(message)s"
# Each of the two files, with its four predecessors, takes half a gigabyte at most.
_MAX_FILE_BYTES = 100_000_000
_FILES_KEPT = 4


def set_up(named: Path | None, role: str, port: int, level: str) -> None:
    """Log lines of this level or a higher one, and print on standard output where.

    The folder is ``named``, if given. Else it is where FastDeploy's guides look: ``log_prefill`` or ``log_decode`` by
    the role; ``log_PORT`` for an instance without such a role, or if another running process has the role's folder.

    Raises:
        OSError: the folder cannot be made or written.
    """
    folder, is_own = _take_folder([named] if named else _list_folders(role, port))
    path = folder / "api_server.log"
    console = logging.StreamHandler()
    console.setLevel(logging.WARNING)
    pool_file = _open_file(folder / "cache_storage.log", is_own=is_own, is_awaited=True)
    pool_file.addFilter(_concerns_pool)
    handlers = [_open_file(path, is_own=is_own), pool_file, console]
    # The libraries' details are of no use here.
    others = "INFO" if level == "debug" else level.upper()
    logging.basicConfig(level=others, format=_FORMAT, handlers=handlers, force=True)
    for name in ("engine", "kvstore_backend"):
        logging.getLogger(name).setLevel(level.upper())
    # Its INFO line for each heartbeat and health probe would hide ours.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
    print(f"engine.api_server: the log is {path}", flush=True)
    if not is_own:
        log.warning("another process writes to %s, too; give each instance a folder of its own by FD_LOG_DIR", path)


def _open_file(path: Path, *, is_own: bool, is_awaited: bool = False) -> logging.Handler:
    """Return the handler of a log file, which is created now, or with ``is_awaited`` at its first line."""
    if is_own:
        return RotatingFileHandler(path, maxBytes=_MAX_FILE_BYTES, backupCount=_FILES_KEPT, delay=is_awaited)
    return WatchedFileHandler(path, delay=is_awaited)  # it reopens the file when the other process rotates it


def _concerns_pool(record: logging.LogRecord) -> bool:
    """Whether this line is one of the pool's own, or says what a request got from the pool."""
    return record.name.startswith("kvstore_backend") or "storage_cache_token_num" in str(record.msg)


def _list_folders(role: str, port: int) -> list[Path]:
    """Return the folders where an instance logs by default, in the order of preference."""
    return [Path(f"log_{port}")] if role == "mixed" else [Path(f"log_{role}"), Path(f"log_{role}_{port}")]


def _take_folder(folders: Sequence[Path]) -> tuple[Path, bool]:
    """Return the first folder that no other running process uses, or the last; and whether it is this process's own.

    It is locked until the process ends, in any way.
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
            # A network file system without locks: it is unknown which other processes write here.
        return folder, True
    return folders[-1], False
