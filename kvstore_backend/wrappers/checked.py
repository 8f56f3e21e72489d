"""Headers that identify every block; a block that does not verify on reading is a miss, and is removed.

A stored object is ``header || payload``, written and read in one piece by scatter/gather, so the payload is not copied.
The header has 128 bytes, so that the payload stays aligned, in little-endian order::

    magic "KVBK" | format version u16 | marks u16 | payload bytes u64 | XXH3-64 of the payload u64
    | namespace digest 16 bytes | block hash 32 bytes | 56 zero bytes

Marks are 0. If the host cannot read the bytes, because they are in a GPU's memory, marks are 0x7575 and the checksum is
0: only the rest of the header is verified. A reader of one kind never accepts the other.

The checksum detects bytes that a transport or a stale buffer changed; the digest and the hash detect complete bytes of
another block. XXH3 (https://xxhash.com) is not cryptographic: it protects against accidents. An attacker who can write
to the pool can also write a matching header (``docs/operations/security.md``).

Several threads hash a large batch (``parts.py``). No block counts before all of its bytes were verified.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore_backend.backend import HEADROOM_BYTES, Span, Status, StorageBackend, Value
from kvstore_backend.namespace import FORMAT_VERSION, parse_key
from kvstore_backend.wrappers.parts import Parts, count_bytes
from kvstore_backend.wrappers.wrapper import Wrapper

__all__ = ["HEADER_BYTES", "REASONS", "CheckedBackend", "find_fault", "seal_bytes"]

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<4sHHQQ48s56x")
_MAGIC = b"KVBK"
HEADER_BYTES = _HEADER.size
assert HEADER_BYTES <= HEADROOM_BYTES
_HeaderMemory = ctypes.c_char * HEADER_BYTES

_FIELDS = struct.Struct("<4sHHQQ16s32s56x")
_FIELD_NAMES = ("magic", "version", "reserved", "size", "checksum", "namespace", "hash")
REASONS = _FIELD_NAMES
"""Reasons to reject a block: the field of its header that is wrong."""
_UNSUMMED = 0x7575
_NO_NAMESPACE = bytes(16)
_SCRATCH_BYTES = 64 * HEADER_BYTES


class CheckedBackend(Wrapper):
    """Wrapper that adds headers to the values in ``store`` and verifies them.

    If the value's memory has headroom (``register``), the header is there. Otherwise it is in this wrapper's own
    memory, so the value has two pieces.

    A block that does not verify, or has another size than ``header || target``, is ``ABSENT``: the pool has other bytes
    in its place. It is read once more, and then removed, so that it can be put again.

    Other clients may read a value while it is removed. A reader that verifies a checksum detects this, so the removal
    does not wait for it. A reader without checksums might accept another block's bytes. So a block without a checksum
    is removed only while no client reads it, and its reader checks after the read that it is still present.

    Args:
        store: any backend.
        rejected: counter of reads that did not verify, by the wrong field of the header: ``magic``, ``version``,
            ``reserved``, ``size``, ``namespace``, ``hash``, or ``checksum`` (the payload).
        is_summed: whether headers have checksums. They cannot if this process cannot read the memory of values; a
            block written without one is a miss for all other readers.
    """

    def __init__(self, store: StorageBackend, rejected: Counter[str] | None = None, *, is_summed: bool = True) -> None:
        self.rejected: Counter[str] = Counter() if rejected is None else rejected
        self._is_summed = is_summed
        super().__init__(store)
        self._roomy: dict[int, int] = {}  # address -> end of memory with headroom
        self._lock = threading.Lock()
        self._scratch: deque[NDArray[np.uint8]] = deque()  # registered memory for headers, not in use now
        self._is_closed = False
        self._outgoing = Parts(hashes_first=True)
        self._incoming = Parts(hashes_first=False)

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        return self._store_values(keys, values, self._store.put)

    def keep(self, keys: Sequence[str], values: Sequence[Value], seconds: float) -> list[Status]:
        return self._store_values(keys, values, lambda keys, whole: self._store.keep(keys, whole, seconds))

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        statuses = [Status.FAILED] * len(keys)
        rejected: set[int] = set()
        with self._lay_out(targets) as whole:

            def fetch(part: slice) -> None:
                statuses[part] = self._store.get(keys[part], whole[part])

            def verify(part: slice) -> None:
                for i in range(part.start, part.stop):
                    if statuses[i] is Status.OK and (fault := self._find_fault(keys[i], targets[i], whole[i])):
                        statuses[i] = Status.ABSENT
                        rejected.add(i)
                        self._reject_block(keys[i], fault.reason)

            self._incoming.move(targets, statuses, verify, fetch)
            if Status.ABSENT in statuses:
                self._look_again(keys, targets, whole, statuses, rejected)
        if not self._is_summed:
            self._confirm_presence(keys, statuses)
        return statuses

    def _look_again(
        self,
        keys: Sequence[str],
        targets: Sequence[Value],
        whole: Sequence[Value],
        statuses: list[Status],
        rejected: set[int],
    ) -> None:
        """Read blocks again that are present and unusable, and remove those that still are.

        One bad read may be this reader's own fault, and others may be reading the block. A block that is ``ABSENT`` in
        the read and exists has another size, or was put just now.
        """
        absent = [i for i, status in enumerate(statuses) if status is Status.ABSENT and i not in rejected]
        exist = self._store.exists([keys[i] for i in absent]) if absent else []
        suspects = [*rejected, *(i for i, status in zip(absent, exist, strict=True) if status is Status.OK)]
        if not suspects:
            return
        again = self._store.get([keys[i] for i in suspects], [whole[i] for i in suspects])
        useless: dict[bool, list[str]] = {True: [], False: []}  # key: whether they may be removed during a read
        for i, status in zip(suspects, again, strict=True):
            fault = self._find_fault(keys[i], targets[i], whole[i]) if status is Status.OK else None
            if status is Status.OK and fault is None:
                statuses[i] = Status.OK
            elif fault is not None:
                useless[self._is_summed and not fault.is_unsummed].append(keys[i])
            elif status is Status.ABSENT and i not in rejected:
                self._reject_block(keys[i], "size")
                useless[self._is_summed].append(keys[i])
        for is_forced, bad in useless.items():
            if bad:
                self._store.remove(bad, force=is_forced)

    def _confirm_presence(self, keys: Sequence[str], statuses: list[Status]) -> None:
        """Correct the answers for blocks without a checksum that are absent now, after the read.

        A client that removes a value during a read frees its memory for others: the read may then have the right header
        and another block's bytes.
        """
        read = [i for i, status in enumerate(statuses) if status is Status.OK]
        if read:
            for i, status in zip(read, self._store.exists([keys[i] for i in read]), strict=True):
                statuses[i] = status

    def _store_values(
        self,
        keys: Sequence[str],
        values: Sequence[Value],
        store: Callable[[Sequence[str], Sequence[Value]], list[Status]],
    ) -> list[Status]:
        """Call ``store`` with the values and a header before each; return its answers."""
        statuses = [Status.FAILED] * len(keys)
        with self._lay_out(values) as whole:

            def seal(part: slice) -> None:
                for key, value, place in zip(keys[part], values[part], whole[part], strict=True):
                    header = _build_header(key, value, is_summed=self._is_summed)
                    _HeaderMemory.from_address(place[0].address).raw = header

            def send(part: slice) -> None:
                statuses[part] = store(keys[part], whole[part])

            self._outgoing.move(values, statuses, seal, send)
        return statuses

    def _find_fault(self, key: str, target: Value, place: Value) -> _Fault | None:
        """Return the error of bytes that were read; None: they are this block's.

        Older bytes in this memory do no harm: a header that verifies is correct wherever it came from.
        """
        header = _HeaderMemory.from_address(place[0].address).raw
        wanted = _build_header(key, target, is_summed=self._is_summed)
        if header == wanted:
            return None
        return _Fault(_find_wrong_field(header, wanted), _FIELDS.unpack(header)[2] == _UNSUMMED)

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        if headroom:
            self._roomy[address] = address + nbytes
        self._store.register(address, nbytes, headroom=headroom)

    def unregister(self, address: int, nbytes: int) -> None:
        self._roomy.pop(address, None)
        self._store.unregister(address, nbytes)

    def close(self) -> None:
        self._is_closed = True
        try:
            self._drop_scratch()
        finally:
            self._store.close()

    @contextlib.contextmanager
    def _lay_out(self, values: Sequence[Value]) -> Iterator[list[Value]]:
        """Yield the values with memory for a header before each one's first span; valid in the block."""
        roomy = list(self._roomy.items())
        whole: list[Value] = []
        with self._lend_headers(len(values)) as scratch:
            for value in values:
                address, nbytes = value[0]
                for start, end in roomy:
                    if start < address < end:
                        whole.append((Span(address - HEADER_BYTES, HEADER_BYTES + nbytes), *value[1:]))
                        break
                else:
                    whole.append((Span(next(scratch), HEADER_BYTES), *value))
            yield whole

    @contextlib.contextmanager
    def _lend_headers(self, most: int) -> Iterator[Iterator[int]]:
        """Yield addresses of up to ``most`` headers in registered memory, which is taken at the first use."""
        taken: list[NDArray[np.uint8]] = []

        def addresses() -> Iterator[int]:
            taken.append(self._take_scratch(most * HEADER_BYTES))
            base: int = taken[0].ctypes.data
            yield from range(base, base + most * HEADER_BYTES, HEADER_BYTES)

        try:
            yield addresses()
        finally:
            self._scratch.extend(taken)
            if self._is_closed:
                self._drop_scratch()

    def _take_scratch(self, nbytes: int) -> NDArray[np.uint8]:
        try:
            scratch = self._scratch.pop()
        except IndexError:
            pass
        else:
            if scratch.nbytes >= nbytes:
                return scratch
            self._store.unregister(scratch.ctypes.data, scratch.nbytes)
        scratch = np.zeros(max(2 * nbytes, _SCRATCH_BYTES), dtype=np.uint8)
        self._store.register(scratch.ctypes.data, scratch.nbytes)
        return scratch

    def _drop_scratch(self) -> None:
        """Unregister the memory for headers that is not in use."""
        with contextlib.suppress(IndexError):
            while True:
                scratch = self._scratch.pop()
                self._store.unregister(scratch.ctypes.data, scratch.nbytes)

    def _reject_block(self, key: str, reason: str) -> None:
        with self._lock:
            self.rejected[reason] += 1
        logger.warning("A block read from the pool is not what it should be (%s): %s", reason, key)


