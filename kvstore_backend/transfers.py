"""Asynchronous loads and saves, for engines that do not wait for the pool.

Each load or save is a *transfer*; the *owner* is the engine that requested it. Loads run one after another on one
thread, and saves on another thread. A transfer calls two functions of its owner::

    load / save ──► on_end(outcome)   called once, soon after the pool's deadline at the latest: the transfer has ended
                ──► on_release()      called once: the owner may use all blocks of the transfer again

Usually ``on_release`` is called just before ``on_end`` (``outcome.is_released``). If a call to the pool is late, it may
still write or read the blocks until it ends. Then ``on_release`` is called when the late call has ended. Before the
``on_release`` of a load, the blocks that did not arrive are set to zero, because the late call may have written a part
of their bytes.

**Ownership.** The owner holds a reference on every block of a transfer from ``load`` or ``save`` until ``on_release``,
so that no other sequence gets the block. This is the only rule that an engine must follow.
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
"""Function that reads blocks of a load to targets, and returns the number of leading blocks that arrived.

The arguments of the function are the index of the first block in the load, and the targets.
"""


class ReadLeading(Protocol):
    """Interface of a function that reads the leading blocks of a load."""

    def __call__(self, count: int, read: ReadBlocks | None = None) -> int:
        """Read the first ``count`` blocks; return the number of leading blocks that arrived.

        Args:
            count: number of blocks.
            read: function that reads the blocks, if some of them have another sharding; None: read them from the pool.
        """


@dataclass(frozen=True)
class Outcome:
    """Result of a load or a save.

    Attributes:
        count: for a load, the number of leading blocks that arrived; for a save, the number of its blocks that the pool
            has now.
        seconds: duration of the transfer, without the time that it waited for its thread.
        is_released: whether the owner (the engine) may use all blocks again. If False, a call that missed its deadline
            may still access the blocks that were not moved. The owner must not use these blocks before ``on_release``
            is called; a sequence that continues earlier needs other blocks.
    """

    count: int
    seconds: float
    is_released: bool


class Event(Protocol):
    """Interface of an event that marks the end of a device's work, such as ``torch.cuda.Event``."""

    def synchronize(self) -> None:
        """Wait until the device's work before the event has ended; raise an exception if the work failed."""


class Window(Protocol):
    """Memory for one call to the pool, with one or more leading blocks of a transfer.

    ``Transfers`` opens a window, passes it to one call of the pool, and calls ``take_back`` after the call. If the call
    misses its deadline, ``Transfers`` calls ``set_aside``, and calls ``take_back`` only when the call has ended.
    """

    @property
    def values(self) -> Sequence[Value]:
        """Memory of each block in the window, which the pool reads or writes."""

    def deliver(self, count: int) -> None:
        """Accept the first ``count`` values that the pool has read; the other values have no defined contents.

        If ``values`` is a buffer outside the blocks, begin to copy the accepted values to the blocks.
        """

    def wait(self) -> None:
        """Wait until the copy between the window and its blocks has ended.

        Raises:
            Exception: the copy failed.
        """

    def set_aside(self) -> bool:
        """Do not reuse the memory before ``take_back``, because a call that missed its deadline may still use it.

        Returns:
            Whether the memory belongs to the blocks, so that the blocks cannot be used either.
        """

    def take_back(self) -> None:
        """Make the window's memory available for other windows.

        ``Transfers`` calls this once, when no call to the pool uses the memory any more; a copy between the memory and
        the blocks may still run.
        """


class TransferMemory(Protocol):
    """Interface of an engine's KV memory. Blocks are moved between this memory and the pool."""

    def record_event(self) -> Event | None:
        """Return an event for the end of all device work that this thread has queued; None if all has ended."""

    def open_incoming(self, blocks: Sequence[int], after: Event | None) -> Window:
        """Return a window (memory for one call) into which the pool reads one or more leading blocks of ``blocks``.

        The memory of the blocks is written only after the event ``after``; None: at any time.
        """

    def open_outgoing(self, blocks: Sequence[int], after: Event | None) -> Window:
        """Return a window (memory for one call) from which the pool writes one or more leading blocks of ``blocks``.

        The window gets the contents that the blocks have after the event ``after``, or now if ``after`` is None. The
        contents are complete when the window's ``wait`` has returned.
        """


