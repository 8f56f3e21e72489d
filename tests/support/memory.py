"""Memory for the values that tests put and get."""

from __future__ import annotations

import ctypes

from kvstore_backend.backend import Span

__all__ = ["Memory"]


class Memory:
    """Bytes at a fixed address. They exist as long as this object, so a test must hold it during the use of spans."""

    def __init__(self, content: bytes | int) -> None:
        """Allocate memory with ``content``, or with this number of bytes 0xEE."""
        data = content if isinstance(content, bytes) else b"\xee" * content
        self._buffer = ctypes.create_string_buffer(data, max(1, len(data)))
        self.nbytes = len(data)
        self.address = ctypes.addressof(self._buffer)

    @property
    def content(self) -> bytes:
        """The present bytes."""
        return self._buffer.raw[: self.nbytes]

    def fill(self, content: bytes, start: int = 0) -> None:
        """Overwrite the bytes from ``start`` on."""
        assert start + len(content) <= self.nbytes
        ctypes.memmove(self.address + start, content, len(content))

    @property
    def value(self) -> list[Span]:
        """Return the whole memory as a value with one span."""
        return [Span(self.address, self.nbytes)]

    def spans(self, *sizes: int) -> list[Span]:
        """Return the first bytes as a value with successive spans of these sizes."""
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [Span(self.address + start, size) for start, size in zip(starts, sizes, strict=True)]
