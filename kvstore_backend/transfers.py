"""Loads and saves on their way, for engines that do not wait for the pool.

Each load or save is a *transfer*. It runs on a thread of its own, loads one after another on one thread, saves on
another, and its owner hears of it twice::

    load / save ──► on_end(outcome)   once, soon after the pool's deadline at the latest: so many blocks were moved
                ──► on_release()      once: all of the transfer's blocks are the owner's again

Mostly both come together (``outcome.is_released``), and the release first. Where the pool gave a call up, native code
may still write into the blocks, or read them, for as long as that call runs: release comes when it has ended and, after
a load, the blocks that did not come were cleared of anything it left in them.

**Ownership.** From ``load`` or ``save`` until ``on_release`` the owner keeps a reference on every block of the
transfer, so that none becomes another sequence's, and gives it back then. That is all an engine has to know.
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
from kvstore_backend.pool import BlockPool
from kvstore_backend.threads import DaemonThreads
from kvstore_backend.wrappers.late_calls import call_after_late_calls

__all__ = ["DirectMemory", "Event", "Outcome", "ReadBlocks", "ReadLeading", "TransferMemory", "Transfers", "Window"]

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 5.0
_LOAD_FAILED = "Loading %d blocks failed; they will be computed"
_SAVE_FAILED = "Saving %d blocks failed"

ReadBlocks = Callable[[int, Sequence[Value]], int]
"""Reads the blocks of a load from this one on into these targets; how many leading ones arrived whole."""


class ReadLeading(Protocol):
    """Reads leading blocks of a load."""

    def __call__(self, count: int, read: ReadBlocks | None = None) -> int:
        """How many of the first ``count`` blocks arrived whole; ``read`` where they are not all the pool's own."""


@dataclass(frozen=True)
class Outcome:
    """The end of a load or a save.

    Attributes:
        count: how many leading blocks were loaded; or how many blocks the pool has now.
        seconds: from when it was its turn.
        is_released: all of its blocks are the owner's again. Else those that were not moved are of no use until
            ``on_release``, and a sequence that has to go on does so in others.
    """

    count: int
    seconds: float
    is_released: bool


class Event(Protocol):
    """A moment that comes when work has ended; ``torch.cuda.Event`` is one."""

    def synchronize(self) -> None:
        """Wait until it has come; raises the exception of work that failed."""


class Window(Protocol):
    """Memory for some leading blocks of a transfer: as much as one call of the pool is given.

    It is opened, given to one call, and taken back when that has ended, at once or, ``set_aside`` meanwhile, later.
    """

    @property
    def values(self) -> Sequence[Value]:
        """Where the pool writes or reads, for each of these blocks."""

    def deliver(self, count: int) -> None:
        """After a read: the first ``count`` values arrived, the contents of the others are undefined.

        Begins to copy those that arrived to their blocks, if they are elsewhere.
        """

    def wait(self) -> None:
        """Wait until the window touches no block any more: the copy of ``deliver`` or ``open_outgoing`` has ended.

        Raises:
            Exception: the copy failed.
        """

    def set_aside(self) -> bool:
        """Use this memory for nothing else until ``take_back``.

        Returns:
            Whether it is the blocks' own, so that they cannot be used either.
        """

    def take_back(self) -> None:
        """Hear, once, that no call touches this memory any more; a copy that was begun may."""


class TransferMemory(Protocol):
    """An engine's KV memory, as transfers reach it."""

    def record_event(self) -> Event | None:
        """On the thread that asks for a transfer: the end of all that it has begun on blocks; None: it has ended."""

    def open_incoming(self, blocks: Sequence[int], after: Event | None) -> Window:
        """Memory that leading ones of ``blocks``, at least one, are to be read into; touched after ``after``."""

    def open_outgoing(self, blocks: Sequence[int], after: Event | None) -> Window:
        """Memory for the contents of leading ones of ``blocks``, at least one, as they are after ``after``.

        They are there when ``wait`` has returned.
        """


class DirectMemory:
    """KV memory that the pool reads and writes itself.

    Args:
        values: where each block's bytes lie.
        clear: makes the contents of blocks finite after a read that failed: attention still meets masked positions,
            times zero.
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
    """The memory of ``blocks`` themselves."""

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
        after: the end of all that the owner had begun on the blocks when it asked.
        set_aside: the window that a call which was given up may still touch.
        is_released: whether its blocks are the owner's as soon as it has ended.
    """

    def __init__(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        on_end: Callable[[Outcome], None],
        on_release: Callable[[], None],
        after: Event | None,
    ) -> None:
        self.hashes = hashes
        self.blocks = blocks
        self.after = after
        self.on_end = on_end
        self.on_release = on_release
        self.set_aside: Window | None = None
        self.is_released = True


