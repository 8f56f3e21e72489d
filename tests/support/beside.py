"""Runs a function in a thread during a block of a test or a benchmark."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

__all__ = ["working_beside"]


@contextlib.contextmanager
def working_beside(work: Callable[[threading.Event], object]) -> Iterator[None]:
    """Run ``work`` in a thread during the block. At the end of the block, raise the exception that ``work`` raised.

    Args:
        work: gets an event that is set at the end of the block, and must then return soon.
    """
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work, is_over)
        try:
            yield
        finally:
            is_over.set()
            working.result()
