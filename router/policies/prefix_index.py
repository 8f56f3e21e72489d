"""PrefixIndex: stores which instance has computed which prefix, with bounded memory.

Every instance saves the chunks that it computes in the pool. So an entry of the index means that the pool has a chunk,
and that certain instances have it in their own caches.
"""

from __future__ import annotations

import copy
import math
import struct
import time
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import orjson

__all__ = ["DEFAULT_MAX_ENTRIES", "PrefixIndex", "PrefixMatch"]

DEFAULT_MAX_ENTRIES = 1_100_000
"""Maximum number of chunks in the index. Measured with 256 instances: 85 bytes per entry, 92 MB in total; in the worst
case, where every chunk is in a different set of instances, 160 bytes per entry, 178 MB in total.
"""

_MAGIC = b"kvrouter prefixes 1\n"
_CHECKSUM = struct.Struct("<I")  # CRC-32 of all following bytes
_SIZE = struct.Struct("<I")  # size of the JSON that follows, in bytes
# Maximum number of bits that belong to removed instances. Reusing them processes every entry (about 0.5 s for a full
# index), so it is done rarely.
_MAX_RETIRED_BITS = 256
_MAX_NAMED_SETS = 4096
# A generation is divided into this many dictionaries, by the last bits of the hash. Then the router stops for less than
# 1 ms when a dictionary grows or is freed. One dictionary with 550,000 entries would stop the router for 10 to 50 ms.
_NUM_PARTS = 256
_PART_BITS = _NUM_PARTS - 1


# An entry is one number. The lowest bits are the time of the last use, in microseconds since the index's epoch. The
# higher bits are the set of instances that computed the chunk, one bit for each instance. Successive chunks with equal
# entries share one object. An entry is not a tuple, because the garbage collector would visit every tuple in a
# dictionary, which takes 10 to 40 ms.
_Entry = int
_Generation = list[dict[int, _Entry]]
_TIME_BITS = 56
_TIME = (1 << _TIME_BITS) - 1
# Maximum age of an entry in seconds. A snapshot may have entries from before the start of the machine's clock.
_MAX_AGE = 1e7


class PrefixMatch(NamedTuple):
    """The number of leading chunks of a prompt in the pool and in each instance's own cache."""

    pool: int
    """Number of leading chunks in the pool: those that any instance has computed."""
    own: dict[str, int]
    """Number of leading chunks in the own cache of each instance that has any."""
    ages: list[tuple[int, float]]
    """Pairs (end, seconds), sorted by ``end``: the chunks up to ``end``, and after the previous pair's end, were last
    used ``seconds`` ago.
    """