class _Fault(NamedTuple):
    """Wrong field of a header, and whether it is the header of a block without a checksum."""

    reason: str
    is_unsummed: bool


def find_fault(key: str, stored: NDArray[np.uint8]) -> str | None:
    """Find the error of the bytes that a pool has stored under ``key``: one of ``REASONS``, or None.

    Args:
        key: key of a block.
        stored: header and payload, as they were read.
    """
    if stored.nbytes <= HEADER_BYTES:
        return "size"
    payload = [Span(stored.ctypes.data + HEADER_BYTES, stored.nbytes - HEADER_BYTES)]
    header = stored[:HEADER_BYTES].tobytes()
    wanted = _build_header(key, payload)
    return None if header == wanted else _find_wrong_field(header, wanted)


def seal_bytes(key: str, data: bytes) -> NDArray[np.uint8]:
    """Return the bytes to store under ``key`` so that a ``CheckedBackend`` reads ``data``."""
    stored: NDArray[np.uint8] = np.frombuffer(bytes(HEADER_BYTES) + data, dtype=np.uint8).copy()
    header = _build_header(key, [Span(stored.ctypes.data + HEADER_BYTES, len(data))])
    stored[:HEADER_BYTES] = np.frombuffer(header, dtype=np.uint8)
    return stored


