"""PrefixIndex: which instance has computed which prefix, with bounded memory.

Every chunk that any instance has computed is in the pool as well, because every instance saves there. So an entry of
the index means both that the pool has a chunk and that these instances have it.
"""

from __future__ import annotations

import copy
import math
import struct
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import orjson

__all__ = ["DEFAULT_MAX_ENTRIES", "PrefixIndex", "PrefixMatch"]

DEFAULT_MAX_ENTRIES = 1_100_000
"""Maximum number of known chunks. Measured with 256 instances: 85 bytes per entry, 92 MB in total; in the worst case,
where every chunk is in a different set of instances, 160 bytes and 178 MB.
"""

_MAGIC = b"kvrouter prefixes 1\n"
_CHECKSUM = struct.Struct("<I")  # CRC-32 of all following bytes
_SIZE = struct.Struct("<I")  # of the JSON that follows, in bytes
# Number of restarts whose bits may be unused. Clearing them processes every entry (about 0.5 s for a full index).
_MAX_RETIRED_BITS = 256
_MAX_NAMED_SETS = 4096
# A generation is divided into this many dictionaries, by the last bits of the hash. One with 550,000 entries would stop
# the router for 10 to 50 ms whenever it grows or is freed; now each step takes less than 1 ms.
_NUM_PARTS = 256
_PART_BITS = _NUM_PARTS - 1


# The time of the last use in the lowest bits, in microseconds since the index' epoch; above them the set of instances
# that computed it, one bit each. The chunks of one run share one entry. It is one number, not a tuple, because the
# garbage collector would look at every entry of a dictionary with tuples, which takes 10 to 40 ms.
_Entry = int
_Generation = list[dict[int, _Entry]]
_TIME_BITS = 56
_TIME = (1 << _TIME_BITS) - 1
# A snapshot may have entries that are older than the machine's clock. None is older than this, in seconds.
_MAX_AGE = 1e7


class PrefixMatch(NamedTuple):
    """Number of leading chunks of a chain in the pool and in each instance."""

    pool: int
    """In the pool: computed by any instance."""
    own: dict[str, int]
    """In each instance that has any."""
    ages: list[tuple[int, float]]
    """(end, seconds), sorted by ``end``: seconds since the chunks before ``end`` (and after the previous end) were last
    used.
    """