class DirectMemory:
    """KV memory that the pool reads and writes directly, without buffers.

    Args:
        values: returns the memory of each block.
        clear: sets blocks to zero after a failed read. (Attention multiplies the values of masked positions by 0, and
            0 * NaN is NaN.)
        record_event: as in ``TransferMemory``; needed only for the memory of a device.
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


@dataclass(eq=False)
class _DirectWindow:
    """Window (memory for one call) without a buffer: the pool reads and writes the memory of the blocks."""

    missing: Sequence[int]
    values: list[Value]
    clear: Callable[[Sequence[int]], None]

    def deliver(self, count: int) -> None:
        self.missing = self.missing[count:]

    def wait(self) -> None:
        pass

    def set_aside(self) -> bool:
        return True

    def take_back(self) -> None:
        self.clear(self.missing)


@dataclass(eq=False)
class _Transfer:
    """One load or save of blocks. Only the thread that runs the transfer changes the attributes.

    Attributes:
        after: event for the end of the work on the blocks that the engine had begun before it requested the transfer.
        num_late: number of the pool's calls that had missed their deadline before the transfer began. If it has grown
            at the end, a call of this transfer may still run.
        set_aside: memory (window) that a call may still use after its deadline, or None if there is none.
        is_released: whether the engine may use the blocks when the transfer has ended; if not, it waits for
            ``on_release``.
    """

    hashes: Sequence[bytes]
    blocks: Sequence[int]
    on_end: Callable[[Outcome], None]
    on_release: Callable[[], None]
    after: Event | None = None
    num_late: int = 0
    set_aside: Window | None = None
    is_released: bool = True


class Transfers:
    """Loads and saves blocks for one engine, the owner.

    Args:
        pool: the pool; ``close`` closes it.
        memory: the memory of the blocks, which the owner has registered.
        post: calls a function in the owner's context, one at a time: on the owner's thread, or under the owner's lock.
            All calls of ``on_end`` and ``on_release`` are made through ``post``.
        start_thread: called on each of the two new threads before everything else.
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
        """Begin to read ``blocks``, or the leading blocks that ``decide`` selects.

        Args:
            hashes: hashes of the blocks.
            blocks: the blocks that are filled.
            on_end: called with the outcome.
            on_release: called when the owner may use the blocks again.
            decide: called on the loading thread with a function that reads a given number of leading blocks. ``decide``
                returns the result of that function, or 0 to read nothing. Before it reads, ``decide`` may change the
                lists ``hashes`` and ``blocks``, to load other blocks on which the owner has references. Without
                ``decide``, all blocks are read.
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
        """Begin to write ``blocks`` to the pool. The contents of the blocks must not change before ``on_release``.

        With ``keep_seconds``, also write blocks that the pool has already, and pin all blocks for this time.
        """
        transfer = _Transfer(hashes, blocks, on_end, on_release)

        def write(hashes: Sequence[bytes], sources: Sequence[Value]) -> list[Status]:
            if keep_seconds:
                return self._pool.put_blocks(hashes, sources, keep_seconds=keep_seconds, wait=False)
            return self._pool.save(hashes, sources, wait=False)

        self._submit_transfer(self._saves, transfer, lambda: self._write_blocks(transfer, write), _SAVE_FAILED)

    def remove(self, hashes: Sequence[bytes]) -> None:
        """Begin to remove blocks with wrong KV from the pool, after all saves that were requested before.

        A failure is logged.

        Blocks are removed even while a client reads them. So this method is only for pools with checksums, by which the
        reader detects the removal.
        """

        def run() -> None:
            self._pool.flush_writes(_FLUSH_SECONDS)
            statuses = self._pool.remove_blocks(hashes, force=True)
            if (failed := statuses.count(Status.FAILED)) > 0:
                logger.warning(
                    "%d of %d blocks with NaN or infinity could not be removed from the pool, so other instances may "
                    "still load them",
                    *(failed, len(hashes)),
                )

        try:
            self._saves.submit(run)
        except RuntimeError as exc:
            logger.warning(
                "%d blocks with NaN or infinity could not be removed from the pool, so other instances may still load "
                "them: %s",
                *(len(hashes), exc),
            )

    def call_after_flush(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on a new thread as soon as other instances can read all blocks that were saved before.

        ``callback`` is called after ``_FLUSH_SECONDS`` at the latest, and also if saves failed. A look-up shows which
        blocks are present.
        """

        def wait() -> None:
            self._pool.flush_writes(_FLUSH_SECONDS)
            callback()

        threading.Thread(target=wait, name="pool-flush", daemon=True).start()

    def close(self, flush_seconds: float = 2.0) -> None:
        """Wait up to ``flush_seconds`` for all saves, drop those that have not ended by then, and close the pool."""
        self._is_closed = True
        try:
            wait([self._saves.submit(lambda: None)], flush_seconds)
        except RuntimeError as exc:
            logger.debug("The pool is closed without waiting for running saves: %s", exc)
        self._loads.close()
        self._saves.close()
        # A native client may take long to close, so this waits for it only for a limited time.
        leaving = threading.Thread(target=self._pool.close, name="pool-close", daemon=True)
        leaving.start()
        leaving.join(flush_seconds)

    def _submit_transfer(
        self, thread: DaemonThreads, transfer: _Transfer, move: Callable[[], int], message: str
    ) -> None:
        """Run a transfer on ``thread``. If the thread cannot be started, or the device fails, move no blocks."""
        try:
            transfer.after = self._memory.record_event()
            thread.submit(lambda: self._run_transfer(transfer, move, message))
        except RuntimeError as exc:
            if self._is_closed:
                logger.debug("A transfer of %d blocks was dropped, because the pool was closed", len(transfer.blocks))
                return
            logger.warning("A transfer of %d blocks failed: %s", len(transfer.blocks), exc)
            self._post(lambda: _release_and_end(transfer, Outcome(0, 0.0, True)))

    def _run_transfer(self, transfer: _Transfer, move: Callable[[], int], message: str) -> None:
        """Move the blocks of a transfer, and report its end to the owner; log ``message`` if ``move`` raises."""
        begun = time.monotonic()
        count = 0
        transfer.num_late = self._pool.count_late_calls()
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
            logger.exception(
                "The engine failed when it was told that a transfer of %d blocks has ended", len(transfer.blocks)
            )
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
        """Read the first ``wanted`` blocks; return the number of leading blocks that arrived.

        While the contents of a window (memory for one call) are copied to its blocks, the next window is already read.
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
        """Write all blocks; return the number of blocks that the pool has now.

        While the pool writes one window (memory for one call), the contents of the next window are already copied.
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
        """Return a window (memory for one put) for a save's blocks from index ``begin`` on; None if none are left.

        When the ``with`` block of ``copies`` ends, it waits for the copy that fills the window.
        """
        if begin >= len(transfer.blocks):
            return None
        window = self._memory.open_outgoing(transfer.blocks[begin:], transfer.after)
        copies.callback(window.wait)
        return window

    def _end_call(self, transfer: _Transfer, window: Window, *, is_whole: bool) -> None:
        """Make the memory of a call available again, or set it aside if the call may still run after its deadline.

        Args:
            transfer: the transfer that made the call.
            window: the memory of the call.
            is_whole: whether the call has succeeded for all blocks, so that it has ended.
        """
        may_be_late = not is_whole and self._pool.count_late_calls() != transfer.num_late
        if not may_be_late or self._pool.wait_for_late_calls(0):
            window.take_back()
        else:
            transfer.set_aside = window
            transfer.is_released = not window.set_aside()

    def _await_late_calls(self, transfer: _Transfer, window: Window) -> None:
        """When no call runs after its deadline any more, make the call's memory available and release the blocks.

        A new thread waits for this.
        """

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
