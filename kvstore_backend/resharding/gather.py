"""Reads pieces (stored blocks of another sharding), and assembles blocks of the own sharding.

Pieces are read to the gatherer's own memory, and copied from there, for three reasons:

- A piece may contain heads or tokens that the reader does not need.
- Over TCP, each separate range of memory takes as long as 50 KiB of data, so reading a block directly into its many
  parts would be slow.
- Bytes that fail the check must not reach the reader's memory, nor bytes of a *late* call, which missed its deadline,
  but still runs. The gatherer uses the memory of a late call again only after the call has ended.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore_backend.backend import HEADROOM_BYTES, Span, Status, StorageBackend, Value, memory_views
from kvstore_backend.namespace import Namespace
from kvstore_backend.resharding.family import Extent, ShardingFamily
from kvstore_backend.wrappers.wrapper import call_after_late_calls

__all__ = ["AlignedSpan", "Gatherer"]

Bytes = NDArray[np.uint8]

# Bytes of one read: so many that the fixed time of a call does not matter, and so few that they fit a processor's
# cache.
_BUFFER_BYTES = 16 << 20


class AlignedSpan:
    """Alignment of a reader's blocks with the blocks of another sharding.

    A *span* is the smallest number of successive tokens that are whole blocks in both shardings.

    Args:
        family: the reader's family.
        sharding: the other sharding, as the namespace of its rank 0.
        heads: the KV heads that the reader needs.

    Attributes:
        ranks: namespaces of the ranks of ``sharding`` that have the heads.
        num_blocks: number of the reader's blocks in a span.
        num_stored: number of blocks of ``sharding`` in a span.
    """

    def __init__(self, family: ShardingFamily, sharding: Namespace, heads: range) -> None:
        self.ranks = family.ranks_with(sharding, heads)
        self.sharding = sharding
        tokens = max(family.own.block_size, sharding.block_size)
        self.num_blocks = tokens // family.own.block_size
        self.num_stored = tokens // sharding.block_size

    def cover(self, blocks: range) -> range:
        """Return the indices of the spans (see the class) that contain ``blocks``, a range of the reader's blocks.

        Blocks and spans are counted from the beginning of the sequence.
        """
        return range(blocks.start // self.num_blocks, -(-blocks.stop // self.num_blocks))

    def keys(self, number: int, names: Sequence[bytes]) -> list[str]:
        """Return the keys of the stored blocks in a span of tokens: the key of each rank, for each block.

        Args:
            number: index of the span.
            names: names of the other sharding's blocks, from the beginning of the sequence.

        Returns:
            The keys; empty if ``names`` lacks a block of the span.
        """
        stored = range(number * self.num_stored, (number + 1) * self.num_stored)
        if stored.stop > len(names):
            return []
        return [rank.key(names[block]) for block in stored for rank in self.ranks]

    def extents(self, number: int, family: ShardingFamily) -> list[Extent]:
        """Return the range of KV heads and of tokens that each stored block of a span contains.

        The blocks have the order in which the method ``keys`` returns their keys.

        Args:
            number: index of the span.
            family: the ``ShardingFamily`` of the instance that reads.
        """
        size, first = self.sharding.block_size, number * self.num_stored
        return [
            Extent(family.heads_of(rank), range(block * size, (block + 1) * size))
            for block in range(first, first + self.num_stored)
            for rank in self.ranks
        ]


class Gatherer:
    """Reads blocks of other shardings from a pool, as blocks of the reader. Several threads may call the methods.

    Args:
        stack: backend of the pool.
        family: the ``ShardingFamily`` of the instance that reads.
    """

    def __init__(self, stack: StorageBackend, family: ShardingFamily) -> None:
        self._stack = stack
        self._family = family
        self._buffers = _Buffers(stack)
        self._heads = family.heads_of(family.own)

    def read_blocks(self, sharding: Namespace, names: Sequence[bytes], first: int, targets: Sequence[Value]) -> int:
        """Read successive blocks of the reader from another sharding; return how many leading blocks arrived.

        The targets of the blocks that did not arrive are not changed. No call of the pool writes to the targets, so the
        caller owns them when this method returns.

        Args:
            sharding: the other sharding, as the namespace of its rank 0.
            names: names of the other sharding's blocks, from the beginning of the sequence.
            first: index of the first block to read, counted from the beginning of the sequence.
            targets: memory for each block.

        Raises:
            ValueError: a target has another size than a block.
        """
        nbytes = self._family.block_bytes(self._family.own)
        if any(sum(span.nbytes for span in target) != nbytes for target in targets):
            raise ValueError(f"each target must have {nbytes} bytes, the size of a block")
        aligned = AlignedSpan(self._family, sharding, self._heads)
        pieces = aligned.num_stored * len(aligned.ranks)
        slot = _slot_bytes(self._family.block_bytes(sharding))
        blocks, done = range(first, first + len(targets)), 0
        spans = aligned.cover(blocks)
        step = max(1, _BUFFER_BYTES // (slot * pieces))
        for begin in range(spans.start, spans.stop, step):
            batch = range(begin, min(begin + step, spans.stop))
            arrived = self._read_spans(aligned, batch, names, blocks, targets)
            done = min(len(targets), (begin + arrived) * aligned.num_blocks - first)
            if arrived < len(batch):
                break
        return max(0, done)

    def close(self) -> None:
        """Unregister the memory for pieces, but not before late calls have ended. Later reads are not allowed."""
        self._buffers.close()

    def _read_spans(
        self, aligned: AlignedSpan, spans: range, names: Sequence[bytes], blocks: range, targets: Sequence[Value]
    ) -> int:
        """Read the stored blocks of ``spans`` in one call, and copy parts of them to the targets.

        A span is the smallest number of tokens that consists of whole blocks in both shardings.

        Args:
            names: names of the other sharding's blocks, from the beginning of the sequence.
            blocks: indices of the blocks to build; ``targets`` has the memory for each of them.

        Returns:
            The number of leading spans of which all stored blocks arrived.
        """
        keys = [aligned.keys(number, names) for number in spans]
        if not all(keys):
            keys = keys[: keys.index([])]
        if not keys or not self._stack.is_ready:
            return 0
        nbytes, count = self._family.block_bytes(aligned.sharding), len(keys[0])
        buffer = self._buffers.take(len(keys) * count * _slot_bytes(nbytes))
        statuses, num_late = [Status.FAILED], self._stack.count_late_calls()
        try:
            slots = buffer[: len(keys) * count * _slot_bytes(nbytes)].reshape(len(keys), count, -1)
            pieces = slots[..., HEADROOM_BYTES : HEADROOM_BYTES + nbytes]
            values = [(Span(piece.ctypes.data, nbytes),) for of_span in pieces for piece in of_span]
            statuses = self._stack.get([key for of_span in keys for key in of_span], values)
            for i, number in enumerate(spans[: len(keys)]):
                if not all(statuses[i * count : (i + 1) * count]):
                    return i
                self._copy_span(aligned, number, pieces[i], blocks, targets)
            return len(keys)
        finally:
            may_be_late = Status.FAILED in statuses and self._stack.count_late_calls() != num_late
            self._buffers.give_back(buffer, maybe_late=may_be_late)

    def _copy_span(
        self, aligned: AlignedSpan, number: int, pieces: Bytes, blocks: range, targets: Sequence[Value]
    ) -> None:
        """Copy from a span's stored blocks (``pieces``) the parts that belong to ``blocks`` to the blocks' targets."""
        family, size = self._family, self._family.own.block_size
        extents, shape = aligned.extents(number, family), family.shape_of(aligned.sharding)
        first = number * aligned.num_blocks
        for block in range(max(first, blocks.start), min(first + aligned.num_blocks, blocks.stop)):
            whole = Extent(self._heads, range(block * size, (block + 1) * size))
            target = targets[block - blocks.start]
            memory = _array_at(target[0]) if len(target) == 1 else np.empty(family.block_bytes(family.own), np.uint8)
            array = memory.reshape(family.shape_of(family.own))
            for piece, extent in zip(pieces, extents, strict=True):
                common = whole.overlap(extent)
                if common.tokens:
                    array[family.index_of(common, whole)] = piece.reshape(shape)[family.index_of(common, extent)]
            if len(target) > 1:
                _scatter(memory, target)


class _Buffers:
    """Buffers for reads from the pool, registered with it. Each buffer is used by one read at a time."""

    def __init__(self, stack: StorageBackend) -> None:
        self._stack = stack
        self._lock = threading.Lock()  # guards the next two attributes
        self._free: list[Bytes] = []
        self._is_closed = False

    def take(self, nbytes: int) -> Bytes:
        """Return a registered buffer of at least ``nbytes`` bytes, which the caller owns until ``give_back``."""
        with self._lock:
            buffer = self._free.pop() if self._free else None
        if buffer is not None and len(buffer) >= nbytes:
            return buffer
        if buffer is not None:
            self._stack.unregister(buffer.ctypes.data, len(buffer))
        buffer = np.zeros(max(nbytes, _BUFFER_BYTES), np.uint8)
        self._stack.register(buffer.ctypes.data, len(buffer), headroom=True)
        return buffer

    def give_back(self, buffer: Bytes, *, maybe_late: bool) -> None:
        """Make a buffer available again, as soon as no late call can write to it.

        Args:
            maybe_late: whether a read into this buffer may be late: it has missed its deadline, but still runs and
                writes.
        """

        def put_back() -> None:
            with self._lock:
                self._free.append(buffer)
            if self._is_closed:
                self.close()

        if maybe_late and not self._stack.wait_for_late_calls(0):
            call_after_late_calls(self._stack, put_back)
        else:
            put_back()

    def close(self) -> None:
        """Unregister the buffers: those in use when they are given back."""
        with self._lock:
            self._is_closed = True
            free, self._free = self._free, []
        for buffer in free:
            self._stack.unregister(buffer.ctypes.data, len(buffer))


def _slot_bytes(nbytes: int) -> int:
    """Return the bytes that a stored block takes in a buffer, with headroom; the next block is aligned, too."""
    return HEADROOM_BYTES + -(-nbytes // HEADROOM_BYTES) * HEADROOM_BYTES


def _array_at(span: Span) -> Bytes:
    memory = (ctypes.c_char * span.nbytes).from_address(span.address)
    return np.frombuffer(memoryview(memory).cast("B"), np.uint8)


def _scatter(memory: Bytes, target: Value) -> None:
    start = 0
    for view in memory_views(target):
        view[:] = memory[start : start + len(view)].data
        start += len(view)
