"""Gatherer: pieces of another cut in, own blocks out.

Pieces are read into memory of the gatherer's own, and copied from there. A piece may hold heads or tokens that the
reader has no use for; a value in many spans takes a transfer over TCP as long for each of them as 50 KiB do; and bytes
that do not verify, or come from a call that was given up at its deadline, never reach the reader's memory. Such a call
may write for as long as it runs: the memory that it was given is set aside until then.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore_backend.backend import HEADROOM_BYTES, Span, Status, StorageBackend, Value, memory_views
from kvstore_backend.cuts.family import Extent, Family
from kvstore_backend.namespace import Namespace
from kvstore_backend.wrappers.late_calls import call_after_late_calls

__all__ = ["Gatherer", "Unit"]

Bytes = NDArray[np.uint8]

# One read: enough that the time of a call does not count, and little enough to stay in a processor's cache.
_BUFFER_BYTES = 16 << 20


class Unit:
    """The fewest successive tokens that are whole blocks both of the reader and of another cut.

    Args:
        family: the reader's.
        cut: the other one.
        heads: those that are wanted.

    Attributes:
        num_blocks: of the reader's, in a unit.
    """

    def __init__(self, family: Family, cut: Namespace, heads: range) -> None:
        self.ranks = family.ranks_with(cut, heads)
        self.cut = cut
        tokens = max(family.own.block_size, cut.block_size)
        self.num_blocks = tokens // family.own.block_size
        self.num_stored = tokens // cut.block_size

    def cover(self, blocks: range) -> range:
        """The units that ``blocks`` of the reader lie in, counted from the beginning of the sequence."""
        return range(blocks.start // self.num_blocks, -(-blocks.stop // self.num_blocks))

    def keys(self, unit: int, names: Sequence[bytes]) -> list[str]:
        """The keys of the pieces of a unit, rank by rank for each block; none where a block of it has no name.

        Args:
            unit: which.
            names: of the cut's blocks, from the beginning of the sequence.
        """
        stored = range(unit * self.num_stored, (unit + 1) * self.num_stored)
        if stored.stop > len(names):
            return []
        return [rank.key(names[block]) for block in stored for rank in self.ranks]

    def extents(self, unit: int, family: Family) -> list[Extent]:
        """The heads and tokens of each of the pieces, in the order of the keys."""
        size, first = self.cut.block_size, unit * self.num_stored
        return [
            Extent(family.heads_of(rank), range(block * size, (block + 1) * size))
            for block in range(first, first + self.num_stored)
            for rank in self.ranks
        ]


class Gatherer:
    """Reads blocks of the other cuts of one family. Calls may come from several threads.

    Args:
        stack: where from.
        family: the reader's.
    """

    def __init__(self, stack: StorageBackend, family: Family) -> None:
        self._stack = stack
        self._family = family
        self._buffers = _Buffers(stack)
        self._heads = family.heads_of(family.own)

    def read_blocks(self, cut: Namespace, names: Sequence[bytes], first: int, targets: Sequence[Value]) -> int:
        """Read successive blocks; how many leading ones arrived whole. The other targets are left as they are.

        No call touches the targets, so they are the caller's as soon as this returns.

        Args:
            cut: rank 0 of whom to read.
            names: of that cut's blocks, from the beginning of the sequence.
            first: the reader's own first block, counted from there.
            targets: where each of the reader's blocks is to lie.

        Raises:
            ValueError: a target has another size than a block.
        """
        nbytes = self._family.block_bytes(self._family.own)
        if any(sum(span.nbytes for span in target) != nbytes for target in targets):
            raise ValueError(f"targets must have the {nbytes} bytes of a block")
        unit = Unit(self._family, cut, self._heads)
        pieces = unit.num_stored * len(unit.ranks)
        slot = _slot_bytes(self._family.block_bytes(cut))
        blocks, done = range(first, first + len(targets)), 0
        units = unit.cover(blocks)
        step = max(1, _BUFFER_BYTES // (slot * pieces))
        for begin in range(units.start, units.stop, step):
            batch = range(begin, min(begin + step, units.stop))
            arrived = self._read_units(unit, batch, names, blocks, targets)
            done = min(len(targets), (begin + arrived) * unit.num_blocks - first)
            if arrived < len(batch):
                break
        return max(0, done)

    def _read_units(
        self, unit: Unit, units: range, names: Sequence[bytes], blocks: range, targets: Sequence[Value]
    ) -> int:
        """Read ``units`` at once; how many leading ones arrived, and were copied to the targets."""
        keys = [unit.keys(number, names) for number in units]
        if not all(keys):
            keys = keys[: keys.index([])]
        if not keys or not self._stack.is_ready:
            return 0
        nbytes, count = self._family.block_bytes(unit.cut), len(keys[0])
        buffer = self._buffers.take(len(keys) * count * _slot_bytes(nbytes))
        statuses = [Status.FAILED]
        try:
            slots = buffer[: len(keys) * count * _slot_bytes(nbytes)].reshape(len(keys), count, -1)
            pieces = slots[..., HEADROOM_BYTES : HEADROOM_BYTES + nbytes]
            values = [(Span(piece.ctypes.data, nbytes),) for of_unit in pieces for piece in of_unit]
            statuses = self._stack._get([key for of_unit in keys for key in of_unit], values)
            for i, number in enumerate(units[: len(keys)]):
                if not all(statuses[i * count : (i + 1) * count]):
                    return i
                self._copy_unit(unit, number, pieces[i], blocks, targets)
            return len(keys)
        finally:
            self._buffers.give_back(buffer, maybe_late=Status.FAILED in statuses)

    def _copy_unit(self, unit: Unit, number: int, pieces: Bytes, blocks: range, targets: Sequence[Value]) -> None:
        """Copy the share of ``blocks`` in the pieces of a unit to where they are wanted."""
        family, size = self._family, self._family.own.block_size
        extents, shape = unit.extents(number, family), family.shape_of(unit.cut)
        first = number * unit.num_blocks
        for block in range(max(first, blocks.start), min(first + unit.num_blocks, blocks.stop)):
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
    """Registered memory for reads, each piece used by one at a time."""

    def __init__(self, stack: StorageBackend) -> None:
        self._stack = stack
        self._lock = threading.Lock()  # guards the next one
        self._free: list[Bytes] = []

    def take(self, nbytes: int) -> Bytes:
        """Memory of at least ``nbytes``, until ``give_back``."""
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
        """``maybe_late``: a call with this memory failed, and may have been given up while it runs."""

        def put_back() -> None:
            with self._lock:
                self._free.append(buffer)

        if maybe_late and not self._stack.wait_for_late_calls(0):
            call_after_late_calls(self._stack, put_back)
        else:
            put_back()


def _slot_bytes(nbytes: int) -> int:
    """A piece of ``nbytes`` with its headroom, so that the next one is as well aligned."""
    return HEADROOM_BYTES + -(-nbytes // HEADROOM_BYTES) * HEADROOM_BYTES


def _array_at(span: Span) -> Bytes:
    memory = (ctypes.c_char * span.nbytes).from_address(span.address)
    return np.frombuffer(memoryview(memory).cast("B"), np.uint8)


def _scatter(memory: Bytes, target: Value) -> None:
    start = 0
    for view in memory_views(target):
        view[:] = memory[start : start + len(view)].data
        start += len(view)
