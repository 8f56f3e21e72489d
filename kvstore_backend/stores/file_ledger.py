"""The accounts of a shared folder: who may write how much, what is evicted, what killed writers left behind.

    folder/
    ├── ledger              bytes and number of values, and the boot they were stored in; its lock guards the folder
    ├── blocks/<2 hex>/...  one file a value, complete from the moment it has a name here
    └── writers/<name>/     one a process, locked as long as that process lives: values being written

Everything that gives a file a name or takes one away happens under the ledger's lock; bytes are moved outside it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import re
import shutil
import stat
import struct
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Accounts", "Block", "Draft", "Ledger", "Removed", "refusal", "stored"]

logger = logging.getLogger(__name__)

_ACCOUNTS = struct.Struct("<QQ")
_BOOT_ID_AT, _ACCOUNTS_AT = 16, 0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LONGEST_LEDGER = 64
_WRITER = re.compile(r"\d+-[0-9a-f]{8}")
# An eviction looks at every file, so it makes more room than was asked for: this share of the capacity.
_EVICTED_SHARE = 0.05
# The rest is what a filesystem needs beside the bytes of its files.
_FILLED_SHARE = 0.95


class Accounts(NamedTuple):
    """What a folder holds, values being written included."""

    used_bytes: int
    keys: int


class Draft(NamedTuple):
    """A value being written: an open file of the value's size."""

    path: str
    file: int
    nbytes: int


class Block(NamedTuple):
    """A stored value; sorts by its last use."""

    used_ns: int
    path: str
    nbytes: int


class Removed(OSError):
    """The folder, or a part of it, was removed by somebody; a new ``Ledger`` makes it anew."""


