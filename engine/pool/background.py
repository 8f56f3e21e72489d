"""Work that must not hold up a running step: moving blocks to and from the pool.

Compute waits at the end of every operation for the slowest of its threads, so time that a copy takes from one of them
is lost to all. On two cores, with four sequences decoding in steps of 11 ms, loading 2,000 tokens made a step take 18
ms on average and up to 47; with a lower priority for the pool's threads it took 13 ms. A load on an idle machine took
no longer than before.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["in_background", "yield_to_compute"]

T = TypeVar("T")

# Of at most 19. With all cores busy such a thread still gets 1/30 of a core: a load is slow then, but ends.
_NICENESS = 15


def yield_to_compute() -> None:
    """Lower the priority of this thread, and of those that it starts from now on, below all others. Linux only."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def in_background(call: Callable[[], T]) -> T:
    """Return the result of ``call``; the threads that it starts, also in a native library, get a lower priority."""
    with ThreadPoolExecutor(1, initializer=yield_to_compute) as thread:
        return thread.submit(call).result()
