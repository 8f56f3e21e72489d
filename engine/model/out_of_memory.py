"""Failed allocations, explained in a sentence; a GPU, torch, Python and mmap each raise another exception."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from kvstore_backend import ConfigError

__all__ = ["LEAVE_ROOM", "LEAVE_ROOM_BESIDE", "is_out_of_memory", "told_if_too_large"]

LEAVE_ROOM = "lower --max-num-batched-tokens, --max-num-seqs or --max-model-len"
"""How a user leaves memory for steps."""
LEAVE_ROOM_BESIDE = "lower --num-gpu-blocks-override or --gpu-memory-utilization"
"""How a user leaves memory in addition to KV blocks."""


@contextlib.contextmanager
def told_if_too_large(wanted: str, *, any_failure: bool = True) -> Iterator[None]:
    """Explain in a sentence that there is not enough memory.

    Args:
        wanted: what the memory is for, and how to need less.
        any_failure: treat each failure in the ``with`` block as out of memory, because the block does nothing but
            allocate; without it, a failure for another reason is raised unchanged.

    Raises:
        ConfigError: there is not enough memory.
    """
    try:
        yield
    except (RuntimeError, OSError, MemoryError, OverflowError) as exc:
        if not any_failure and not is_out_of_memory(exc):
            raise
        reason = (str(exc).strip() or "out of memory").splitlines()[0]
        raise ConfigError(f"there is no memory for {wanted}: {reason}") from exc


def is_out_of_memory(exc: Exception) -> bool:
    """Whether an exception of any type means out of memory: from torch, Python, the driver or cuBLAS."""
    said = str(exc).lower()
    told = ("out of memory", "allocate memory", "alloc_failed")
    return isinstance(exc, torch.OutOfMemoryError | MemoryError) or any(words in said for words in told)
