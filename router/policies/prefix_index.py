"""PrefixIndex: stores which instance has computed which prefix, with bounded memory.

Every instance saves the chunks that it computes in the pool. So an entry of the index means that the pool has a chunk,
and that certain instances have it in their own caches.
"""

from __future__ import annotations

import math
import struct
import threading
import time
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate, chain
from typing import NamedTuple

import orjson

__all__ = ["DEFAULT_MAX_ENTRIES", "PrefixIndex", "PrefixMatch"]

DEFAULT_MAX_ENTRIES = 1_100_000
"""Maximum number of chunks in the index. Measured: 11 MB if every prompt has 256 chunks of its own, 17 MB with 64, and
92 MB with 6 after a common beginning; at most 180 MB.
"""

_MAGIC = b"kvrouter prefixes 2\n"
_CHECKSUM = struct.Struct("<I")  # CRC-32 of all following bytes
_SIZE = struct.Struct("<I")  # size of the JSON that follows, in bytes
# A node needs as much memory as this many chunks in a long node, so there may be one node for this many chunks.
_CHUNKS_PER_NODE = 5
# The nodes are in this many dictionaries, by the last bits of their first hash. Then the router stops for less than
# 1 ms when a dictionary grows.
_NUM_PARTS = 256
_PART_BITS = _NUM_PARTS - 1
# Maximum number of bits that belong to removed instances. Reusing them processes every node, so it is done rarely.
_MAX_RETIRED_BITS = 256
# Maximum number of sets for which the instances' names are cached.
_MAX_NAMED_SETS = 4096
# Maximum number of old nodes that are removed for each prompt that is added.
_MAX_REMOVED_AT_ONCE = 8
# Dropped chunks that are not in the index are not removed before there are this many dropped chunks. This processes
# every chunk in the index, so it is done rarely.
_MIN_DROPPED = 100_000


class PrefixMatch(NamedTuple):
    """The number of leading chunks of a prompt in the pool and in each instance's own cache."""

    pool: int
    """Number of leading chunks in the pool: those that any instance has computed."""
    own: dict[str, int]
    """Number of leading chunks in the own cache of each instance that has any."""
    ages: list[tuple[int, float]]
    """Pairs (end, seconds), sorted by ``end``. The chunks between the previous pair's ``end`` and this ``end`` were
    last used ``seconds`` ago.
    """


class _Node:
    """Successive chunks that were computed by the same instances, and used at the same time.

    The nodes are a tree: the chunks before those of a node are the chunks of its ancestors. As a chunk's hash depends
    on all chunks before it, a node is found by its first hash alone. All nodes are also in a list, the least
    recently used one first. In this list, a node is before its parent.
    """

    __slots__ = ("chunks", "holders", "newer", "num_children", "older", "parent", "used_at")

    def __init__(self, chunks: array[int], parent: _Node | None, holders: int, used_at: float) -> None:
        self.chunks = chunks
        """The chunks' hashes. The array is never changed, only replaced, because another thread may read it."""
        self.parent = parent
        self.num_children = 0
        self.holders = holders
        """The set of instances that computed these chunks and have not lost all of them, one bit for each instance."""
        self.used_at = used_at
        """Time of the last use, by the index's clock."""
        self.older = self.newer = self

    def link(self, newer: _Node) -> None:
        """Put this node into the list, before ``newer``."""
        older = newer.older
        self.older, self.newer = older, newer
        older.newer = newer.older = self

    def unlink(self) -> None:
        """Take this node out of the list."""
        older, newer = self.older, self.newer
        older.newer, newer.older = newer, older


class _Table:
    """What a snapshot stores of each node.

    It has no object for each node, because the garbage collector would visit all of them, which stops every thread.
    """

    def __init__(self) -> None:
        self.parents: dict[_Node, _Node | None] = {}
        self.chunks: dict[_Node, array[int]] = {}
        self.holders: dict[_Node, int] = {}
        self.used_at: dict[_Node, float] = {}

    def read(self, node: _Node) -> None:
        """Copy the values of a node. No other thread can split it between the reads of its parent and of its chunks."""
        parent, chunks = node.parent, node.chunks
        self.parents[node], self.chunks[node] = parent, chunks
        self.holders[node], self.used_at[node] = node.holders, node.used_at