class PrefixIndex:
    """Maps a chunk hash to the time of its last use, and to the set of instances that computed it.

    There are two generations. When a chain is used, it is written into
    the current generation. When that is full, or half a lifetime old, it replaces the previous generation, which is
    dropped. So an entry lives for half a lifetime to a whole one after its last use, and expired entries never have to
    be searched.

    Chains are always added from their first chunk on. So along a chain, times never increase and sets never grow.
    ``_find_runs`` relies on this to look up a chain of 256 chunks in about twenty steps.
    """

    def __init__(
        self,
        max_entries: int = DEFAULT_MAX_ENTRIES,
        lifetime_seconds: float = 1800.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Raises:
            ValueError: there is no capacity for two entries.
        """
        if max_entries < 2:
            raise ValueError(f"max_entries is {max_entries}; an index needs room for at least 2")
        self._max_in_generation = max_entries // 2
        self._half_life = lifetime_seconds / 2
        self._clock = clock
        self._turned_at = clock()
        self._epoch = self._turned_at - _MAX_AGE
        self._current, self._previous = _make_generation(), _make_generation()
        self._most_in_current = 0  # upper bound of its number of entries
        self._retired: _Generation = []  # parts of a dropped generation, which are freed one at a time
        self._names: list[str] = []  # of each bit; "" if its instance was removed
        self._bits: dict[str, int] = {}
        self._named_sets: dict[int, tuple[str, ...]] = {}

    def __len__(self) -> int:
        return _count_entries(self._current) + _count_entries(self._previous)

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self)} of {2 * self._max_in_generation} entries, {len(self._bits)} instances>"

    def look_up(self, chunks: Sequence[int], kept_seconds: float = math.inf) -> PrefixMatch:
        """Return where the leading chunks of a chain are.

        Args:
            kept_seconds: time without use after which an instance is assumed to have evicted a chunk; the pool is not.
        """
        now = self._turn_generations(0)
        own: dict[str, int] = {}
        ages = []
        end = 0
        for _, end, entry in self._find_runs(chunks):
            age = max(0.0, now - self._time_of(entry))  # entries' times are rounded
            ages.append((end, age))
            if age <= kept_seconds:
                # Later runs are longer, and their sets are subsets of the earlier ones.
                own.update(dict.fromkeys(self._name_holders(entry >> _TIME_BITS), end))
        return PrefixMatch(end, own, ages)

    def add_chain(self, chunks: Sequence[int], key: str) -> None:
        """Note that the instance ``key`` has computed this chain, or is about to."""
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
            # In proportion to what was added: so all are freed before a current generation that fills replaces another.
            del self._retired[-1 - 2 * _NUM_PARTS * len(chunks) // self._max_in_generation :]

    def forget_holder(self, key: str) -> None:
        """Note that the instance has lost its chunks; the pool has not."""
        bit = self._bits.pop(key, 0)
        if not bit:
            return
        self._names[bit.bit_length() - 1] = ""
        self._named_sets.clear()
        if len(self._names) - len(self._bits) > _MAX_RETIRED_BITS:
            self._renumber_bits()

    def copy(self) -> PrefixIndex:
        """Return a copy of this index; takes 0.02 microseconds per entry."""
        other = copy.copy(self)
        other._current, other._previous = ([part.copy() for part in each] for each in (self._current, self._previous))
        other._retired = []
        other._names, other._bits, other._named_sets = self._names.copy(), self._bits.copy(), {}
        return other

    def dump(self) -> bytes:
        """Encode the whole index, for ``load`` after a restart of the router.

        Measured: 12 bytes and 0.2 microseconds per entry, four times as much if every set is different. If this thread
        must not be blocked, dump a ``copy`` in another thread.
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
        """Replace the content by an index that ``dump`` encoded on this machine.

        Raises:
            ValueError: ``data`` is damaged, or of another version; then nothing has changed.
        """
        start = len(_MAGIC) + _CHECKSUM.size
        view = memoryview(data)
        if len(data) < start or not data.startswith(_MAGIC):
            raise ValueError(f"it is no prefix index of this version: it does not begin with {_MAGIC!r}")
        if _CHECKSUM.unpack_from(data, len(_MAGIC))[0] != zlib.crc32(view[start:]):
            raise ValueError("the prefix index in it is damaged: its checksum does not fit")
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
            if count > self._max_in_generation:  # the first chunks of a chain were used at least as late as its last
                entries.sort(key=lambda each: each[1] & _TIME, reverse=True)
            generation = _make_generation()
            for chunk, entry in entries[: self._max_in_generation]:
                generation[chunk & _PART_BITS][chunk] = entry
            generations.append(generation)
            at += 12 * count
        self._previous, self._current = generations
        self._most_in_current = _count_entries(self._current)
        self._names = names
        self._bits = {name: 1 << place for place, name in enumerate(names) if name}
        self._named_sets.clear()
        self._turned_at = now

    def _turn_generations(self, coming: int) -> float:
        """Return the time. Begin a new generation if one is too old, or has no capacity for ``coming`` more entries."""
        now = self._clock()
        age = now - self._turned_at
        if age < self._half_life:
            if self._most_in_current + coming <= self._max_in_generation:
                return now
            self._most_in_current = _count_entries(self._current)  # repeated chunks were counted each time
            if self._most_in_current + coming <= self._max_in_generation:
                return now
        self._retired = self._previous  # what is left of earlier ones is freed now: else it would grow without bound
        if age >= 2 * self._half_life:
            self._retired = self._retired + self._current
        self._previous = self._current if age < 2 * self._half_life else _make_generation()
        self._current, self._most_in_current = _make_generation(), 0
        # If a generation begins late, use the time at which it was due, so that delays do not add up.
        self._turned_at = self._turned_at + self._half_life if self._half_life <= age < 2 * self._half_life else now
        return now

    def _number_time(self, at: float) -> int:
        """Return a time of the clock as entries have it."""
        return round(1e6 * (at - self._epoch))

    def _time_of(self, entry: _Entry) -> float:
        """Return the time of the clock at which the chunks of an entry were last used."""
        return self._epoch + 1e-6 * (entry & _TIME)

    def _find_runs(self, chunks: Sequence[int]) -> list[tuple[int, int, _Entry]]:
        """Return the chain's known part as (start, end, entry) of the chunks with equal entries."""
        current, previous = self._current, self._previous
        runs = []
        start, count = 0, len(chunks)
        while start < count:
            chunk = chunks[start]
            entry = current[chunk & _PART_BITS].get(chunk) or previous[chunk & _PART_BITS].get(chunk)
            if entry is None:
                break
            end, beyond = start + 1, count  # chunks before `end` are in the run, chunks from `beyond` on are not
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

    def _name_holders(self, holders: int) -> tuple[str, ...]:
        """Return the names in a set. Results are cached, because the same sets occur repeatedly."""
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
        """Clear the bits of removed instances, so that sets stay small."""
        moved = {old: 1 << new for new, old in enumerate(self._bits.values())}
        renumbered: dict[_Entry, _Entry] = {}
        for part in (*self._previous, *self._current):
            for entry in set(part.values()) - renumbered.keys():
                holders = sum(new for old, new in moved.items() if entry >> _TIME_BITS & old)
                renumbered[entry] = holders << _TIME_BITS | entry & _TIME
            for chunk, entry in part.items():
                part[chunk] = renumbered[entry]
        self._names = list(self._bits)
        self._bits = {name: 1 << place for place, name in enumerate(self._names)}
        self._named_sets.clear()


def _make_generation() -> _Generation:
    return [{} for _ in range(_NUM_PARTS)]


def _count_entries(generation: _Generation) -> int:
    return sum(map(len, generation))
