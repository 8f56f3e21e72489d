"""Ledger of a shared folder: limits the size of the folder, evicts values, and removes the files of killed writers.

    folder/
    ├── ledger              a file of 64 bytes; its lock guards the folder. Its contents: at byte 0 the bytes of all
    │                       values, at 8 the number of values, at 16 the id of the machine's last start, at 54 the size
    │                       limit of the folder, at 63 whether a process is changing the blocks
    ├── blocks/<2 hex>/...  one file for each value; a file here is always complete
    └── writers/<name>/     one folder for each process, locked as long as the process lives; its files are the values
                            that the process is writing

Files are created, renamed and removed under the ledger's lock; bytes are written and read outside it. The time under
the lock does not grow with the number of values, with two exceptions: the values are counted after a writer was killed
in the middle of a change, and the values from before the machine's last start are removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import random
import re
import shutil
import struct
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvstore_backend.stores.file.folder import (
    Block,
    find_refusal,
    list_entries,
    list_folders,
    scan_block_folder,
    scan_blocks,
)

__all__ = [
    "BOOT_ID_FILE",
    "DEFAULT_BYTES",
    "SAMPLE_SIZE",
    "Accounts",
    "Draft",
    "FolderRemoved",
    "Ledger",
    "find_size",
    "write_accounts",
]

logger = logging.getLogger(__name__)

_ACCOUNTS = struct.Struct("<QQ")
_SIZE = struct.Struct("<Q")
_ACCOUNTS_AT, _BOOT_ID_AT, _SIZE_AT, _STATE_AT = 0, 16, 54, 63
_CONSISTENT, _CHANGING = b"\1", b"\0"
_WRITER = re.compile(r"\d+-[0-9a-f]{8}")
# An eviction frees more bytes than requested, so that not every put must evict: this share of the sampled bytes.
_EVICTED_SHARE = 0.05
# Share of the free space that the values may use. The filesystem needs the rest for its own data.
_FILLED_SHARE = 0.95

DEFAULT_BYTES = 1 << 30
"""Size limit of a new folder, in bytes, if no size is configured."""

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
"""File with an id that the kernel generates at each start of the machine."""

SAMPLE_SIZE = 4096
"""Number of values in the sample of an eviction, from random subfolders of ``blocks``.