def _hash_value(value: Value) -> int:
    if len(value) == 1:
        address, nbytes = value[0]
        return xxhash.xxh3_64_intdigest((ctypes.c_char * nbytes).from_address(address))
    state = xxhash.xxh3_64()
    for address, nbytes in value:
        state.update((ctypes.c_char * nbytes).from_address(address))
    return state.intdigest()


def _build_header(key: str, value: Value, *, is_summed: bool = True) -> bytes:
    """Build the header for a value to store, or the expected header for a value that was read."""
    checksum, marks = (_hash_value(value), 0) if is_summed else (0, _UNSUMMED)
    return _HEADER.pack(_MAGIC, FORMAT_VERSION, marks, count_bytes(value), checksum, _build_identity(key))


def _build_identity(key: str) -> bytes:
    """Build the part of a header that a key determines: the namespace's digest and the block's hash.

    For a key that is not a block's, return zeros and the digest of its text.
    """
    try:
        digest, block_hash = parse_key(key)
    except ValueError:
        digest, block_hash = _NO_NAMESPACE, hashlib.sha256(key.encode(errors="surrogatepass")).digest()
    return digest + block_hash


def _find_wrong_field(header: bytes, wanted: bytes) -> str:
    """Return the first field that differs; the checksum last, because it also differs for another block."""
    pairs = zip(_FIELD_NAMES, _FIELDS.unpack(header), _FIELDS.unpack(wanted), strict=True)
    return next((name for name, is_, should in pairs if is_ != should and name != "checksum"), "checksum")
