"""Divides a large batch into parts for several threads, so that hashing does not limit a fast store.

If the store is fast, each part is hashed and moved (read or written) separately: while one part is hashed, another is
moved. A slow store gets the whole batch in one call, and only the hashing is divided, because several calls are slower:
over TCP on two cores, two concurrent calls, each for half of the batch, took 1.5 times as long as one call for the
batch. The duration of the last batch shows whether the store is fast.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import accumulate, pairwise

from kvstore_backend.backend import Status, Value
from kvstore_backend.threads import DaemonThreads

__all__ = ["Parts", "Step", "count_bytes"]

# Minimum size of a part, because each part costs the fixed time of a call: 0.3 ms with Mooncake.
_PART_BYTES = 4 << 20
_THREADS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
_PARTS = 2 * _THREADS
# A store becomes fast if it moves more bytes per second than the first number. It becomes slow again if hashing and
# moving together are slower than the second number.
_QUICK, _SLOW = 3e9, 1.5e9
# Hashing of smaller values does not release Python's lock, so several threads would only block each other.
_SHARED_BYTES = 512 << 10

Step = Callable[[slice], None]
"""Function that hashes or moves a part of a batch."""


class Parts:
    """Hashes batches of values and moves them to or from a store, on several threads if that is faster.

    Args:
        hashes_first: whether values are hashed before they are moved, as in puts, or after, as in reads.
    """

    def __init__(self, *, hashes_first: bool) -> None:
        self._hashes_first = hashes_first
        self._helpers = DaemonThreads(_THREADS, "pool-part")  # a part's call may never return
        self._is_quick = False

    def move(self, values: Sequence[Value], statuses: list[Status], hash_part: Step, move_part: Step) -> None:
        """Hash a batch of values, and move them to or from the store.

        Args:
            values: the batch.
            statuses: one status per value, which ``move_part`` sets.
            hash_part: hashes the values of a part.
            move_part: calls the store with the values of a part.
        """
        nbytes, parts = _cut_batch(values)
        steps = (hash_part, move_part) if self._hashes_first else (move_part, hash_part)
        if len(parts) == 1:
            for step in steps:
                step(parts[0])
            return
        began = time.perf_counter()
        if self._is_quick:
            self._share(parts, lambda part: _work_on_part(part, steps, statuses))
            self._is_quick = nbytes > _SLOW * (time.perf_counter() - began)
            return
        whole = [slice(0, len(values))]
        is_shared = nbytes >= _SHARED_BYTES * len(values)
        for step in steps:
            began = time.perf_counter()
            self._share(parts if is_shared and step is hash_part else whole, partial(_work_always, step))
            if step is move_part:
                self._is_quick = nbytes > _QUICK * (time.perf_counter() - began)

    def _share(self, parts: Sequence[slice], work: Callable[[slice], bool]) -> None:
        """Call ``work`` with each part of a batch, in order, on several threads. Stop when ``work`` returns False.

        The calling thread works, too, so the batch makes progress even if other batches use all helper threads.
        """
        left = deque(parts)

        def work_until_done() -> None:
            while (part := _take_first(left)) is not None:
                if not work(part):
                    left.clear()

        helpers: list[Future[None]] = []
        try:
            for _ in range(min(_THREADS, len(left)) - 1):
                helpers.append(self._helpers.submit(work_until_done))
            work_until_done()
        finally:
            # Helper threads that have begun use the caller's memory until they end.
            begun = [helper for helper in helpers if not helper.cancel()]
            wait(begun)
        for helper in begun:
            helper.result()


def count_bytes(value: Value) -> int:
    """Return the size of a value in bytes."""
    return value[0][1] if len(value) == 1 else sum([nbytes for _, nbytes in value])


def _work_always(step: Step, part: slice) -> bool:
    step(part)
    return True


def _work_on_part(part: slice, steps: Sequence[Step], statuses: Sequence[Status]) -> bool:
    """Hash and move a part of a batch; return False if every value failed, so that later parts are not tried.

    The later parts would only wait for the same unavailable pool.
    """
    for step in steps:
        step(part)
    answers = statuses[part]
    return answers.count(Status.FAILED) < len(answers)


def _cut_batch(values: Sequence[Value]) -> tuple[int, list[slice]]:
    """Return the size of a batch in bytes, and the slices of the batch's parts, which have similar sizes.

    A large batch has two parts for each thread, so that moving and hashing overlap.
    """
    ends = list(accumulate(map(count_bytes, values)))
    nbytes = ends[-1] if ends else 0
    count = min(_PARTS, nbytes // _PART_BYTES) if _THREADS > 1 else 1
    inner = {1 + bisect_left(ends, nbytes * part // count) for part in range(1, count)}
    bounds = sorted({0, *inner, len(values)}) if values else [0, 0]
    return nbytes, [slice(*bound) for bound in pairwise(bounds)]


def _take_first(parts: deque[slice]) -> slice | None:
    try:
        return parts.popleft()
    except IndexError:
        return None
