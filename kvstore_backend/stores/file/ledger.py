"""The accounts of a shared folder: who may write how much, what is evicted, what killed writers left behind.

    folder/
    ├── ledger              bytes and number of values, and the boot they were stored in; its lock guards the folder
    │                       (at 0 both numbers, at 16 the boot's id, at 63 whether somebody is changing what is there)
    ├── blocks/<2 hex>/...  one file a value, complete from the moment it has a name here
    └── writers/<name>/     one a process, locked as long as that process lives: values being written

Everything that gives a file a name or takes one away happens under the ledger's lock; bytes are moved outside it.
Nothing under that lock takes longer the more values there are, but for a count where a writer was killed in the middle
of a change, and dropping what is from before the machine's last start.
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

from kvstore_backend.stores.file.folder import Block, entries, folders_in, refusal, stored, stored_in

__all__ = ["Accounts", "Draft", "Ledger", "Removed"]

logger = logging.getLogger(__name__)

_ACCOUNTS = struct.Struct("<QQ")
_ACCOUNTS_AT, _BOOT_ID_AT, _STATE_AT = 0, 16, 63
_CONSISTENT, _CHANGING = b"\1", b"\0"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_WRITER = re.compile(r"\d+-[0-9a-f]{8}")
# An eviction looks at so many values, of folders drawn by chance, and removes those of them that were used least
# recently: of fewer it looks at all. It makes more room than was asked for, so that not every put must: this share
# of what it looked at.
_SAMPLE = 4096
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


class Removed(OSError):
    """The folder, or a part of it, was removed by somebody; a new ``Ledger`` makes it anew."""


class Ledger:
    """Keeps a folder under ``capacity`` bytes for all processes that open it.

    The ledger is trusted: it says so while somebody changes the folder, and whoever takes the lock and finds that,
    since a process was killed at it, counts anew. All methods raise ``OSError`` for whatever is wrong with the folder,
    and may be called from several threads.
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
                os.pwrite(ledger, _CHANGING, _STATE_AT)
            if os.pread(ledger, 1, _STATE_AT) != _CONSISTENT or not self.blocks.is_dir():
                self._count(ledger)
            self._bury_the_dead(ledger)
            for part in (self.blocks, self._writers):
                part.mkdir(mode=0o700, exist_ok=True)
            self._own.mkdir(mode=0o700)
            undo.callback(os.rmdir, self._own)
            self._alive = os.open(self._own, os.O_RDONLY | os.O_CLOEXEC)
            undo.callback(os.close, self._alive)
            fcntl.flock(self._alive, fcntl.LOCK_EX)
            used = _read(ledger).used_bytes
            filesystem = os.statvfs(folder)
            undo.pop_all()
        room = used + filesystem.f_bavail * filesystem.f_frsize
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
            if _read(ledger).used_bytes + nbytes > self.capacity >= nbytes:
                self._evict(ledger, nbytes)
            used, keys = _read(ledger)
            if used + nbytes > self.capacity:
                raise OSError(errno.ENOSPC, f"no room for {nbytes} bytes in {self.capacity}")
            path = f"{self._own}/{next(self._serial)}"
            os.pwrite(ledger, _CHANGING, _STATE_AT)
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                raise Removed(errno.EIO, "this process's folder in it was removed") from None
            except OSError:
                os.pwrite(ledger, _CONSISTENT, _STATE_AT)
                raise
            try:
                os.truncate(file, nbytes)
                _write(ledger, Accounts(used + nbytes, keys + 1))
            except BaseException:
                os.close(file)
                raise
        return Draft(path, file, nbytes)

    def publish(self, draft: Draft, block: str) -> None:
        """Give a draft that is whole its name in ``blocks``, unless another writer's value has it already.

        Raises:
            Removed: any part of the folder.
        """
        with self._locked() as ledger:
            if os.path.exists(block):
                _take_off(ledger, draft)
                return
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(os.path.dirname(block), 0o700)
                os.rename(draft.path, block)
            except FileNotFoundError:
                os.pwrite(ledger, _CHANGING, _STATE_AT)
                raise Removed(errno.EIO, "its blocks were removed") from None

    def discard(self, draft: Draft) -> None:
        """Give back what was reserved for a draft that will not be published."""
        with self._locked() as ledger:
            _take_off(ledger, draft)

    def remove(self, block: str) -> None:
        """Remove a stored value; ``FileNotFoundError`` where there is none."""
        with self._locked() as ledger:
            _take_off(ledger, Block(0, block, os.stat(block).st_size))

    def clear(self, prefix: str) -> None:
        """Remove the stored values whose files' names begin with ``prefix``, letting others in between."""
        for folder in folders_in(self.blocks):
            with self._locked() as ledger:
                _take_off(ledger, *stored_in(folder, prefix))

    def close(self) -> None:
        """Leave the folder; what is stored stays for the others."""
        with contextlib.suppress(OSError), self._locked() as ledger:
            _bury(ledger, self._own)
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
            if os.pread(ledger, 1, _STATE_AT) == _CHANGING:
                self._count(ledger)
            yield ledger
        finally:
            os.close(ledger)

    def _evict(self, ledger: int, nbytes: int) -> None:
        """Remove values used least recently until ``nbytes`` more fit, and some to spare."""
        self._bury_the_dead(ledger)
        folders = folders_in(self.blocks)
        random.shuffle(folders)
        while True:
            sample = _sample(folders)
            if not folders:  # what is left is quickly counted, and somebody may have removed some
                self._count(ledger)
            used = _read(ledger).used_bytes
            goal = self.capacity - nbytes - _EVICTED_SHARE * sum(block.nbytes for block in sample)
            victims = []
            for block in sorted(sample):
                if used <= goal:
                    break
                victims.append(block)
                used -= block.nbytes
            _take_off(ledger, *victims)
            if used + nbytes <= self.capacity or not folders:
                return

    def _bury_the_dead(self, ledger: int) -> None:
        """Remove what writers that were killed left."""
        for writer in folders_in(self._writers):
            if _WRITER.fullmatch(writer.name) and _is_dead(writer.path):
                _bury(ledger, writer)

    def _count(self, ledger: int) -> None:
        """Enter what is there."""
        sizes = [block.nbytes for block in stored(self.blocks)]
        sizes += [entry.stat().st_size for writer in folders_in(self._writers) for entry in os.scandir(writer)]
        _write(ledger, Accounts(sum(sizes), len(sizes)))


