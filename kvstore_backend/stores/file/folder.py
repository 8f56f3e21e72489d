"""Lists the contents of a pool's folder, and checks whether a folder can be used as a pool.

``ledger.py`` describes the layout of the folder. Other processes use the folder at the same time, so a file in a list
may be removed before it is read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Block", "find_refusal", "list_entries", "list_folders", "scan_block_folder", "scan_blocks"]

_MAX_LEDGER_BYTES = 64


class Block(NamedTuple):
    """File of a stored value. Blocks are sorted by the time of their last use."""

    used_ns: int
    path: str
    nbytes: int


def find_refusal(folder: Path) -> tuple[str, str] | None:
    """Return why an existing folder cannot be used as a pool, and a remedy; None if the folder can be used.

    The folder, its ledger, ``blocks`` and ``writers`` must belong to this process's user or to root, and no other user
    may have the permission to write to them.
    """
    for path in (folder, *(folder / name for name in ("ledger", "blocks", "writers"))):
        part = "" if path == folder else f"has a part, {path.name}, that "
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            if found.st_uid not in (0, os.geteuid()):
                reason = f"{part}belongs to user {found.st_uid}, who could change the stored blocks"
                return reason, f"name another folder, or: chown {os.geteuid()} {path}"
            if found.st_mode & 0o022:
                mode = f"{stat.S_IMODE(found.st_mode):o}"
                reason = f"{part}is writable for other users (mode {mode}), who could change the stored blocks"
                return reason, f"name a folder of your own, such as {folder}/kvpool, or: chmod go-w {path}"
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return "is not writable", "name another folder, or make it writable"
    names = sorted(os.listdir(folder))
    elsewhere = f"name a new or an empty folder, such as {folder}/kvpool"
    ledger = folder / "ledger"
    # The ledger is checked after the names were listed: another process that creates the pool creates the ledger first.
    if names and not ledger.exists():
        return f"contains {', '.join(names[:3])} and no ledger, so it is not the folder of a pool", elsewhere
    if names and not (ledger.is_file() and ledger.stat().st_size <= _MAX_LEDGER_BYTES):
        return f"contains {', '.join(names[:3])}, and its ledger is not the ledger of a pool", elsewhere
    return None


def scan_blocks(blocks: Path) -> Iterator[Block]:
    """Yield the files of all values in ``blocks``, the subfolder of a pool's folder; omit other files."""
    for folder in list_folders(blocks):
        yield from scan_block_folder(folder)


def scan_block_folder(folder: os.PathLike[str], prefix: str = "") -> Iterator[Block]:
    """Yield the files of values in one subfolder of ``blocks``, if their names begin with ``prefix``."""
    for entry in list_entries(folder):
        if entry.name.startswith(prefix) and entry.name.endswith(".block"):
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat()
                yield Block(found.st_mtime_ns, entry.path, found.st_size)


def list_folders(folder: Path) -> list[os.DirEntry[str]]:
    """Return the subfolders of a folder; an empty list if the folder does not exist."""
    return [entry for entry in list_entries(folder) if entry.is_dir(follow_symlinks=False)]


def list_entries(folder: os.PathLike[str]) -> list[os.DirEntry[str]]:
    """Return the files and subfolders of a folder; an empty list if the folder does not exist."""
    try:
        return list(os.scandir(folder))
    except FileNotFoundError:
        return []