class Ledger:
    """Keeps a folder under ``capacity`` bytes for all processes that open it.

    Bytes are entered before they are written and taken off after they are gone, each under the ledger's lock, so a
    process killed between the two leaves the accounts too high, never too low; the next count puts them right.
    All methods raise ``OSError`` for whatever is wrong with the folder, and may be called from several threads.
    """

    def __init__(self, folder: Path, capacity: int) -> None:
        """Open ``folder``, which is made where it is missing; clean up after writers that were killed.

        A folder with other contents is refused: nothing but values and what writers left is ever removed. Values from
        before the machine's last start are dropped: files are not synced to the disk, so after a crash one may have
        its full size and not its bytes.
        """
        self.blocks = folder / "blocks"
        self._ledger = folder / "ledger"
        self._writers = folder / "writers"
        self._own = self._writers / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._serial = itertools.count()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (refused := refusal(folder)) is not None:
            raise PermissionError(errno.EPERM, f"it {refused[0]}; {refused[1]}")
        self._ledger.touch(mode=0o600)  # before anything else: what has no ledger is not ours
        with self._locked() as ledger, contextlib.ExitStack() as undo:
            boot_id = _BOOT_ID.read_bytes()
            if os.pread(ledger, len(boot_id), _BOOT_ID_AT) != boot_id:
                for block in stored(self.blocks):
                    os.unlink(block.path)
                os.pwrite(ledger, boot_id, _BOOT_ID_AT)
            for part in (self.blocks, self._writers):
                part.mkdir(mode=0o700, exist_ok=True)
            self._own.mkdir(mode=0o700)
            undo.callback(os.rmdir, self._own)
            self._alive = os.open(self._own, os.O_RDONLY | os.O_CLOEXEC)
            undo.callback(os.close, self._alive)
            fcntl.flock(self._alive, fcntl.LOCK_EX)
            accounts, _ = self._counted()
            _write(ledger, accounts)
            filesystem = os.statvfs(folder)
            undo.pop_all()
        room = accounts.used_bytes + filesystem.f_bavail * filesystem.f_frsize
        self.capacity = min(capacity, int(room * _FILLED_SHARE))
        """Bytes at which values are evicted."""
        if self.capacity < capacity:
            logger.warning("%s has room for %d of the %d bytes asked for", folder, self.capacity, capacity)

    def accounts(self) -> Accounts:
        """What the folder holds now."""
        with self._locked() as ledger:
            return _read(ledger)

    def reserve(self, nbytes: int) -> Draft:
        """A draft for a value, made when there is room for it; evicts to make room. The caller closes its file.

        Raises:
            Removed: the ledger or this process's folder in ``writers``.
            OSError: ``ENOSPC`` where even evicting makes no room.
        """
        with self._locked() as ledger:
            accounts = _read(ledger)
            if accounts.used_bytes + nbytes > self.capacity >= nbytes:
                accounts = self._evicted(nbytes)
                _write(ledger, accounts)
            if accounts.used_bytes + nbytes > self.capacity:
                raise OSError(errno.ENOSPC, f"no room for {nbytes} bytes in {self.capacity}")
            path = f"{self._own}/{next(self._serial)}"
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                raise Removed(errno.EIO, "this process's folder in it was removed") from None
            os.truncate(file, nbytes)
            _write(ledger, Accounts(accounts.used_bytes + nbytes, accounts.keys + 1))
        return Draft(path, file, nbytes)

    def publish(self, draft: Draft, block: str) -> None:
        """Give a draft that is whole its name in ``blocks``, unless another writer's value has it already.

        Raises:
            Removed: any part of the folder.
        """
        with self._locked() as ledger:
            if os.path.exists(block):
                self._take_off(ledger, draft.path, draft.nbytes)
                return
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(os.path.dirname(block), 0o700)
                os.rename(draft.path, block)
            except FileNotFoundError:
                raise Removed(errno.EIO, "its blocks were removed") from None

    def discard(self, draft: Draft) -> None:
        """Give back what was reserved for a draft that will not be published."""
        with self._locked() as ledger:
            self._take_off(ledger, draft.path, draft.nbytes)

    def remove(self, block: str) -> None:
        """Remove a stored value; ``FileNotFoundError`` where there is none."""
        with self._locked() as ledger:
            self._take_off(ledger, block, os.stat(block).st_size)

    def close(self) -> None:
        """Leave the folder; what is stored stays for the others."""
        with contextlib.suppress(OSError), self._locked():
            shutil.rmtree(self._own, ignore_errors=True)
        os.close(self._alive)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The open ledger, locked against other processes and threads alike."""
        try:
            ledger = os.open(self._ledger, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # which would mean that a value is not there
            raise Removed(errno.EIO, "its ledger was removed") from None
        try:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            yield ledger
        finally:
            os.close(ledger)

    def _take_off(self, ledger: int, path: str, nbytes: int) -> None:
        used, keys = _read(ledger)
        os.unlink(path)
        _write(ledger, Accounts(max(0, used - nbytes), max(0, keys - 1)))

    def _evicted(self, nbytes: int) -> Accounts:
        """Remove the least recently used values until ``nbytes`` more fit, and some to spare."""
        (used, keys), blocks = self._counted()
        goal = self.capacity * (1 - _EVICTED_SHARE) - nbytes
        for block in sorted(blocks):
            if used <= goal:
                break
            os.unlink(block.path)
            used, keys = used - block.nbytes, keys - 1
        return Accounts(used, keys)

    def _counted(self) -> tuple[Accounts, list[Block]]:
        """Count what is there, after removing what dead writers left."""
        for writer in _folders(self._writers):
            if _WRITER.fullmatch(writer.name) and _is_dead(writer.path):
                shutil.rmtree(writer.path, ignore_errors=True)
        now = time.time_ns()  # set back by somebody, it makes a last use in the future one that nothing is known of
        blocks = [block if block.used_ns <= now else block._replace(used_ns=0) for block in stored(self.blocks)]
        drafts = [entry.stat().st_size for writer in _folders(self._writers) for entry in os.scandir(writer.path)]
        used = sum(block.nbytes for block in blocks) + sum(drafts)
        return Accounts(used, len(blocks) + len(drafts)), blocks


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
    for folder in _folders(blocks):
        for entry in _entries(folder):
            if entry.name.endswith(".block"):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat()
                    yield Block(found.st_mtime_ns, entry.path, found.st_size)


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    return [entry for entry in _entries(folder) if entry.is_dir(follow_symlinks=False)]


def _entries(folder: os.PathLike[str]) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing where it is gone."""
    try:
        return list(os.scandir(folder))
    except FileNotFoundError:
        return []


def _is_dead(writer: str) -> bool:
    """Whether the process that made this folder is gone: the kernel let go of its lock."""
    folder = os.open(writer, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(folder)
    return True


def _read(ledger: int) -> Accounts:
    record = os.pread(ledger, _ACCOUNTS.size, _ACCOUNTS_AT)
    if len(record) < _ACCOUNTS.size:
        raise OSError(errno.EIO, "its ledger was cut short")
    return Accounts(*_ACCOUNTS.unpack(record))


def _write(ledger: int, accounts: Accounts) -> None:
    os.pwrite(ledger, _ACCOUNTS.pack(*accounts), _ACCOUNTS_AT)