class PrefixIndex:
    """Maps a chunk hash to the time of its last use, and to the set of instances that computed the chunk.

    The entries are in two generations. When a prompt is used, its chunks are written into the current generation. When
    the current generation is full, or half a lifetime old, it replaces the previous generation, which is deleted. So an
    entry is deleted between half a lifetime and one lifetime after its last use, and no search for expired entries is
    needed.

    A prompt is always added from its first chunk on. So from the first chunk of a prompt to its last, times never
    increase and sets never grow. ``_find_runs`` uses this to look up a prompt of 256 chunks in about twenty steps.
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
        self._max_in_generation = max_entries // 2
        self._half_life = lifetime_seconds / 2
        self._clock = clock
        self._turned_at = clock()
        self._epoch = self._turned_at - _MAX_AGE
        self._current, self._previous = _make_generation(), _make_generation()
        self._most_in_current = 0  # upper limit of the number of entries in ``_current``
        self._retired: _Generation = []  # dictionaries of a deleted generation, which are freed one at a time
        self._names: list[str] = []  # the instance of each bit; "" if the instance was removed
        self._bits: dict[str, int] = {}
        self._named_sets: dict[int, tuple[str, ...]] = {}
        self._has_holes = False  # whether chunks were dropped, so that sets may grow along a prompt
        self._never_aged = 0  # bits of the instances that report what they evict
        self._has_chunk: dict[str, Callable[[int], bool]] = {}  # for each of these instances, what it has

    def __len__(self) -> int:
        return _count_entries(self._current) + _count_entries(self._previous)

    def look_up(self, chunks: Sequence[int], kept_seconds: float = math.inf) -> PrefixMatch:
        """Return how many leading chunks of a prompt the pool and each instance have.

        Args:
            chunks: the prompt's chunk hashes, first to last.
            kept_seconds: after this time without use, an instance is assumed to have evicted a chunk. The pool is
                assumed to have it still.
        """
        now = self._turn_generations(0)
        own: dict[str, int] = {}
        ages = []
        end, present = 0, -1
        for start, end, entry in self._find_runs(chunks):
            age = max(0.0, now - self._time_of(entry))  # entries' times are rounded
            ages.append((end, age))
            present &= entry >> _TIME_BITS
            if age <= kept_seconds:
                if present:
                    # Later runs are longer, and their sets are subsets of the earlier ones.
                    own.update(dict.fromkeys(self._name_holders(present), end))
                continue
            present &= self._never_aged
            for name in self._name_holders(present):
                known = self._find_known_end(name, chunks, start, end)
                if known > start:
                    own[name] = known
                if known < end:
                    present &= ~self._bits[name]
        return PrefixMatch(end, own, ages)

    def add_chain(self, chunks: Sequence[int], key: str) -> None:
        """Record that the instance ``key`` has computed a prompt with these chunks, or will compute it now."""
        chunks = chunks[: self._max_in_generation]
        now = self._turn_generations(len(chunks))
        latest = self._assign_bit(key) << _TIME_BITS | self._number_time(now)
        current, known = self._current, 0
        for start, known, entry in self._find_runs(chunks):
            entry = entry & ~_TIME | latest
            for chunk in chunks[start:known]:
                current[chunk & _PART_BITS][chunk] = entry
        entry = latest
        for chunk in chunks[known:]:
            current[chunk & _PART_BITS][chunk] = entry
        self._most_in_current += len(chunks)
        if self._retired:
            # As many dictionaries are freed as new chunks require: all, before the current generation is full.
            del self._retired[-1 - 2 * _NUM_PARTS * len(chunks) // self._max_in_generation :]

    def forget_holder(self, key: str) -> None:
        """Record that the instance ``key`` has lost all its chunks. The pool still has them."""
        bit = self._bits.pop(key, 0)
        if not bit:
            return
        self._names[bit.bit_length() - 1] = ""
        self._named_sets.clear()
        if self._never_aged & bit:
            self._never_aged |= self._assign_bit(key)
        if len(self._names) - len(self._bits) > _MAX_RETIRED_BITS:
            self._renumber_bits()

    def drop_chunks(self, chunks: Iterable[int], key: str) -> None:
        """Record that the instance ``key`` has lost these chunks. The pool still has them."""
        self._has_holes = True
        bit = self._bits.get(key, 0) << _TIME_BITS
        for chunk in chunks:
            part = chunk & _PART_BITS
            for generation in (self._current, self._previous):
                entry = generation[part].get(chunk)
                if entry is not None and entry & bit:
                    generation[part][chunk] = entry & ~bit

    def restore_chunks(self, chunks: Iterable[int], key: str) -> None:
        """Record that the instance ``key`` has these chunks. Chunks that are not in the index are ignored."""
        bit = self._assign_bit(key) << _TIME_BITS
        for chunk in chunks:
            part = chunk & _PART_BITS
            for generation in (self._current, self._previous):
                entry = generation[part].get(chunk)
                if entry is not None:
                    generation[part][chunk] = entry | bit

    def set_aging(self, key: str, has_chunk: Callable[[int], bool] | None) -> None:
        """Set how the index finds out that the instance ``key`` has evicted a chunk.

        Args:
            has_chunk: returns whether the instance has a chunk. None, as for a new instance: a chunk counts as evicted
                after a time without use.
        """
        if has_chunk is None:
            self._never_aged &= ~self._bits.get(key, 0)
            self._has_chunk.pop(key, None)
        else:
            self._never_aged |= self._assign_bit(key)
            self._has_chunk[key] = has_chunk

    def copy(self) -> PrefixIndex:
        """Return a copy of this index. Copying takes 0.02 microseconds per entry."""
        other = copy.copy(self)
        other._current, other._previous = ([part.copy() for part in each] for each in (self._current, self._previous))
        other._retired = []
        other._names, other._bits, other._named_sets = self._names.copy(), self._bits.copy(), {}
        return other

    def dump(self) -> bytes:
        """Encode the whole index as bytes, which ``load`` reads after a restart of the router.

        Measured: 12 bytes and 0.2 microseconds per entry; four times as much if every set is different. A caller that
        must not wait for this can dump a ``copy`` in another thread.
        """
        numbers: dict[_Entry, int] = {}
        parts = []
        for generation in (self._previous, self._current):
            hashes = array("Q", chain.from_iterable(generation))
            places = [numbers.setdefault(entry, len(numbers)) for part in generation for entry in part.values()]
            parts += [hashes.tobytes(), array("I", places).tobytes()]
        width = len(self._names) // 8 + 1
        now = self._clock()
        counts = [_count_entries(self._previous), _count_entries(self._current)]
        header = orjson.dumps({"names": self._names, "values": len(numbers), "entries": counts})
        ages = array("d", [now - self._time_of(entry) for entry in numbers]).tobytes()
        sets = [(entry >> _TIME_BITS).to_bytes(width, "little") for entry in numbers]
        body = b"".join([_SIZE.pack(len(header)), header, ages, *sets, *parts])
        return _MAGIC + _CHECKSUM.pack(zlib.crc32(body)) + body

    def load(self, data: bytes) -> None:
        """Replace the entries by those of an index that ``dump`` encoded on this machine.

        Raises:
            ValueError: ``data`` is damaged, or has another version. Then this index is unchanged.
        """
        start = len(_MAGIC) + _CHECKSUM.size
        view = memoryview(data)
        if len(data) < start or not data.startswith(_MAGIC):
            raise ValueError(f"it is not a prefix index of this version: it does not begin with {_MAGIC!r}")
        if _CHECKSUM.unpack_from(data, len(_MAGIC))[0] != zlib.crc32(view[start:]):
            raise ValueError("its prefix index is damaged: the checksum does not match")
        at = start + _SIZE.size
        header_end = at + _SIZE.unpack_from(data, start)[0]
        header = orjson.loads(view[at:header_end])
        names, width, now = header["names"], len(header["names"]) // 8 + 1, self._clock()
        ages = array("d")
        sets_start = header_end + 8 * header["values"]
        ages.frombytes(view[header_end:sets_start])
        at = sets_start + width * len(ages)
        sets = [int.from_bytes(view[i : i + width], "little") for i in range(sets_start, at, width)]
        values = [
            holders << _TIME_BITS | self._number_time(now - min(age, _MAX_AGE))
            for age, holders in zip(ages, sets, strict=True)
        ]
        generations = []
        for count in header["entries"]:
            hashes, places = array("Q"), array("I")
            hashes.frombytes(view[at : at + 8 * count])
            places.frombytes(view[at + 8 * count : at + 12 * count])
            entries = list(zip(hashes, map(values.__getitem__, places), strict=True))
            if count > self._max_in_generation:  # the newest entries are kept: a prompt's first chunks before its last
                entries.sort(key=lambda each: each[1] & _TIME, reverse=True)
            generation = _make_generation()
            for chunk, entry in entries[: self._max_in_generation]:
                generation[chunk & _PART_BITS][chunk] = entry
            generations.append(generation)
            at += 12 * count
        self._previous, self._current = generations
        self._most_in_current = _count_entries(self._current)
        self._names, self._never_aged = names, 0
        self._bits = {name: 1 << place for place, name in enumerate(names) if name}
        self._named_sets.clear()
        self._turned_at = now
        for key in self._has_chunk:
            self._never_aged |= self._assign_bit(key)

    def _turn_generations(self, coming: int) -> float:
        """Begin a new generation if the current one is too old, or too full for ``coming`` entries. Return the time."""
        now = self._clock()
        age = now - self._turned_at
        if age < self._half_life:
            if self._most_in_current + coming <= self._max_in_generation:
                return now
            self._most_in_current = _count_entries(self._current)  # counts repeated chunks only once
            if self._most_in_current + coming <= self._max_in_generation:
                return now
        self._retired = self._previous  # frees the rest of earlier generations now, so that memory stays bounded
        if age >= 2 * self._half_life:
            self._retired = self._retired + self._current
        self._previous = self._current if age < 2 * self._half_life else _make_generation()
        self._current, self._most_in_current = _make_generation(), 0
        # If a generation begins late, use the time at which it was due, so that delays do not add up.
        self._turned_at = self._turned_at + self._half_life if self._half_life <= age < 2 * self._half_life else now
        return now

    def _number_time(self, at: float) -> int:
        """Return a time of the clock as the number that an entry contains."""
        return round(1e6 * (at - self._epoch))

    def _time_of(self, entry: _Entry) -> float:
        """Return the time at which the chunks of an entry were last used, as a value of the policy's clock."""
        return self._epoch + 1e-6 * (entry & _TIME)

    def _find_runs(self, chunks: Sequence[int]) -> list[tuple[int, int, _Entry]]:
        """Return the leading chunks that the index has, as (start, end, entry) for each run of equal entries."""
        current, previous = self._current, self._previous
        runs = []
        start, count = 0, len(chunks)
        while start < count:
            chunk = chunks[start]
            entry = current[chunk & _PART_BITS].get(chunk) or previous[chunk & _PART_BITS].get(chunk)
            if entry is None:
                break
            end, beyond = start + 1, count  # the entry is equal before `end`, and different from `beyond` on
            while self._has_holes and end < beyond:
                chunk = chunks[end]
                part = chunk & _PART_BITS
                if (current[part].get(chunk) or previous[part].get(chunk)) != entry:
                    beyond = end
                    break
                end += 1
            while end < beyond:
                middle = (end + beyond) // 2
                chunk = chunks[middle]
                part = chunk & _PART_BITS
                if (current[part].get(chunk) or previous[part].get(chunk)) == entry:
                    end = middle + 1
                else:
                    beyond = middle
            runs.append((start, end, entry))
            start = end
        return runs

    def _find_known_end(self, name: str, chunks: Sequence[int], start: int, end: int) -> int:
        """Return the index after the last of the chunks from ``start`` to ``end`` that the instance ``name`` has."""
        has_chunk = self._has_chunk[name]
        if has_chunk(chunks[end - 1]):
            return end
        return bisect_left(chunks, True, start, end, key=lambda chunk: not has_chunk(chunk))

    def _name_holders(self, holders: int) -> tuple[str, ...]:
        """Return the names of the instances in a set. Results are cached, because the same sets occur repeatedly."""
        names = self._named_sets.get(holders)
        if names is None:
            rest, found = holders, []
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
        moved = {old: 1 << new for new, old in enumerate(self._bits.values())}
        renumbered: dict[_Entry, _Entry] = {}
        for part in (*self._previous, *self._current):
            for entry in set(part.values()) - renumbered.keys():
                holders = sum(new for old, new in moved.items() if entry >> _TIME_BITS & old)
                renumbered[entry] = holders << _TIME_BITS | entry & _TIME
            for chunk, entry in part.items():
                part[chunk] = renumbered[entry]
        self._never_aged = sum(new for old, new in moved.items() if self._never_aged & old)
        self._names = list(self._bits)
        self._bits = {name: 1 << place for place, name in enumerate(self._names)}
        self._named_sets.clear()


def _make_generation() -> _Generation:
    return [{} for _ in range(_NUM_PARTS)]


def _count_entries(generation: _Generation) -> int:
    return sum(map(len, generation))
