"""Writes in the background: a put copies the blocks to a queue in memory and returns; a thread writes them in batches.

The memory of the queue (the arena) is a ring of fixed size::

    ┌────────┬───────────────────────────────┬────────┐
    │  free  │ oldest  ...  queued  ... newest│  free  │   a block is removed when it was written or dropped
    └────────┴───────────────────────────────┴────────┘

Blocks are removed in the order in which they were added, so the ring needs no list of free places. While a block is in
the ring, this wrapper answers calls for it: ``exists`` returns ``OK``, ``get`` copies it from the arena, and a second
put of it returns ``OK`` immediately. So in this process a put that returned ``OK`` means *readable now*, as usual.
Other clients of the pool can read the block only after it was written. If the pool refuses the block, ``dropped``
counts it, and readers do not find it any more, as after an eviction.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore_backend.backend import HEADROOM_BYTES, Span, Status, StorageBackend, Value
from kvstore_backend.threads import after_fork
from kvstore_backend.wrappers.wrapper import Wrapper

__all__ = ["WriteBehindBackend"]

logger = logging.getLogger(__name__)

_ARENA_BYTES = 256 << 20
_BATCH_BYTES = 16 << 20
_RETRY_SECONDS = _FLUSH_SECONDS = 2.0
_ALIGNMENT = 128
_FIRST_PAUSE_SECONDS = 0.05
_LATE_CALL_WAIT_SECONDS = 1.0
# Arenas that must not be freed, because a late call may still read them.
_ABANDONED: list[NDArray[np.uint8]] = []


@dataclass(eq=False, slots=True)
class _Block:
    """Queued block: ``nbytes`` bytes at the offset ``start`` in the arena, with headroom before ``start``."""

    start: int
    nbytes: int
    is_sending: bool = False


# The reasons why queued blocks are dropped, for the log.
_WHY_LOST = {
    "refused": "the pool refused them",
    "pool away": "the pool does not answer",
    "closed": "the process ended first",
}


class WriteBehindBackend(Wrapper):
    """Wrapper that writes to ``store`` in the background.

    A put returns ``FAILED`` without waiting if the arena has no space for the block; ``dropped`` counts the block.

    Args:
        store: any backend; ``close`` closes it.
        arena_bytes: size of the memory for queued blocks.
        batch_bytes: maximum size of one write in bytes; a larger block is written alone.
        retry_seconds: time in which a write is repeated that a working pool refuses (a pool may be full for a moment).
        flush_seconds: time in which ``close`` continues to write.

    Attributes:
        dropped: number of blocks that were not written to the pool, by reason: ``arena full``, ``refused`` (by a
            working pool), ``pool away`` (the pool does not answer), ``closed``.
    """

    def __init__(
        self,
        store: StorageBackend,
        *,
        arena_bytes: int = _ARENA_BYTES,
        batch_bytes: int = _BATCH_BYTES,
        retry_seconds: float = _RETRY_SECONDS,
        flush_seconds: float = _FLUSH_SECONDS,
    ) -> None:
        self.dropped: Counter[str] = Counter()
        super().__init__(store)
        self._batch_bytes = batch_bytes
        self._retry_seconds = retry_seconds
        self._flush_seconds = flush_seconds
        self._arena: NDArray[np.uint8] = np.empty(arena_bytes, dtype=np.uint8)
        self._base: int = self._arena.ctypes.data
        self._changed = threading.Condition()  # guards all attributes below
        self._blocks: OrderedDict[str, _Block] = OrderedDict()  # in the order of the ring
        self._tail = 0  # offset of the end of the newest block
        self._is_closed = False
        self._must_stop = False  # closed, and the time for the remaining writes is over
        self._sender = threading.Thread(target=self._run_sender, name="pool-write-behind", daemon=True)
        self._has_raised = False
        with contextlib.ExitStack() as undo:
            self._store.register(self._base, arena_bytes, headroom=True)
            undo.callback(self._store.unregister, self._base, arena_bytes)
            self._sender.start()
            undo.pop_all()
        after_fork(self)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._blocks)} blocks queued"
        return f"WriteBehindBackend({self._store!r}, {state})"

    @property
    def queued_blocks(self) -> int:
        """Number of blocks that were accepted and are not written yet."""
        return len(self._blocks)

    @property
    def queued_bytes(self) -> int:
        """Size in bytes of all blocks that were accepted and are not written yet."""
        with self._changed:
            return sum(block.nbytes for block in self._blocks.values())

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        return [self._accept_block(key, value) for key, value in zip(keys, values, strict=True)]

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        statuses = [self._copy_out(key, target) for key, target in zip(keys, targets, strict=True)]
        ask = [i for i, status in enumerate(statuses) if status is None]
        answers = self._store.get([keys[i] for i in ask], [targets[i] for i in ask]) if ask else []
        return _fill_in(statuses, answers)

    def exists_for_all(self, keys: Sequence[str]) -> list[Status]:
        return self._store.exists_for_all(keys)

    def get_for_all(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        return self._store.get_for_all(keys, targets)

    def exists(self, keys: Sequence[str]) -> list[Status]:
        with self._changed:
            if self._is_closed:
                return [Status.FAILED] * len(keys)
            statuses = [Status.OK if key in self._blocks else None for key in keys]
        ask = [key for key, status in zip(keys, statuses, strict=True) if status is None]
        return _fill_in(statuses, self._store.exists(ask) if ask else [])

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        """Remove keys from the queue and the pool.

        A block that is being written now is not removed, and has the status ``FAILED``.
        """
        with self._changed:
            if self._is_closed:
                return [Status.FAILED] * len(keys)
            is_sending = [key in self._blocks and self._blocks[key].is_sending for key in keys]
            withdrawn = {key for key, busy in zip(keys, is_sending, strict=True) if not busy and key in self._blocks}
            self._take_out(withdrawn)
        statuses = [Status.FAILED if busy else None for busy in is_sending]
        ask = [key for key, busy in zip(keys, is_sending, strict=True) if not busy]
        answers = self._store.remove(ask, force=force) if ask else []
        found = [
            Status.OK if key in withdrawn and answer is Status.ABSENT else answer
            for key, answer in zip(ask, answers, strict=True)
        ]
        return _fill_in(statuses, found)

    def clear(self, prefix: str) -> Status:
        """Remove all keys that begin with ``prefix`` from the queue and the pool.

        The answer is ``FAILED`` if one of the blocks is being written now, otherwise the answer of the pool.
        """
        is_sending = self._withdraw(prefix)
        answer = self._store.clear(prefix)
        return Status.FAILED if is_sending else answer

    def drop_own_copies(self, prefix: str) -> bool:
        """Remove the keys that begin with ``prefix`` from the queue, and from the copies of the inner backend.

        A block that is being written now stays in the queue, but the result may still be True.
        """
        self._withdraw(prefix)
        return self._store.drop_own_copies(prefix)

    def _withdraw(self, prefix: str) -> bool:
        """Remove the keys that begin with ``prefix`` from the queue, except blocks that are being written now.

        Returns:
            Whether a block with such a key is being written now.
        """
        with self._changed:
            queued = {key for key in self._blocks if key.startswith(prefix)}
            is_sending = {key for key in queued if self._blocks[key].is_sending}
            self._take_out(queued - is_sending)
        return bool(is_sending)

    def flush_writes(self, seconds: float) -> bool:
        """Wait until all queued blocks have been written or dropped; return False if ``seconds`` were not enough."""
        with self._changed:
            last = next(reversed(self._blocks.values()), None)
            return last is None or self._changed.wait_for(lambda: last not in self._blocks.values(), seconds)

    def close(self) -> None:
        """Write queued blocks for up to ``flush_seconds``, drop the others, and close the store."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._blocks, self._flush_seconds)
            self._must_stop = True
            self._changed.notify_all()
        with contextlib.ExitStack() as closing:
            closing.callback(self._store.close)
            self._sender.join(self._flush_seconds)
            with self._changed:
                self._drop_blocks(set(self._blocks), "closed")
            if self._sender.is_alive() or not self._store.wait_for_late_calls(0):
                _ABANDONED.append(self._arena)
            else:
                self._store.unregister(self._base, self._arena.nbytes)

    def on_fork(self) -> None:
        """Close the wrapper in a forked child, which has no sender thread. The parent writes the queued blocks."""
        self._changed = threading.Condition()
        self._is_closed = True
        self._blocks = OrderedDict()

    def _accept_block(self, key: str, value: Value) -> Status:
        nbytes = sum([nbytes for _, nbytes in value])
        with self._changed:
            if self._is_closed:
                return Status.FAILED
            if key in self._blocks:
                return Status.OK
            start = self._find_room(HEADROOM_BYTES + nbytes) if self._store.is_ready else None
            if start is None:
                self.dropped["arena full" if self._store.is_ready else "pool away"] += 1
                return Status.FAILED
            payload = start + HEADROOM_BYTES
            # Copied under the lock, so that a queued block is complete and the queue has the order of the ring.
            position = self._base + payload
            for address, size in value:
                ctypes.memmove(position, address, size)
                position += size
            self._tail = payload + nbytes
            self._blocks[key] = _Block(payload, nbytes)
            self._changed.notify_all()
        return Status.OK

    def _find_room(self, nbytes: int) -> int | None:
        """Return the offset of ``nbytes`` free bytes behind the newest block in the ring; None if there is no space."""
        oldest = next(iter(self._blocks.values()), None)
        tail = -(-self._tail // _ALIGNMENT) * _ALIGNMENT if oldest else 0
        head = oldest.start - HEADROOM_BYTES if oldest else 0
        if oldest and tail <= head:  # the newest blocks are before the oldest
            return tail if tail + nbytes <= head else None
        if tail + nbytes <= self._arena.nbytes:
            return tail
        return 0 if oldest and nbytes <= head else None

    def _copy_out(self, key: str, target: Value) -> Status | None:
        """Copy a queued block to ``target``; return the status, or None if the block is not queued."""
        with self._changed:
            if self._is_closed:
                return Status.FAILED
            block = self._blocks.get(key)
            if block is None:
                return None
            if sum([nbytes for _, nbytes in target]) != block.nbytes:
                return Status.ABSENT
            position = self._base + block.start
            for address, size in target:
                ctypes.memmove(address, position, size)
                position += size
        return Status.OK

    def _run_sender(self) -> None:
        while batch := self._next_batch():
            give_up_at = time.monotonic() + self._retry_seconds
            pause = _FIRST_PAUSE_SECONDS
            while not self._try_batch(batch, is_last=time.monotonic() + pause > give_up_at):
                with self._changed:
                    self._changed.wait_for(lambda: self._must_stop, pause)
                    if self._must_stop:
                        return
                pause *= 2

    def _next_batch(self) -> dict[str, _Block]:
        """Wait for queued blocks; mark the oldest ones as being sent and return them; {} if the sender must end."""
        with self._changed:
            self._changed.wait_for(lambda: self._blocks or self._is_closed)
            batch: dict[str, _Block] = {}
            nbytes = 0
            for key, block in self._blocks.items():
                nbytes += block.nbytes
                if self._must_stop or (batch and nbytes > self._batch_bytes):
                    break
                batch[key] = block
                block.is_sending = True
            return batch

    def _try_batch(self, batch: dict[str, _Block], *, is_last: bool) -> bool:
        """Write a batch with ``_send_batch``; an exception of the store counts as a refusal of the blocks."""
        try:
            return self._send_batch(batch, is_last=is_last)
        except Exception:
            if not self._has_raised:
                logger.exception(
                    "A store raised an exception in a write of %d blocks, which no store may do; this is logged once",
                    len(batch),
                )
            self._has_raised = True
            if is_last:
                self._finish_blocks(batch, set(batch), "refused")
            return is_last

    def _send_batch(self, batch: dict[str, _Block], *, is_last: bool) -> bool:
        """Write the blocks of ``batch`` that the pool lacks; return False if some writes must be tried again.

        Blocks that were written or dropped are removed from ``batch``.
        """
        keys = list(batch)
        known = self._store.exists(keys)
        self._finish_blocks(batch, {key for key, status in zip(keys, known, strict=True) if status is Status.OK})
        if Status.FAILED in known:
            self._finish_blocks(batch, set(batch), "pool away")
        if not batch:
            return True
        keys = list(batch)
        values = [[Span(self._base + block.start, block.nbytes)] for block in batch.values()]
        stored = self._store.put(keys, values)
        self._finish_blocks(batch, {key for key, status in zip(keys, stored, strict=True) if status is Status.OK})
        # A late call may still read from the arena, so the memory of these blocks must not be used again before it
        # ends.
        while batch and not self._store.wait_for_late_calls(_LATE_CALL_WAIT_SECONDS):
            if self._must_stop:
                return True
        if is_last:
            self._finish_blocks(batch, set(batch), "refused")
        return not batch

    def _finish_blocks(self, batch: dict[str, _Block], keys: set[str], dropped_because: str | None = None) -> None:
        """Remove the blocks ``keys`` from ``batch`` and the queue; with ``dropped_because``, count them as dropped."""
        for key in keys:
            del batch[key]
        with self._changed:
            if dropped_because:
                self._drop_blocks(keys, dropped_because)
            else:
                self._take_out(keys)

    def _drop_blocks(self, keys: set[str], reason: str) -> None:
        if lost := len(self._blocks.keys() & keys):
            self.dropped[reason] += lost
            logger.warning("%d blocks were not written to the pool, because %s", lost, _WHY_LOST[reason])
        self._take_out(keys)

    def _take_out(self, keys: set[str]) -> None:
        for key in keys:
            self._blocks.pop(key, None)  # ``close`` may have removed the block already
        self._changed.notify_all()


def _fill_in(statuses: Sequence[Status | None], answers: Sequence[Status]) -> list[Status]:
    """Return ``statuses`` with each ``None`` replaced by the next item of ``answers``."""
    rest = iter(answers)
    return [next(rest) if status is None else status for status in statuses]