def _sample(folders: list[os.DirEntry[str]]) -> list[Block]:
    """The values in as many of ``folders``, which are taken off the list, as give a fair sample."""
    now = time.time_ns()  # set back by somebody, it makes a last use in the future one that nothing is known of
    sample: list[Block] = []
    while folders and len(sample) < _SAMPLE:
        found = stored_in(folders.pop())
        sample += [block if block.used_ns <= now else block._replace(used_ns=0) for block in found]
    return sample


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


def _bury(ledger: int, writer: os.PathLike[str]) -> None:
    """Remove a writer's folder, and the values that it was writing from the accounts."""
    _take_off(ledger, *(Block(0, entry.path, entry.stat().st_size) for entry in entries(writer) if entry.is_file()))
    shutil.rmtree(writer, ignore_errors=True)


def _take_off(ledger: int, *values: Block | Draft) -> None:
    """Remove values and what they have in the accounts."""
    if not values:
        return
    used, keys = _read(ledger)
    os.pwrite(ledger, _CHANGING, _STATE_AT)
    for value in values:
        os.unlink(value.path)
    nbytes = sum(value.nbytes for value in values)
    _write(ledger, Accounts(max(0, used - nbytes), max(0, keys - len(values))))


def _read(ledger: int) -> Accounts:
    record = os.pread(ledger, _ACCOUNTS.size, _ACCOUNTS_AT)
    if len(record) < _ACCOUNTS.size:
        raise OSError(errno.EIO, "its ledger was cut short")
    return Accounts(*_ACCOUNTS.unpack(record))


def _write(ledger: int, accounts: Accounts) -> None:
    """Enter what is there now that a change is done."""
    os.pwrite(ledger, _ACCOUNTS.pack(*accounts), _ACCOUNTS_AT)
    os.pwrite(ledger, _CONSISTENT, _STATE_AT)
