"""Memory that tests put from and get into."""

from __future__ import annotations

import ctypes

from kvstore_backend.backend import Span

__all__ = ["Memory"]


class Memory:
    """Bytes at a fixed address, alive as long as this object is: give it a name before its spans are used."""

    def __init__(self, content: bytes | int) -> None:
        """Memory holding ``content``, or that many bytes of 0xEE."""
        data = content if isinstance(content, bytes) else b"\xee" * content
        self._buffer = ctypes.create_string_buffer(data, max(1, len(data)))
        self.nbytes = len(data)
        self.address = ctypes.addressof(self._buffer)

    @property
    def content(self) -> bytes:
        """The bytes it holds now."""
        return self._buffer.raw[: self.nbytes]

    def fill(self, content: bytes, start: int = 0) -> None:
        """Overwrite its bytes from ``start`` on."""
        assert start + len(content) <= self.nbytes
        ctypes.memmove(self.address + start, content, len(content))

    @property
    def value(self) -> list[Span]:
        """All of it as a value of one span."""
        return [Span(self.address, self.nbytes)]

    def spans(self, *sizes: int) -> list[Span]:
        """Its first bytes as a value of several spans of these sizes, one after another."""
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [Span(self.address + start, size) for start, size in zip(starts, sizes, strict=True)]
