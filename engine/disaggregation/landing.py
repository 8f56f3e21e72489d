"""Where a prefill instance writes the blocks of one reservation, and how they get from there into KV memory."""

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
    """The windows of some blocks, from ``open_windows`` until the blocks are there or ``close``. For any thread.

    Args:
        memory: of the blocks.
        blocks: to be written.
    """

    def __init__(self, memory: TransferMemory, blocks: Sequence[int]) -> None:
        self.blocks = blocks
        self._memory = memory
        self._after = memory.record_event()
        self._windows: list[Window] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def open_windows(self) -> list[int]:
        """One address for each block; those of a landing that was closed before are nobody's."""
        with self._lock:
            begun = 0
            while begun < len(self.blocks) and not self._is_closed:
                self._windows.append(self._memory.open_incoming(self.blocks[begun:], self._after))
                begun += len(self._windows[-1].values)
            return [value[0].address for value in self._values()]

    def take_in(self, digests: object) -> bool:
        """Bring the written values to the blocks, if they have these digests; nobody may write any more then.

        Returns:
            Whether all of them are there. After that, or ``close``, this answers False.
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
        """Hear that nobody writes any more, and that the blocks are needed for something else."""
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
    """The XXH3-64 of each value's bytes, one span each, in hexadecimal."""
    return [xxhash.xxh3_64_hexdigest((ctypes.c_char * span.nbytes).from_address(span.address)) for (span,) in values]
