"""Host memory through which KV blocks pass on their way between a GPU, or memory that is short, and the pool.

And where they become smaller for it (``kv_codec.py``): on the device, before they are copied.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch

from engine.kv_codec import Codec, PlainCodec, choose_codec
from kvstore_backend import BlockPool, Span, Value
from kvstore_backend.backend import HEADROOM_BYTES
from kvstore_backend.transfers import Window

__all__ = ["StagedMemory", "Staging"]

_BUFFER_BYTES = 64 << 20


class Staging:
    """A buffer for as many blocks as fit in 64 MiB, for one thread and one direction.

    It stays where it is, so that a pool can be told of it once (RDMA needs that). Beside a GPU it is pinned, and copies
    run on a stream of their own: after all that the engine had begun when they were asked for, beside all that it
    begins later.

    Args:
        kv: the KV memory, ``[block, ...]``.
        codec: the form of blocks in the buffer; not given: as in KV memory.
    """

    def __init__(self, kv: torch.Tensor, codec: Codec | None = None) -> None:
        self._kv = kv
        self._codec = codec or PlainCodec(kv)
        self.capacity = max(1, min(len(kv), _BUFFER_BYTES // (kv[0].numel() * kv.element_size())))
        """How many blocks it holds."""
        self._block_bytes = math.prod(self._codec.shape) * self._codec.dtype.itemsize
        self._stride = HEADROOM_BYTES + self._block_bytes
        self._memory = torch.empty(self.capacity * self._stride, dtype=torch.uint8, pin_memory=kv.is_cuda)
        self._stream = torch.cuda.Stream(kv.device) if kv.is_cuda else None

    @property
    def span(self) -> Span:
        """Where the buffer lies; each block of it has headroom."""
        return Span(self._memory.data_ptr(), self._memory.nbytes)

    @property
    def is_pinned(self) -> bool:
        """Whether a GPU can copy to and from it directly."""
        return self._memory.is_pinned()

    def values(self, count: int) -> list[Value]:
        """Where its first ``count`` blocks lie, for the pool."""
        address = self._memory.data_ptr() + HEADROOM_BYTES
        return [(Span(address + i * self._stride, self._block_bytes),) for i in range(count)]

    def fetch_blocks(self, blocks: Sequence[int]) -> None:
        """Copy ``blocks`` (at most ``capacity``) of the KV memory to the beginning of the buffer."""
        with self._beside_the_engine():
            here = self._memory[: len(blocks) * self._stride]
            there = torch.empty_like(here, device=self._kv.device) if self._kv.is_cuda else here
            self._cut_rows(there).copy_(self._codec.encode(self._kv[list(blocks)]))
            if there is not here:
                here.copy_(there, non_blocking=True)

    def deliver_blocks(self, blocks: Sequence[int]) -> None:
        """Copy as many blocks from the beginning of the buffer to ``blocks`` of the KV memory."""
        with self._beside_the_engine():
            encoded = self._memory[: len(blocks) * self._stride].to(self._kv.device, non_blocking=True)
            self._kv[list(blocks)] = self._codec.decode(self._cut_rows(encoded))

    def _cut_rows(self, memory: torch.Tensor) -> torch.Tensor:
        """``[block, ...]`` of encoded blocks in memory that is laid out as the buffer."""
        rows = memory.view(-1, self._stride)[:, HEADROOM_BYTES:]
        return rows.view(self._codec.dtype).view(-1, *self._codec.shape)

    @contextlib.contextmanager
    def _beside_the_engine(self) -> Iterator[None]:
        """Run the ``with`` block on the side stream, and wait for it; the engine's thread does not."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.default_stream(self._kv.device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


class StagedMemory:
    """KV memory as ``Transfers`` reach it by way of two buffers, one for loads and one for saves.

    The pool touches buffers only, so blocks are the engine's again as soon as a transfer has ended. A buffer that is
    set aside is replaced.

    Args:
        kv: the KV memory, ``[block, ...]``.
        pool: told of every buffer; its namespace says in which form it has blocks.
    """

    def __init__(self, kv: torch.Tensor, pool: BlockPool) -> None:
        self._incoming = _Lane(kv, pool)
        self._outgoing = _Lane(kv, pool)

    def open_incoming(self, blocks: Sequence[int]) -> Window:
        return _StagedWindow(self._incoming, blocks)

    def open_outgoing(self, blocks: Sequence[int]) -> Window:
        window = _StagedWindow(self._outgoing, blocks)
        window.fetch()
        return window


class _Lane:
    """One direction's buffer, registered with the pool."""

    def __init__(self, kv: torch.Tensor, pool: BlockPool) -> None:
        self._kv = kv
        self._pool = pool
        self.renew()

    def renew(self) -> None:
        """Go on with another buffer."""
        self.staging = Staging(self._kv, choose_codec(self._pool.namespace, self._kv))
        self._pool.register(*self.staging.span, headroom=True)

    def unregister(self, staging: Staging) -> None:
        """Tell the pool of the end of a buffer that was replaced."""
        self._pool.unregister(*staging.span)


class _StagedWindow:
    """The part of a lane's buffer that holds leading ones of ``blocks``."""

    def __init__(self, lane: _Lane, blocks: Sequence[int]) -> None:
        self._lane = lane
        self._staging = lane.staging
        self._blocks = blocks[: self._staging.capacity]
        self.values = self._staging.values(len(self._blocks))

    def fetch(self) -> None:
        self._staging.fetch_blocks(self._blocks)

    def deliver(self, count: int) -> None:
        self._staging.deliver_blocks(self._blocks[:count])

    def set_aside(self) -> bool:
        self._lane.renew()
        return False

    def take_back(self) -> None:
        self._lane.unregister(self._staging)