class Transfers:
    """Loads and saves of one engine.

    Args:
        pool: closed by ``close``.
        memory: where blocks lie; the owner has it registered.
        post: runs a callable where the owner's bookkeeping is, one at a time: on its thread, or under its lock.
            ``on_end`` and ``on_release`` go through it.
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
        """Begin to read ``blocks``, or as many leading ones as ``decide`` asks for.

        Args:
            hashes: the blocks' names.
            blocks: where to.
            on_end: called with the outcome.
            on_release: called when the blocks are the owner's again.
            decide: called on the thread that loads, with a function that reads as many leading blocks as it is told;
                returns that function's answer, or 0 where nothing is to be read. Default: all blocks are read.
        """
        transfer = _Transfer(hashes, blocks, on_end, on_release, self._memory.record_event())
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
        """Begin to write ``blocks``, whose contents must not change before ``on_release``.

        With ``keep_seconds`` also those that the pool has: to keep them from eviction for so long.
        """
        transfer = _Transfer(hashes, blocks, on_end, on_release, self._memory.record_event())

        def write(hashes: Sequence[bytes], sources: Sequence[Value]) -> list[Status]:
            if keep_seconds:
                return self._pool.keep_by_deadline(hashes, sources, keep_seconds)
            return self._pool.save_by_deadline(hashes, sources)

        self._submit_transfer(self._saves, transfer, lambda: self._write_blocks(transfer, write), _SAVE_FAILED)

    def remove(self, hashes: Sequence[bytes]) -> None:
        """Begin to remove blocks from the pool, after all saves that have begun; the log shows a failure."""

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
        """Call ``callback`` on a thread of its own once other instances can read all blocks saved so far.

        Or once those were given up, or after some seconds: a look-up tells which are there.
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
        # A native client takes its time to leave; leaving is not worth more than a moment.
        leaving = threading.Thread(target=self._pool.close, name="pool-close", daemon=True)
        leaving.start()
        leaving.join(flush_seconds)

    def _submit_transfer(
        self, thread: DaemonThreads, transfer: _Transfer, move: Callable[[], int], message: str
    ) -> None:
        """Have a thread run the transfer; where there is none, it ends here, and nothing was moved."""
        try:
            thread.submit(lambda: self._run_transfer(transfer, move, message))
        except RuntimeError as exc:
            if self._is_closed:
                logger.debug("The pool was left; a transfer was dropped")
                return
            logger.warning("A transfer of %d blocks was not made: %s", len(transfer.blocks), exc)
            self._post(lambda: _release_and_end(transfer, Outcome(0, 0.0, True)))

    def _run_transfer(self, transfer: _Transfer, move: Callable[[], int], message: str) -> None:
        """Move the blocks and tell the owner, by way of its ``post``; ``message`` is logged where that raises."""
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
            return self._pool.load_by_deadline(transfer.hashes[begin : begin + len(targets)], targets)

        def read_leading(count: int, read: ReadBlocks | None = None) -> int:
            return self._read_blocks(transfer, count, read or read_own)

        return decide(read_leading) if decide else read_leading(len(transfer.blocks))

    def _read_blocks(self, transfer: _Transfer, wanted: int, read: ReadBlocks) -> int:
        """Read the first ``wanted`` blocks; how many leading ones arrived whole.

        While the contents of a window are copied to its blocks, the next one is read.
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
        """Write all blocks; how many the pool has now.

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
        """A window for blocks from this one on, if there are any; ``copies`` waits for the copy that fills it."""
        if begin >= len(transfer.blocks):
            return None
        window = self._memory.open_outgoing(transfer.blocks[begin:], transfer.after)
        copies.callback(window.wait)
        return window

    def _end_call(self, transfer: _Transfer, window: Window, *, is_whole: bool) -> None:
        """After a call on a window: it is taken back, or kept out of use while a call that failed still runs."""
        if is_whole or self._pool.wait_for_late_calls(0):
            window.take_back()
        else:
            transfer.set_aside = window
            transfer.is_released = not window.set_aside()

    def _await_late_calls(self, transfer: _Transfer, window: Window) -> None:
        """Take the window back, and release the blocks if it is theirs, once no late call touches it."""

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