class PrefixIndex:
    """Maps a prefix to the time of its last use, and to the set of instances that computed it.

    The index stores successive chunks together as a node. It removes nodes that were not used for longer than the
    lifetime; and, if there are too many, the least recently used ones.

    A prompt is always added from its first chunk on. So a chunk was never used later, or computed by more instances,
    than the chunks before it, and the least recently used node has no children.
    """

    def __init__(
        self,
        max_entries: int = DEFAULT_MAX_ENTRIES,
        lifetime_seconds: float = 1800.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Raises:
            ValueError: ``max_entries`` is less than 2.
        """
        if max_entries < 2:
            raise ValueError(f"max_entries is {max_entries}; it must be at least 2")
        self._max_entries = max_entries
        self._lifetime = lifetime_seconds
        self._clock = clock
        self._parts: list[dict[int, _Node]] = [{} for _ in range(_NUM_PARTS)]
        self._ends = _Node(array("Q"), None, 0, math.inf)  # before the oldest node of the list, and after the newest
        self._num_chunks = self._num_nodes = 0
        self._names: list[str] = []  # the instance of each bit; "" if the instance was removed
        self._bits: dict[str, int] = {}
        self._named_sets: dict[int, tuple[str, ...]] = {}
        self._dropped: dict[int, int] = {}  # the instances that have evicted a chunk, although its node has their bits
        self._max_dropped = _MIN_DROPPED  # if there are more, those that are not in the index are removed
        self._has_chunk: dict[str, Callable[[int], bool]] = {}  # for each instance that reports what it evicts
        self._numbering = 0  # is odd while the numbers of the bits change, and different after that
        self._moved: list[_Node] | None = None  # the nodes that lost their first chunks since ``dump`` began
        self._dumping = threading.Lock()

    def __len__(self) -> int:
        return self._num_chunks

    def look_up(self, chunks: Sequence[int], kept_seconds: float = math.inf) -> PrefixMatch:
        """Return how many leading chunks of a prompt the pool and each instance have.

        Args:
            chunks: the prompt's chunk hashes, first to last.
            kept_seconds: after this time without use, an instance is assumed to have evicted a chunk. The pool is
                assumed to have it still.
        """
        now = self._clock()
        own: dict[str, int] = {}
        ages = []
        end, present, old_start = 0, -1, len(chunks)
        for start, node_end, node in self._find_nodes(chunks):
            age = now - node.used_at
            if age > self._lifetime:
                break
            end = node_end
            ages.append((end, age))
            if age > kept_seconds:
                old_start = min(old_start, start)
            if start and (ended := present & ~node.holders):
                own.update(dict.fromkeys(self._name_holders(ended), start))
            present &= node.holders
        if end:
            own.update(dict.fromkeys(self._name_holders(present), end))
        if old_start < end:
            for name in [name for name, own_end in own.items() if own_end > old_start]:
                has_chunk = self._has_chunk.get(name)
                own[name] = _find_end(chunks, old_start, own[name], has_chunk) if has_chunk else old_start
        if self._dropped:
            self._subtract_drops(own, chunks[:end])
        if 0 in own.values():
            own = {name: own_end for name, own_end in own.items() if own_end}
        return PrefixMatch(end, own, ages)

    def add_chain(self, chunks: Sequence[int], key: str) -> None:
        """Record that the instance ``key`` has computed a prompt with these chunks, or will compute it now.

        Chunks after the first ``max_entries // 2`` ones are ignored.
        """
        chunks = chunks[: self._max_entries // 2]
        now, bit = self._clock(), self._assign_bit(key)
        self._cancel_drops(chunks, bit)
        self._remove_old_nodes(now)
        path: list[_Node] = []
        end = 0
        for start, end, node in self._find_nodes(chunks):
            if end - start < len(node.chunks):
                node = self._split(node, end - start)
            node.holders = node.holders | bit if now - node.used_at <= self._lifetime else bit
            path.append(node)
        if end < len(chunks):
            self._add_chunks(path, array("Q", chunks[end:]), bit, now)
        for node in reversed(path):
            node.used_at = now
            node.unlink()
            node.link(self._ends)
        while self._num_chunks > self._max_entries or (
            self._num_nodes * _CHUNKS_PER_NODE > self._max_entries and self._num_nodes > len(path)
        ):
            self._remove(self._ends.newer)

    def forget_holder(self, key: str) -> None:
        """Record that the instance ``key`` has lost all its chunks. The pool still has them."""
        bit = self._bits.pop(key, 0)
        if not bit:
            return
        self._names[bit.bit_length() - 1] = ""
        self._named_sets.clear()
        if len(self._names) - len(self._bits) > _MAX_RETIRED_BITS:
            self._renumber_bits()

    def drop_chunks(self, chunks: Sequence[int], key: str) -> None:
        """Record that the instance ``key`` has lost these chunks. The pool still has them.

        An instance that has lost a chunk has also lost all chunks after it.
        """
        bit = self._bits.get(key, 0)
        if not bit:
            return
        dropped = self._dropped
        for chunk in chunks:
            dropped[chunk] = dropped.get(chunk, 0) | bit
        for chunk in chunks:
            node = self._parts[chunk & _PART_BITS].get(chunk)
            if node is not None:  # the instance has lost all chunks of this node
                node.holders &= ~bit
                self._cancel_drops(node.chunks, bit)
        if len(dropped) > self._max_dropped:
            present = dropped.keys() & chain.from_iterable(node.chunks for node in self._list_nodes())
            live = sum(self._bits.values())
            self._dropped = {chunk: holders for chunk in present if (holders := dropped[chunk] & live)}
            self._max_dropped = max(_MIN_DROPPED, 2 * len(self._dropped))

    def restore_chunks(self, chunks: Sequence[int], key: str) -> None:
        """Record that the instance ``key`` has the chunks of a prompt. Chunks that are not in the index are ignored."""
        bit = self._assign_bit(key)
        self._cancel_drops(chunks, bit)
        for start, end, node in self._find_nodes(chunks):
            self._add_holder(node, end - start, bit)

    def restore_holder(self, cached: AbstractSet[int], key: str) -> None:
        """Record that the instance ``key`` has certain chunks. Chunks that are not in the index are ignored.

        Args:
            cached: these chunks. If the instance has a chunk, it has all chunks before this one, too.
            key: the instance.
        """
        bit = self._assign_bit(key)
        self._cancel_drops(cached, bit)
        for first in cached:
            node = self._parts[first & _PART_BITS].get(first)
            if node is not None:
                self._add_holder(node, _find_end(node.chunks, 1, len(node.chunks), cached.__contains__), bit)

    def set_aging(self, key: str, has_chunk: Callable[[int], bool] | None) -> None:
        """Set how the index finds out that the instance ``key`` has evicted a chunk.

        Args:
            has_chunk: returns whether the instance has a chunk. None, as for a new instance: a chunk counts as evicted
                after a time without use.
        """
        if has_chunk is None:
            self._has_chunk.pop(key, None)
        else:
            self._has_chunk[key] = has_chunk

    def dump(self) -> bytes:
        """Encode the index as bytes, which ``load`` reads after a restart of the router.

        This may run in a thread of its own. Prompts that other threads add meanwhile may be missing.
        """
        with self._dumping:
            while True:
                numbering = self._numbering
                table = self._read_nodes()
                names, dropped = self._names.copy(), self._dropped.copy()
                if not numbering % 2 and numbering == self._numbering:
                    break
                time.sleep(0.001)
        now = self._clock()
        places: dict[_Node, int] = {}  # a parent is before its children
        for node in table.parents:
            path = []
            above: _Node | None = node
            while above is not None and above not in places:
                path.append(above)
                above = table.parents[above]
            places.update(zip(reversed(path), range(len(places), len(places) + len(path)), strict=True))
        width = len(names) // 8 + 1
        parents = array("i")
        for node in places:
            above = table.parents[node]
            parents.append(-1 if above is None else places[above])
        lengths = array("I", [len(table.chunks[node]) for node in places])
        ages = array("d", [now - table.used_at[node] for node in places])
        holders = chain((table.holders[node] for node in places), dropped.values())
        sets = b"".join([each.to_bytes(width, "little") for each in holders])
        hashes = b"".join([table.chunks[node].tobytes() for node in places])
        header = orjson.dumps({"names": names, "nodes": len(places), "dropped": len(dropped)})
        body = b"".join([_SIZE.pack(len(header)), header, parents, lengths, ages, sets, array("Q", dropped), hashes])
        return _MAGIC + _CHECKSUM.pack(zlib.crc32(body)) + body

    def load(self, data: bytes) -> None:
        """Replace the contents by those of an index that ``dump`` encoded on this machine.

        Raises:
            ValueError: ``data`` is damaged, or has another version. Then this index is unchanged.
        """
        start = len(_MAGIC) + _CHECKSUM.size
        at = start + _SIZE.size
        view = memoryview(data)
        if not data.startswith(_MAGIC):
            raise ValueError(f"it is not a prefix index of this version: it does not begin with {_MAGIC!r}")
        if len(data) <= at or _CHECKSUM.unpack_from(data, len(_MAGIC))[0] != zlib.crc32(view[start:]):
            raise ValueError("its prefix index is damaged: it is too short, or the checksum does not match")
        end = at + _SIZE.unpack_from(data, start)[0]
        header = orjson.loads(view[at:end])
        names, count, num_dropped, now = header["names"], header["nodes"], header["dropped"], self._clock()
        width = len(names) // 8 + 1
        parents, lengths, ages, dropped, hashes = array("i"), array("I"), array("d"), array("Q"), array("Q")
        for numbers in (parents, lengths, ages):
            at, end = end, end + numbers.itemsize * count
            numbers.frombytes(view[at:end])
        at, end = end, end + width * (count + num_dropped)
        sets = [int.from_bytes(view[i : i + width], "little") for i in range(at, end, width)]
        at, end = end, end + dropped.itemsize * num_dropped
        dropped.frombytes(view[at:end])
        hashes.frombytes(view[end:])
        for place in reversed(range(count)):  # a parent may have been read before its child was used
            if (parent := parents[place]) >= 0:
                ages[parent] = min(ages[parent], ages[place])
        starts = list(accumulate(lengths, initial=0))
        self._numbering += 1
        self._clear()
        nodes: dict[int, _Node] = {}
        # From the newest to the oldest, as many as there is room for. A parent is never older than its children.
        for place in sorted(range(count), key=ages.__getitem__):
            most = min(lengths[place], self._max_entries - self._num_chunks)
            if not most or (self._num_nodes + 1) * _CHUNKS_PER_NODE > self._max_entries:
                break
            chunks = hashes[starts[place] : starts[place] + most]
            node = _Node(chunks, nodes.get(parents[place]), sets[place], now - ages[place])
            node.link(self._ends.newer)
            self._register(node)
            nodes[place] = node
        self._names = names
        self._bits = {name: 1 << place for place, name in enumerate(names) if name}
        self._dropped = dict(zip(dropped, sets[count:], strict=True))
        self._numbering += 1

    def _read_nodes(self) -> _Table:
        """Read what a snapshot stores of each node, although the nodes may be split meanwhile."""
        table = _Table()
        moved = self._moved = []
        for part in self._parts:
            for node in part.copy().values():
                table.read(node)
        while moved:  # its part may have been read before it moved there, or it was read before a new parent
            table.read(moved.pop())
        self._moved = None
        for above in list(table.parents.values()):
            while above is not None and above not in table.parents:  # a new parent
                table.read(above)
                above = table.parents[above]
        return table

    def _clear(self) -> None:
        for node in self._list_nodes():
            del node.older, node.newer  # so that no cycles of references are left
        for part in self._parts:
            part.clear()
        self._ends.older = self._ends.newer = self._ends
        self._num_chunks = self._num_nodes = 0
        self._named_sets.clear()

    def _find_nodes(self, chunks: Sequence[int]) -> Iterator[tuple[int, int, _Node]]:
        """Yield the nodes of the leading chunks that the index has, each with the range of its chunks.

        The last node may have further chunks, which are not those of this prompt.
        """
        parts, at, count, parent = self._parts, 0, len(chunks), None
        while at < count:
            chunk = chunks[at]
            node = parts[chunk & _PART_BITS].get(chunk)
            if node is None or node.parent is not parent:  # another parent: two chunks have the same hash
                return
            start, at = at, at + _count_common(node.chunks, chunks, at)
            is_whole = at - start == len(node.chunks)
            yield start, at, node
            if not is_whole:
                return
            parent = node

    def _add_chunks(self, path: list[_Node], chunks: array[int], bit: int, now: float) -> None:
        """Add new chunks after the nodes of ``path``: to the last if only this instance has it, else as a new node."""
        parent = path[-1] if path else None
        if parent is not None and not parent.num_children and parent.holders == bit:
            parent.chunks = parent.chunks + chunks
            self._num_chunks += len(chunks)
        else:
            path.append(_Node(chunks, parent, bit, now))
            self._register(path[-1])

    def _split(self, node: _Node, count: int) -> _Node:
        """Make a new node of the first ``count`` chunks of a node; return it. The other chunks become its child."""
        head = _Node(node.chunks[:count], node.parent, node.holders, node.used_at)
        head.link(node.newer)
        node.chunks, node.parent, head.num_children = node.chunks[count:], head, 1
        moved = self._moved
        if moved is not None:  # before the head takes the place of the node, so that ``dump`` misses neither
            moved.append(node)
        for each in (node, head):
            first = each.chunks[0]
            self._parts[first & _PART_BITS][first] = each
        self._num_nodes += 1
        return head

    def _register(self, node: _Node) -> None:
        """Make a node findable by its first hash, and count it."""
        first = node.chunks[0]
        self._parts[first & _PART_BITS][first] = node
        self._num_chunks += len(node.chunks)
        self._num_nodes += 1
        if node.parent is not None:
            node.parent.num_children += 1

    def _remove(self, node: _Node) -> None:
        node.unlink()
        first = node.chunks[0]
        part = self._parts[first & _PART_BITS]
        if part.get(first) is node:  # not if two chunks have the same hash
            del part[first]
        self._num_chunks -= len(node.chunks)
        self._num_nodes -= 1
        if node.parent is not None:
            node.parent.num_children -= 1
        self._cancel_drops(node.chunks, -1)

    def _cancel_drops(self, chunks: Iterable[int], holders: int) -> None:
        """Delete what ``drop_chunks`` has recorded about these chunks and a set of instances (one bit for each)."""
        dropped = self._dropped
        if dropped:
            for chunk in dropped.keys() & chunks:
                dropped[chunk] &= ~holders
                if not dropped[chunk]:
                    del dropped[chunk]

    def _subtract_drops(self, own: dict[str, int], chunks: Sequence[int]) -> None:
        """Reduce the numbers in ``own``: an instance has only the chunks before the first one that it has lost."""
        dropped, seen = self._dropped, 0
        if dropped.keys().isdisjoint(chunks):
            return
        for place, chunk in enumerate(chunks):
            holders = dropped.get(chunk, 0) & ~seen
            if holders:
                seen |= holders
                for name in self._name_holders(holders):
                    if name in own:
                        own[name] = min(own[name], place)

    def _remove_old_nodes(self, now: float) -> None:
        """Remove some of the nodes that were not used for a lifetime."""
        for _ in range(_MAX_REMOVED_AT_ONCE):
            oldest = self._ends.newer
            if now - oldest.used_at <= self._lifetime:
                return
            self._remove(oldest)

    def _list_nodes(self) -> Iterator[_Node]:
        """Yield all nodes, from the newest to the oldest. A node may be split after it was yielded."""
        node = self._ends.older
        while node is not self._ends:
            following = node.older
            yield node
            node = following

    def _add_holder(self, node: _Node, count: int, bit: int) -> None:
        """Record that an instance has the first ``count`` chunks of a node."""
        if not node.holders & bit:
            if count < len(node.chunks):
                node = self._split(node, count)
            node.holders |= bit

    def _name_holders(self, holders: int) -> tuple[str, ...]:
        """Return the names of the instances in a set. Results are cached, because the same sets occur repeatedly."""
        names = self._named_sets.get(holders)
        if names is None:
            found, rest = [], holders
            while rest:
                bit = rest & -rest
                found.append(self._names[bit.bit_length() - 1])
                rest ^= bit
            if len(self._named_sets) >= _MAX_NAMED_SETS:
                self._named_sets.clear()
            names = self._named_sets[holders] = tuple(name for name in found if name)
        return names

    def _assign_bit(self, key: str) -> int:
        bit = self._bits.get(key)
        if bit is None:
            bit = self._bits[key] = 1 << len(self._names)
            self._names.append(key)
        return bit

    def _renumber_bits(self) -> None:
        """Renumber the instances' bits without those of removed instances, so that sets stay small."""
        self._numbering += 1
        moved = {old: 1 << new for new, old in enumerate(self._bits.values())}
        renumbered: dict[int, int] = {}

        def renumber(holders: int) -> int:
            if holders not in renumbered:
                renumbered[holders] = sum(new for old, new in moved.items() if holders & old)
            return renumbered[holders]

        for node in self._list_nodes():
            node.holders = renumber(node.holders)
        self._dropped = {chunk: new for chunk, old in self._dropped.items() if (new := renumber(old))}
        self._names = list(self._bits)
        self._bits = {name: 1 << place for place, name in enumerate(self._names)}
        self._named_sets.clear()
        self._numbering += 1


def _count_common(chunks: Sequence[int], prompt: Sequence[int], at: int) -> int:
    """Return how many leading ``chunks`` equal those of ``prompt`` from index ``at`` on. The first must be equal."""
    most = min(len(chunks), len(prompt) - at)
    if chunks[most - 1] == prompt[at + most - 1]:  # then all chunks before it are equal, too
        return most
    low, high = 1, most - 1
    while low < high:
        middle = (low + high) // 2
        if chunks[middle] == prompt[at + middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _find_end(chunks: Sequence[int], start: int, end: int, has_chunk: Callable[[int], bool]) -> int:
    """Return the index after the last one of the chunks from ``start`` to ``end`` that an instance has.

    If the instance has a chunk, it has all chunks before this one, too.
    """
    if has_chunk(chunks[end - 1]):
        return end
    return bisect_left(chunks, True, start, end, key=lambda chunk: not has_chunk(chunk))
