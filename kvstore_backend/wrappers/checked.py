"""Stores a header before every block, and checks it in each read. A block that fails the check is a miss.

The value in the store is ``header || payload``. Scatter/gather writes and reads both in one piece, so the payload is
not copied. The header has 128 bytes, so that the payload stays aligned. Its fields, in little-endian order::

    magic "KVBK" | format version u16 | marks u16 | payload bytes u64 | XXH3-64 of the payload u64
    | namespace digest 16 bytes | block hash 32 bytes | 56 zero bytes

A client that can read the memory of its values writes marks 0 and the checksum, and in a read it checks all fields and
the payload. A client whose values are in a GPU's memory cannot compute checksums: it writes marks 0x7575 and checksum
0, and in a read it checks only the header. A block from a client of one kind is a miss for clients of the other kind.

The checksum detects bytes that a transport or a stale buffer changed. The digest and the hash detect the bytes of
another block. XXH3 (https://xxhash.com) is not cryptographic: it protects against accidents. An attacker who can write
to the pool can also write a matching header (``docs/operations/security.md``).

Several threads hash a large batch (``parts.py``). A block is ``OK`` only after all of its bytes were checked.
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
"""Reasons to reject a block: each is the field of the header that is wrong."""
_UNSUMMED = 0x7575
_NO_NAMESPACE = bytes(16)
_SCRATCH_BYTES = 64 * HEADER_BYTES


class CheckedBackend(Wrapper):
    """Wrapper that stores a header with each value in ``store``, and checks the header and the value in each read.

    If the value's memory has headroom (``register``), the header is written there. Otherwise the header is in this
    wrapper's own memory, so the value has two pieces.

    The answer is ``ABSENT`` for a block that fails the check or has another size than header and target together. If
    the block also fails the check in a second read, it is removed, so that it can be stored again.

    Other clients may read a block while it is removed. A reader with checksums detects the removal, so a block with a
    checksum is removed even during reads. A reader without checksums might accept the bytes of another block. So a
    block without a checksum is removed only while no client reads it, and its reader checks after each read whether the
    block is still present.

    Args:
        store: any backend.
        rejected: counter of blocks that failed the check, by the field of the header that differed: ``magic``,
            ``version``, ``reserved``, ``size``, ``namespace``, ``hash``, or ``checksum`` (the payload).
        is_summed: whether headers have checksums. It must be False if this process cannot read the memory of the
            values. A block without a checksum is a miss for readers with checksums.
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
        """Read the blocks again that the pool has but that failed the check; remove those that fail again.

        One failed check may be the fault of this reader's own transfer. This method also reads blocks again that were
        ``ABSENT`` although the pool has them: they have another size, or were put after the first read.

        Args:
            whole: the memory for each block and its header.
            statuses: the statuses of the first read, which this method changes.
            rejected: indices of the blocks that failed the check.
        """
        absent = [i for i, status in enumerate(statuses) if status is Status.ABSENT and i not in rejected]
        exist = self._store.exists([keys[i] for i in absent]) if absent else []
        suspects = [*rejected, *(i for i, status in zip(absent, exist, strict=True) if status is Status.OK)]
        if not suspects:
            return
        again = self._store.get([keys[i] for i in suspects], [whole[i] for i in suspects])
        useless: dict[bool, list[str]] = {True: [], False: []}  # True: may be removed while a client reads the block
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
        """Set the status ``ABSENT`` for blocks that were read, but that the pool does not have any more.

        If a client removes a block during the read, the pool may use the block's memory for another block. Then the
        read may bring the right header with the bytes of the other block. Without checksums only a look-up detects
        this.
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
        """Call ``store`` with a header before each value; return the answers of ``store``."""
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
        """Check the value that was read for ``key``, and its header in ``place``; return the fault, or None."""
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
        """Yield for each value the memory of a header and of the value; the headers exist during the ``with`` block."""
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
        """Yield an iterator over addresses for up to ``most`` headers in registered memory.

        The memory is allocated when the iterator is first used.
        """
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
        """Unregister and free the memory for headers that is not in use."""
        with contextlib.suppress(IndexError):
            while True:
                scratch = self._scratch.pop()
                self._store.unregister(scratch.ctypes.data, scratch.nbytes)

    def _reject_block(self, key: str, reason: str) -> None:
        with self._lock:
            self.rejected[reason] += 1
        logger.warning(
            "A block read from the pool failed its check (wrong %s); it is used only if a second read succeeds: %s",
            reason,
            key,
        )


class _Fault(NamedTuple):
    """Fault of a block that was read: the wrong field of its header, and whether the header has no checksum."""

    reason: str
    is_unsummed: bool


def find_fault(key: str, stored: NDArray[np.uint8]) -> str | None:
    """Check the bytes that a pool stored under ``key``; return the reason to reject them, or None if they are correct.

    Args:
        key: key of a block.
        stored: header and payload, as they were read.

    Returns:
        One of ``REASONS``, or None.
    """
    if stored.nbytes <= HEADER_BYTES:
        return "size"
    payload = [Span(stored.ctypes.data + HEADER_BYTES, stored.nbytes - HEADER_BYTES)]
    header = stored[:HEADER_BYTES].tobytes()
    wanted = _build_header(key, payload)
    return None if header == wanted else _find_wrong_field(header, wanted)


def seal_bytes(key: str, data: bytes) -> NDArray[np.uint8]:
    """Return ``data`` with the header that a ``CheckedBackend`` expects under ``key``."""
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
    """Return the header of a value that will be stored, or the expected header of a value that was read."""
    checksum, marks = (_hash_value(value), 0) if is_summed else (0, _UNSUMMED)
    return _HEADER.pack(_MAGIC, FORMAT_VERSION, marks, count_bytes(value), checksum, _build_identity(key))


def _build_identity(key: str) -> bytes:
    """Return the part of a header that identifies the key: the digest of the namespace and the hash of the block.

    For a key that is not the key of a block, the part consists of zeros and the digest of the key's text.
    """
    try:
        digest, block_hash = parse_key(key)
    except ValueError:
        digest, block_hash = _NO_NAMESPACE, hashlib.sha256(key.encode(errors="surrogatepass")).digest()
    return digest + block_hash


def _find_wrong_field(header: bytes, wanted: bytes) -> str:
    """Return the name of the first field in which two headers differ; ``checksum`` only if no other field differs."""
    pairs = zip(_FIELD_NAMES, _FIELDS.unpack(header), _FIELDS.unpack(wanted), strict=True)
    return next((name for name, is_, should in pairs if is_ != should and name != "checksum"), "checksum")
