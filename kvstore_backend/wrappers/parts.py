"""Parts of a large batch on several threads, so that hashing does not limit a quick transport.

With a quick transport, each part is moved and hashed separately: while one part is hashed, another is moved. A slow
transport gets the whole batch in one call, and its parts are hashed before or after, because every cut makes it slower:
over TCP on two cores, two concurrent halves took 1.5 times as long as the whole. The last batch shows how quick a store
is.
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

# A part costs the store's fixed time for a call, a third of a millisecond with Mooncake.
_PART_BYTES = 4 << 20
_THREADS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
_PARTS = 2 * _THREADS
# Bytes per second of moving alone that make a store quick; and of all the work, below which it is slow again.
_QUICK, _SLOW = 3e9, 1.5e9
# Python's lock is not released to hash less than this, so threads would only block each other.
_SHARED_BYTES = 512 << 10

Step = Callable[[slice], None]
"""Function that processes a part of a batch."""


class Parts:
    """Threads of one store, and its speed in one direction.

    Args:
        hashes_first: whether values are hashed before they are moved.
    """

    def __init__(self, *, hashes_first: bool) -> None:
        self._hashes_first = hashes_first
        self._helpers = DaemonThreads(_THREADS, "pool-part")  # a part's call may never return
        self._is_quick = False

    def move(self, values: Sequence[Value], statuses: list[Status], hash_part: Step, move_part: Step) -> None:
        """Hash and move all parts of ``values``, in this instance's order.

        Args:
            values: the batch.
            statuses: the answers, which ``move_part`` fills in.
            hash_part: hashes values before or after they are moved.
            move_part: calls the store.
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
        """Run ``work`` on the parts in order on several threads, until no part is left or it returns False.

        The calling thread is one of them, so the call makes progress even if other calls use all helpers.
        """
        left = deque(parts)

        def work_on() -> None:
            while (part := _take_first(left)) is not None:
                if not work(part):
                    left.clear()

        helpers: list[Future[None]] = []
        try:
            for _ in range(min(_THREADS, len(left)) - 1):
                helpers.append(self._helpers.submit(work_on))
            work_on()
        finally:
            # Helpers that have begun use the caller's memory until they end.
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
    """Process a part; return False if all of it failed.

    Later parts would wait for the same unavailable pool.
    """
    for step in steps:
        step(part)
    answers = statuses[part]
    return answers.count(Status.FAILED) < len(answers)


def _cut_batch(values: Sequence[Value]) -> tuple[int, list[slice]]:
    """Return a batch's bytes, and its parts of similar size.

    There are two for each thread, so that moving and hashing overlap.
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
