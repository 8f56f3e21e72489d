"""Work that must not hold up a running step: moving blocks to and from the pool.

Compute waits at the end of every operation for the slowest of its threads, so each moment that a copy takes from one
of them is lost to all. On two cores, with four sequences decoding in steps of 11 ms, loading 2,000 tokens made a step
take 18 ms on average and up to 47; with the pool's threads behind the others in the queue for a core 13, while a load
on an idle machine took no longer than before.
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

# Of 19. With all cores busy such a thread still gets a thirtieth of one: a load is slow then, but ends.
_NICENESS = 15


def yield_to_compute() -> None:
    """Let this thread, and those that it starts from now on, have a core when nobody else wants it. Linux only."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def in_background(call: Callable[[], T]) -> T:
    """The result of ``call``; the threads that it starts, a native library's too, yield to compute."""
    with ThreadPoolExecutor(1, initializer=yield_to_compute) as thread:
        return thread.submit(call).result()
