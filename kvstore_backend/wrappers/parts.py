"""A large batch in parts, on several threads: so that hashing is not the bound of a quick transport.

Over a quick one, a batch goes as two calls of the store, one after the other, and most of it is hashed while the other
part is on its way: a small part is sealed and sent while the large one behind it is sealed, or a large one is read and
verified while the small one behind it is read. Only the small part's hashing is waited for. The store never has two
calls at once: over TCP on two cores two halves at once took 1.5 times as long as the whole.

A slow transport loses by the second call, and to the hashing beside it. It is given the whole batch at once, which is
hashed before or after. How quick a store is, its last batch has shown.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import accumulate

from kvstore_backend.backend import Status, Value

__all__ = ["Parts", "Step", "count_bytes"]

# A second call costs the store's fixed time, a third of a millisecond in Mooncake.
_SHARED_BYTES = 8 << 20
_THREADS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
# Of a batch's bytes, the part that is hashed with nothing on its way: the other is hashed while this one is moved, by
# one thread where hashing is four times as quick.
_SMALL_SHARE = 0.2
# What one thread hashes at a time.
_PIECE_BYTES = 1 << 20
# Bytes a second, of moving alone, that make a store quick; and of all the work, below which it is slow again.
_QUICK, _SLOW = 3e9, 1.5e9
# Python's lock is not let go for hashing less, so threads would only be in each other's way.
_UNLOCKED_BYTES = 128 << 10

Step = Callable[[slice], None]
"""Works on a part of a batch."""


class Parts:
    """The threads of one store, and how quick it is in one direction.

    Args:
        hashes_first: whether values are hashed before they are moved.
    """

    def __init__(self, *, hashes_first: bool) -> None:
        self._hashes_first = hashes_first
        self._helpers = ThreadPoolExecutor(_THREADS, "pool-part")
        self._is_quick = False

    def move(self, values: Sequence[Value], statuses: list[Status], hash_part: Step, move_part: Step) -> None:
        """Hash and move all of ``values``, in this instance's order.

        Args:
            values: the batch.
            statuses: the answers, which ``move_part`` fills in.
            hash_part: works on values before they are moved, or on those that were.
            move_part: calls the store.
        """
        batch = _Batch(values, self._helpers, hash_part)
        whole = slice(0, len(values))
        if not batch.is_shared:
            for step in (hash_part, move_part) if self._hashes_first else (move_part, hash_part):
                step(whole)
            return
        began = time.perf_counter()
        if self._is_quick:
            (self._hash_ahead if self._hashes_first else self._hash_behind)(batch, statuses, move_part)
            self._is_quick = batch.nbytes > _SLOW * (time.perf_counter() - began)
            return
        if self._hashes_first:
            batch.hash_now(whole)
        began = time.perf_counter()
        move_part(whole)
        self._is_quick = batch.nbytes > _QUICK * (time.perf_counter() - began)
        if not self._hashes_first:
            batch.hash_now(whole)

    @staticmethod
    def _hash_ahead(batch: _Batch, statuses: Sequence[Status], move_part: Step) -> None:
        """Send a small part while the one behind it is hashed, and that one unless the pool has died."""
        first, rest = batch.cut(_SMALL_SHARE)
        hashing = batch.begin_hashing(rest)
        try:
            batch.hash_part(first)
            move_part(first)
        finally:
            hashing.finish()
        if _has_answered(statuses[first]):
            move_part(rest)

    @staticmethod
    def _hash_behind(batch: _Batch, statuses: Sequence[Status], move_part: Step) -> None:
        """Read a large part, and hash it while the one behind it is read; that one unless the pool has died."""
        first, rest = batch.cut(1 - _SMALL_SHARE)
        move_part(first)
        if not _has_answered(statuses[first]):
            return
        hashing = batch.begin_hashing(first)
        try:
            move_part(rest)
            hashing.add(rest)
        finally:
            hashing.finish()


class _Batch:
    """The values of one call, and the threads that hash them.

    Attributes:
        hash_part: works on a part of them.
        nbytes: of all values.
        is_shared: whether it is so large that threads share in it.
    """

    def __init__(self, values: Sequence[Value], helpers: ThreadPoolExecutor, hash_part: Step) -> None:
        self._ends = list(accumulate(map(count_bytes, values)))
        self._helpers = helpers
        self.hash_part = hash_part
        self.nbytes = self._ends[-1] if values else 0
        self.is_shared = _THREADS > 1 and len(values) > 1 and self.nbytes >= _SHARED_BYTES
        self._is_unlocked = self.nbytes >= _UNLOCKED_BYTES * len(values)

    def cut(self, share: float) -> tuple[slice, slice]:
        """Two parts, neither empty, of which the first has about this share of the bytes."""
        count = len(self._ends)
        middle = max(1, min(count - 1, 1 + bisect_left(self._ends, self.nbytes * share)))
        return slice(0, middle), slice(middle, count)

    def hash_now(self, part: slice) -> None:
        """Hash the values of ``part`` on this thread, and on helpers where they would not be in its way."""
        if self._is_unlocked:
            self.begin_hashing(part).finish()
        else:
            self.hash_part(part)

    def begin_hashing(self, part: slice) -> _Hashing:
        """Have helpers begin with the values of ``part``."""
        return _Hashing(self, self._helpers, part)

    def cut_pieces(self, part: slice) -> list[slice]:
        """Pieces of about ``_PIECE_BYTES``; all in one where threads would be in each other's way."""
        step = part.stop - part.start
        if self._is_unlocked:
            step = max(1, len(self._ends) * _PIECE_BYTES // self.nbytes)
        return [slice(start, min(start + step, part.stop)) for start in range(part.start, part.stop, step)]


class _Hashing:
    """Parts of a batch that helpers hash, until this thread finishes the work with them."""

    def __init__(self, batch: _Batch, helpers: ThreadPoolExecutor, part: slice) -> None:
        self._batch = batch
        self._left = deque(batch.cut_pieces(part))
        self._helping = [helpers.submit(self._work_on) for _ in range(min(_THREADS - 1, len(self._left)))]

    def add(self, part: slice) -> None:
        """Hash the values of ``part``, too."""
        self._left.extend(self._batch.cut_pieces(part))

    def finish(self) -> None:
        """Hash what is left, and wait for the helpers.

        This thread works, too, so that the call goes on where other calls have all the helpers.
        """
        try:
            self._work_on()
        finally:
            # Those that have begun use the caller's memory until they end.
            begun = [helper for helper in self._helping if not helper.cancel()]
            wait(begun)
        for helper in begun:
            helper.result()

    def _work_on(self) -> None:
        while True:
            try:
                piece = self._left.popleft()
            except IndexError:
                return
            self._batch.hash_part(piece)


def count_bytes(value: Value) -> int:
    """The size of a value."""
    return value[0][1] if len(value) == 1 else sum([nbytes for _, nbytes in value])


def _has_answered(answers: Sequence[Status]) -> bool:
    """False for a part that failed as a whole: the one behind it would wait for the same dead pool."""
    return answers.count(Status.FAILED) < len(answers)