The eviction removes the values of the sample that were used least recently. If there are fewer values, it samples all.
"""


class Accounts(NamedTuple):
    """Bytes and number of the values in a folder, including values that are being written."""

    used_bytes: int
    keys: int


class Draft(NamedTuple):
    """Open file for a value that is being written. The file already has the size of the value."""

    path: str
    file: int
    nbytes: int


class FolderRemoved(OSError):
    """Error: another program removed the folder or a part of it. A new ``Ledger`` creates the folder again."""


class Ledger:
    """Makes all processes that open a folder use one size limit for it.

    The ledger stores the size limit of the folder. A process without a configured size uses the stored limit. A process
    with another size is refused while another process has the folder open; otherwise it changes the stored limit. (If
    each process had its own limit, the smallest limit would apply to all.)

    Before a change of the folder, a process marks the ledger as changing. A process that was killed during a change
    leaves this mark, and the next process that locks the ledger counts the values again. All methods raise ``OSError``
    if the folder cannot be used. Several threads may call them.
    """

    def __init__(self, folder: Path, size: int | None) -> None:
        """Open ``folder``, or create it if it is missing, and remove the unfinished files of killed processes.

        Raises ``PermissionError`` for a folder that ``find_refusal`` refuses. Values from before the machine's last
        start are removed: files are not synced to the disk, so after a crash of the machine a file may have its full
        size without its bytes.
        """
        self.blocks = folder / "blocks"
        self._ledger = folder / "ledger"
        self._writers = folder / "writers"
        self._own = self._writers / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._serial = itertools.count()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (refusal := find_refusal(folder)) is not None:
            raise PermissionError(errno.EPERM, f"the folder {refusal[0]}; {refusal[1]}")
        self._ledger.touch(mode=0o600)  # first, because a folder with files and no ledger is refused
        with self._lock_ledger() as ledger, contextlib.ExitStack() as undo:
            boot_id = BOOT_ID_FILE.read_bytes()
            if (recorded := os.pread(ledger, len(boot_id), _BOOT_ID_AT)) != boot_id:
                if len(recorded) == len(boot_id) and all(recorded):  # otherwise the ledger is new or was truncated
                    self._refuse_other_machine()
                for block in scan_blocks(self.blocks):
                    os.unlink(block.path)
                os.pwrite(ledger, boot_id, _BOOT_ID_AT)
                os.pwrite(ledger, _CHANGING, _STATE_AT)
            if os.pread(ledger, 1, _STATE_AT) != _CONSISTENT or not self.blocks.is_dir():
                self._recount_blocks(ledger)
            self._remove_dead_writers(ledger)
            self.size = self._settle_size(ledger, size)
            for part in (self.blocks, self._writers):
                part.mkdir(mode=0o700, exist_ok=True)
            self._own.mkdir(mode=0o700)
            undo.callback(os.rmdir, self._own)
            self._alive = os.open(self._own, os.O_RDONLY | os.O_CLOEXEC)
            undo.callback(os.close, self._alive)
            fcntl.flock(self._alive, fcntl.LOCK_EX)
            used = _read_accounts(ledger).used_bytes
            filesystem = os.statvfs(folder)
            undo.pop_all()
        room = used + filesystem.f_bavail * filesystem.f_frsize
        self.capacity = min(self.size, int(room * _FILLED_SHARE))
        """Bytes at which values are evicted: the size limit, or less if the filesystem has less space."""
        if self.capacity < self.size:
            logger.warning(
                "The filesystem of %s has space for only %d of the configured %d bytes",
                *(folder, self.capacity, self.size),
            )

    def read_accounts(self) -> Accounts:
        """Return the bytes and the number of the values in the folder now."""
        with self._lock_ledger() as ledger:
            return _read_accounts(ledger)

    def reserve_draft(self, nbytes: int) -> Draft:
        """Create a draft, the file to which a value of ``nbytes`` bytes is written; evict other values if necessary.

        The caller closes the draft's file.

        Raises:
            FolderRemoved: the ledger or this process's folder in ``writers`` was removed.
            OSError: with ``ENOSPC`` if eviction cannot free enough space.
        """
        with self._lock_ledger() as ledger:
            if _read_accounts(ledger).used_bytes + nbytes > self.capacity >= nbytes:
                self._evict_blocks(ledger, nbytes)
            used, keys = _read_accounts(ledger)
            if used + nbytes > self.capacity:
                raise OSError(errno.ENOSPC, f"no space for {nbytes} bytes; the folder's limit is {self.capacity} bytes")
            path = f"{self._own}/{next(self._serial)}"
            os.pwrite(ledger, _CHANGING, _STATE_AT)
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                raise FolderRemoved(errno.EIO, "this process's folder in writers/ was removed") from None
            except OSError:
                os.pwrite(ledger, _CONSISTENT, _STATE_AT)
                raise
            try:
                os.truncate(file, nbytes)
                write_accounts(ledger, Accounts(used + nbytes, keys + 1))
            except BaseException:
                os.close(file)
                raise
        return Draft(path, file, nbytes)

    def publish_draft(self, draft: Draft, block: str) -> None:
        """Move a complete draft to the path ``block``; remove the draft if another writer has stored the value.

        Raises:
            FolderRemoved: a part of the folder was removed.
        """
        with self._lock_ledger() as ledger:
            if os.path.exists(block):
                _remove_files(ledger, draft)
                return
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(os.path.dirname(block), 0o700)
                os.rename(draft.path, block)
            except FileNotFoundError:
                os.pwrite(ledger, _CHANGING, _STATE_AT)
                raise FolderRemoved(errno.EIO, "the subfolder blocks/ was removed") from None

    def discard_draft(self, draft: Draft) -> None:
        """Remove a draft (unfinished file of a value) that will not be published, and free its space."""
        with self._lock_ledger() as ledger:
            _remove_files(ledger, draft)

    def remove_block(self, block: str) -> None:
        """Remove the stored value at the path ``block``; raise ``FileNotFoundError`` if the path does not exist."""
        with self._lock_ledger() as ledger:
            _remove_files(ledger, Block(0, block, os.stat(block).st_size))

    def clear_prefix(self, prefix: str) -> None:
        """Remove the stored values in files with names that begin with ``prefix``.

        The lock is released after each subfolder of ``blocks``, so other calls may run in between.
        """
        for folder in list_folders(self.blocks):
            with self._lock_ledger() as ledger:
                _remove_files(ledger, *scan_block_folder(folder, prefix))

    def close(self) -> None:
        """Remove this process's folder in ``writers``; the stored values stay for other processes."""
        with contextlib.suppress(OSError), self._lock_ledger() as ledger:
            _remove_writer(ledger, self._own)
        self.release_lock()

    def release_lock(self) -> None:
        """Close the file that marks this process as alive, without a change of the folder."""
        os.close(self._alive)

    @contextlib.contextmanager
    def _lock_ledger(self) -> Iterator[int]:
        """Yield the open ledger, locked against other processes and threads."""
        try:
            ledger = os.open(self._ledger, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # to callers a FileNotFoundError means that a value is absent
            raise FolderRemoved(errno.EIO, "the file ledger was removed") from None
        try:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            if os.pread(ledger, 1, _STATE_AT) == _CHANGING:
                self._recount_blocks(ledger)
            yield ledger
        finally:
            fcntl.flock(ledger, fcntl.LOCK_UN)  # a child that was forked meanwhile has a copy of the open file
            os.close(ledger)

    def _refuse_other_machine(self) -> None:
        """Raise ``OSError`` if a process of another machine has the folder open."""
        for writer in list_folders(self._writers):
            if _WRITER.fullmatch(writer.name) and not _is_writer_dead(writer.path):
                text = "a process of another machine has the folder open, which only one machine can use; "
                raise OSError(errno.EINVAL, text + "give each machine its own folder, or use a Mooncake pool")

    def _settle_size(self, ledger: int, named: int | None) -> int:
        """Return the size limit of the folder, and store it: ``named``, else the stored limit, else ``DEFAULT_BYTES``.

        Args:
            named: the configured size limit, or None if none is configured.

        Raises:
            OSError: another process has the folder open with another limit than ``named``.
        """
        recorded = _read_size(ledger)
        size = named or recorded or DEFAULT_BYTES
        if recorded and size != recorded and any(_WRITER.fullmatch(each.name) for each in list_folders(self._writers)):
            raise OSError(
                errno.EINVAL,
                f"other processes opened the folder with a size of {recorded} bytes, but this process requests {size} "
                "bytes; give the same size or none, or stop the other processes first",
            )
        os.pwrite(ledger, _SIZE.pack(size), _SIZE_AT)
        return size

    def _evict_blocks(self, ledger: int, nbytes: int) -> None:
        """Remove the least recently used values until ``nbytes`` more bytes fit, and some more for later calls."""
        self._remove_dead_writers(ledger)
        folders = list_folders(self.blocks)
        random.shuffle(folders)
        while True:
            sample = _sample_blocks(folders)
            if not folders:  # few values are left, so a count is quick; another program may have removed values
                self._recount_blocks(ledger)
            used = _read_accounts(ledger).used_bytes
            goal = self.capacity - nbytes - _EVICTED_SHARE * sum(block.nbytes for block in sample)
            victims = []
            for block in sorted(sample):
                if used <= goal:
                    break
                victims.append(block)
                used -= block.nbytes
            _remove_files(ledger, *victims)
            if used + nbytes <= self.capacity or not folders:
                return

    def _remove_dead_writers(self, ledger: int) -> None:
        """Remove the folders of processes that were killed, with their drafts (unfinished files of values)."""
        for writer in list_folders(self._writers):
            if _WRITER.fullmatch(writer.name) and _is_writer_dead(writer.path):
                _remove_writer(ledger, writer)

    def _recount_blocks(self, ledger: int) -> None:
        """Count all values, stored and unfinished, and write their number and total size to the ledger."""
        sizes = [block.nbytes for block in scan_blocks(self.blocks)]
        sizes += [entry.stat().st_size for writer in list_folders(self._writers) for entry in os.scandir(writer)]
        write_accounts(ledger, Accounts(sum(sizes), len(sizes)))


def _sample_blocks(folders: list[os.DirEntry[str]]) -> list[Block]:
    """Remove folders from the end of the list; return their values, at least ``SAMPLE_SIZE`` if there are as many."""
    now = time.time_ns()  # a last use in the future (the clock was set back) counts as the oldest
    sample: list[Block] = []
    while folders and len(sample) < SAMPLE_SIZE:
        found = scan_block_folder(folders.pop())
        sample += [block if block.used_ns <= now else block._replace(used_ns=0) for block in found]
    return sample


def _is_writer_dead(writer: str) -> bool:
    """Return whether the process that created the folder ``writer`` has ended, by the lock that it held."""
    folder = os.open(writer, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(folder)
    return True


def _remove_writer(ledger: int, writer: os.PathLike[str]) -> None:
    """Remove a process's folder in ``writers`` with its unfinished files; subtract these from the accounts."""
    drafts = [Block(0, entry.path, entry.stat().st_size) for entry in list_entries(writer) if entry.is_file()]
    _remove_files(ledger, *drafts)
    shutil.rmtree(writer, ignore_errors=True)


def _remove_files(ledger: int, *values: Block | Draft) -> None:
    """Remove files of values, and subtract their sizes and their number from the folder's accounts."""
    if not values:
        return
    used, keys = _read_accounts(ledger)
    os.pwrite(ledger, _CHANGING, _STATE_AT)
    for value in values:
        os.unlink(value.path)
    nbytes = sum(value.nbytes for value in values)
    write_accounts(ledger, Accounts(max(0, used - nbytes), max(0, keys - len(values))))


def find_size(folder: Path, named: int | None) -> int:
    """Return the size limit that a folder would have if a process opened it with the size limit ``named``."""
    try:
        ledger = os.open(folder / "ledger", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return named or DEFAULT_BYTES
    try:
        return named or _read_size(ledger) or DEFAULT_BYTES
    finally:
        os.close(ledger)


def _read_size(ledger: int) -> int:
    """Return the size limit in the ledger; 0 if the ledger has none yet."""
    record = os.pread(ledger, _SIZE.size, _SIZE_AT)
    return int(_SIZE.unpack(record)[0]) if len(record) == _SIZE.size else 0


def _read_accounts(ledger: int) -> Accounts:
    record = os.pread(ledger, _ACCOUNTS.size, _ACCOUNTS_AT)
    if len(record) < _ACCOUNTS.size:
        raise OSError(errno.EIO, "the ledger of the folder was truncated")
    return Accounts(*_ACCOUNTS.unpack(record))


def write_accounts(ledger: int, accounts: Accounts) -> None:
    """Write the accounts (bytes and number of values) after a change, and mark the change as complete."""
    os.pwrite(ledger, _ACCOUNTS.pack(*accounts), _ACCOUNTS_AT)
    os.pwrite(ledger, _CONSISTENT, _STATE_AT)
