"""Ledger of a shared folder: permissions to write, evictions, and the removal of files of killed writers.

    folder/
    ├── ledger              bytes and number of values, the boot they were stored in, and the bytes at which values are
    │                       evicted; its lock guards the folder
    │                       (at 0 both numbers, at 16 the boot's id, at 54 the size, at 63 whether a process is changing
    │                       the blocks)
    ├── blocks/<2 hex>/...  one file a value, complete from the moment it has a name here
    └── writers/<name>/     one a process, locked as long as that process lives: values being written

Every step that gives a file a name or removes one runs under the ledger's lock; bytes are moved outside it. No step
under that lock takes longer with more values, with two exceptions: a count after a writer was killed in the middle of a
change, and the removal of values from before the machine's last start.
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
# An eviction frees more than was requested, so that not every put must evict: this share of the values it looked at.
_EVICTED_SHARE = 0.05
# A filesystem needs the rest for itself, in addition to the bytes of its files.
_FILLED_SHARE = 0.95

DEFAULT_BYTES = 1 << 30
"""Size of a new folder without a configured size."""

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
"""File with an id that the kernel draws at each start of the machine."""

SAMPLE_SIZE = 4096
"""Number of values that an eviction looks at, in random folders; with fewer values it looks at all of them.

It removes those of them that were used least recently.
"""


class Accounts(NamedTuple):
    """Bytes and number of values in a folder, values being written included."""

    used_bytes: int
    keys: int


class Draft(NamedTuple):
    """Value being written: an open file of the value's size."""

    path: str
    file: int
    nbytes: int


class FolderRemoved(OSError):
    """Error: the folder, or a part of it, was removed by another program; a new ``Ledger`` creates it again."""


class Ledger:
    """Accounts that limit a folder to one size for all processes that open it.

    The size belongs to the folder. A process without a configured size uses it. A process with another size is refused
    while another process has the folder open, and otherwise changes the size: if each process had its own limit, the
    smallest one would in effect apply to all.

    The ledger is trusted: it records that a process is changing the folder. A process that takes the lock and finds
    this record, because another was killed in the middle of a change, counts the values again. All methods raise
    ``OSError`` if something is wrong with the folder, and several threads may call them.
    """

    def __init__(self, folder: Path, size: int | None) -> None:
        """Open ``folder``, which is created if it is missing; clean up after writers that were killed.

        A folder with other contents is refused: only values and writers' drafts are ever removed. Values from before
        the machine's last start are dropped: files are not synced to the disk, so after a crash a file may have its
        full size without its bytes.
        """
        self.blocks = folder / "blocks"
        self._ledger = folder / "ledger"
        self._writers = folder / "writers"
        self._own = self._writers / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._serial = itertools.count()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (refusal := find_refusal(folder)) is not None:
            raise PermissionError(errno.EPERM, f"it {refusal[0]}; {refusal[1]}")
        self._ledger.touch(mode=0o600)  # before anything else: a folder without a ledger is not ours
        with self._lock_ledger() as ledger, contextlib.ExitStack() as undo:
            boot_id = BOOT_ID_FILE.read_bytes()
            if (recorded := os.pread(ledger, len(boot_id), _BOOT_ID_AT)) != boot_id:
                if len(recorded) == len(boot_id) and all(recorded):  # otherwise the ledger is new or was cut short
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
        """Bytes at which values are evicted: the size, or less if the filesystem has less space."""
        if self.capacity < self.size:
            logger.warning("%s has room for %d of the %d bytes requested", folder, self.capacity, self.size)

    def read_accounts(self) -> Accounts:
        """Return the folder's accounts now."""
        with self._lock_ledger() as ledger:
            return _read_accounts(ledger)

    def reserve_draft(self, nbytes: int) -> Draft:
        """Create a draft for a value when there is space for it; evict values if necessary. The caller closes its file.

        Raises:
            FolderRemoved: the ledger or this process's folder in ``writers`` was removed.
            OSError: ``ENOSPC`` if even eviction does not free enough space.
        """
        with self._lock_ledger() as ledger:
            if _read_accounts(ledger).used_bytes + nbytes > self.capacity >= nbytes:
                self._evict_blocks(ledger, nbytes)
            used, keys = _read_accounts(ledger)
            if used + nbytes > self.capacity:
                raise OSError(errno.ENOSPC, f"no room for {nbytes} bytes in {self.capacity}")
            path = f"{self._own}/{next(self._serial)}"
            os.pwrite(ledger, _CHANGING, _STATE_AT)
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                raise FolderRemoved(errno.EIO, "this process's folder in it was removed") from None
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
        """Give a complete draft its name in ``blocks``, unless another writer's value already has it.

        Raises:
            FolderRemoved: any part of the folder was removed.
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
                raise FolderRemoved(errno.EIO, "its blocks were removed") from None

    def discard_draft(self, draft: Draft) -> None:
        """Free the space of a draft that will not be published."""
        with self._lock_ledger() as ledger:
            _remove_files(ledger, draft)

    def remove_block(self, block: str) -> None:
        """Remove a stored value; ``FileNotFoundError`` if there is none."""
        with self._lock_ledger() as ledger:
            _remove_files(ledger, Block(0, block, os.stat(block).st_size))

    def clear_prefix(self, prefix: str) -> None:
        """Remove the stored values in files with names that begin with ``prefix``; other calls can run in between."""
        for folder in list_folders(self.blocks):
            with self._lock_ledger() as ledger:
                _remove_files(ledger, *scan_block_folder(folder, prefix))

    def close(self) -> None:
        """Leave the folder; its values stay for other processes."""
        with contextlib.suppress(OSError), self._lock_ledger() as ledger:
            _remove_writer(ledger, self._own)
        self.let_go()

    def let_go(self) -> None:
        """Close the files that this process has open, and do not change the folder."""
        os.close(self._alive)

    @contextlib.contextmanager
    def _lock_ledger(self) -> Iterator[int]:
        """Open and lock the ledger, against other processes and threads."""
        try:
            ledger = os.open(self._ledger, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # not passed on, because it would mean that a value is absent
            raise FolderRemoved(errno.EIO, "its ledger was removed") from None
        try:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            if os.pread(ledger, 1, _STATE_AT) == _CHANGING:
                self._recount_blocks(ledger)
            yield ledger
        finally:
            os.close(ledger)

    def _refuse_other_machine(self) -> None:
        """Raise if a process has the folder open that did not see this machine's start."""
        for writer in list_folders(self._writers):
            if _WRITER.fullmatch(writer.name) and not _is_writer_dead(writer.path):
                text = "a process of another machine has it open, and a folder is a pool for one machine's processes; "
                raise OSError(errno.EINVAL, text + "give each machine a folder of its own, or use a Mooncake pool")

    def _settle_size(self, ledger: int, named: int | None) -> int:
        """Return the size of the folder, which becomes ``named`` if no other process has it open."""
        recorded = _read_size(ledger)
        size = named or recorded or DEFAULT_BYTES
        if recorded and size != recorded and any(_WRITER.fullmatch(each.name) for each in list_folders(self._writers)):
            text = f"it has a size of {recorded} bytes for all who have it open now, and {size} were asked for; "
            raise OSError(errno.EINVAL, text + "name the same size or none, or end those processes first to change it")
        os.pwrite(ledger, _SIZE.pack(size), _SIZE_AT)
        return size

    def _evict_blocks(self, ledger: int, nbytes: int) -> None:
        """Remove the least recently used values until ``nbytes`` more fit, and some more."""
        self._remove_dead_writers(ledger)
        folders = list_folders(self.blocks)
        random.shuffle(folders)
        while True:
            sample = _sample_blocks(folders)
            if not folders:  # the rest is quick to count, and another program may have removed some
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
        """Remove the folders and drafts of writers that were killed."""
        for writer in list_folders(self._writers):
            if _WRITER.fullmatch(writer.name) and _is_writer_dead(writer.path):
                _remove_writer(ledger, writer)

    def _recount_blocks(self, ledger: int) -> None:
        """Count the existing values and their bytes, and write them to the ledger."""
        sizes = [block.nbytes for block in scan_blocks(self.blocks)]
        sizes += [entry.stat().st_size for writer in list_folders(self._writers) for entry in os.scandir(writer)]
        write_accounts(ledger, Accounts(sum(sizes), len(sizes)))


