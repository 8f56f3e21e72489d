"""Gives the threads that move blocks to and from the pool a lower priority than the threads that compute.

At the end of each operation the computation waits for its slowest thread. So if a copy takes CPU time from one thread,
all threads wait. Measured on two cores with four sequences in decode and steps of 11 ms: while 2,000 tokens were
loaded, a step took 18 ms on average and at most 47 ms. With a lower priority for the pool's threads a step took 13 ms.
On an idle machine the lower priority makes loads no slower.
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

# The lowest priority is 19. If all cores are busy, a thread with 15 still gets 1/30 of a core, so that a load ends.
_NICENESS = 15


def yield_to_compute() -> None:
    """Lower the priority of this thread, and of the threads that it starts later. Only Linux supports this."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def in_background(call: Callable[[], T]) -> T:
    """Run ``call`` on a thread with a lower priority, and return its result.

    Threads that ``call`` starts, also in native libraries, get the same priority.
    """
    with ThreadPoolExecutor(1, initializer=yield_to_compute) as thread:
        return thread.submit(call).result()
