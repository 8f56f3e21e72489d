"""A large batch in parts, on several threads: so that hashing is not the bound of a quick transport.

Over a quick one, parts are moved and hashed each for itself: while one part's bytes are hashed, another's are on their
way. A slow one is given the whole batch at once, as it loses by every cut, and the parts are hashed by several threads
before or after: over TCP on two cores two halves at once took 1.5 times as long as the whole. How quick a store
is, its last large batch has shown.
"""

from __future__ import annotations

import os
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import accumulate, pairwise

from kvstore_backend.backend import Status, Value

__all__ = ["Parts", "Step", "count_bytes"]

# A part costs the store's fixed time for a call, a third of a millisecond in Mooncake.
_PART_BYTES = 4 << 20
_THREADS = min(4, len(os.sched_getaffinity(0)))
_PARTS = 2 * _THREADS
# Bytes a second; one thread hashes several times as many.
_QUICK = 4e9

Step = Callable[[slice], None]
"""Works on a part of a batch."""


class Parts:
    """The threads of one store, and how quick it is in one direction and the other."""

    def __init__(self) -> None:
        self._helpers = ThreadPoolExecutor(_THREADS, "pool-part")
        self._rates = {"put": 0.0, "get": 0.0}

    def put(self, values: Sequence[Value], statuses: list[Status], seal: Step, send: Step) -> None:
        """``seal`` and then ``send`` all parts of ``values``; ``send`` fills in ``statuses``."""
        self._move("put", values, statuses, (seal, send), send)

    def get(self, targets: Sequence[Value], statuses: list[Status], fetch: Step, verify: Step) -> None:
        """``fetch`` and then ``verify`` all parts of ``targets``; ``fetch`` fills in ``statuses``."""
        self._move("get", targets, statuses, (fetch, verify), fetch)

    def _move(
        self, operation: str, values: Sequence[Value], statuses: list[Status], steps: Sequence[Step], transfer: Step
    ) -> None:
        nbytes, parts = _cut_batch(values)
        if len(parts) == 1:
            for step in steps:
                step(parts[0])
            return

        def move_part(part: slice) -> bool:
            for step in steps:
                step(part)
            # Behind a part that failed as a whole, the others would wait for the same dead pool.
            return statuses[part].count(Status.FAILED) < len(statuses[part])

        def hash_part(step: Step) -> Callable[[slice], bool]:
            return lambda part: step(part) is None

        began = time.perf_counter()
        if self._rates[operation] > _QUICK:
            self._share(parts, move_part)
        else:
            for step in steps:
                if step is transfer:
                    step(slice(0, len(values)))
                else:
                    self._share(parts, hash_part(step))
        self._rates[operation] = nbytes / (time.perf_counter() - began)

    def _share(self, parts: Sequence[slice], work: Callable[[slice], bool]) -> None:
        """Have several threads ``work`` on the parts in order, until there are none or it says False.

        This thread is one of them, so that the call goes on where other calls have all the helpers.
        """
        left = deque(parts)

        def work_on() -> None:
            while (part := _take_first(left)) is not None:
                if not work(part):
                    left.clear()

        helpers = [self._helpers.submit(work_on) for _ in range(min(_THREADS, len(left)) - 1)]
        try:
            work_on()
        finally:
            # Those that have begun use the caller's memory until they end.
            begun = [helper for helper in helpers if not helper.cancel()]
            wait(begun)
        for helper in begun:
            helper.result()


def count_bytes(value: Value) -> int:
    """The size of a value."""
    return value[0][1] if len(value) == 1 else sum([nbytes for _, nbytes in value])


def _cut_batch(values: Sequence[Value]) -> tuple[int, list[slice]]:
    """A batch's bytes, and its parts of about as many each: two for each thread, so that moving and hashing overlap."""
    ends = list(accumulate(map(count_bytes, values)))
    nbytes = ends[-1] if ends else 0
    count = min(_PARTS, nbytes // _PART_BYTES) if _THREADS > 1 else 1
    inner = {1 + bisect(ends, nbytes * part // count) for part in range(1, count)}
    bounds = sorted({0, *inner, len(values)}) if values else [0, 0]
    return nbytes, [slice(*bound) for bound in pairwise(bounds)]


def _take_first(parts: deque[slice]) -> slice | None:
    try:
        return parts.popleft()
    except IndexError:
        return None
