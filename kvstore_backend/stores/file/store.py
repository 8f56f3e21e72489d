"""A store in a folder that the processes of one machine share: on a tmpfs, or on an SSD.

A value is written to a file of its own and gets its name when it is whole: nobody can open half a value. Reading
takes no lock: a file that is evicted while it is read stays whole until it is closed.
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
    StoreStats,
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
    """Values as files, shared by all processes that open the same folder, the least recently used evicted.

    Of more than some thousand values those evicted are the least recently used of a sample drawn by chance.
    A folder is trusted as far as those who may write to it: one that belongs to another user than this process's or
    root is refused, and so is one that others may write to.
    """

    def __init__(self, folder: str | Path, capacity_bytes: int | None) -> None:
        """Open the folder, which is made where it is missing.

        Args:
            folder: on a filesystem of this machine, not a network's.
            capacity_bytes: limit for all processes together; less where the filesystem has not that much room. None:
                the one that the folder has, ``DEFAULT_BYTES`` where it is new.

        Raises:
            ValueError: ``capacity_bytes`` is not positive.
            PoolUnavailable: the folder cannot be made, written to or trusted, or is open with another limit.
        """
        if capacity_bytes is not None and capacity_bytes <= 0:
            raise ValueError(f"capacity_bytes is {capacity_bytes}; it must be positive")
        self._folder = Path(folder).absolute()
        self._closed = False
        self._opening = threading.Lock()  # guards which ledger is in use, and that none is opened after ``close``
        try:
            self._ledger = Ledger(self._folder, capacity_bytes)
        except OSError as exc:
            raise PoolUnavailable(f"folder {self._folder} cannot be used as a store: {exc.strerror}") from exc
        after_fork(self)

    def __repr__(self) -> str:
        return f"FileStore({self._folder}, {'closed' if self._closed else f'up to {self._ledger.capacity} bytes'})"

    def _put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        return [self._try_call(self._put_value, *each) or Status.FAILED for each in zip(keys, values, strict=True)]

    def _get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        return [self._try_call(self._get_value, *each) for each in zip(keys, targets, strict=True)]

    def _exists(self, keys: Sequence[str]) -> list[Status]:
        return [self._try_call(os.stat, key) for key in keys]

    def _remove(self, keys: Sequence[str], *, force: bool) -> list[Status]:
        return [self._try_call(self._ledger.remove_block, key) for key in keys]

    def _clear(self, prefix: str) -> Status:
        """Finds only keys whose names are not too long for a file's, as those of blocks are."""
        if self._closed:
            return Status.FAILED
        try:
            self._ledger.clear_prefix(quote(prefix, safe=""))
        except OSError as exc:
            logger.warning("Folder %s cannot be cleared: %s", self._folder, exc)
            return Status.FAILED
        return Status.OK

    def health(self) -> Health:
        if self._closed:
            return Health(False, "closed")
        try:
            used = self._ledger.read_accounts().used_bytes
        except OSError as exc:
            return Health(False, f"folder {self._folder} cannot be used: {exc.strerror}")
        return Health(True, f"folder {self._folder} holds {used} of {self._ledger.capacity} bytes")

    def stats(self) -> StoreStats:
        try:
            used, keys = self._ledger.read_accounts()
        except OSError:
            return StoreStats("file", capacity_bytes=self._ledger.capacity)
        return StoreStats("file", keys, used, self._ledger.capacity)

    def close(self) -> None:
        """Leave the folder; its values stay for the others."""
        with self._opening:
            if not self._closed:
                self._closed = True
                self._ledger.close()

    def on_fork(self) -> None:
        """Be closed in a child process, which opens the folder itself: this writer's drafts and lock are its parent's.

        A lock lasts as long as anybody has the file open: the child closes it, so that it ends with the parent.
        """
        self._opening = threading.Lock()
        if not self._closed:
            self._closed = True
            self._ledger.let_go()

    def _try_call(self, call: Callable[..., object], key: str, *value: Value) -> Status:
        """``OK`` unless ``call`` failed, which is given the path of the key's file."""
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
        """A ledger in place of one that lost its folder, as it does when somebody empties the pool by deleting that."""
        with self._opening:
            if self._closed:
                raise reason
            if self._ledger is ledger:
                self._ledger = Ledger(self._folder, ledger.size)
                ledger.close()
                logger.warning("Folder %s is opened anew: %s", self._folder, reason.strerror)
            return self._ledger

    def _get_value(self, path: str, target: Value) -> None:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if (stored := os.fstat(file).st_size) != _count_bytes(target):
                text = f"{stored} bytes are stored, {_count_bytes(target)} were asked for"
                raise FileNotFoundError(errno.ENOENT, text)
            _move_bytes(os.preadv, file, target)
            _mark_used(file)
        finally:
            os.close(file)

    def _block_path(self, key: str) -> str:
        """Where a key's value lies: under the key itself where that can name a file, so that people can read it."""
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
        with contextlib.suppress(OSError):  # the error before tells more
            ledger.discard_draft(draft)
        raise
    finally:
        os.close(draft.file)


def _move_bytes(call: Callable[[int, Sequence[memoryview], int], int], file: int, value: Value) -> None:
    """Read or write all of ``value`` at the beginning of ``file``, however few bytes each call moves."""
    pending = memory_views(value)
    offset = 0
    while pending:
        moved = call(file, pending[:_MAX_BUFFERS], offset)
        if moved == 0:
            raise OSError(errno.EIO, f"the file ends after {offset} bytes")
        offset += moved
        while pending and moved >= len(pending[0]):
            moved -= len(pending.pop(0))
        if moved:
            pending[0] = pending[0][moved:]


def _mark_used(file: int) -> None:
    """Note that it is in use now; the kernel's own clock for files is too coarse to order uses by."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))
