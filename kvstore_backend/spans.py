"""Spans as Python memory: views of the caller's bytes, without copying them."""

from __future__ import annotations

import ctypes

from kvstore_backend.backend import Value

__all__ = ["views"]


def views(value: Value) -> list[memoryview]:
    """One writable view of bytes per non-empty span. Valid only as long as the caller's memory is."""
    return [memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") for address, nbytes in value if nbytes]
