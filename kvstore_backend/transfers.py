"""Asynchronous loads and saves, for engines that do not wait for the pool.

Each load or save is a *transfer*. Loads run one after another on one thread, saves on another. A transfer calls its
owner twice::

    load / save ──► on_end(outcome)   once, at the latest soon after the pool's deadline: the number of blocks moved
                ──► on_release()      once: the owner owns all of the transfer's blocks again

Usually both come together (``outcome.is_released``), and the release first. If the pool gave a call up, native code may
still write into the blocks, or read them, as long as that call runs. Then the release comes when the call has ended
and, after a load, the blocks that did not arrive were cleared of any bytes that it left in them.

**Ownership.** From ``load`` or ``save`` until ``on_release`` the owner holds a reference on every block of the
transfer, so that no other sequence gets it, and then drops the reference. An engine has to know no more than this.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Protocol

from kvstore_backend.backend import Status, Value
from kvstore_backend.pool import BlockPool, count_leading
from kvstore_backend.threads import DaemonThreads
from kvstore_backend.wrappers.wrapper import call_after_late_calls

__all__ = ["DirectMemory", "Event", "Outcome", "ReadBlocks", "ReadLeading", "TransferMemory", "Transfers", "Window"]

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 5.0
_LOAD_FAILED = "Loading %d blocks failed; they will be computed"
_SAVE_FAILED = "Saving %d blocks failed"

ReadBlocks = Callable[[int, Sequence[Value]], int]
"""Function that reads blocks of a load, from an index on, into targets; returns how many leading blocks arrived."""


class ReadLeading(Protocol):
    """Function that reads leading blocks of a load."""

    def __call__(self, count: int, read: ReadBlocks | None = None) -> int:
        """Read the first ``count`` blocks; return how many leading ones arrived.

        Args:
            count: number of blocks.
            read: how to read them, if some are not blocks of the pool's own sharding.
        """


@dataclass(frozen=True)
class Outcome:
    """Result of a load or a save.

    Attributes:
        count: for a load, how many leading blocks arrived; for a save, how many blocks the pool has now.
        seconds: duration, from when the transfer began to run.
        is_released: whether the owner owns all blocks again. If not, the blocks that were not moved cannot be used
            until ``on_release``, and a sequence that must continue uses others.
    """

    count: int
    seconds: float
    is_released: bool


class Event(Protocol):
    """Event that occurs when work has ended; ``torch.cuda.Event`` is one."""

    def synchronize(self) -> None:
        """Wait until the work has ended; raises the exception of work that failed."""


class Window(Protocol):
    """Memory for some leading blocks of a transfer: as much as one call of the pool gets.

    It is opened, passed to one call, and taken back when that call has ended: immediately, or later after
    ``set_aside``.
    """

    @property
    def values(self) -> Sequence[Value]:
        """Places that the pool writes or reads, for each of these blocks."""

    def deliver(self, count: int) -> None:
        """Deliver the first ``count`` values after a read; the contents of the others are undefined.

        If the blocks are elsewhere, this begins to copy the values to them.
        """

    def wait(self) -> None:
        """Wait until the window touches no block any more: the copy of ``deliver`` or ``open_outgoing`` has ended.

        Raises:
            Exception: the copy failed.
        """

    def set_aside(self) -> bool:
        """Do not reuse this memory until ``take_back``.

        Returns:
            Whether it is the blocks' own memory, so that they cannot be used either.
        """

    def take_back(self) -> None:
        """Make the memory available again, once: no call touches it any more, but a copy that was begun may."""


class TransferMemory(Protocol):
    """KV memory of an engine, as transfers reach it."""

    def record_event(self) -> Event | None:
        """Return an event for all work on blocks that the calling thread has begun; None: it has ended."""

    def open_incoming(self, blocks: Sequence[int], after: Event | None) -> Window:
        """Open memory to read leading ones of ``blocks``, at least one, into; it is touched after ``after``."""

    def open_outgoing(self, blocks: Sequence[int], after: Event | None) -> Window:
        """Open memory with the contents that leading ones of ``blocks``, at least one, have after ``after``.

        The contents are complete when ``wait`` has returned.
        """


class DirectMemory:
    """KV memory that the pool itself reads and writes.

    Args:
        values: returns the places of each block's bytes.
        clear: zeroes blocks after a read that failed: attention multiplies masked positions by 0, and 0 * NaN is NaN.
        record_event: as in ``TransferMemory``, for memory of a device.
    """

    def __init__(
        self,
        values: Callable[[Sequence[int]], list[Value]],
        clear: Callable[[Sequence[int]], None],
        record_event: Callable[[], Event | None] = lambda: None,
    ) -> None:
        self._values = values
        self._clear = clear
        self.record_event = record_event

    def open_incoming(self, blocks: Sequence[int], after: Event | None) -> Window:
        return self._open(blocks, after, self._clear)

    def open_outgoing(self, blocks: Sequence[int], after: Event | None) -> Window:
        return self._open(blocks, after, lambda _: None)

    def _open(self, blocks: Sequence[int], after: Event | None, clear: Callable[[Sequence[int]], None]) -> Window:
        if after is not None:
            after.synchronize()
        return _DirectWindow(blocks, self._values(blocks), clear)


class _DirectWindow:
    """Window on the memory of ``blocks`` themselves."""

    def __init__(self, blocks: Sequence[int], values: list[Value], clear: Callable[[Sequence[int]], None]) -> None:
        self.values = values
        self._missing = blocks
        self._clear = clear

    def deliver(self, count: int) -> None:
        self._missing = self._missing[count:]

    def wait(self) -> None:
        pass

    def set_aside(self) -> bool:
        return True

    def take_back(self) -> None:
        self._clear(self._missing)


class _Transfer:
    """One load or save; only its own thread writes to it.

    Attributes:
        after: the end of all work on the blocks that the owner had begun before it requested the transfer.
        set_aside: the window that a call which was given up may still touch.
        is_released: whether the owner owns the blocks as soon as the transfer has ended.
    """

    def __init__(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        on_end: Callable[[Outcome], None],
        on_release: Callable[[], None],
    ) -> None:
        self.hashes = hashes
        self.blocks = blocks
        self.after: Event | None = None
        self.on_end = on_end
        self.on_release = on_release
        self.set_aside: Window | None = None
        self.is_released = True


class Transfers:
    """Loads and saves of one engine.

    Args:
        pool: the pool; ``close`` closes it.
        memory: the memory of the blocks; the owner has registered it.
        post: runs a callable in the owner's context, one at a time: on its thread, or under its lock. It runs
            ``on_end`` and ``on_release``.
        start_thread: called first on each of the two threads.
    """

    def __init__(
        self,
        pool: BlockPool,
        memory: TransferMemory,
        post: Callable[[Callable[[], None]], None],
        *,
        start_thread: Callable[[], None] | None = None,
    ) -> None:
        self._pool = pool
        self._memory = memory
        self._post = post
        self._is_closed = False
        self._loads = DaemonThreads(1, "pool-load", start_thread)
        self._saves = DaemonThreads(1, "pool-save", start_thread)

    def load(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        on_end: Callable[[Outcome], None],
        on_release: Callable[[], None],
        *,
        decide: Callable[[ReadLeading], int] | None = None,
    ) -> None:
        """Begin to read ``blocks``, or as many leading ones as ``decide`` requests.

        Args:
            hashes: the blocks' names.
            blocks: the blocks to fill.
            on_end: called with the outcome.
            on_release: called when the owner owns the blocks again.
            decide: called on the loading thread, with a function that reads a given number of leading blocks; returns
                that function's answer, or 0 to read nothing. Default: all blocks are read.
        """
        transfer = _Transfer(hashes, blocks, on_end, on_release)
        self._submit_transfer(self._loads, transfer, lambda: self._decide_and_read(transfer, decide), _LOAD_FAILED)

    def save(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        on_end: Callable[[Outcome], None],
        on_release: Callable[[], None],
        *,
        keep_seconds: float = 0.0,
    ) -> None:
        """Begin to write ``blocks``; their contents must not change before ``on_release``.

        With ``keep_seconds`` this also writes blocks that the pool has, to protect them from eviction for that time.
        """
        transfer = _Transfer(hashes, blocks, on_end, on_release)

        def write(hashes: Sequence[bytes], sources: Sequence[Value]) -> list[Status]:
            if keep_seconds:
                return self._pool.put_blocks(hashes, sources, keep_seconds=keep_seconds, wait=False)
            return self._pool.save(hashes, sources, wait=False)

        self._submit_transfer(self._saves, transfer, lambda: self._write_blocks(transfer, write), _SAVE_FAILED)

    def remove(self, hashes: Sequence[bytes]) -> None:
        """Begin to remove blocks from the pool, after all saves that have begun; a failure is logged."""

        def run() -> None:
            self._pool.flush_writes(_FLUSH_SECONDS)
            statuses = self._pool.remove_blocks(hashes)
            if (failed := statuses.count(Status.FAILED)) > 0:
                logger.warning("%d of %d blocks were not removed from the pool", failed, len(hashes))

        try:
            self._saves.submit(run)
        except RuntimeError as exc:
            logger.warning("%d blocks were not removed from the pool: %s", len(hashes), exc)

    def call_after_flush(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on a new thread once other instances can read all blocks saved so far.

        It is also called if those were given up, or after some seconds: a look-up shows which blocks are present.
        """

        def wait() -> None:
            self._pool.flush_writes(_FLUSH_SECONDS)
            callback()

        threading.Thread(target=wait, name="pool-flush", daemon=True).start()

    def close(self, flush_seconds: float = 2.0) -> None:
        """Give running saves ``flush_seconds``, drop the rest, and leave the pool."""
        self._is_closed = True
        try:
            wait([self._saves.submit(lambda: None)], flush_seconds)
        except RuntimeError as exc:
            logger.debug("Saves are not waited for: %s", exc)
        self._loads.close()
        self._saves.close()
        # A native client is slow to leave; do not wait longer than this for it.
        leaving = threading.Thread(target=self._pool.close, name="pool-close", daemon=True)
        leaving.start()
        leaving.join(flush_seconds)

    def _submit_transfer(
        self, thread: DaemonThreads, transfer: _Transfer, move: Callable[[], int], message: str
    ) -> None:
        """Run the transfer on a thread; if there is none, or the device fails, it ends here, and nothing was moved."""
        try:
            transfer.after = self._memory.record_event()
            thread.submit(lambda: self._run_transfer(transfer, move, message))
        except RuntimeError as exc:
            if self._is_closed:
                logger.debug("The pool was left; a transfer was dropped")
                return
            logger.warning("A transfer of %d blocks was not made: %s", len(transfer.blocks), exc)
            self._post(lambda: _release_and_end(transfer, Outcome(0, 0.0, True)))

    def _run_transfer(self, transfer: _Transfer, move: Callable[[], int], message: str) -> None:
        """Move the blocks and notify the owner through its ``post``; log ``message`` if the move raises."""
        begun = time.monotonic()
        count = 0
        try:
            count = move()
        except Exception:
            logger.exception(message, len(transfer.blocks))
        outcome = Outcome(count, time.monotonic() - begun, transfer.is_released)
        try:
            if transfer.is_released:
                self._post(lambda: _release_and_end(transfer, outcome))
            else:
                self._post(lambda: transfer.on_end(outcome))
        except Exception:
            logger.exception("The end of a transfer of %d blocks could not be reported", len(transfer.blocks))
        if transfer.set_aside is not None:
            self._await_late_calls(transfer, transfer.set_aside)

    def _decide_and_read(self, transfer: _Transfer, decide: Callable[[ReadLeading], int] | None) -> int:
        def read_own(begin: int, targets: Sequence[Value]) -> int:
            hashes = transfer.hashes[begin : begin + len(targets)]
            return count_leading(self._pool.get_blocks(hashes, targets, wait=False))

        def read_leading(count: int, read: ReadBlocks | None = None) -> int:
            return self._read_blocks(transfer, count, read or read_own)

        return decide(read_leading) if decide else read_leading(len(transfer.blocks))

    def _read_blocks(self, transfer: _Transfer, wanted: int, read: ReadBlocks) -> int:
        """Read the first ``wanted`` blocks; return how many leading ones arrived.

        While the contents of a window are copied to its blocks, the next window is read.
        """
        loaded = 0
        with contextlib.ExitStack() as copies:
            while loaded < wanted:
                window = self._memory.open_incoming(transfer.blocks[loaded:wanted], transfer.after)
                copies.callback(window.wait)
                size, count = len(window.values), 0
                try:
                    count = read(loaded, window.values)
                finally:
                    try:
                        window.deliver(count)
                    finally:
                        self._end_call(transfer, window, is_whole=count == size)
                loaded += count
                if count < size:
                    break
        return loaded

    def _write_blocks(
        self, transfer: _Transfer, write: Callable[[Sequence[bytes], Sequence[Value]], list[Status]]
    ) -> int:
        """Write all blocks; return how many the pool has now.

        While a window is written, the contents of the next one are copied to it.
        """
        begun = saved = 0
        with contextlib.ExitStack() as copies:
            window = self._open_outgoing(transfer, 0, copies)
            try:
                while window is not None and transfer.set_aside is None:
                    current, size, count = window, len(window.values), 0
                    window = None
                    try:
                        window = self._open_outgoing(transfer, begun + size, copies)
                        current.wait()
                        count = sum(map(bool, write(transfer.hashes[begun : begun + size], current.values)))
                    finally:
                        self._end_call(transfer, current, is_whole=count == size)
                    begun += size
                    saved += count
            finally:
                if window is not None:
                    window.take_back()
        return saved

    def _open_outgoing(self, transfer: _Transfer, begin: int, copies: contextlib.ExitStack) -> Window | None:
        """Open a window for blocks from ``begin`` on, if there are any; ``copies`` waits for the copy that fills it."""
        if begin >= len(transfer.blocks):
            return None
        window = self._memory.open_outgoing(transfer.blocks[begin:], transfer.after)
        copies.callback(window.wait)
        return window

    def _end_call(self, transfer: _Transfer, window: Window, *, is_whole: bool) -> None:
        """Take a window back after a call on it, or set it aside while a call that failed still runs."""
        if is_whole or self._pool.wait_for_late_calls(0):
            window.take_back()
        else:
            transfer.set_aside = window
            transfer.is_released = not window.set_aside()

    def _await_late_calls(self, transfer: _Transfer, window: Window) -> None:
        """Take the window back once no late call touches it, and release the blocks if it is their own memory."""

        def take_back() -> None:
            try:
                window.take_back()
            finally:
                if not transfer.is_released:
                    self._post(transfer.on_release)

        call_after_late_calls(self._pool.stack, take_back)


def _release_and_end(transfer: _Transfer, outcome: Outcome) -> None:
    transfer.on_release()
    transfer.on_end(outcome)
