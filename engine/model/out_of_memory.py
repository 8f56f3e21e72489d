"""Explains a failed allocation in one sentence. CUDA, torch, Python and mmap raise different exceptions for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from kvstore_backend import ConfigError

__all__ = ["LEAVE_ROOM", "LEAVE_ROOM_BESIDE", "explain_out_of_memory", "is_out_of_memory"]

LEAVE_ROOM = "lower --max-num-batched-tokens, --max-num-seqs or --max-model-len"
"""Advice for messages: how to make a step use less memory."""
LEAVE_ROOM_BESIDE = "lower --num-gpu-blocks-override or --gpu-memory-utilization"
"""Advice for messages: how to make KV blocks use less memory."""


@contextlib.contextmanager
def explain_out_of_memory(wanted: str, *, any_failure: bool = True) -> Iterator[None]:
    """Replace an exception of the ``with`` block that means out of memory by a ``ConfigError`` of one sentence.

    Args:
        wanted: what the memory is for, and how to need less, for the message.
        any_failure: whether every ``RuntimeError``, ``OSError``, ``MemoryError`` and ``OverflowError`` counts as out of
            memory. Use this if the ``with`` block only allocates memory.

    Raises:
        ConfigError: there is not enough memory.
    """
    try:
        yield
    except (RuntimeError, OSError, MemoryError, OverflowError) as exc:
        if not any_failure and not is_out_of_memory(exc):
            raise
        reason = (str(exc).strip() or "out of memory").splitlines()[0]
        raise ConfigError(f"there is not enough memory for {wanted}: {reason}") from exc


def is_out_of_memory(exc: Exception) -> bool:
    """Return whether an exception means out of memory. It may come from torch, Python, the CUDA driver or cuBLAS."""
    message = str(exc).lower()
    signs = ("out of memory", "allocate memory", "alloc_failed")
    return isinstance(exc, torch.OutOfMemoryError | MemoryError) or any(sign in message for sign in signs)
