"""Marks that ``kvstore clear`` writes to a pool, so that no instance saves removed blocks again.

    kvstore-cleared/<32 hex digits: digest of the Namespace>      the namespace, or a part of it, was cleared
    kvstore-cleared/all                                           all namespaces were cleared

An instance saves blocks again that the pool has lost (``refill.py``). Without marks, it could not distinguish lost
blocks from removed blocks. The value of a mark is a new id for each clear. An instance that finds a new id does not
save those blocks again that it saved before. It remembers the id, so it does not matter if the pool loses the mark
later. No clocks are compared.
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
from kvstore_backend.wrappers.wrapper import call_after_late_calls

__all__ = ["ALL", "MARK_PREFIX", "ClearMarks", "ClearWatch", "Pool", "make_mark", "mark_key"]

logger = logging.getLogger(__name__)

MARK_PREFIX = "kvstore-cleared/"
"""Beginning of the keys of all marks (of cleared namespaces). Keys of blocks have another beginning."""

ALL = "all"
"""Text that the key of a mark has in place of a digest if an operator cleared all namespaces."""

_PERIOD_SECONDS = 5.0
# Maximum wait for the thread to end, longer than the deadline of a read.
_CLOSE_SECONDS = 2.0
_ID_BYTES = 32
_ID = re.compile(rb"[0-9a-f]{32}")


def mark_key(digest: str) -> str:
    """Return the key of the mark that shows a clear of the namespace with this digest, or of ``ALL`` namespaces."""
    return f"{MARK_PREFIX}{digest}"


def make_mark(key: str) -> NDArray[np.uint8]:
    """Return the value of a new mark for ``key``: a random id, after a header that readers check as for blocks."""
    return seal_bytes(key, secrets.token_hex(_ID_BYTES // 2).encode())


class Pool(Protocol):
    """Interface of ``BlockPool``, as far as this module uses it; ``pool.py`` imports this module."""

    namespace: Namespace

    @property
    def is_ready(self) -> bool: ...

    @property
    def stack(self) -> StorageBackend: ...

    def register(self, address: int, nbytes: int) -> None: ...

    def unregister(self, address: int, nbytes: int) -> None: ...


class ClearMarks:
    """Reads the marks of cleared namespaces in a pool. A mark is new until ``accept`` is called after it was found.

    Args:
        pool: the pool with the marks.
        digests: digests of the namespaces of the instance's blocks.
    """

    def __init__(self, pool: Pool, digests: Sequence[str]) -> None:
        self._pool = pool
        self._keys = [mark_key(each) for each in (*digests, ALL)]
        self._memory: NDArray[np.uint8] = np.zeros(len(self._keys) * _ID_BYTES, dtype=np.uint8)
        pool.register(self._memory.ctypes.data, self._memory.nbytes)
        self._known: dict[str, bytes] = {}
        self._found: dict[str, bytes] = {}

    def look(self) -> bool | None:
        """Read the marks; return True if the pool has a new mark, False if not, None if a mark could not be read."""
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
        """Unregister the memory for the marks as soon as no look-up uses it. ``look`` must not be called after this."""

        def unregister() -> None:
            self._pool.unregister(self._memory.ctypes.data, self._memory.nbytes)

        if self._pool.stack.wait_for_late_calls(0):
            unregister()
        else:
            call_after_late_calls(self._pool.stack, unregister)

    def accept(self) -> None:
        """Remember the marks that the last ``look`` found, so that they do not count as new again."""
        self._known |= self._found


class ClearWatch:
    """Thread that drops this process's copies of blocks (fast tier, queued writes) after an operator's clear.

    Marks that exist when the thread starts count as new, because a fast tier in a folder may have older copies.

    Args:
        pool: the pool. The thread reads the marks of its current namespace, and drops copies of all namespaces.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._period = _PERIOD_SECONDS
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool-clear-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and wait until it has ended, for at most ``_CLOSE_SECONDS``."""
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
                    logger.exception(
                        "The marks of namespaces that an operator has cleared could not be read; this is tried again"
                    )
            marks.close()

    def _look(self, marks: ClearMarks) -> None:
        if self._pool.is_ready and marks.look() and self._pool.stack.drop_own_copies(BLOCK_PREFIX):
            marks.accept()  # otherwise the copies are dropped in the next period
            logger.info(
                "An operator cleared the pool, so this process dropped its own copies of blocks and its queued writes"
            )
