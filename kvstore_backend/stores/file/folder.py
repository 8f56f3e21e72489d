"""What lies in a pool's folder, whose layout file_ledger.py tells; and which folder may be a pool's.

Others use the folder meanwhile: what was listed may be gone when it is looked at.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Block", "entries", "folders_in", "refusal", "stored", "stored_in"]

_LONGEST_LEDGER = 64


class Block(NamedTuple):
    """A stored value; sorts by its last use."""

    used_ns: int
    path: str
    nbytes: int


def refusal(folder: Path) -> tuple[str, str] | None:
    """Why a folder that exists cannot be used, said of it, and what would be right; None where it can.

    Nobody but this process's user and root may be able to change what is stored, or could have made parts of it.
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
    if names and not ledger.exists():  # asked last: somebody who opens the folder at this moment makes it first
        return f"holds {', '.join(names[:3])} and no ledger, so it is not a pool's", elsewhere
    if names and not (ledger.is_file() and ledger.stat().st_size <= _LONGEST_LEDGER):
        return f"holds {', '.join(names[:3])}, and its ledger is not a pool's", elsewhere
    return None


def stored(blocks: Path) -> Iterator[Block]:
    """What is stored under ``blocks``, but for what goes meanwhile; whatever else lies there is passed over."""
    for folder in folders_in(blocks):
        yield from stored_in(folder)


def stored_in(folder: os.PathLike[str], prefix: str = "") -> Iterator[Block]:
    """What is stored in one of the folders of ``blocks`` under names that begin with ``prefix``."""
    for entry in entries(folder):
        if entry.name.startswith(prefix) and entry.name.endswith(".block"):
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat()
                yield Block(found.st_mtime_ns, entry.path, found.st_size)


def folders_in(folder: Path) -> list[os.DirEntry[str]]:
    """The folders in a folder; none where it is gone."""
    return [entry for entry in entries(folder) if entry.is_dir(follow_symlinks=False)]


def entries(folder: os.PathLike[str]) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing where it is gone."""
    try:
        return list(os.scandir(folder))
    except FileNotFoundError:
        return []
