"""The KV blocks that a decode instance has reserved for one prompt, while a prefill instance writes them."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence

import xxhash

from kvstore_backend import Value
from kvstore_backend.transfers import TransferMemory, Window

__all__ = ["IncomingBlocks", "digest_values"]


class IncomingBlocks:
    """The blocks of this instance that a prefill instance writes in one hand-over.

    The prefill instance writes to windows (pieces of memory), which ``memory`` opens: KV memory itself or, with a GPU,
    buffers in host memory from which the blocks are copied to KV memory. Any thread may call the methods.
    """

    def __init__(self, memory: TransferMemory, blocks: Sequence[int]) -> None:
        self.blocks = blocks
        self._memory = memory
        self._after = memory.record_event()
        self._windows: list[Window] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def open_windows(self) -> list[int]:
        """Open windows for all blocks, and return the address to write to for each block.

        If ``close`` is called during this call, the addresses are not valid, and some may be missing.
        """
        with self._lock:
            begun = 0
            while begun < len(self.blocks) and not self._is_closed:
                self._windows.append(self._memory.open_incoming(self.blocks[begun:], self._after))
                begun += len(self._windows[-1].values)
            return [value[0].address for value in self._values()]

    def move_in(self, digests: object) -> bool:
        """Check the written bytes, and move them to the blocks in KV memory. Call this after all writes.

        Args:
            digests: the digest of each block; any object, because it comes from another instance.

        Returns:
            Whether all blocks were moved. False if a digest is wrong, if an earlier call moved the blocks, or if
            ``close`` was called.
        """
        with self._lock:
            if self._is_closed or digest_values(self._values()) != digests:
                return False
            for window in self._windows:
                window.deliver(len(window.values))
            for window in self._windows:
                window.wait()
            self._take_back()
            return True

    def close(self) -> None:
        """Release the memory to which the prefill instance writes. It must not write any more."""
        with self._lock:
            self._take_back()

    def _take_back(self) -> None:
        self._is_closed = True
        windows, self._windows = self._windows, []
        with contextlib.ExitStack() as ended:
            for window in windows:
                ended.callback(window.take_back)
                ended.callback(window.wait)

    def _values(self) -> list[Value]:
        return [value for window in self._windows for value in window.values]


def digest_values(values: Sequence[Value]) -> list[str]:
    """Return the XXH3-64 of the bytes of each value, in hexadecimal. Each value must be one span of memory."""
    return [xxhash.xxh3_64_hexdigest((ctypes.c_char * span.nbytes).from_address(span.address)) for (span,) in values]
