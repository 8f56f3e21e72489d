"""Contents of a pool's folder (ledger.py has its layout), and which folder may be a pool's.

Other processes use the folder concurrently: a file in a listing may be gone when it is read.
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
    """Stored value; sorts by its last use."""

    used_ns: int
    path: str
    nbytes: int


def find_refusal(folder: Path) -> tuple[str, str] | None:
    """Return why an existing folder cannot be used, and a remedy; None if it can be used.

    Only this process's user and root may be able to change a stored value, or to have made parts of the folder.
    """
    for path in (folder, *(folder / name for name in ("ledger", "blocks", "writers"))):
        it = "" if path == folder else f"has a part, {path.name}, that "
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            if found.st_uid not in (0, os.geteuid()):
                reason = f"{it}belongs to user {found.st_uid}, who could change what is stored in it"
                return reason, f"name another folder, or: chown {os.geteuid()} {path}"
            if found.st_mode & 0o022:
                reason = f"{it}may be written to by others (mode {stat.S_IMODE(found.st_mode):o}), who could change it"
                return reason, f"name a folder of your own, such as {folder}/kvpool, or: chmod go-w {path}"
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return "cannot be written to", "name another folder, or make it writable"
    names = sorted(os.listdir(folder))
    elsewhere = f"name a new or an empty folder, such as {folder}/kvpool"
    ledger = folder / "ledger"
    # Checked last: another process may be opening the folder, and makes the ledger first.
    if names and not ledger.exists():
        return f"holds {', '.join(names[:3])} and no ledger, so it is not a pool's", elsewhere
    if names and not (ledger.is_file() and ledger.stat().st_size <= _MAX_LEDGER_BYTES):
        return f"holds {', '.join(names[:3])}, and its ledger is not a pool's", elsewhere
    return None


def scan_blocks(blocks: Path) -> Iterator[Block]:
    """Yield the values stored under ``blocks``, except those removed meanwhile; other files there are skipped."""
    for folder in list_folders(blocks):
        yield from scan_block_folder(folder)


def scan_block_folder(folder: os.PathLike[str], prefix: str = "") -> Iterator[Block]:
    """Yield the values in one of the folders of ``blocks``, from files with names that begin with ``prefix``."""
    for entry in list_entries(folder):
        if entry.name.startswith(prefix) and entry.name.endswith(".block"):
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat()
                yield Block(found.st_mtime_ns, entry.path, found.st_size)


def list_folders(folder: Path) -> list[os.DirEntry[str]]:
    """Return the folders in a folder; none if it is gone."""
    return [entry for entry in list_entries(folder) if entry.is_dir(follow_symlinks=False)]


def list_entries(folder: os.PathLike[str]) -> list[os.DirEntry[str]]:
    """Return the files and folders in a folder; none if it is gone."""
    try:
        return list(os.scandir(folder))
    except FileNotFoundError:
        return []
