"""Memory that cannot be had, told in a sentence; a GPU, torch, Python and mmap each say it in their own way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from kvstore_backend import ConfigError

__all__ = ["LEAVE_ROOM", "LEAVE_ROOM_BESIDE", "is_out_of_memory", "told_if_too_large"]

LEAVE_ROOM = "lower --max-num-batched-tokens, --max-num-seqs or --max-model-len"
"""How a user makes room for steps."""
LEAVE_ROOM_BESIDE = "lower --num-gpu-blocks-override or --gpu-memory-utilization"
"""How a user makes room beside KV blocks."""


@contextlib.contextmanager
def told_if_too_large(wanted: str, *, any_failure: bool = True) -> Iterator[None]:
    """Tell in a sentence that there is no memory for it.

    Args:
        wanted: the purpose, and how to do with less.
        any_failure: each failure in the ``with`` block means this, as nothing but memory is asked for there; without
            it, a failure for another reason is raised as it is.

    Raises:
        ConfigError: there is none.
    """
    try:
        yield
    except (RuntimeError, OSError, MemoryError, OverflowError) as exc:
        if not any_failure and not is_out_of_memory(exc):
            raise
        reason = (str(exc).strip() or "out of memory").splitlines()[0]
        raise ConfigError(f"there is no memory for {wanted}: {reason}") from exc


def is_out_of_memory(exc: Exception) -> bool:
    """Whether an exception that may mean anything means this: torch's, Python's, the driver's or cuBLAS's."""
    said = str(exc).lower()
    told = ("out of memory", "allocate memory", "alloc_failed")
    return isinstance(exc, torch.OutOfMemoryError | MemoryError) or any(words in said for words in told)
