"""Store in a folder that the processes of one machine share: on a tmpfs, or on an SSD.

A value is written to a temporary file, which is renamed when it is complete: no process can read an incomplete value.
Reads need no lock: a file that is evicted during a read stays readable until it is closed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

from kvstore_backend.backend import (
    Health,
    PoolUnavailable,
    Status,
    StorageBackend,
    Value,
    memory_views,
)
from kvstore_backend.stores.file.ledger import FolderRemoved, Ledger
from kvstore_backend.threads import after_fork

__all__ = ["FileStore"]

logger = logging.getLogger(__name__)

_MAX_NAME_LENGTH = 200
_FAN_OUT = 256
_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")


class FileStore(StorageBackend):
    """Store with values as files in a folder, which several processes share; evicts the least recently used values.

    With more than ``SAMPLE_SIZE`` values, an eviction takes the least recently used values of a random sample. A folder
    is refused if it belongs to another user than this process's user or root, or if other users may write to it.
    """

    def __init__(self, folder: str | Path, capacity_bytes: int | None) -> None:
        """Open the folder, or create it if it is missing.

        Args:
            folder: a folder on a filesystem of this machine, not on a network filesystem.
            capacity_bytes: size limit for all processes together; less if the filesystem has less space. None: the
                limit that the folder has already, or ``DEFAULT_BYTES`` for a new folder.

        Raises:
            ValueError: ``capacity_bytes`` is not positive.
            PoolUnavailable: the folder cannot be created, written to or trusted, or is open with another limit.
        """
        if capacity_bytes is not None and capacity_bytes <= 0:
            raise ValueError(f"capacity_bytes is {capacity_bytes}; it must be positive")
        self._folder = Path(folder).absolute()
        self._closed = False
        self._opening = threading.Lock()  # guards ``_ledger`` and ``_closed``: no ledger is opened after ``close``
        try:
            self._ledger = Ledger(self._folder, capacity_bytes)
        except OSError as exc:
            raise PoolUnavailable(f"folder {self._folder} cannot be used as a store: {exc.strerror}") from exc
        after_fork(self)

    def __repr__(self) -> str:
        return f"FileStore({self._folder}, {'closed' if self._closed else f'up to {self._ledger.capacity} bytes'})"

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        return [self._try_call(self._put_value, *each) or Status.FAILED for each in zip(keys, values, strict=True)]

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        return [self._try_call(self._get_value, *each) for each in zip(keys, targets, strict=True)]

    def exists(self, keys: Sequence[str]) -> list[Status]:
        return [self._try_call(os.stat, key) for key in keys]

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        return [self._try_call(self._ledger.remove_block, key) for key in keys]

    def clear(self, prefix: str) -> Status:
        """Remove all keys that begin with ``prefix``, except keys that are too long for a file name.

        The keys of blocks are short enough.
        """
        if self._closed:
            return Status.FAILED
        try:
            self._ledger.clear_prefix(quote(prefix, safe=""))
        except OSError as exc:
            logger.warning("The blocks in the folder %s cannot be removed: %s", self._folder, exc)
            return Status.FAILED
        return Status.OK

    def health(self) -> Health:
        if self._closed:
            return Health(False, "closed")
        try:
            used = self._ledger.read_accounts().used_bytes
        except OSError as exc:
            return Health(False, f"folder {self._folder} cannot be used: {exc.strerror}")
        return Health(True, f"folder {self._folder} has {used} of {self._ledger.capacity} bytes")

    def close(self) -> None:
        """Close the folder; the stored values stay for other processes."""
        with self._opening:
            if not self._closed:
                self._closed = True
                self._ledger.close()

    def on_fork(self) -> None:
        """Close the store in a child process after a fork, because unfinished files and the lock belong to the parent.

        To use the folder, the child must open another store. The child closes its copy of the locked file, because a
        lock lasts until all processes have closed the file: so the lock ends when the parent ends.
        """
        self._opening = threading.Lock()
        if not self._closed:
            self._closed = True
            self._ledger.release_lock()

    def _try_call(self, call: Callable[..., object], key: str, *value: Value) -> Status:
        """Call ``call`` with the path of the key's file; return ``OK``, or the status for the error that it raised."""
        if self._closed:
            return Status.FAILED
        try:
            call(self._block_path(key), *value)
        except FileNotFoundError:
            return Status.ABSENT
        except OSError as exc:
            logger.debug("%s: %s", key, exc)
            return Status.FAILED
        return Status.OK

    def _put_value(self, path: str, value: Value) -> None:
        if os.path.exists(path):
            return
        ledger = self._ledger
        try:
            _write_block(ledger, path, value)
        except FolderRemoved as exc:
            _write_block(self._reopen_ledger(ledger, exc), path, value)

    def _reopen_ledger(self, ledger: Ledger, reason: FolderRemoved) -> Ledger:
        """Open the folder again after another program removed it; return the new ledger.

        Does nothing if another thread has already replaced ``ledger``. Raises ``reason`` if the store is closed.
        """
        with self._opening:
            if self._closed:
                raise reason
            if self._ledger is ledger:
                self._ledger = Ledger(self._folder, ledger.size)
                ledger.close()
                logger.warning(
                    "Folder %s was removed or replaced and is opened again: %s", self._folder, reason.strerror
                )
            return self._ledger

    def _get_value(self, path: str, target: Value) -> None:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if (stored := os.fstat(file).st_size) != _count_bytes(target):
                text = f"{stored} bytes are stored, but the target has {_count_bytes(target)} bytes"
                raise FileNotFoundError(errno.ENOENT, text)
            _move_bytes(os.preadv, file, target)
            _mark_used(file)
        finally:
            os.close(file)

    def _block_path(self, key: str) -> str:
        """Return the path of a key's file. Its name is the key in percent-encoding, or a hash if that is too long."""
        name = quote(key, safe="")
        if len(name) > _MAX_NAME_LENGTH:
            name = "=" + hashlib.sha256(name.encode()).hexdigest()
        return f"{self._ledger.blocks}/{zlib.crc32(name.encode()) % _FAN_OUT:02x}/{name}.block"


def _count_bytes(value: Value) -> int:
    return sum(span.nbytes for span in value)


def _write_block(ledger: Ledger, path: str, value: Value) -> None:
    draft = ledger.reserve_draft(_count_bytes(value))
    try:
        _move_bytes(os.pwritev, draft.file, value)
        _mark_used(draft.file)
        ledger.publish_draft(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the earlier error is raised
            ledger.discard_draft(draft)
        raise
    finally:
        os.close(draft.file)


def _move_bytes(call: Callable[[int, Sequence[memoryview], int], int], file: int, value: Value) -> None:
    """Read or write all bytes of ``value`` at the beginning of ``file``; repeat ``call`` until all bytes are moved."""
    pending = memory_views(value)
    offset = 0
    while pending:
        moved = call(file, pending[:_MAX_BUFFERS], offset)
        if moved == 0:
            raise OSError(errno.EIO, f"the block's file ends after {offset} bytes")
        offset += moved
        while pending and moved >= len(pending[0]):
            moved -= len(pending.pop(0))
        if moved:
            pending[0] = pending[0][moved:]


def _mark_used(file: int) -> None:
    """Set the time of a file's last use to now; the kernel's own times of files are too coarse for sorting."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))
