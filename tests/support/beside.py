"""Work that goes on in a thread beside a block of a test or a benchmark."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

__all__ = ["working_beside"]


@contextlib.contextmanager
def working_beside(work: Callable[[threading.Event], object]) -> Iterator[None]:
    """Run ``work`` in a thread while the block runs; an error of its own is raised at the block's end.

    Args:
        work: is given the event that is set at the block's end, and returns soon after that.
    """
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work, is_over)
        try:
            yield
        finally:
            is_over.set()
            working.result()
