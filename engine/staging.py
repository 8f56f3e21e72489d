"""Host memory through which KV blocks pass on their way between a GPU and the pool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from kvstore_backend import Span, Value

__all__ = ["Staging"]

_BUFFER_BYTES = 64 << 20


class Staging:
    """A buffer for as many blocks as fit in 64 MiB, for one thread and one direction.

    It stays where it is, so that a pool can be told of it once (RDMA needs that). Beside a GPU it is pinned, and copies
    run on a stream of their own: after all that the engine had begun when they were asked for, beside all that it
    begins later.

    Args:
        kv: the KV memory, ``[block, ...]``.
    """

    def __init__(self, kv: torch.Tensor) -> None:
        self._kv = kv
        self._block_bytes = kv[0].numel() * kv.element_size()
        self.capacity = max(1, min(len(kv), _BUFFER_BYTES // self._block_bytes))
        """How many blocks it holds."""
        self._buffer = torch.empty((self.capacity, *kv.shape[1:]), dtype=kv.dtype, pin_memory=kv.is_cuda)
        self._stream = torch.cuda.Stream(kv.device) if kv.is_cuda else None

    @property
    def span(self) -> Span:
        """Where the buffer lies."""
        return Span(self._buffer.data_ptr(), self.capacity * self._block_bytes)

    def values(self, count: int) -> list[Value]:
        """Where its first ``count`` blocks lie, for the pool."""
        address = self._buffer.data_ptr()
        return [(Span(address + i * self._block_bytes, self._block_bytes),) for i in range(count)]

    def fetch(self, blocks: Sequence[int]) -> None:
        """Copy ``blocks`` (at most ``capacity``) of the KV memory to the beginning of the buffer."""
        with self._beside_the_engine():
            self._buffer[: len(blocks)].copy_(self._kv[list(blocks)], non_blocking=True)

    def deliver(self, blocks: Sequence[int]) -> None:
        """Copy as many blocks from the beginning of the buffer to ``blocks`` of the KV memory."""
        with self._beside_the_engine():
            self._kv[list(blocks)] = self._buffer[: len(blocks)].to(self._kv.device, non_blocking=True)

    @contextlib.contextmanager
    def _beside_the_engine(self) -> Iterator[None]:
        """Run what is within on the side stream, and wait for it; the engine's thread does not."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.default_stream(self._kv.device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