def _sample_blocks(folders: list[os.DirEntry[str]]) -> list[Block]:
    """Return the values in enough of ``folders`` for a fair sample; those folders are removed from the list."""
    now = time.time_ns()  # if the clock was set back, a last use in the future counts as unknown
    sample: list[Block] = []
    while folders and len(sample) < SAMPLE_SIZE:
        found = scan_block_folder(folders.pop())
        sample += [block if block.used_ns <= now else block._replace(used_ns=0) for block in found]
    return sample


def _is_writer_dead(writer: str) -> bool:
    """Return whether the process that made this folder has ended: the kernel has released its lock."""
    folder = os.open(writer, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(folder)
    return True


def _remove_writer(ledger: int, writer: os.PathLike[str]) -> None:
    """Remove a writer's folder, and the values that it was writing from the accounts."""
    drafts = [Block(0, entry.path, entry.stat().st_size) for entry in list_entries(writer) if entry.is_file()]
    _remove_files(ledger, *drafts)
    shutil.rmtree(writer, ignore_errors=True)


def _remove_files(ledger: int, *values: Block | Draft) -> None:
    """Remove values, and their part of the accounts."""
    if not values:
        return
    used, keys = _read_accounts(ledger)
    os.pwrite(ledger, _CHANGING, _STATE_AT)
    for value in values:
        os.unlink(value.path)
    nbytes = sum(value.nbytes for value in values)
    write_accounts(ledger, Accounts(max(0, used - nbytes), max(0, keys - len(values))))


def find_size(folder: Path, named: int | None) -> int:
    """Return the size that the folder gets if a single process opens it; reads only the ledger."""
    try:
        ledger = os.open(folder / "ledger", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return named or DEFAULT_BYTES
    try:
        return named or _read_size(ledger) or DEFAULT_BYTES
    finally:
        os.close(ledger)


def _read_size(ledger: int) -> int:
    """Read the size in the ledger; 0 if none was recorded yet."""
    record = os.pread(ledger, _SIZE.size, _SIZE_AT)
    return int(_SIZE.unpack(record)[0]) if len(record) == _SIZE.size else 0


def _read_accounts(ledger: int) -> Accounts:
    record = os.pread(ledger, _ACCOUNTS.size, _ACCOUNTS_AT)
    if len(record) < _ACCOUNTS.size:
        raise OSError(errno.EIO, "its ledger was cut short")
    return Accounts(*_ACCOUNTS.unpack(record))


def write_accounts(ledger: int, accounts: Accounts) -> None:
    """Write the accounts after a change, which ends the change."""
    os.pwrite(ledger, _ACCOUNTS.pack(*accounts), _ACCOUNTS_AT)
    os.pwrite(ledger, _CONSISTENT, _STATE_AT)
