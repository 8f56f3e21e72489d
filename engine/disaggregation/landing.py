"""Incoming blocks of one reservation: where a prefill instance writes them, and how they get into KV memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence

import xxhash

from kvstore_backend import Value
from kvstore_backend.transfers import TransferMemory, Window

__all__ = ["Landing", "digest_values"]


class Landing:
    """The windows of some blocks, from ``open_windows`` until the blocks are in place or ``close``. For any thread.

    Args:
        memory: the memory of the blocks.
        blocks: the blocks to be written.
    """

    def __init__(self, memory: TransferMemory, blocks: Sequence[int]) -> None:
        self.blocks = blocks
        self._memory = memory
        self._after = memory.record_event()
        self._windows: list[Window] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def open_windows(self) -> list[int]:
        """Return one address for each block. After ``close`` the addresses belong to no request."""
        with self._lock:
            begun = 0
            while begun < len(self.blocks) and not self._is_closed:
                self._windows.append(self._memory.open_incoming(self.blocks[begun:], self._after))
                begun += len(self._windows[-1].values)
            return [value[0].address for value in self._values()]

    def take_in(self, digests: object) -> bool:
        """Move the written values into the blocks, if they have these digests; P must not write any more then.

        Returns:
            Whether all of them are in place. After that, or after ``close``, this returns False.
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
        """Release the windows: P writes no more, and the blocks get another use."""
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
    """Return the XXH3-64 of each value's bytes in hexadecimal; each value is one span."""
    return [xxhash.xxh3_64_hexdigest((ctypes.c_char * span.nbytes).from_address(span.address)) for (span,) in values]
