"""Marks that ``kvstore clear`` leaves in a pool, so that no instance puts again what an operator has removed.

    kvstore-cleared/<32 hex digits: digest of the Namespace>      that namespace was cleared, or a part of it
    kvstore-cleared/all                                           all namespaces were

An instance cannot distinguish a pool that lost blocks from a pool that was cleared, and it puts lost blocks again
(``refill.py``). The value of a mark is an id that no other clear has. An instance that finds a new id stops putting the
blocks that it had saved before. It remembers the id, so a mark that the pool loses later changes nothing for an
instance that has seen it. No clocks are compared.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore_backend.backend import Span, Status, StorageBackend
from kvstore_backend.namespace import BLOCK_PREFIX, Namespace
from kvstore_backend.wrappers.checked import seal_bytes

__all__ = ["ALL", "MARK_PREFIX", "ClearMarks", "ClearWatch", "Pool", "make_mark", "mark_key"]

logger = logging.getLogger(__name__)

MARK_PREFIX = "kvstore-cleared/"
"""Beginning of the keys of all marks; no block's key begins with it."""

ALL = "all"
"""Text in the place of a digest that means all namespaces."""

_PERIOD_SECONDS = 5.0
# Longer than the deadline of a read; after that the instance does not wait for a hung pool.
_CLOSE_SECONDS = 2.0
_ID_BYTES = 32
_ID = re.compile(rb"[0-9a-f]{32}")


def mark_key(digest: str) -> str:
    """Return the key of the mark of the namespace with this digest, or of ``ALL``."""
    return f"{MARK_PREFIX}{digest}"


def make_mark(key: str) -> NDArray[np.uint8]:
    """Return the bytes to store under ``key`` for a clear that begins now."""
    return seal_bytes(key, secrets.token_hex(_ID_BYTES // 2).encode())


class Pool(Protocol):
    """Part of ``BlockPool`` that this module uses."""

    namespace: Namespace

    @property
    def is_ready(self) -> bool:
        """Whether the pool answers calls now."""

    @property
    def stack(self) -> StorageBackend:
        """The backend of the pool, with its wrappers."""

    def register(self, address: int, nbytes: int) -> None:
        """Register memory that reads write to."""

    def unregister(self, address: int, nbytes: int) -> None:
        """Undo a ``register``."""


class ClearMarks:
    """Marks of some namespaces, as an instance knows them.

    Args:
        pool: the pool with the marks.
        digests: digests of the namespaces whose blocks the instance saves.
    """

    def __init__(self, pool: Pool, digests: Sequence[str]) -> None:
        self._pool = pool
        self._keys = [mark_key(each) for each in (*digests, ALL)]
        self._memory: NDArray[np.uint8] = np.zeros(len(self._keys) * _ID_BYTES, dtype=np.uint8)
        pool.register(self._memory.ctypes.data, self._memory.nbytes)
        self._known: dict[str, bytes] = {}
        self._found: dict[str, bytes] = {}

    def look(self) -> bool | None:
        """Return whether the pool was cleared since the last ``accept``; None if the pool does not answer."""
        base: int = self._memory.ctypes.data
        targets = [[Span(base + i * _ID_BYTES, _ID_BYTES)] for i in range(len(self._keys))]
        statuses = self._pool.stack.get_for_all(self._keys, targets)
        if Status.FAILED in statuses:
            return None
        read = [self._memory[i * _ID_BYTES : (i + 1) * _ID_BYTES].tobytes() for i in range(len(self._keys))]
        marks = zip(self._keys, statuses, read, strict=True)
        self._found = {key: text for key, status, text in marks if status and _ID.fullmatch(text)}
        return any(self._known.get(key) != text for key, text in self._found.items())

    def close(self) -> None:
        """Unregister the memory; callers do not call ``look`` after this."""
        self._pool.unregister(self._memory.ctypes.data, self._memory.nbytes)

    def accept(self) -> None:
        """Remember the marks that the last ``look`` found."""
        self._known |= self._found


class ClearWatch:
    """Watcher that, after a clear, drops everything that only this process has: its fast tier, and queued writes.

    It reads the marks on its own thread. A mark that exists at the first look counts as new, because a fast tier in a
    folder may hold older copies.

    Args:
        pool: a pool of one namespace, which may change; the copies of all namespaces are dropped.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._period = _PERIOD_SECONDS
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool-clear-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and wait until it has unregistered the memory of the marks, unless the pool hangs."""
        self._closed.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._closed.is_set():
            digest = self._pool.namespace.digest
            marks = ClearMarks(self._pool, [digest])
            while not self._closed.wait(self._period) and self._pool.namespace.digest == digest:
                try:
                    self._look(marks)
                except Exception:
                    logger.exception("Looking for the marks of a clear failed; it is tried again")
            marks.close()

    def _look(self, marks: ClearMarks) -> None:
        if self._pool.is_ready and marks.look() and self._pool.stack.drop_own_copies(BLOCK_PREFIX):
            marks.accept()  # otherwise it tries again in the next period
            logger.info("An operator cleared the pool: the copies that only this process has were dropped")
